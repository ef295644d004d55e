// Demand: what was wanted, what will be, and how good such forecasts were.

import { byId, h, keyed, radios, say } from "./dom.js";
import { Fan, valueAt } from "./fan.js";
import { clockTime, duration, figure, list, num, object, percent, rows, text, whole, words } from "./format.js";

const TARGETS = [
  ["wanted", "wanted"],
  ["running", "running"],
  ["queued", "queued"],
  ["arriving", "arriving"],
];
const MEANING = {
  wanted: "GPUs running plus queued",
  running: "GPUs running",
  queued: "GPUs queued",
  arriving: "GPUs asked for by jobs that arrive, per 10 min",
  request_rate: "requests per second to served models",
};
const REQUESTS = ["request_rate", "requests"]; // a choice where models are served
const SERVING = "inference"; // the class that requests are of
const SPANS_H = [6, 24, 72];
const DRAWN_BACK_H = 24;
const HOUR_MS = 3_600_000;
const LATE_MS_PER_S = 50; // a forecast is a little older than now: its end is read as the end of the span
const READ_AT_S = [1800, 3600, 10_800, 21_600, 43_200, 86_400, 259_200];

/** Points [[ms, value], …] of a quantile of a series, [] when it has none near. */
function quantileOf(series, wanted) {
  const quantiles = list(series.quantiles).map(num);
  let at = -1;
  quantiles.forEach((quantile, index) => {
    if (quantile !== null && Math.abs(quantile - wanted) < 0.051 && (at < 0 || Math.abs(quantile - wanted) < Math.abs(quantiles[at] - wanted))) at = index;
  });
  const issued = num(series.issued_ms);
  if (at < 0 || issued === null) return [];
  const values = list(list(series.values)[at]);
  return list(series.horizons_s)
    .map((horizonS, index) => [issued + horizonS * 1000, num(values[index])])
    .filter(([time, value]) => num(time) !== null && value !== null);
}

/** A past forecast as three paths, from the value known when it was made to now, so that the outcome lies over it. */
function pastForecast(record, history, fromMs, nowMs) {
  const paths = [1, 2, 3].map((column) => recorded(record.old, column).filter(([time]) => time >= fromMs && time <= nowMs));
  const first = paths[1][0]?.[0];
  const made = num(record.old_issued_ms) ?? first - 1;
  const issued = history.filter(([time]) => time <= made && time < first).at(-1);
  return issued ? paths.map((path) => [issued, ...path]) : paths;
}

/** Points of a recorded path: `column` 1 is its first value. */
const recorded = (points, column) =>
  list(points)
    .map((point) => [num(list(point)[0]), num(list(point)[column])])
    .filter(([time, value]) => time !== null && value !== null);

/** Who serves which horizons, nearest first: "persistence to 60 min, theta to 3 d". */
export function whoServes(series) {
  const ends = [];
  list(series.models).forEach((model, at) => {
    if (ends.at(-1)?.[0] !== model) ends.push([model, 0]);
    ends.at(-1)[1] = num(list(series.horizons_s)[at]);
  });
  if (ends.length < 2) return words(series.model).replaceAll("+", " + ") || "unknown";
  return ends.map(([model, end]) => `${words(model)} to ${duration(end)}`).join(", ");
}

export class Demand {
  constructor({ changed }) {
    this.changed = changed;
    this.queue = "all";
    this.pool = "all";
    this.scopes = new Map();
    this.class = "all";
    this.target = "wanted";
    this.spanH = SPANS_H[0];
    this.fan = new Fan(byId("fan"));
    this.select = byId("pool");
    this.select.addEventListener("change", () => this.choose({ ...this.scopes.get(this.select.value), class: "all" }));
    this.classes = byId("class");
    this.classes.addEventListener("change", () => this.choose({ class: this.classes.value }));
    this.targets(TARGETS);
    this.switches();
  }

  /** Requests are of one class: there is none to choose. */
  get wantedClass() {
    return this.target === REQUESTS[0] ? SERVING : this.class;
  }

