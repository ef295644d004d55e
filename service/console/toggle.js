// The theme button: as the system, light, dark. Kept in localStorage where that is allowed, else for this page.

const ORDER = ["auto", "light", "dark"];
const KEPT = "fleetcast.theme";

function keep(theme) {
  try {
    if (theme === "auto") localStorage.removeItem(KEPT);
    else localStorage.setItem(KEPT, theme);
  } catch {
    // storage is forbidden here
  }
}

/** `changed` repaints what the style sheet cannot: the canvas. */
export function themeButton(button, changed) {
  const root = document.documentElement;
  const show = () => {
    const theme = root.dataset.theme ?? "auto";
    button.textContent = { auto: "Auto", light: "Light", dark: "Dark" }[theme];
    button.setAttribute("aria-label", `Theme: ${theme}. Change`);
  };
  button.addEventListener("click", () => {
    const next = ORDER[(ORDER.indexOf(root.dataset.theme ?? "auto") + 1) % ORDER.length];
    if (next === "auto") delete root.dataset.theme;
    else root.dataset.theme = next;
    keep(next);
    show();
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
  show();
}
