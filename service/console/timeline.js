// A node's past on one time axis: risk, signals, faults and events, jobs, actions. Drawn by hand, in CSS pixels.

import { step } from "./colour.js";
import { h, mark, radios, s, say } from "./dom.js";
import { clockTime, duration, num, object, percent, text } from "./format.js";
import { lanesOf, riskAt, stateOf, told, when } from "./lanes.js";

const SPANS = [
  [60, "1 h"],
  [360, "6 h"],
  [1440, "24 h"],
  [10_080, "7 d"],
];
const NAME = 15; // height of a lane's name
const HIGH = { score: 14, signal: 18, event: 14, job: 17, action: 17 };
const GAP = 7;
const FOOT = 20;
const LETTER = 6.1; // width of one, about
const NARROW = 10; // hit area of what is thinner
const TICKS_MIN = [5, 10, 15, 30, 60, 120, 180, 360, 720, 1440, 2880];
const HINT = "Point at the picture, or go through it with the arrow keys.";

let made = 0;

export class Timeline {
  /** `changed()` is called when another span is chosen; `open(job)` when a job is. */
  constructor({ changed, open }) {
    Object.assign(this, { changed, open, minutes: 60, at: -1, body: null, reasons: [], failed: "" });
    this.name = `timeline-${++made}`;
    this.svg = s("svg", { "aria-hidden": true });
    this.readout = h("p", { class: "readout", "aria-live": "polite" }, HINT);
    this.state = h("p", { class: "axis-state", role: "status" }, "Asking for the timeline …");
    this.plot = h("div", { class: "plot", tabindex: 0, role: "group", "aria-roledescription": "timeline" }, this.svg);
    this.list = h("ol");
    this.count = h("summary");
    this.spans = h("div", { class: "switch", role: "radiogroup", "aria-label": "How far back" });
    this.element = h("div", { class: "axis" }, this.spans, this.state, this.plot, this.readout, h("details", {}, this.count, this.list));
    this.showSpans();
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.plot.addEventListener("pointermove", (event) => this.hover(event));
    this.plot.addEventListener("pointerleave", () => this.point(-1));
    this.plot.addEventListener("blur", () => this.point(-1));
    this.plot.addEventListener("click", (event) => this.press(event.target.closest?.("[data-at]")));
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  path(node) {
    return `/nodes/${encodeURIComponent(node)}/timeline?minutes=${this.minutes}`;
  }

  showSpans() {
    radios(this.spans, this.name, SPANS, this.minutes, (minutes) => {
      this.minutes = minutes;
      this.body = null;
      this.showSpans();
      say(this.state, "Asking for the timeline …");
      this.changed();
    });
  }

  update(body, nowMs) {
    Object.assign(this, { body: object(body), nowMs, failed: "" });
    this.draw();
  }

  /** The API has no answer now: what was drawn stays, and a line says so. */
  fail(error) {
    this.failed = text(error.message) || "no answer";
    if (this.body) this.draw();
    else say(this.state, `No timeline: ${this.failed}`);
    this.state.hidden = false;
  }

  draw() {
    const width = Math.floor(this.plot.clientWidth);
    if (!this.body || width < 40) return;
    const kept = this.items?.[this.at];
    const view = (this.view = lanesOf(this.body, this.reasons));
    this.items = view.lanes.flatMap((lane) => lane.entries).filter((item) => (item.to ?? view.endMs) >= view.fromMs);
    this.at = kept ? this.items.findIndex((item) => item.kind === kept.kind && item.from === kept.from && item.title === kept.title) : -1;
    const span = Math.max(1, view.endMs - view.fromMs);
    this.x = (time) => (Math.max(0, Math.min(1, (time - view.fromMs) / span)) * (width - 2)) + 1;
    this.paint(view, width);
    const said = stateOf(view, { nowMs: this.nowMs, failed: this.failed, minutes: this.minutes });
    say(this.state, said);
    this.state.hidden = !said;
    mark(this.plot, "aria-label", `Timeline of ${text(this.body.node)}, ${duration(this.minutes * 60)} to ${clockTime(view.endMs)}: ${this.items.length} entries; arrow keys go through them`);
    this.showList(view);
    this.point(this.at, true);
  }

  paint(view, width) {
    const drawn = [];
    let y = 0;
    for (const lane of view.lanes) {
      const high = HIGH[lane.kind] * Math.max(1, lane.high ?? 1);
      const here = lane.entries.filter((item) => (item.to ?? view.endMs) >= view.fromMs);
      drawn.push(s("text", { class: "lane-name", x: 0, y: y + 11 }, clip(lane.name, width - (lane.kind === "score" ? 60 : 0))));
      if (lane.kind === "score") drawn.push(s("text", { class: "lane-now", x: width, y: y + 11, "text-anchor": "end" }, lane.now === null ? "unknown" : percent(lane.now)));
      drawn.push(s("rect", { class: "ground", x: 0, y: y + NAME, width, height: high }));
      if (view.knownMs !== null && view.knownMs > view.fromMs) drawn.push(s("rect", { class: "unknown", x: 0, y: y + NAME, width: this.x(view.knownMs), height: high }));
      if (here.length === 0 && lane.kind !== "score") drawn.push(s("text", { class: "none", x: 4, y: y + NAME + 11 }, lane.none ?? "none"));
      for (const item of here) drawn.push(this.draws(item, y + NAME + (item.row ?? 0) * HIGH[lane.kind], HIGH[lane.kind], view, width));
      y += NAME + high + GAP;
    }
    this.height = y + FOOT;
    mark(this.svg, "viewBox", `0 0 ${width} ${this.height}`);
    mark(this.svg, "width", width);
    mark(this.svg, "height", this.height);
    this.cursor = s("path", { class: "cursor", d: "" });
    this.svg.replaceChildren(PATTERN(), ...ticks(view, this.x, width, y), ...drawn, this.cursor);
  }

  /** One entry as a group, with what can be pointed at. */
  draws(item, y, high, view, width) {
    const left = this.x(item.from);
    const right = this.x(item.to ?? view.endMs);
    const at = this.items.indexOf(item);
    const box = { x: left, y: y + 1, width: Math.max(1.5, right - left), height: high - 2 };
    const group = s("g", { class: `entry entry-${item.kind}`, "data-at": at });
    if (item.kind === "score") group.append(s("rect", { ...box, class: item.p === null ? "unknown" : "", style: null }));
    if (item.kind === "score" && item.p !== null) group.lastChild.style.fill = `var(--r${step(item.p)})`;
    if (item.kind === "signal") group.append(s("rect", { ...box, class: "bar" }), ...valueLine(item, this.x, y + 1, high - 2, right));
    if (item.kind === "fault" || item.kind === "event") group.append(diamond(left, y + high / 2, item.kind));
    if (item.kind === "job" || item.kind === "action") {
      mark(group, "data-soft", item.failed || (item.kind === "action" && !item.taken));
      group.append(s("rect", { ...box, class: "bar", rx: 2 }));
      group.append(...barName(item.title, left, right, y + high - 5, this.roomBefore(item, left)));
    }
    const wide = Math.max(NARROW, box.width);
    group.append(s("rect", { class: "hit", x: Math.min(left - (wide - box.width) / 2, width - wide), y, width: wide, height: high }));
    return group;
  }

  /** Pixels without another bar before one that begins at `left`. */
  roomBefore(item, left) {
    const before = item.lane.entries.filter((other) => other !== item && other.row === item.row && other.from <= item.from);
    return left - 5 - Math.max(0, ...before.map((other) => this.x(other.to ?? this.view.endMs)));
  }

  hover(event) {
    if (!this.view) return;
    const found = event.target.closest?.("[data-at]");
    if (found) return this.point(Number(found.dataset.at));
    this.point(-1, true);
    const box = this.svg.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const time = this.view.fromMs + share * (this.view.endMs - this.view.fromMs);
    mark(this.cursor, "d", `M${share * box.width} 0V${this.height - FOOT}`);
    say(this.readout, `${clockTime(time, this.view.endMs)} UTC: ${riskAt(this.view, time)}.`);
  }

  /** Say an entry and outline it; -1 for none. `quiet`: leave the sentence as it is where there is none. */
  point(at, quiet = false) {
    if (!this.items) return;
    this.at = at;
    this.svg.querySelector(".pointed")?.classList.remove("pointed");
    const item = this.items[at];
    if (!item) {
      mark(this.cursor, "d", "");
      if (!quiet) say(this.readout, HINT);
      return;
    }
    this.svg.querySelector(`[data-at="${at}"]`)?.classList.add("pointed");
    mark(this.cursor, "d", `M${this.x(Math.max(item.from, this.view.fromMs))} 0V${this.height - FOOT}`);
    say(this.readout, sentenceOf(item, this.view));
  }

  key(event) {
    if (event.key === "Enter") return this.press(this.svg.querySelector(`[data-at="${this.at}"]`));
    const next = this.next(event.key);
    if (next === null) return;
    event.preventDefault();
    event.stopPropagation();
    this.point(next);
  }

  /** Where a key leads: in time with left and right, to the lane beside with up and down. */
  next(key) {
    const order = [...(this.items ?? []).keys()].sort((a, b) => this.items[a].from - this.items[b].from || a - b);
    if (order.length === 0) return null;
    const here = order.indexOf(this.at);
    if (key === "Home") return order[0];
    if (key === "End") return order.at(-1);
    if (key === "ArrowLeft") return here < 0 ? order.at(-1) : order[Math.max(0, here - 1)];
    if (key === "ArrowRight") return here < 0 ? order.at(-1) : order[Math.min(order.length - 1, here + 1)];
    if (key === "ArrowUp" || key === "ArrowDown") return here < 0 ? order.at(-1) : this.beside(key === "ArrowDown" ? 1 : -1);
    return null;
  }

  beside(by) {
    const lanes = [...new Set(this.items.map((item) => item.lane))];
    const item = this.items[this.at];
    const lane = lanes[lanes.indexOf(item.lane) + by];
    if (!lane) return this.at;
    const near = [...this.items.keys()].filter((at) => this.items[at].lane === lane);
    return near.reduce((best, at) => (Math.abs(this.items[at].from - item.from) < Math.abs(this.items[best].from - item.from) ? at : best));
  }

  press(group) {
    const item = group && this.items?.[Number(group.dataset.at)];
    if (item?.kind === "job") this.open(item.title);
  }

  showList(view) {
    const all = told(view).filter((item) => (item.to ?? view.endMs) >= view.fromMs);
    say(this.count, all.length === 1 ? "The same as a list: 1 entry" : `The same as a list: ${all.length} entries`);
    const lines = all.map((item) => sentenceOf(item, view));
    if (lines.join("\n") === this.lines) return;
    this.lines = lines.join("\n");
    this.list.replaceChildren(...lines.map((line) => h("li", {}, line)));
  }
}

function sentenceOf(item, view) {
  const moment = when(item.from, item.to, view.endMs);
  return `${moment}: ${item.title}${item.said && item.said !== item.title ? ` (${item.said})` : ""}`;
}

const clip = (words, room) => (words.length * LETTER <= room ? words : `${words.slice(0, Math.max(1, Math.floor(room / LETTER) - 1))}…`);

/** The name of a bar: in it, before it where there is more room, or not at all. */
function barName(words, left, right, y, before) {
  const [inside, needs] = [right - left - 8, words.length * LETTER];
  if (inside < needs && before > Math.max(inside, 6 * LETTER)) return [s("text", { class: "bar-name outside", x: left - 5, y, "text-anchor": "end" }, clip(words, before - 5))];
  return inside > 5 * LETTER ? [s("text", { class: "bar-name", x: left + 4, y }, clip(words, inside))] : [];
}

const PATTERN = () =>
  s("defs", {}, s("pattern", { id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, s("rect", { width: 1.4, height: 5, class: "hatch" })));

function diamond(x, y, kind) {
  const size = kind === "fault" ? 6 : 4.5;
  return s("path", { class: "bar", d: `M${x} ${y - size}l${size} ${size}l${-size} ${size}l${-size} ${-size}z` });
}

/** The values of a signal as steps, and its usual one as a dashed line; from 0 to the highest of them. */
function valueLine(item, x, y, high, right) {
  const top = Math.max(...item.values.map((point) => point.value), item.usual ?? 0);
  if (!(top > 0)) return [];
  const level = (value) => (y + high - (Math.max(0, value) / top) * high).toFixed(1);
  const steps = item.values.map((point, at) => `${at ? `H${x(point.time_ms)}V` : `M${x(item.from)} `}${level(point.value)}`);
  const line = s("path", { class: "value", d: `${steps.join("")}H${right}` });
  const usual = num(item.usual) === null ? [] : [s("path", { class: "usual", d: `M${x(item.from)} ${level(item.usual)}H${right}` })];
  return [...usual, line];
}

/** Lines and times at round minutes, as many as have room. */
function ticks(view, x, width, bottom) {
  const minutes = (view.endMs - view.fromMs) / 60_000;
  const every = TICKS_MIN.find((size) => (width * size) / minutes >= 74) ?? TICKS_MIN.at(-1);
  const first = Math.ceil(view.fromMs / (every * 60_000));
  const found = [];
  for (let at = first; at * every * 60_000 < view.endMs; at++) {
    const time = at * every * 60_000;
    const place = x(time);
    found.push(s("path", { class: "tick", d: `M${place} 0V${bottom}` }));
    const label = clockTime(time, view.endMs);
    const half = (label.length * LETTER) / 2;
    if (place > half && place < width - 42 - half) found.push(s("text", { class: "tick-name", x: place, y: bottom + 14, "text-anchor": "middle" }, label));
  }
  found.push(s("text", { class: "tick-name tick-now", x: width, y: bottom + 14, "text-anchor": "end" }, clockTime(view.endMs)));
  return found;
}
