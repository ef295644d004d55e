// The doors to other schedulers and autoscalers: who answers, observes or writes, what was written last and why, and what is held back.

import { byId, h, keyed, mark, say } from "./dom.js";
import { clockTime, count, list, num, object, rows, sentence, text, whole } from "./format.js";

const SAYS = { done: "", observed: "would write ", conflict: "left alone ", refused: "was refused ", unreachable: "could not write " };

/** In which state a writer is: a word for its row. */
function standing(row) {
  if (text(row.error)) return "fails";
  if (row.withdrawn) return "withdrawn";
  if (num(row.board) === null) return "not run yet";
  return text(row.mode) === "write" ? "writes" : "observes";
}

/** Its numbers, those that say something. */
function figures(row) {
  const parts = [
    num(row.ours) && `${whole(row.ours)} marked`,
    num(row.writes) && `${whole(row.writes)} written`,
    num(row.held_back) && `${whole(row.held_back)} held back`,
    num(row.conflicts) && `${whole(row.conflicts)} left alone`,
    num(row.errors) && count(row.errors, "error"),
  ];
  return list(parts).filter(Boolean).join(" · ") || "nothing written yet";
}

/** The newest write in words. */
function newest(line, nowMs) {
  const at = clockTime(num(line.time_ms), nowMs);
  const change = line.value === null ? `takes back ${text(line.field)}` : `${text(line.field)} = ${text(line.value)}`;
  return `${at} ${SAYS[text(line.outcome)] ?? ""}${text(line.key)}: ${change}. ${sentence(line.why)}`;
}

export class Doors {
  constructor() {
    this.root = byId("doors");
  }

  update(body, nowMs) {
    const known = rows(object(body).rows);
    const writers = known.filter((row) => text(row.kind) === "writer");
    const answerers = known.filter((row) => text(row.kind) !== "writer").map((row) => text(row.name));
    say(byId("doors-sub"), answerers.length ? `on request: ${answerers.join(", ")}` : "");
    keyed(this.root, writers, (row) => text(row.name), () => this.make(), (item, row) => this.write(item, row, nowMs));
    say(byId("doors-foot"), writers.length ? "" : "No adapter writes into another system: docs/schedulers/index.md says which ones there are.");
  }

  make() {
    return h("li", { class: "row" }, h("span", { class: "name" }), h("span", { class: "place" }), h("span", { class: "state" }), h("span", { class: "why" }));
  }

  write(item, row, nowMs) {
    const [name, amounts, state, why] = item.children;
    say(name, text(row.name));
    say(amounts, figures(row));
    say(state, standing(row));
    mark(item, "data-fails", text(row.error) ? "" : null);
    const last = object(row.last);
    say(why, text(row.error) ? `${sentence(row.error)}. Trying again.` : text(last.key) ? newest(last, nowMs) : "");
  }
}
