// The fleet map for thousands of nodes: racks as cells on a canvas, a square a node. Arrows move from rack to rack.

import { heat, isDark, SCALES, step, STEPS } from "./colour.js";
import { STATES } from "./columns.js";
import { h, s, say } from "./dom.js";
import { percent } from "./format.js";
import { groupsOf } from "./map_grid.js";
import { hideTip, showTip } from "./tip.js";

const LARGEST = 16;
const SMALLEST = 3;
const LEAST_HEIGHT = 440; // the squares are made to fit in this or what the panel offers, in CSS pixels
const PAD = 3;
const GROUP_GAP = 6;
const HOLLOW_FROM = 5; // squares of this size can show an idle node as a hollow one

/** Place all racks for squares of `size`: [{name, group, block, rows, x, y, wide, high, across}], and the height. */
export function placeRacks(groups, width, size) {
  const placed = [];
  let x = 0;
  let y = 0;
  let tallest = 0;
  for (const { group, block, racks } of groups) {
    for (const rack of racks) {
      const across = Math.max(1, Math.round(Math.sqrt(rack.rows.length)));
      const wide = across * size + PAD;
      const high = Math.ceil(rack.rows.length / across) * size + PAD;
      if (x > 0 && x + wide > width) {
        x = 0;
        y += tallest + PAD;
        tallest = 0;
      }
      placed.push({ ...rack, group, block, x, y, wide, high, across });
      x += wide + PAD;
      tallest = Math.max(tallest, high);
    }
    x += GROUP_GAP;
  }
  return { placed, height: y + tallest };
}

export class CanvasMap {
  constructor(root, { open, openRack }) {
    this.open = open;
    this.openRack = openRack;
    this.current = 0;
    this.canvas = h("canvas", { "aria-hidden": true });
    this.status = h("p", { class: "quiet", "aria-live": "polite" });
    this.root = root;
    this.frame = h(
      "div",
      { class: "canvas", tabindex: 0, role: "application", "aria-label": "Racks of the fleet: arrow keys move, Enter lists" },
      this.canvas,
      this.status,
    );
    root.replaceChildren(this.frame);
    this.frame.addEventListener("keydown", (event) => this.key(event));
    this.frame.addEventListener("focus", () => this.paint());
    this.frame.addEventListener("blur", () => this.paint());
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", hideTip);
    this.canvas.addEventListener("click", (event) => this.click(event));
    this.resized = new ResizeObserver(() => this.columns && this.arrange());
    this.resized.observe(root);
  }

  destroy() {
    this.resized.disconnect();
    this.root.replaceChildren();
  }

  update(columns, gang) {
    const moved = this.columns?.signature !== columns.signature;
    this.columns = columns;
    this.gang = gang;
    if (moved) {
      this.groups = groupsOf(columns);
      this.arrange();
    } else this.paint();
  }

  /** The largest squares that fit. */
  arrange() {
    const width = Math.floor(this.root.clientWidth);
    if (!width || !this.groups) return;
    const most = Math.max(LEAST_HEIGHT, Math.floor(this.root.clientHeight) - 4);
    let size = LARGEST;
    let fit = placeRacks(this.groups, width, size);
    while (fit.height > most && size > SMALLEST) {
      size -= 0.5;
      fit = placeRacks(this.groups, width, size);
    }
    Object.assign(this, { size, racks: fit.placed, width, height: Math.max(20, fit.height + 2) });
    const scale = Math.min(2, devicePixelRatio || 1);
    this.canvas.width = width * scale;
    this.canvas.height = this.height * scale;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.context = this.canvas.getContext("2d");
    this.context.setTransform(scale, 0, 0, scale, 0, 0);
    this.paint();
  }

  /** Squares by colour: one fill style a step instead of one a node. */
  paint() {
    if (!this.context) return;
    const { context, columns, size } = this;
    const style = getComputedStyle(this.frame); // the style sheet hands over its colours in properties that draw nothing here
    const scale = SCALES[isDark() ? "dark" : "light"];
    const buckets = Array.from({ length: STEPS + 2 }, () => []);
    const idle = [];
    context.clearRect(0, 0, this.width, this.height);
    context.fillStyle = style.caretColor;
    for (const rack of this.racks) {
      context.fillRect(rack.x - 1, rack.y - 1, rack.wide + 1, rack.high + 1);
      rack.rows.forEach((row, at) => {
        const p = columns.p[row];
        const square = [rack.x + 1 + (at % rack.across) * size, rack.y + 1 + Math.floor(at / rack.across) * size, row];
        buckets[Number.isNaN(p) ? STEPS + 1 : step(p)].push(square);
        if (columns.busy[row] === 0) idle.push(square);
      });
    }
    const gap = size > 4 ? 1 : 0.5;
    buckets.forEach((squares, level) => {
      context.fillStyle = level > STEPS ? this.hatch(style) : scale[level].fill;
      for (const [x, y] of squares) context.fillRect(x, y, size - gap, size - gap);
    });
    context.fillStyle = style.caretColor;
    const hole = size - gap - 3;
    if (size >= HOLLOW_FROM) for (const [x, y] of idle) context.fillRect(x + 1.5, y + 1.5, hole, hole);
    context.strokeStyle = style.color;
    context.lineWidth = 1.5;
    if (this.gang.size) this.outline(buckets.flat().filter(([, , row]) => this.gang.has(row)));
    const rack = this.racks[this.current];
    if (rack && document.activeElement === this.frame) context.strokeRect(rack.x - 0.5, rack.y - 0.5, rack.wide, rack.high);
  }