  query() {
    return `queue=${encodeURIComponent(this.queue)}&pool=${encodeURIComponent(this.pool)}&target=${this.target}&class=${encodeURIComponent(this.wantedClass)}`;
  }

  path() {
    return `/demand?${this.query()}&group=all`;
  }

  /** Null until there is a forecast to hold against a record. */
  recordPath() {
    return !this.series ? null : `/demand/record?${this.query()}`;
  }

  targets(options) {
    radios(byId("targets"), "target", options, this.target, (target) => {
      this.choose({ target });
      this.pick(this.classes, this.named, this.class);
    });
  }

  switches() {
    radios(byId("spans"), "span", SPANS_H.map((hours) => [hours, `${hours} h`]), this.spanH, (spanH) => {
      this.spanH = spanH;
      this.draw();
    });
  }

  choose(choice) {
    Object.assign(this, choice, { series: null, record: null });
    this.changed();
  }

  /** The GPUs to draw as a line: of the whole fleet, or of the pool that is chosen. */
  capacityOf() {
    if (this.class !== "all" || this.queue !== "all" || (this.target !== "wanted" && this.target !== "running")) return null;
    return this.pool === "all" ? this.capacity : num(this.series?.capacity);
  }

  /** Whether a row is of the queue or pool that is chosen. */
  isChosen(row) {
    return (text(row.queue) || "all") === this.queue && (text(row.pool) || "all") === this.pool;
  }

  get whose() {
    return this.pool === "all" ? `queue ${this.queue}` : `pool ${this.pool}`;
  }

  /** The queues, pools and classes to choose from: those of any series; and whether requests are forecast. */
  pools(body) {
    const series = rows(object(body).series);
    const named = (key, among) => [...new Set(["all", ...among.map((row) => text(row[key])).filter(Boolean)])];
    const queues = named("queue", series).map((queue) => [queue === "all" ? "all" : `queue ${queue}`, { queue, pool: "all" }]);
    const pools = named("pool", series).filter((pool) => pool !== "all").map((pool) => [`pool ${pool}`, { queue: "all", pool }]);
    this.scopes = new Map([...queues, ...pools]);
    this.pick(this.select, [...this.scopes.keys()], this.queue === "all" && this.pool === "all" ? "all" : this.whose);
    const own = series.filter((row) => text(row.target) !== REQUESTS[0] && this.isChosen(row));
    this.named = named("class", own);
    this.pick(this.classes, this.named, this.class);
    this.targets(series.some((row) => text(row.target) === REQUESTS[0]) ? [...TARGETS, REQUESTS] : TARGETS);
  }

  pick(select, names, chosen) {
    keyed(select, names ?? ["all"], (name) => name, (name) => h("option", { value: name }, words(name)), () => {});
    select.value = chosen;
    this.classes.disabled = this.target === REQUESTS[0];
  }

  update(body) {
    const found = rows(object(body).series).filter(
      (row) =>
        text(row.target) === this.target &&
        this.isChosen(row) &&
        (text(row.class) || "all") === this.wantedClass &&
        (text(row.group) || "all") === "all",
    );
    this.series = found[0] ?? null;
    this.draw();
  }

  updateRecord(body) {
    const answer = object(body);
    this.record = object(answer.record ?? answer);
    this.draw();
  }

  /** `header`: the fleet document; gives the capacity line and the time. */
  fleet(header, nowMs) {
    const gpus = object(header.gpus);
    this.capacity = num(gpus.running) === null ? null : gpus.running + (num(gpus.promised) ?? 0) + (num(gpus.free) ?? 0);
    this.nowMs = nowMs;
    if (this.series) this.draw();
  }

  draw() {
    const { series, nowMs } = this;
    if (!series || nowMs === undefined || nowMs === null) {
      this.fan.empty(series === null ? "No forecast yet: it needs some job events first." : "");
      byId("ahead").replaceChildren();
      return say(byId("demand-foot"), "");
    }
    const data = this.data(series);
    if (data.median.length < 2) return this.fan.empty("The forecast of this series is empty.");
    this.fan.draw(data);
    this.readAhead(data);
    this.foot(series, data);
  }

