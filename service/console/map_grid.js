// The fleet map for up to some hundred nodes: racks as columns inside rail groups, a button a node, a tick a GPU.

import { STATES } from "./columns.js";
import { shade } from "./colour.js";
import { h, mark, s, say } from "./dom.js";
import { percent } from "./format.js";
import { hideTip, label, showTip } from "./tip.js";

const TICK = 5; // width of a GPU's tick with its gap
const SHOWN_FROM = 0.05; // below this the map stays quiet: the number is in the card

/** Racks in order of block, rail group and name: [{group, block, racks: [{name, rows}]}]. */
export function groupsOf(columns) {
  const groups = new Map();
  for (let row = 0; row < columns.n; row++) {
    const name = columns.groups[row];
    const key = `${columns.blocks[row]}\u0000${name}`;
    if (!groups.has(key)) groups.set(key, { group: name, block: columns.blocks[row], racks: new Map() });
    const { racks } = groups.get(key);
    const rack = columns.racks[row];
    if (!racks.has(rack)) racks.set(rack, { name: rack, rows: [] });
    racks.get(rack).rows.push(row);
  }
  const order = new Intl.Collator("en", { numeric: true });
  const last = (name) => (name ? name : "\uffff");
  return [...groups.values()]
    .sort((a, b) => order.compare(last(a.block), last(b.block)) || order.compare(last(a.group), last(b.group)))
    .map((group) => ({
      ...group,
      racks: [...group.racks.values()].sort((a, b) => order.compare(last(a.name), last(b.name))),
    }));
}

const box = (at) => `M${at * TICK + 0.5} 0.5h3v8h-3z`;
const half = (at) => `M${at * TICK + 0.5} 0.5h3v8h-3zM${at * TICK + 1.5} 1.5h1v3h-1z`;
const hollow = (at) => `M${at * TICK + 1} 1h2v7h-2z`;
const cross = (at) => `M${at * TICK + 0.5} 1l3 7m0 -7l-3 7`;

function pathOf(mask, count, draw) {
  let path = "";
  for (let at = 0; at < count; at++) if (mask & (1 << at)) path += draw(at);
  return path;
}

/** What stands at a cell's right end: the probability, or the state where that says more. */
function figureOf(columns, row) {
  const state = STATES[columns.state[row]];
  if (state !== "ok" && state !== "degraded" && state !== "unknown") return state;
  const p = columns.p[row];
  return p >= SHOWN_FROM ? percent(p) : "";
}

export class GridMap {
  /** `open(name)` opens a node, `openRack(name, rows)` a rack. */
  constructor(root, { open, openRack }) {
    this.root = root;
    this.open = open;
    this.openRack = openRack;
    this.cells = [];
    this.current = 0;
    this.listeners = new AbortController();
    const on = (type, act) => root.addEventListener(type, act, { signal: this.listeners.signal });
    on("click", (event) => this.act(event));
    on("keydown", (event) => this.move(event));
    on("pointerover", (event) => event.pointerType === "mouse" && this.hover(event.target));
    on("pointerleave", hideTip);
    on("focusin", (event) => event.target.matches(":focus-visible") && this.hover(event.target));
    on("focusout", hideTip);
  }

  destroy() {
    this.listeners.abort();
    this.root.replaceChildren();
  }

  layout(columns) {
    this.columns = columns;
    this.racks = [];
    this.cells = new Array(columns.n);
    this.root.replaceChildren(h("div", { class: "groups" }, ...groupsOf(columns).map((group) => this.group(group))));
    this.current = Math.min(this.current, Math.max(0, columns.n - 1));
    if (this.cells[this.current]) this.cells[this.current].tabIndex = 0;
  }

  group({ group, block, racks }) {
    const title = group ? [group, block].filter(Boolean).join(" · ") : racks[0].name ? block : "unplaced";
    const element = h(
      "div",
      { class: "group", role: "group", "aria-label": `rail group ${title}` },
      h("p", { class: "group-title" }, title || "racks"),
      h("div", { class: "racks" }, ...racks.map((rack) => this.rack(rack))),
    );
    element.style.setProperty("--racks", racks.length);
    return element;
  }

