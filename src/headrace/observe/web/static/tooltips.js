// What stands under the pointer, or under the keyboard's cursor, in a drawing with the attribute data-plot.
// Texts go into the page as text only; points are read from the drawing.
"use strict";
window.headrace ??= {};
(() => {
  const three = (value) => Number(value.toPrecision(3)).toLocaleString("en", { maximumSignificantDigits: 6 });
  const say = (value, unit) => {
    switch (unit) {
      case "ms": return value < 1 ? three(value * 1e3) + " µs" : value < 1e3 ? three(value) + " ms" : three(value / 1e3) + " s";
      case "s": return value < 120 ? three(value) + " s" : Math.floor(value / 60) + " min " + Math.round(value % 60) + " s";
      case "share": return three(100 * value) + " %";
      case "percentile": return "p" + Number((100 * value).toPrecision(value > 0.99 ? 5 : 4));
      default: return three(value);
    }
  };
  const warp = (value, kind) =>
    kind === "log" ? Math.log10(value) : kind === "tail" ? -Math.log10(1 - value) : value;
  const unwarp = (value, kind) => (kind === "log" ? 10 ** value : kind === "tail" ? 1 - 10 ** -value : value);
  const valueAt = (axis, place) => {
    const low = warp(axis.low, axis.kind);
    return unwarp(low + place * (warp(axis.high, axis.kind) - low), axis.kind);
  };

  const tip = document.getElementById("tip");
  const row = (kind, name, value) => {
    const line = document.createElement("div");
    if (kind) {
      const mark = document.createElement("span");
      mark.className = "swatch " + kind;
      line.append(mark);
    }
    for (const text of value === undefined ? [name] : [name, value]) {
      const part = document.createElement("span");
      part.textContent = text;
      line.append(part);
    }
    return line;
  };
  const put = (rows, x, y) => {
    tip.replaceChildren(...rows);
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    const left = x + 16 + width > innerWidth ? x - 16 - width : x + 16;
    const top = Math.min(Math.max(4, y - height / 2), innerHeight - height - 4);
    tip.style.transform = `translate(${Math.max(4, left)}px, ${top}px)`;
  };

  // Watch a drawing. Call the returned function after the drawing has changed.
  const watchPlot = (svg) => {
    let plot = null; // read when first needed
    let lines = null;
    let left, top, width, height;
    let cross = null;
    let at = null; // the place of the keyboard's cursor
    const read = () => {
      if (plot !== null) return;
      plot = JSON.parse(svg.dataset.plot);
      [left, top, width, height] = plot.box;
      lines = [...svg.querySelectorAll("polyline[data-name]")].map((line) => ({
        element: line,
        kind: [...line.classList].filter((name) => /^(s\d|plain|dashed)$/.test(name)).join(" "),
        name: line.dataset.name,
        points: line.getAttribute("points").split(" ").map((pair) => pair.split(",").map(Number)),
      }));
    };
    const visible = () => lines.filter((line) => getComputedStyle(line.element).display !== "none");
    const hide = () => {
      tip.hidden = true;
      if (cross) { cross.remove(); cross = null; }
    };
    const nearest = (points, x) => {
      let best = points[0];
      for (const point of points) if (Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
      return best;
    };
    const show = (x, y, screenX, screenY) => {
      read();
      if (plot.hints) {
        const hint = plot.hints.find(([a, b, c, d]) => x >= a - 1 && x <= b + 1 && y >= c && y <= d);
        if (hint) put([row("", hint[4])], screenX, screenY); else hide();
        return;
      }
      const shown = visible();
      if (!shown.length || x < left - 8 || x > left + width + 8) { hide(); return; }
      const found = shown.map((line) => ({ line, point: nearest(line.points, x) }));
      const place = found.reduce((a, b) => (Math.abs(a.point[0] - x) <= Math.abs(b.point[0] - x) ? a : b)).point[0];
      const rows = [row("", say(valueAt(plot.x, (place - left) / width), plot.x.unit))];
      rows[0].className = "head";
      for (const { line, point } of found) {
        if (Math.abs(point[0] - place) > 12) continue; // it has nothing here
        rows.push(row(line.kind, line.name, say(valueAt(plot.y, 1 - (point[1] - top) / height), plot.y.unit)));
      }
      if (!cross) {
        cross = document.createElementNS("http://www.w3.org/2000/svg", "line");
        cross.setAttribute("class", "cross");
        svg.append(cross);
      }
      for (const [name, value] of [["x1", place], ["x2", place], ["y1", top], ["y2", top + height]]) {
        cross.setAttribute(name, value);
      }
      at = place;
      put(rows, screenX, screenY);
    };
    svg.addEventListener("pointermove", (event) => {
      const point = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      show(point.x, point.y, event.clientX, event.clientY);
    });
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("blur", hide);
    svg.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") hide();
      if (way === undefined) return;
      read();
      if (plot.hints) return;
      const places = [...new Set(visible().flatMap((line) => line.points.map((p) => p[0])))];
      if (!places.length) return;
      places.sort((a, b) => a - b);
      let index = at === null ? -1 : places.indexOf(at);
      if (index < 0 && way < 0) index = places.length;
      index = Math.min(Math.max(index + way, 0), places.length - 1);
      const screen = new DOMPoint(places[index], top + height / 2).matrixTransform(svg.getScreenCTM());
      show(places[index], top + height / 2, screen.x, screen.y);
      event.preventDefault();
    });
    return () => { plot = null; if (cross && !svg.contains(cross)) cross = null; };
  };

  headrace.format = say;
  headrace.watchPlot = watchPlot;
})();
