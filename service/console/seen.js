// What the page has seen itself: short histories for spark lines, from answers, not from an endpoint.

import { heat } from "./colour.js";
import { s } from "./dom.js";

const KEPT = 120;

export class Seen {
  constructor() {
    this.points = new Map();
  }

  /** Note a value of `key` at a fleet time; the same or an earlier time is ignored. */
  note(key, timeMs, value) {
    if (value === null || Number.isNaN(value)) return;
    let points = this.points.get(key);
    if (!points) this.points.set(key, (points = []));
    if (points.length && points[points.length - 1][0] >= timeMs) return;
    points.push([timeMs, value]);
    if (points.length > KEPT) points.shift();
  }

  of(key) {
    return this.points.get(key) ?? [];
  }
}

/** Path of probabilities over [fromMs, toMs] in a box; heights on the scale of the map's colours. */
function riskPath(points, fromMs, toMs, width, height) {
  const x = (time) => ((time - fromMs) / Math.max(1, toMs - fromMs)) * width;
  const y = (p) => height - 1 - heat(p) * (height - 2);
  return points
    .filter(([time]) => time >= fromMs)
    .map(([time, p], at) => `${at ? "L" : "M"}${x(time).toFixed(1)} ${y(p).toFixed(1)}`)
    .join("");
}

export const sparkline = (width, height) =>
  s(
    "svg",
    { class: "spark", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": true },
    s("path", { class: "spark-base", d: `M0 ${height - 0.5}h${width}` }),
    s("path", { class: "spark-line" }),
  );

/** Redraw a spark line over the span that was seen. */
export function redraw(svg, points, width, height) {
  const path = points.length > 1 ? riskPath(points, points[0][0], points.at(-1)[0], width, height) : "";
  if (svg.lastChild.getAttribute("d") !== path) svg.lastChild.setAttribute("d", path);
}