  rack({ name, rows }) {
    const column = this.racks.push(rows) - 1;
    return h(
      "div",
      { class: "rack", role: "group", "aria-label": name ? `rack ${name}` : "no rack" },
      h(
        "button",
        { class: "rack-title", tabindex: -1, onclick: () => this.openRack(name, rows) },
        name || "no rack",
      ),
      ...rows.map((row, at) => this.cell(row, column, at)),
    );
  }

  cell(row, column, at) {
    const width = Math.max(1, this.columns.gpus[row]) * TICK - 1;
    const cell = h(
      "button",
      { class: "node", tabindex: -1, "data-row": row },
      h("span", { class: "name" }, this.columns.names[row]),
      s(
        "svg",
        { class: "ticks", width, height: 9, viewBox: `0 0 ${width} 9`, preserveAspectRatio: "none", "aria-hidden": true },
        s("path", { class: "tick-busy" }),
        s("path", { class: "tick-free" }),
        s("path", { class: "tick-bad" }),
        s("path", { class: "tick-loose" }),
      ),
      " ",
      h("span", { class: "figure" }),
    );
    Object.assign(cell, { column, at });
    this.cells[row] = cell;
    return cell;
  }

  update(columns, gang) {
    const moved = this.columns?.signature !== columns.signature;
    if (moved) this.layout(columns);
    const before = moved ? null : this.columns;
    this.columns = columns;
    this.root.classList.toggle("has-gang", gang.size > 0);
    for (let row = 0; row < columns.n; row++) {
      const cell = this.cells[row];
      cell.classList.toggle("gang", gang.has(row));
      const same =
        before !== null &&
        Object.is(before.p[row], columns.p[row]) &&
        before.state[row] === columns.state[row] &&
        before.busy[row] === columns.busy[row] &&
        before.loose[row] === columns.loose[row] &&
        before.bad[row] === columns.bad[row] &&
        before.gpus[row] === columns.gpus[row] &&
        before.reasons[row] === columns.reasons[row];
      if (!same) this.draw(cell, row);
    }
  }

  draw(cell, row) {
    const { columns } = this;
    const [, ticks, figure] = cell.children;
    const all = columns.gpus[row];
    const bad = columns.bad[row];
    shade(cell, Number.isNaN(columns.p[row]) ? null : columns.p[row]);
    mark(cell, "data-state", STATES[columns.state[row]]);
    mark(ticks, "width", Math.max(1, all) * TICK - 1);
    mark(ticks, "viewBox", `0 0 ${Math.max(1, all) * TICK - 1} 9`);
    mark(ticks.children[0], "d", pathOf(columns.busy[row] & ~columns.loose[row] & ~bad, all, box));
    mark(ticks.children[1], "d", pathOf(~columns.busy[row] & ~bad, all, hollow));
    mark(ticks.children[2], "d", pathOf(bad, all, cross));
    mark(ticks.children[3], "d", pathOf(columns.loose[row] & ~bad, all, half));
    say(figure, figureOf(columns, row));
    mark(cell, "aria-label", label(columns, row, figureOf(columns, row)));
  }

  hover(target) {
    const cell = target.closest?.(".node");
    if (!cell) hideTip();
    else showTip(this.columns, Number(cell.dataset.row), cell.getBoundingClientRect());
  }

  act(event) {
    const cell = event.target.closest(".node");
    if (!cell) return;
    hideTip();
    this.focus(Number(cell.dataset.row), false);
    this.open(this.columns.names[Number(cell.dataset.row)]);
  }

  /** Arrow keys: up and down in a rack, left and right to the same height of the next rack. */
  move(event) {
    const cell = event.target.closest(".node");
    const step = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[event.key];
    if (!cell || (!step && event.key !== "Home" && event.key !== "End")) return;
    event.preventDefault();
    const column = Math.min(this.racks.length - 1, Math.max(0, cell.column + (step?.[0] ?? 0)));
    const rows = this.racks[column];
    const wanted = step ? cell.at + step[1] : event.key === "Home" ? 0 : rows.length - 1;
    this.focus(rows[Math.min(rows.length - 1, Math.max(0, wanted))], true);
  }

  focus(row, take) {
    if (this.cells[this.current]) this.cells[this.current].tabIndex = -1;
    this.current = row;
    const cell = this.cells[row];
    if (!cell) return;
    cell.tabIndex = 0;
    if (take) cell.focus();
  }
}
