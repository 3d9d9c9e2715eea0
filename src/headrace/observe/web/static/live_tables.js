// Builds the dashboard's tables, meters and the waterfall of a request. Texts go into the page as text only.
"use strict";
window.headrace ??= {};
(() => {
  const element = (name, className, ...parts) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    made.append(...parts);
    return made;
  };
  const none = "–";
  const number = (value, digits = 1) =>
    value === null || value === undefined ? none : value.toLocaleString("en", { maximumFractionDigits: digits });
  const ms = (value) => (value === null || value === undefined ? none : headrace.format(value, "ms"));
  const percent = (share, digits = 1) => (share === null || share === undefined ? none : number(100 * share, digits) + " %");
  const bytes = (value) => {
    if (value === null || value === undefined) return none;
    const power = value < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(value) / 10));
    return `${number(value / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
  };
  const money = (micros, currency) =>
    micros === null || micros === undefined ? none : `${Math.abs(micros) < 1e6 ? (micros / 1e6).toLocaleString("en", { maximumSignificantDigits: 3 }) : number(micros / 1e6, 2)} ${currency}`.trim();

  // `plain`: a low share is no warning.
  const meter = (share, text, plain = false) => {
    const bar = element("span", "meter" + (plain ? "" : share <= 0 ? " out" : share < 0.2 ? " low" : ""));
    const fill = element("span");
    fill.style.width = `${100 * Math.min(1, Math.max(0, share))}%`;
    bar.append(fill);
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", text);
    return element("span", "", bar, text);
  };

  // columns: [[title, row => text or element]]. The first column heads its row.
  const table = (target, columns, rows, nothing) => {
    if (!rows.length) {
      target.replaceChildren(...(nothing ? [element("p", "nothing", nothing)] : []));
      return;
    }
    const head = element("tr", "", ...columns.map(([title]) => {
      const cell = element("th", "", title);
      cell.scope = "col";
      return cell;
    }));
    const body = rows.map((row) => element("tr", "", ...columns.map(([, value], place) => {
      const cell = element(place ? "td" : "th", "", value(row));
      if (!place) cell.scope = "row";
      return cell;
    })));
    target.replaceChildren(element("table", "", element("thead", "", head), element("tbody", "", ...body)));
  };

  // The stages of the mean request as one bar.
  const stages = (target, rows) => {
    const shown = rows.filter((row) => row.mean_ms > 0);
    if (!shown.length) {
      target.replaceChildren(element("p", "nothing", "No requests in the last five minutes."));
      return;
    }
    const bar = element("div", "stages");
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", shown.map((row) => `${row.stage} ${ms(row.mean_ms)}`).join(", "));
    const names = element("div", "stage-names");
    for (const [place, row] of shown.entries()) {
      const span = element("span", "s" + (place % 8));
      span.style.flexGrow = String(row.share);
      bar.append(span);
      names.append(element("span", "", element("span", "swatch s" + (place % 8)), `${row.stage} `, element("b", "", ms(row.mean_ms))));
    }
    target.replaceChildren(bar, names);
  };

  const waterfall = (target, request) => {
    const whole = Math.max(request.duration_ms, 1e-6);
    const lanes = element("div", "waterfall");
    const add = (name, span, inner) => {
      const lane = element("div", "lane" + (inner ? " inner" : ""));
      const bar = element("span");
      bar.style.left = `${100 * span.start_ms / whole}%`;
      bar.style.width = `${100 * span.duration_ms / whole}%`;
      lane.append(bar);
      const known = Object.entries(span.attributes ?? {}).map(([key, value]) => `${key} ${value}`).join(", ");
      lanes.append(element("span", inner ? "part" : "", name), lane, element("span", "", ms(span.duration_ms) + (known ? ` (${known})` : "")));
    };
    for (const span of request.spans) {
      add(span.name, span, false);
      for (const part of span.parts ?? []) add(part.name, part, true);
    }
    const facts = [request.endpoint, request.tenant, request.error ?? request.status, ms(request.duration_ms), request.started_at];
    target.replaceChildren(element("p", "hint", facts.filter(Boolean).join(" · ")), lanes, element("p", "hint", `Trace ${request.trace_id}`));
  };

  Object.assign(headrace, { element, number, ms, percent, bytes, money, meter, table, stages, waterfall });
})();
