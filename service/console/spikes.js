// Load peaks ahead, and what busy GPUs really do: two small panels.

import { byId, h, keyed, say, unique } from "./dom.js";
import { amount, clockTime, count, duration, num, object, percent, rows, short, text, whole, withoutJobs, words } from "./format.js";

const SHOWN = 6;
const DOMAINS = { rack: "rack", rail: "rail", power: "power domain", storage: "storage" };
const QUANTITIES = { power_w: "power", checkpoint_bytes_per_s: "checkpoint writes", sent_bytes_per_s: "traffic" };
const VERDICTS = {
  works: "works",
  busy_but_little_work: "busy, little work",
  waits_for_data: "waits for data",
  waits_for_communication: "waits for communication",
  idle: "idle",
  abandoned: "abandoned",
  unknown: "not known",
};

/** How full a domain would be at p90; null where its capacity is not known. */
export const fill = (row) => (num(row.p90) === null || !(num(row.capacity) > 0) ? null : row.p90 / row.capacity);

/** The fullest first, then the ones without a capacity by how large they are beside their own median. */
export function pressing(spikes) {
  const named = rows(spikes).filter((row) => text(row.domain) && num(row.p90) !== null);
  const rise = (row) => row.p90 / Math.max(1, num(row.p50) ?? row.p90);
  return unique(named, keyOf).sort((a, b) => (fill(b) ?? -1) - (fill(a) ?? -1) || rise(b) - rise(a));
}

const keyOf = (row) => `${text(row.domain_kind)} ${text(row.domain)} ${text(row.quantity)}`;

/** " · 90 of 124 running jobs were looked at so far". */
function lookedAt(body) {
  const [looked, running] = [num(body.jobs_looked), num(body.jobs_running)];
  return looked === null || running === null ? "" : ` · ${whole(looked)} of ${count(running, "running job")} looked at so far`;
}

export class Spikes {
  update(body, nowMs, header) {
    const all = pressing(object(body).rows);
    const asOfMs = num(object(body).as_of_ms);
    say(byId("spikes-sub"), all.length > SHOWN ? `${SHOWN} of ${whole(all.length)}` : "");
    keyed(
      byId("spikes"),
      all.slice(0, SHOWN),
      keyOf,
      () => h("li", {}, h("div", { class: "row" }, h("span", { class: "name" }), h("span", { class: "place" }), h("span", { class: "times" }), h("span", { class: "why" }))),
      (item, row) => this.write(item.firstChild.children, row, nowMs),
    );
    const seen = `${lookedAt(object(body))}${asOfMs === null ? "" : ` · as of ${clockTime(asOfMs)}`}`;
    say(byId("spikes-foot"), all.length ? `The highest minute of the next 15, summed over jobs${seen}` : withoutJobs(header, "No load peak is foreseen: no running job was looked at yet, or none has a load that is known."));
  }

  write([name, place, at, why], row, nowMs) {
    const unit = text(row.unit);
    const full = fill(row);
    say(name, `${DOMAINS[text(row.domain_kind)] ?? words(row.domain_kind)} ${text(row.domain)}`);
    say(place, `${QUANTITIES[text(row.quantity)] ?? words(row.quantity)} of ${count(num(row.jobs) ?? 0, "job")}`);
    say(at, `${clockTime(num(row.peak_ms), nowMs)}${num(row.peak_ms) === null || nowMs === null ? "" : `, in ${duration(Math.max(0, (row.peak_ms - nowMs) / 1000))}`}`);
    const level = `${amount(row.p50, unit)} expected, ${amount(row.p90, unit)} at p90`;
    say(why, full === null ? `${level}; its capacity is not known${text(row.capacity_reason) ? `: ${text(row.capacity_reason)}` : ""}.` : `${level}: ${Math.round(100 * full)} % of ${amount(row.capacity, unit)}${full > 1 ? ", more than it can take" : ""}.`);
  }
}

export class Use {
  constructor({ open }) {
    this.open = open;
  }

  update(body, header) {
    const answer = object(body);
    const all = unique(rows(answer.rows).filter((row) => text(row.job)), (row) => text(row.job));
    const gpusOf = (verdicts) => all.filter((row) => verdicts.includes(row.verdict)).reduce((sum, row) => sum + (num(row.gpus) ?? 0), 0);
    const nothing = gpusOf(["idle", "abandoned"]);
    const total = all.reduce((sum, row) => sum + (num(row.gpus) ?? 0), 0);
    say(byId("use-sub"), all.length ? `${whole(nothing)} of ${count(total, "GPU")} in jobs do nothing` : "");
    const first = all.filter((row) => row.verdict !== "works");
    keyed(
      byId("use"),
      [...first, ...all.filter((row) => row.verdict === "works")].slice(0, SHOWN),
      (row) => text(row.job),
      (row) => h("li", {}, h("button", { class: "row", onclick: () => this.open(text(row.job)) }, h("span", { class: "name" }, text(row.job)), h("span", { class: "place" }), h("span", { class: "times" }), h("span", { class: "why" }))),
      (item, row) => this.write(item.firstChild.children, row),
    );
    const asOf = num(answer.as_of_ms) === null ? "" : ` · as of ${clockTime(answer.as_of_ms)}`;
    const longest = Math.max(0, ...all.map((row) => num(row.span_s) ?? 0));
    say(byId("use-foot"), all.length ? `${longest ? `Of the last ${duration(longest)}; busy` : "Busy"} is what the driver calls so${lookedAt(answer)}${asOf}` : withoutJobs(header, "No running job was looked at yet."));
  }

  write([, place, verdict, why], row) {
    say(place, [text(row.user), count(num(row.gpus) ?? 0, "GPU")].filter(Boolean).join(" · "));
    say(verdict, VERDICTS[text(row.verdict)] ?? words(row.verdict));
    const idle = num(row.idle_s) > 60 && `nothing done for ${duration(row.idle_s)}`;
    const held = ["idle", "abandoned"].includes(row.verdict) && num(row.held_gpu_memory_gib) !== null && `holds ${short(row.held_gpu_memory_gib)} GiB of GPU memory`;
    const data = num(row.data_share) > 0.05 && `${percent(row.data_share)} of the time loading data`;
    const talk = num(row.communication_share) > 0.05 && `${percent(row.communication_share)} communicating`;
    if (row.verdict === "unknown" && text(row.reason)) return say(why, `Not known: ${text(row.reason)}.`);
    const mfu = num(row.mfu) === null ? `not known${text(row.mfu_reason) ? ` (${text(row.mfu_reason)})` : ""}` : percent(row.mfu);
    say(why, [`busy ${percent(num(row.busy))}, SM active ${percent(num(row.sm_active))}, MFU ${mfu}`, idle, held, data, talk].filter(Boolean).join(" · "));
  }
}
