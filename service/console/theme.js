// Applied before the first paint, so that a chosen theme does not flash. Kept in localStorage, else in memory.
"use strict";
(() => {
  const root = document.documentElement;
  try {
    const kept = localStorage.getItem("fleetcast.theme");
    if (kept === "light" || kept === "dark") root.dataset.theme = kept;
  } catch {
    // storage is forbidden here: the theme follows the system until toggled
  }
})();
