// The fan chart, drawn by hand in SVG: what was, now, the median with its 50 % and 90 % bands, the capacity, and the
// forecast of some time ago under what then happened. Values in GPUs (or jobs), times Unix ms.

import { h, mark, s, say } from "./dom.js";
import { clockTime, figure, whole } from "./format.js";

const HOUR_MS = 3_600_000;
const MARGIN = { top: 14, right: 12, bottom: 22, left: 44 };
const LEAST_HEIGHT = 264;

/** Round steps for about `most` lines over a span. Between 1 and 10 they are whole: nobody wants 2.5 GPUs. */
export function niceStep(span, most) {
  const rough = span / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  return (power === 1 ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10]).map((step) => step * power).find((step) => step >= rough) ?? power * 10;
}

const line = (points, x, y) => points.map(([t, v], at) => `${at ? "L" : "M"}${x(t).toFixed(1)} ${y(v).toFixed(1)}`).join("");

/** Midnight is the day's name where hours alone would be told twice. */
const dayOrTime = (time, gap) => (gap >= 3 && time % (24 * HOUR_MS) === 0 ? clockTime(time, time - HOUR_MS).split(" ")[0] : clockTime(time));

/** A closed band between two paths over the same times. */
function band(low, high, x, y) {
  if (low.length < 2 || low.length !== high.length) return "";
  return `${line(high, x, y)}${line([...low].reverse(), x, y).replace("M", "L")}Z`;
}

/** Value of a path at a time, linear between its points; null outside. */
export function valueAt(path, time) {
  const at = path.findIndex(([t]) => t >= time);
  if (at < 0 || (at === 0 && path[0][0] > time)) return null;
  if (at === 0) return path[0][1];
  const [[t0, v0], [t1, v1]] = [path[at - 1], path[at]];
  return v0 + ((v1 - v0) * (time - t0)) / Math.max(1, t1 - t0);
}

const PARTS = ["grid", "old-band", "band90", "band50", "old", "median", "history", "now"];

