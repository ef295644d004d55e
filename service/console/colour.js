// Risk as colour: one scale from neutral to red whose lightness changes evenly, so that it reads without colour vision.
// Interpolated in OKLab (Björn Ottosson, 2020), 33 steps, for the light and the dark theme; text on it keeps 4.5:1.

export const STEPS = 32;
// Ends as OKLCH: lightness, chroma, hue in degrees. The neutral end is a little cool, so that base rates look grey.
const ENDS = {
  light: { from: [0.925, 0.003, 250], to: [0.47, 0.19, 27] },
  dark: { from: [0.31, 0.007, 255], to: [0.67, 0.225, 26] },
};

/** OKLab of an OKLCH colour. */
const lab = ([lightness, chroma, hue]) => [
  lightness,
  chroma * Math.cos((hue * Math.PI) / 180),
  chroma * Math.sin((hue * Math.PI) / 180),
];

const gamma = (value) => (value <= 0.0031308 ? 12.92 * value : 1.055 * value ** (1 / 2.4) - 0.055);
const linear = (value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);

/** sRGB (0..1, clipped) of an OKLab colour. */
function srgb([lightness, a, b]) {
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const n = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * n,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * n,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * n,
  ].map((value) => Math.min(1, Math.max(0, gamma(Math.max(0, value)))));
}

const hex = (rgb) => `#${rgb.map((value) => Math.round(value * 255).toString(16).padStart(2, "0")).join("")}`;

/** WCAG relative luminance. */
const luminance = (rgb) => rgb.map(linear).reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);

function scale(ends) {
  const from = lab(ends.from);
  const to = lab(ends.to);
  return Array.from({ length: STEPS + 1 }, (_, step) => {
    const rgb = srgb(from.map((value, axis) => value + ((to[axis] - value) * step) / STEPS));
    return { fill: hex(rgb), ink: luminance(rgb) > 0.179 ? "#000000" : "#ffffff" };
  });
}

export const SCALES = { light: scale(ENDS.light), dark: scale(ENDS.dark) };

/** Where a probability lies on the scale, 0..1: base rates stay quiet, two chances in five are half of the way. */
export const heat = (p) => Math.min(1, Math.max(0, p)) ** 0.75;

/** The step of a probability. */
export const step = (p) => Math.round(heat(p) * STEPS);

/** Publish the scale to the style sheet as --r0 … --r32 and --o0 … --o32 (text on it). */
export function publishScale(root) {
  SCALES.light.forEach((light, index) => {
    const dark = SCALES.dark[index];
    root.style.setProperty(`--r${index}`, `light-dark(${light.fill}, ${dark.fill})`);
    root.style.setProperty(`--o${index}`, `light-dark(${light.ink}, ${dark.ink})`);
  });
}

/** Colour `node` by a probability; null is unknown and hatched. */
export function shade(node, p) {
  const level = p === null ? "unknown" : String(step(p));
  if (node.dataset.level === level) return;
  node.dataset.level = level;
  node.style.setProperty("--fill", p === null ? "transparent" : `var(--r${level})`);
  node.style.setProperty("--on", p === null ? "var(--ink-2)" : `var(--o${level})`);
}

/** Whether the page is dark now. */
export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}