  outline(squares) {
    for (const [x, y] of squares) this.context.strokeRect(x - 0.5, y - 0.5, this.size, this.size);
  }

  hatch(style) {
    const tile = h("canvas", { width: 4, height: 4 });
    const context = tile.getContext("2d");
    context.strokeStyle = style.textDecorationColor;
    context.stroke(new Path2D("M-1 1l2 -2M0 4l4 -4M3 5l2 -2"));
    return this.context.createPattern(tile, "repeat");
  }

  /** The rack under a point of the canvas and the row of its node there, if any. */
  at(event) {
    const x = event.offsetX;
    const y = event.offsetY;
    const index = this.racks.findIndex((rack) => x >= rack.x && x < rack.x + rack.wide && y >= rack.y && y < rack.y + rack.high);
    if (index < 0) return null;
    const rack = this.racks[index];
    const across = Math.min(rack.across - 1, Math.max(0, Math.floor((x - rack.x - 1) / this.size)));
    const at = Math.floor((y - rack.y - 1) / this.size) * rack.across + across;
    return { index, rack, row: rack.rows[at] };
  }

  hover(event) {
    const found = this.at(event);
    if (!found || found.row === undefined) return hideTip();
    showTip(this.columns, found.row, new DOMRect(event.clientX, event.clientY, 6, 6));
  }

  click(event) {
    const found = this.at(event);
    if (!found) return;
    hideTip();
    this.current = found.index;
    if (found.row === undefined) this.openRack(found.rack.name, found.rack.rows);
    else this.open(this.columns.names[found.row]);
  }

  key(event) {
    const step = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[event.key];
    const rack = this.racks?.[this.current];
    if (!rack) return;
    if (event.key === "Enter") this.openRack(rack.name, rack.rows);
    else if (step) {
      event.preventDefault();
      this.current = this.towards(rack, step);
      this.paint();
      this.tell();
    }
  }

  /** The nearest rack in a direction. */
  towards(from, [dx, dy]) {
    let best = this.current;
    let least = Infinity;
    this.racks.forEach((rack, index) => {
      const along = (rack.x - from.x) * dx + (rack.y - from.y) * dy;
      const aside = Math.abs((rack.x - from.x) * dy) + Math.abs((rack.y - from.y) * dx);
      if (along > 0 && along + aside * 4 < least) {
        least = along + aside * 4;
        best = index;
      }
    });
    return best;
  }

  tell() {
    const { rows, name } = this.racks[this.current];
    const worst = rows.reduce((a, b) => (this.columns.p[b] > (this.columns.p[a] || 0) ? b : a), rows[0]);
    const { columns } = this;
    say(
      this.status,
      `rack ${name || "without a name"}: riskiest ${columns.names[worst]}, ${percent(columns.p[worst])}, ${STATES[columns.state[worst]]}`,
    );
    const rect = this.canvas.getBoundingClientRect();
    const rack = this.racks[this.current];
    showTip(columns, worst, new DOMRect(rect.left + rack.x, rect.top + rack.y, rack.wide, rack.high));
  }

  focus(row, take) {
    const index = this.racks?.findIndex((rack) => rack.rows.includes(row)) ?? -1;
    if (index >= 0) this.current = index;
    if (take) this.frame.focus();
    this.paint();
  }
}

/** The scale's key is drawn here so that both maps share it. */
export function legendOf() {
  const marks = [0, 0.1, 0.25, 0.5, 1];
  const width = 132;
  const x = (p) => heat(p) * width;
  const bars = Array.from({ length: STEPS + 1 }, (_, at) => {
    const bar = s("rect", { x: (at * width) / (STEPS + 1), y: 0, width: width / (STEPS + 1) + 0.5, height: 8 });
    bar.style.fill = `var(--r${at})`;
    return bar;
  });
  const labels = marks.map((p) => s("text", { x: x(p), y: 19, "text-anchor": p === 0 ? "start" : p === 1 ? "end" : "middle" }, String(p * 100)));
  return [
    h("span", {}, "risk within 1 h, %"),
    s("svg", { width, height: 21, viewBox: `0 0 ${width} 21`, role: "img", "aria-label": "colour scale from neutral at 0 % to red at 100 %" }, ...bars, ...labels),
    h("span", { class: "key key-unknown" }, "unknown"),
    h("span", { class: "key key-busy" }, "busy"),
    h("span", { class: "key key-loose" }, "in use, no job known"),
    h("span", { class: "key key-free" }, "free"),
    h("span", { class: "key key-bad" }, "out"),
  ];
}
