// Draws charts that move: lines and stacked areas over the last minutes. The drawings have the classes and the data of
// the report's plots, so charts.css and tooltips.js serve both.
"use strict";
window.headrace ??= {};
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const WIDTH = 560, HEIGHT = 200, LEFT = 58, RIGHT = 16, TOP = 14, BOTTOM = 26;
  const across = WIDTH - LEFT - RIGHT, down = HEIGHT - TOP - BOTTOM;
  let charts = 0;

  const shape = (name, attributes, text) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const short = (value) => String(Math.round(value * 10) / 10);

  const step = (span, most) => {
    const rough = span / most;
    const power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((each) => each >= rough * (1 - 1e-9));
  };

  const ago = (seconds) => (seconds === 0 ? "now" : seconds < 60 ? `${seconds} s ago` : `${seconds / 60} min ago`);

  // `figure`: an empty <figure>. `unit`: ms, s, share or number. `names`: of the series. `stacked`: areas on each other.
  // `rules`: objectives, drawn as lines: [{value, text}].
  const chart = (figure, { title, note = "", unit = "number", names, stacked = false, seconds = 300, rules = [] }) => {
    const id = "chart-" + ++charts;
    const caption = document.createElement("figcaption");
    caption.textContent = title;
    caption.id = id;
    const keys = document.createElement("p");
    keys.className = "chart-keys";
    const latest = names.map((name, place) => {
      const key = document.createElement("span");
      const swatch = document.createElement("span");
      swatch.className = "swatch s" + place;
      const value = document.createElement("b");
      key.append(swatch, name + " ", value);
      keys.append(key);
      return value;
    });
    const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-labelledby": id, tabindex: "0" });
    const plot = document.createElement("div");
    plot.className = "plot";
    plot.append(svg);
    figure.replaceChildren(caption);
    if (note) {
      const about = document.createElement("p");
      about.textContent = note;
      figure.append(about);
    }
    figure.append(keys, plot);
    const changed = headrace.watchPlot(svg);

    // points: [{at, values}], `at` in seconds and ascending; a value may be null.
    return (points, now) => {
      const shown = points.filter((point) => point.at >= now - seconds);
      const heights = shown.map((point) => {
        let sum = 0;
        return point.values.map((value) => (stacked && value !== null ? (sum += value) : value));
      });
      const known = heights.flat().filter((value) => value !== null && Number.isFinite(value));
      const highest = Math.max(...known, ...rules.map((rule) => rule.value), unit === "share" ? 0.01 : 1);
      const each = step(highest, 4);
      const high = Math.ceil(highest / each - 1e-9) * each;
      const x = (at) => LEFT + (1 - (now - at) / seconds) * across;
      const y = (value) => TOP + (1 - value / high) * down;
      const parts = [];
      for (let value = 0; value <= high * (1 + 1e-9); value += each) {
        parts.push(shape("line", { class: "grid", x1: LEFT, x2: LEFT + across, y1: short(y(value)), y2: short(y(value)) }));
        parts.push(shape("text", { class: "tick", x: LEFT - 8, y: short(y(value) + 4), "text-anchor": "end" }, headrace.format(value, unit)));
      }
      for (const back of [0, seconds / 5 * 2, seconds / 5 * 4]) {
        const anchor = back === 0 ? "end" : "middle";
        parts.push(shape("text", { class: "tick", x: short(x(now - back)), y: HEIGHT - 8, "text-anchor": anchor }, ago(back)));
      }
      for (let place = names.length - 1; place >= 0; place -= 1) {
        const runs = [[]];
        shown.forEach((point, index) => {
          const value = heights[index][place];
          if (value === null || value === undefined) { if (runs.at(-1).length) runs.push([]); return; }
          runs.at(-1).push([x(point.at), y(value)]);
        });
        const drawn = runs.filter((run) => run.length);
        const text = (run) => run.map(([a, b]) => `${short(a)},${short(b)}`).join(" ");
        for (const run of drawn) {
          const look = `line s${place} r${place}`;
          if (stacked) {
            const path = `M${short(run[0][0])} ${short(y(0))}L${text(run)}L${short(run.at(-1)[0])} ${short(y(0))}Z`;
            parts.push(shape("path", { class: `bars s${place}`, d: path }));
          } else {
            parts.push(shape("polyline", { class: look, points: text(run.length > 1 ? run : [run[0], run[0]]) }));
          }
        }
        // What the tooltip reads: a series' own values, whatever it is drawn on.
        const own = shown.map((point) => [point.at, point.values[place]]).filter(([, value]) => value !== null && value !== undefined);
        if (own.length) {
          parts.push(shape("polyline", {
            class: `unseen s${place}`, "data-name": names[place],
            points: own.map(([at, value]) => `${short(x(at))},${(Math.round(y(value) * 1000) / 1000)}`).join(" "),
          }));
        }
        const last = own.length ? own.at(-1)[1] : null;
        latest[place].textContent = last === null ? "–" : headrace.format(last, unit);
      }
      for (const { value, text } of rules) {
        parts.push(shape("line", { class: "rule objective", x1: LEFT, x2: LEFT + across, y1: short(y(value)), y2: short(y(value)) }));
        parts.push(shape("text", { class: "note", x: LEFT + 6, y: short(y(value) - 4) }, text));
      }
      svg.dataset.plot = JSON.stringify({
        box: [LEFT, TOP, across, down],
        x: { kind: "linear", low: -seconds, high: 0, unit: "s" },
        y: { kind: "linear", low: 0, high, unit },
      });
      svg.replaceChildren(...parts);
      changed();
    };
  };

  headrace.chart = chart;
})();
