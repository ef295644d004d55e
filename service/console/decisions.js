// What the placement engine decided last, in its own sentences.

import { byId, h, keyed, say, unique } from "./dom.js";
import { clockTime, num, object, rows, text } from "./format.js";

const SHOWN = 6;
const PAGE = 50;

export class Decisions {
  constructor() {
    this.root = byId("decisions");
    this.kept = [];
    this.cursor = null;
  }

  path() {
    return `/placements?limit=${PAGE}${this.cursor === null ? "" : `&after=${encodeURIComponent(this.cursor)}`}`;
  }

  /** Takes a page; true when there may be more behind it. */
  update(body, nowMs) {
    const found = rows(object(body).rows).filter((row) => text(row.sentence) || text(row.outcome));
    const cursor = object(body).cursor;
    const moved = (num(cursor) !== null || text(cursor)) && cursor !== this.cursor;
    if (moved) this.cursor = cursor;
    const key = (row) => text(row.decision_id) || `${text(row.request_id)} ${text(row.cursor)}`;
    const newest = [...found, ...this.kept].sort((a, b) => (num(b.time_ms) ?? 0) - (num(a.time_ms) ?? 0));
    this.kept = unique(newest, key).slice(0, SHOWN);
    keyed(this.root, this.kept, key, () => this.make(), (item, row) => this.write(item, row, nowMs));
    say(byId("decisions-foot"), this.kept.length ? "" : "No decision yet.");
    return moved && found.length >= PAGE;
  }

  make() {
    return h(
      "li",
      { class: "row" },
      h("time", { class: "times" }),
      h("span", { class: "name" }),
      h("span", { class: "place" }),
      h("span", { class: "why" }),
    );
  }

  write(item, row, nowMs) {
    const [time, name, outcome, why] = item.children;
    say(time, clockTime(num(row.time_ms), nowMs));
    say(name, text(row.job) || text(row.request_id));
    say(outcome, text(row.outcome));
    item.dataset.outcome = text(row.outcome);
    say(why, text(row.sentence));
  }
}
