// The button that switches between the light and the dark theme. The choice is kept for the next visit.
"use strict";
(() => {
  const root = document.documentElement;
  const theme = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const named = () => { theme.textContent = isDark() ? "Light" : "Dark"; };
  try { // a page from a file may have no storage
    const kept = localStorage.getItem("headrace-theme");
    if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  } catch { /* the system's theme, then */ }
  theme.hidden = false;
  named();
  system.addEventListener("change", named);
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("headrace-theme", root.dataset.theme); } catch { /* not kept */ }
    named();
  });
})();
