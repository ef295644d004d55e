// What would change if a node were drained now, as the API works it out.

import { h, keyed, say } from "./dom.js";
import { clockTime, count, duration, num, object, percent, rows, sentence, span, text, whole } from "./format.js";

const dash = (value) => (num(value) === null ? "not known" : whole(value));

/** "5–17 min left" and what of its work would be done twice. */
function costOf(row) {
  const left = object(row.remaining_s);
  const next = num(object(row.next_checkpoint_ms).p50);
  return [
    `${count(num(row.gpus) ?? 0, "GPU")} on ${count(num(row.nodes) ?? 0, "node")}, ${whole(num(row.gpus_here))} here`,
    num(row.running_s) !== null && `runs for ${duration(row.running_s)}`,
    num(left.p50) !== null && num(left.p90) !== null ? `${span(left.p50, left.p90)} left (p50–p90)` : "what is left is not known",
    num(row.last_checkpoint_s) !== null ? `about ${duration(row.last_checkpoint_s)} of work since its last checkpoint` : "its checkpoints are not known",
    next !== null && `next one at ${clockTime(next)}`,
  ];
}

function restartOf(row, nowMs) {
  const start = object(row.restart_ms);
  if (num(start.p50) === null) return `When it would start again is not known: ${text(row.restart_reason) || "no reason is given"}.`;
  const waits = [start.p50, num(start.p90) ?? start.p50].map((time) => Math.max(0, (time - nowMs) / 1000));
  return waits[1] < 60 ? "It could start again elsewhere at once." : `It would start again elsewhere in ${span(...waits)} (p50–p90), at ${clockTime(start.p50, nowMs)} or later.`;
}

/** {element, update(body, nowMs), fail(error)}. `open(job)`. */
export function drainView(open) {
  const parts = { line: h("p", { class: "sentence" }, "Asking what a drain would change …"), jobs: h("ul", { class: "jobs hit" }), facts: h("dl", { class: "facts-grid" }), foot: h("p", { class: "why" }) };
  const element = h("div", { class: "drain" }, parts.line, parts.jobs, parts.facts, parts.foot);
  const update = (answer, nowMs) => {
    const body = object(answer);
    say(parts.line, sentence(body.sentence) || "The API does not say.");
    const jobs = rows(body.jobs).filter((row) => text(row.job));
    keyed(
      parts.jobs,
      jobs,
      (row) => row.job,
      (row) => h("li", {}, h("button", { class: "link name", onclick: () => open(text(row.job)) }, text(row.job)), h("span", { class: "place" }), h("p", { class: "why" })),
      (item, row) => {
        say(item.children[1], costOf(row).filter(Boolean).join(" · "));
        say(item.children[2], restartOf(row, num(body.as_of_ms) ?? nowMs));
      },
    );
    const pool = text(body.pool) ? ` of pool ${text(body.pool)}` : "";
    const facts = [
      [`Free GPUs${pool}`, `${dash(body.gpus_free_now)} → ${dash(body.gpus_free_after)}`],
      [`GPUs in service${pool}`, `${dash(body.gpus_in_service_now)} → ${dash(body.gpus_in_service_after)}`],
      ["Jobs interrupted", whole(jobs.length)],
      ...(num(body.unknown_gpus) > 0 ? [["GPUs at work for unknown jobs", whole(body.unknown_gpus)]] : []),
      ["If left alone: it fails within 24 h", percent(num(body.p_day))],
    ];
    keyed(
      parts.facts,
      facts,
      ([name]) => name,
      ([name]) => h("div", {}, h("dt", {}, name), h("dd")),
      (item, [, value]) => say(item.lastChild, value),
    );
    const delay = num(body.queue_delay_s);
    const queue = delay === null ? `What it does to the queue is not known: ${text(body.queue_reason) || "no reason is given"}.` : `The queue waits ${duration(delay)} longer.`;
    say(parts.foot, `${queue} As of ${clockTime(num(body.as_of_ms))} UTC; nothing is drained by looking.`);
  };
  const fail = (error) => parts.jobs.children.length === 0 && parts.facts.children.length === 0 && say(parts.line, `Not known now: ${text(error.message) || "no answer"}.`);
  return { element, update, fail };
}