  data(series) {
    const issued = num(series.issued_ms) ?? this.nowMs;
    const fromMs = this.nowMs - Math.min(this.spanH * 0.75, DRAWN_BACK_H) * HOUR_MS;
    const now = num(series.now);
    const ahead = (quantile) => {
      const path = quantileOf(series, quantile);
      const start = now === null || path.length === 0 ? path : [[issued, now], ...path];
      const toMs = Math.min(this.nowMs + this.spanH * HOUR_MS, start.at(-1)?.[0] ?? 0);
      const end = valueAt(start, toMs);
      return [...start.filter(([time]) => time < toMs), ...(end === null ? [] : [[toMs, end]])];
    };
    const inside = (path) => path.filter(([time]) => time >= fromMs);
    const record = object(this.record);
    const history = inside(recorded(record.history, 1));
    const median = ahead(0.5);
    const [low, middle, high] = pastForecast(record, history, fromMs, this.nowMs);
    return {
      history: now !== null && history.length && history.at(-1)[0] < issued ? [...history, [issued, now]] : history,
      median,
      bands: { 50: [ahead(0.25), ahead(0.75)], 90: [ahead(0.05), ahead(0.95)] },
      old: { median: middle, band: [low, high] },
      capacity: this.capacityOf(),
      nowMs: this.nowMs,
      fromMs,
      toMs: median.at(-1)?.[0] ?? this.nowMs + HOUR_MS,
      noun: this.target === REQUESTS[0] ? "requests/s" : "GPUs",
      round: this.round,
      words: `${MEANING[this.target]}, ${this.whose}${this.class === "all" ? "" : `, class ${words(this.class)}`}: now ${this.round(now)}, then the median forecast with its 50 % and 90 % bands`,
    };
  }

  get round() {
    return this.target === REQUESTS[0] ? figure : whole;
  }

  /** The forecast in figures, for a few horizons: also what a screen reader gets instead of the picture. */
  readAhead(data) {
    const [low, high] = data.bands[90];
    const found = READ_AT_S.filter((ahead) => data.nowMs + ahead * 1000 <= data.toMs + ahead * LATE_MS_PER_S)
      .map((ahead) => {
        const time = Math.min(data.nowMs + ahead * 1000, data.toMs);
        return { ahead, median: valueAt(data.median, time), low: valueAt(low, time), high: valueAt(high, time) };
      })
      .filter(({ median }) => median !== null)
      .slice(-5);
    keyed(
      byId("ahead"),
      found,
      ({ ahead }) => ahead,
      () => h("div", {}, h("dt"), h("dd", {}, h("b"), h("span"))),
      (item, { ahead, median, low: least, high: most }) => {
        say(item.firstChild, `in ${duration(ahead)}`);
        say(item.lastChild.firstChild, this.round(median));
        const [from, to] = [least, most].map((value) => (value === null ? "" : this.round(value)));
        say(item.lastChild.lastChild, from === to ? "" : ` ${from}–${to}`);
      },
    );
  }

  /** What the figures are, who made them, and how good they were; bands without width are said to be none. */
  foot(series, { bands, old }) {
    const record = object(series.record);
    const [low, high] = bands[90];
    const flat = !num(record.origins) && low.every(([, value], at) => value === high[at]?.[1]);
    const wql = num(record.wql_vs_best_naive);
    const parts = [
      MEANING[this.target],
      flat ? "no bands yet: too little history" : "ranges are 90 %, bands 50 and 90 %",
      old.median.length > 1 && `dashed: the forecast of ${clockTime(old.median[0][0], this.nowMs)}`,
      `model ${whoServes(series)}, issued ${clockTime(num(series.issued_ms))}`,
      wql !== null && num(record.origins) !== null && `record over ${whole(record.origins)} forecasts: error ${wql.toFixed(2)} of the best naive`,
      num(record.coverage_80) !== null && `80 % band held ${percent(record.coverage_80)}`,
    ];
    say(byId("demand-foot"), parts.filter(Boolean).join(" · "));
  }
}
