// The riskiest nodes: which one to look at, and why.

import { shade } from "./colour.js";
import { byId, h, keyed, radios, say, unique } from "./dom.js";
import { advice, clockTime, happening, horizon, num, object, percent, rows, sentence, text } from "./format.js";
import { redraw, Seen, sparkline } from "./seen.js";
import { failures } from "./trust.js";

const HORIZONS_S = [3600, 18_000, 86_400, 604_800];
const SHOWN = 10;
const SPARK = [56, 18];

/** Two neighbours change places only when the lower one is clearly riskier: noise moves no row. */
export const clearlyAbove = (lower, upper) => lower - upper > Math.max(0.005, Math.min(0.04, 0.15 * upper));

/** The rows of `ranking` in an order as near as possible to `before` (names): what is already there keeps its place. */
export function steady(ranking, before) {
  const place = new Map(before.map((name, at) => [name, at]));
  const kept = ranking.filter((row) => place.has(row.node)).sort((a, b) => place.get(a.node) - place.get(b.node));
  const order = [...kept];
  for (const row of ranking) {
    if (place.has(row.node)) continue;
    const at = order.findIndex((other) => (row.p ?? -1) > (other.p ?? -1));
    order.splice(at < 0 ? order.length : at, 0, row);
  }
  for (let pass = 0; pass < order.length; pass++) {
    for (let at = order.length - 1; at > 0; at--) {
      if (clearlyAbove(order[at].p ?? -1, order[at - 1].p ?? -1)) [order[at - 1], order[at]] = [order[at], order[at - 1]];
    }
  }
  return order;
}

/** " · failures within 1 h: 0.8 % predicted, 1.1 % observed (of 5,000)": how true its own forecasts were. */
export function recordOf(calibration, horizonS) {
  const record = failures(rows(calibration).find((one) => one.horizon_s === horizonS));
  return record ? ` · ${record.figures}` : rows(calibration).length ? " · no record yet" : "";
}

export class RiskList {
  constructor({ open, hover, changed }) {
    this.open = open;
    this.hover = hover;
    this.changed = changed;
    this.horizonS = HORIZONS_S[0];
    this.seen = new Seen();
    this.order = [];
    this.root = byId("risk");
    this.switch();
  }

  path() {
    return `/risk/nodes?limit=${SHOWN}&horizon_s=${this.horizonS}`;
  }

  switch() {
    radios(
      byId("horizons"),
      "horizon",
      HORIZONS_S.map((seconds) => [seconds, horizon(seconds)]),
      this.horizonS,
      (seconds) => {
        this.horizonS = seconds;
        this.order = [];
        this.changed();
      },
    );
  }

  update(body) {
    const ranking = unique(
      rows(object(body).rows)
        .filter((row) => text(row.node))
        .map((row) => ({ ...row, node: text(row.node), p: num(row.p) })),
      (row) => row.node,
    ).slice(0, SHOWN);
    const asOfMs = num(body.as_of_ms) ?? 0;
    for (const row of ranking) this.seen.note(`${row.node} ${this.horizonS}`, asOfMs, row.p);
    const held = this.root.matches(":hover, :focus-within");
    const names = new Set(ranking.map((row) => row.node));
    const before = this.order.filter((name) => names.has(name));
    Object.assign(this, { ranking, calibration: rows(object(body).calibration) });
    const settled = held && before.length === ranking.length;
    const shown = settled ? before.map((name) => ranking.find((row) => row.node === name)) : steady(ranking, before);
    this.order = shown.map((row) => row.node);
    keyed(this.root, shown, (row) => row.node, () => this.make(), (item, row) => this.write(item, row));
    const model = text(body.model) || "rules";
    say(byId("risk-foot"), shown.length ? `Within ${horizon(this.horizonS)}, the likeliest of fail, drain, slow · model ${model}${recordOf(object(body).calibration, this.horizonS)} · as of ${clockTime(asOfMs)}` : "No node has a score yet.");
  }

  make() {
    const button = h(
      "button",
      { class: "row" },
      h("span", { class: "name" }),
      h("span", { class: "place" }),
      sparkline(...SPARK),
      h("span", { class: "chance" }),
      h("span", { class: "why" }),
      h("span", { class: "act" }),
    );
    const item = h("li", {}, button);
    button.addEventListener("click", () => this.open(item.dataset.key));
    button.addEventListener("pointerenter", () => this.hover(item.dataset.key));
    button.addEventListener("pointerleave", () => this.hover(""));
    return item;
  }

  write(item, row) {
    const [name, place, spark, chance, why, act] = item.firstChild.children;
    const state = text(row.state);
    const action = object(row.action);
    say(name, row.node);
    say(place, [text(row.rack) || "unplaced", state === "ok" ? "" : state, row.p >= 0.05 ? happening(row.kind) : ""].filter(Boolean).join(" · "));
    redraw(spark, this.seen.of(`${row.node} ${this.horizonS}`), ...SPARK);
    shade(chance, row.p);
    say(chance, percent(row.p));
    say(why, sentence(row.reason) || (row.p === null ? "Nothing is known of it yet." : "Nothing unusual; what such nodes show on average."));
    item.classList.toggle("quiet-row", !text(row.reason));
    say(act, text(action.code) === "none" ? "" : advice(row.action, text(row.reason)));
  }
}
