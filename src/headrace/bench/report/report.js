// What moves in a report beside the theme and the tooltips: the boxes that hide a result.
"use strict";
(() => {
  for (const box of document.querySelectorAll("input[data-series]")) {
    const apply = () => document.body.classList.toggle("hide-" + box.dataset.series, !box.checked);
    box.addEventListener("change", apply);
    apply(); // a browser may keep a box as it was left
  }
  for (const svg of document.querySelectorAll("svg[data-plot]")) headrace.watchPlot(svg);
})();
