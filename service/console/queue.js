// The queue: who waits, for what shape, why, and until when.

import { byId, h, keyed, say, unique } from "./dom.js";
import { clockTime, count, duration, num, object, rows, sentence, span, text, whole } from "./format.js";

const SHOWN = 6;

/** "8 × 8 GPUs", "4 GPUs", "2–8 × 8 GPUs" for a gang that may shrink. */
export function shape(row) {
  const gang = num(row.gang) ?? num(object(row.gang).desired) ?? 1;
  const least = num(object(row.gang).min) ?? gang;
  const each = num(row.gpus_per_node) ?? 1;
  if (gang === 1) return count(each, "GPU");
  return `${least < gang ? `${least}–${gang}` : gang} × ${count(each, "GPU")}`;
}

/** "starts in 12–40 min", from quantiles of the start. */
export function start(startMs, nowMs) {
  const { p50, p90 } = object(startMs);
  if (num(p50) === null || num(p90) === null || nowMs === null) return { line: "start unknown", times: "" };
  const [soon, late] = [Math.max(0, (p50 - nowMs) / 1000), Math.max(0, (p90 - nowMs) / 1000)];
  const times = `${clockTime(p50, nowMs)}–${clockTime(p90, nowMs)}`;
  return late < 60 ? { line: "any moment", times } : { line: `in ${span(soon, late)}`, times };
}

/** Nobody in this queue; jobs of Slurm or Kubernetes may wait in theirs. */
function nobody(header) {
  const jobs = num(header.queued_jobs) ?? 0;
  if (jobs === 0) return "No request waits.";
  return `No request waits in this engine's queue; ${count(jobs, "job")} with ${count(num(header.queued_gpus) ?? 0, "GPU")} ${jobs === 1 ? "waits" : "wait"} in others.`;
}

export class Queue {
  constructor({ why }) {
    this.why = why;
    this.all = false;
    this.root = byId("queue");
    this.more = h("button", { class: "link", onclick: () => this.toggle() });
  }

  toggle() {
    this.all = !this.all;
    if (this.body) this.update(this.body, this.nowMs);
  }

  /** header: of the fleet; it counts jobs that wait by their events, too. */
  update(body, nowMs, header = this.header) {
    Object.assign(this, { body, nowMs, header });
    const waiting = unique(rows(object(body).rows).filter((row) => text(row.request_id) || text(row.job)), (row) => text(row.request_id) || text(row.job));
    const shown = this.all ? waiting : waiting.slice(0, SHOWN);
    const gpus = waiting.reduce((sum, row) => sum + (num(row.gang) ?? num(object(row.gang).desired) ?? 1) * (num(row.gpus_per_node) ?? 1), 0);
    say(byId("queue-sub"), waiting.length ? `${count(waiting.length, "job")}, ${whole(gpus)} GPUs` : "");
    keyed(this.root, shown, (row) => text(row.request_id) || text(row.job), (row) => this.make(text(row.request_id)), (item, row) => this.write(item, row, nowMs));
    const foot = byId("queue-foot");
    if (waiting.length <= SHOWN) return say(foot, waiting.length ? "Start times are p50–p90." : nobody(object(header)));
    say(this.more, this.all ? "show fewer" : `show all ${waiting.length}`);
    if (!foot.contains(this.more)) foot.replaceChildren("Start times are p50–p90 · ", this.more);
  }

  /** A row opens the reasons why it waits. */
  make(request) {
    const row = h(
      "button",
      { class: "row", onclick: () => request && this.why(request) },
      h("span", { class: "position" }),
      h("span", { class: "name" }),
      h("span", { class: "shape" }),
      h("span", { class: "chance" }),
      h("span", { class: "place" }),
      h("span", { class: "times" }),
      h("span", { class: "why" }),
    );
    return h("li", {}, row);
  }

  write(item, row, nowMs) {
    const [position, name, gang, when, who, times, why] = item.firstChild.children;
    const expected = start(row.start_ms, nowMs);
    say(position, whole(row.position));
    say(name, text(row.job) || text(row.request_id));
    say(gang, shape(row));
    say(when, expected.line);
    say(times, expected.times);
    const groups = [...new Set([text(row.user), text(row.tenant), text(row.queue)])].filter(Boolean).join(" · ");
    say(who, `${groups}${groups ? " · " : ""}waits ${duration(row.waiting_s)}`);
    say(why, sentence(row.why));
  }
}