export class Fan {
  constructor(root) {
    this.root = root;
    this.parts = Object.fromEntries(PARTS.map((name) => [name, s("path", { class: `fan-${name}` })]));
    this.capacity = s("g", { class: "fan-capacity" }, s("path"), s("text"));
    this.labels = s("g", { class: "fan-labels" });
    this.notes = s("g", { class: "fan-notes" });
    this.cursor = s("g", { class: "fan-cursor" }, s("path"), s("circle", { r: 3 }));
    this.readout = h("p", { class: "fan-readout", "aria-hidden": "true" });
    this.title = s("title");
    this.svg = s("svg", { role: "img" }, this.title, ...Object.values(this.parts), this.capacity, this.labels, this.notes, this.cursor);
    this.none = h("p", { class: "empty", hidden: true });
    root.replaceChildren(this.svg, this.readout, this.none);
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.data && this.draw(this.data)).observe(root);
    this.point(null);
  }

  /** Say in words why there is nothing to draw. */
  empty(sentence) {
    this.data = null;
    this.svg.style.display = "none";
    this.none.hidden = false;
    say(this.none, sentence);
  }

  /**
   * `data`: {history, median, bands: {50: [low, high], 90: [low, high]}, old: {median, band: [low, high]}, capacity,
   * nowMs, fromMs, toMs, noun, round (a value as text), words}; each path is [[time, value], …] in order.
   */
  draw(data) {
    this.data = data;
    const width = Math.max(240, Math.floor(this.root.clientWidth));
    this.svg.style.display = "";
    this.none.hidden = true;
    mark(this.svg, "width", width);
    this.height = Math.max(LEAST_HEIGHT, Math.floor(this.root.clientHeight));
    mark(this.svg, "height", this.height);
    mark(this.svg, "viewBox", `0 0 ${width} ${this.height}`);
    const [x, y, ticks] = this.scales(data, width);
    this.x = x;
    this.y = y;
    const draw = (name, path) => mark(this.parts[name], "d", path);
    draw("grid", ticks.map((value) => `M${MARGIN.left} ${Math.round(y(value)) + 0.5}H${width - MARGIN.right}`).join(""));
    draw("band90", band(...data.bands[90], x, y));
    draw("band50", band(...data.bands[50], x, y));
    draw("median", line(data.median, x, y));
    draw("history", line(data.history, x, y));
    draw("old", line(data.old.median, x, y));
    draw("old-band", band(...data.old.band, x, y));
    draw("now", `M${x(data.nowMs).toFixed(1)} ${MARGIN.top - 6}V${this.height - MARGIN.bottom}`);
    this.limit(data, width, y);
    this.label(data, width, x, y, ticks);
    say(this.title, data.words);
  }

  scales(data, width) {
    const paths = [data.history, data.median, ...data.bands[50], ...data.bands[90], data.old.median, ...data.old.band];
    const values = paths.flat().map(([, value]) => value);
    if (data.capacity !== null) values.push(data.capacity);
    let low = Math.min(...values);
    let high = Math.max(...values);
    if (low < 0.5 * high) low = 0;
    const pad = Math.max(1, (high - low) * 0.08);
    low = low === 0 ? 0 : Math.max(0, low - pad);
    high += pad;
    const gap = niceStep(high - low, 5);
    const ticks = [];
    for (let value = Math.ceil(low / gap) * gap; value <= high; value += gap) ticks.push(value);
    const inside = width - MARGIN.left - MARGIN.right;
    const x = (time) => MARGIN.left + ((time - data.fromMs) / (data.toMs - data.fromMs)) * inside;
    const y = (value) => MARGIN.top + (1 - (value - low) / (high - low)) * (this.height - MARGIN.top - MARGIN.bottom);
    return [x, y, ticks];
  }

  limit({ capacity }, width, y) {
    const [path, label] = this.capacity.children;
    this.capacity.style.display = capacity === null ? "none" : "";
    if (capacity === null) return;
    const at = Math.round(y(capacity)) + 0.5;
    mark(path, "d", `M${MARGIN.left} ${at}H${width - MARGIN.right}`);
    mark(label, "x", MARGIN.left + 4);
    mark(label, "y", at - 4);
    say(label, `${whole(capacity)} GPUs in service`);
  }

  label(data, width, x, y, ticks) {
    const hours = (data.toMs - data.fromMs) / HOUR_MS;
    const most = width < 480 ? 5 : 10;
    const gap = [0.5, 1, 2, 3, 6, 12, 24, 48].find((step) => hours / step <= most) ?? 96;
    const children = ticks.map((value) =>
      s("text", { x: MARGIN.left - 6, y: y(value) + 4, "text-anchor": "end" }, figure(value)),
    );
    const first = Math.ceil(data.fromMs / (gap * HOUR_MS)) * gap * HOUR_MS;
    for (let time = first; time <= data.toMs; time += gap * HOUR_MS) {
      if (x(time) < MARGIN.left + 12 || x(time) > width - 24) continue;
      children.push(s("text", { x: x(time), y: this.height - 6, "text-anchor": "middle" }, dayOrTime(time, gap)));
    }
    this.labels.replaceChildren(...children);
    this.notes.replaceChildren(s("text", { x: x(data.nowMs) + 4, y: MARGIN.top - 2 }, "now"));
  }

  /** The value under the pointer, in words above the chart. */
  point(offsetX) {
    const { data, cursor } = this;
    cursor.style.display = offsetX === null || !data ? "none" : "";
    if (!data) return;
    if (offsetX === null) return say(this.readout, "");
    const width = Number(this.svg.getAttribute("width"));
    const share = (offsetX - MARGIN.left) / (width - MARGIN.left - MARGIN.right);
    const time = data.fromMs + Math.min(1, Math.max(0, share)) * (data.toMs - data.fromMs);
    const past = time <= (data.history.at(-1)?.[0] ?? data.nowMs);
    const value = valueAt(past ? data.history : data.median, time);
    if (value === null) return say(this.readout, "");
    mark(cursor.firstChild, "d", `M${this.x(time).toFixed(1)} ${MARGIN.top}V${this.height - MARGIN.bottom}`);
    mark(cursor.lastChild, "cx", this.x(time).toFixed(1));
    mark(cursor.lastChild, "cy", this.y(value).toFixed(1));
    const [low, high] = data.bands[90].map((path) => valueAt(path, time));
    const range = past || low === null ? "" : `, 90 % between ${data.round(low)} and ${data.round(high)}`;
    say(this.readout, `${clockTime(time, data.nowMs)}: ${past ? "was" : "median"} ${data.round(value)} ${data.noun}${range}`);
  }
}
