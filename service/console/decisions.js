// What the placement engine decided last, in its own sentences.

import { byId, h, keyed, say, unique } from "./dom.js";
import { clockTime, num, object, rows, sentence, text } from "./format.js";

const SHOWN = 5;
const PAGE = 50;

/**
 * Where the log ends. The API pages forwards from a cursor, oldest first; a long log is not read from its beginning but
 * probed for its end with single rows: in steps that double while there is one, then by halves.
 */
export class Tail {
  constructor() {
    this.low = 0; // a cursor with something behind it, or the beginning
    this.high = null; // a cursor with nothing behind it
    this.step = PAGE;
  }

  get found() {
    return this.high !== null && this.high - this.low <= PAGE;
  }

  get probe() {
    return this.high === null ? this.low + this.step : Math.floor((this.low + this.high) / 2);
  }

  /** `cursor`: that of the row behind the probe, null when there was none; one that lies before it is no cursor. */
  note(cursor) {
    if (cursor === null) this.high = this.probe;
    else if (!(cursor > this.probe)) this.high = this.low;
    else {
      this.low = this.high === null ? cursor : Math.min(cursor, this.high);
      this.step *= 2;
    }
  }
}

export class Decisions {
  constructor() {
    this.root = byId("decisions");
    this.kept = [];
    this.cursor = null;
    this.tail = new Tail();
  }

  path() {
    if (this.cursor === null && !this.tail.found) return `/placements?limit=1&after=${this.tail.probe}`;
    const after = this.cursor ?? Math.max(0, this.tail.low - PAGE);
    return `/placements?limit=${PAGE}&after=${encodeURIComponent(after)}`;
  }

  /** Takes a page; true when there may be more behind it. */
  update(body, nowMs) {
    const found = rows(object(body).rows);
    if (this.cursor === null && !this.tail.found) {
      this.tail.note(found.length ? (num(found.at(-1).cursor) ?? 0) : null);
      return true;
    }
    const cursor = object(body).cursor;
    const moved = (num(cursor) !== null || text(cursor) !== "") && cursor !== this.cursor;
    if (moved) this.cursor = cursor;
    this.show(found.filter((row) => text(row.sentence) || text(row.outcome)), nowMs);
    return moved && found.length >= PAGE;
  }

  show(found, nowMs) {
    const key = (row) => text(row.decision_id) || `${text(row.request_id)} ${text(row.cursor)}`;
    const newest = [...found, ...this.kept].sort((a, b) => (num(b.time_ms) ?? 0) - (num(a.time_ms) ?? 0));
    this.kept = unique(newest, key).slice(0, SHOWN);
    keyed(this.root, this.kept, key, () => this.make(), (item, row) => this.write(item, row, nowMs));
    say(byId("decisions-foot"), this.kept.length ? "" : "No decision yet.");
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
    say(why, sentence(row.sentence));
  }
}
