// The header strip: the fleet in numbers, each with its unit, and the line that says how old they are.

import { byId, say } from "./dom.js";
import { clockTime, count, duration, fullTime, list, NONE, num, object, rows, short, text, whole } from "./format.js";

// States of GPUs that nothing is placed on and nothing uses, as GET /v1/fleet names them.
const CLOSED = [
  ["unusable", "vanished from their exporter's page"],
  ["unheard", "without fresh telemetry"],
  ["window", "in maintenance"],
  ["reservation", "reserved"],
  ["out_of_service", "drained, lost or withheld"],
];
const SIGNAL_SHOWN_MS = 15 * 60_000; // fleet time

/** A fleet duration since `ms`, never negative. */
export const ago = (ms, nowMs) => (num(ms) === null || nowMs === null ? NONE : duration(Math.max(0, (nowMs - ms) / 1000)));

export class Strip {
  constructor() {
    this.signals = new Map();
    this.latest = null;
  }

  update(header) {
    const gpus = object(header.gpus);
    say(byId("fleet-name"), text(header.name) || "fleet");
    document.title = `${text(header.name) || "fleet"} · Fleetcast`;
    const speed = num(header.speed) ?? 1;
    byId("speed").hidden = speed === 1;
    say(byId("speed"), `${speed}× speed`);
    say(byId("gpus-total"), whole(gpus.total));
    say(byId("gpus-running"), whole(gpus.running));
    const loose = num(gpus.unknown_use) ?? 0;
    const promised = num(gpus.promised) ?? 0;
    byId("gpus-running").title = [
      loose && `${count(loose, "GPU")} of them in use by work that no job event names`,
      promised && `${count(promised, "GPU")} more promised to requests`,
    ].filter(Boolean).join("; ");
    say(byId("gpus-free"), whole(gpus.free));
    const closed = CLOSED.map(([state, words]) => [num(gpus[state]) ?? 0, words]).filter(([value]) => value > 0);
    const out = num(gpus.total) === null ? null : closed.reduce((sum, [value]) => sum + value, 0);
    say(byId("gpus-out"), whole(out));
    byId("gpus-out").title = closed.map(([value, words]) => `${count(value, "GPU")} ${words}`).join("; ");
    const total = Math.max(1, num(gpus.total) ?? 1);
    for (const [name, value] of [["running", (num(gpus.running) ?? 0) + promised], ["free", gpus.free], ["out", out]]) {
      byId(`share-${name}`).style.flexBasis = `${(100 * (num(value) ?? 0)) / total}%`;
    }
    say(byId("queued"), num(header.queued_gpus) === null ? NONE : header.queued_gpus === 0 ? "nothing" : `${whole(header.queued_gpus)} GPUs in ${count(num(header.queued_jobs) ?? 0, "job")}`);
    say(byId("at-risk"), whole(header.at_risk));
    say(byId("samples"), num(header.samples_per_s) === null ? NONE : `${short(header.samples_per_s)} /s`);
  }

  /** What moves with the clock alone; called every half second. */
  tick(header, nowMs, fresh) {
    say(byId("clock"), nowMs === null ? NONE : `${fullTime(nowMs)} UTC`);
    say(byId("newest"), header === null ? NONE : num(header.newest_sample_ms) === null ? "none yet" : `${ago(header.newest_sample_ms, nowMs)} old`);
    document.body.dataset.state = fresh.state;
    say(byId("notice"), fresh.state === "live" ? `Live. Scores as of ${clockTime(header.as_of_ms)} UTC, ${ago(header.as_of_ms, nowMs)} old.` : fresh.sentence);
    const recent = this.latest && nowMs !== null && nowMs - this.latest.time_ms < SIGNAL_SHOWN_MS;
    say(byId("signal"), recent ? `${this.latest.sentence} · ${clockTime(this.latest.time_ms)}` : "");
  }

  /** Hard signals from the stream; repeats are ignored. */
  hear(data, nowMs) {
    const found = Array.isArray(data) ? rows(data) : rows(list(object(data).rows));
    for (const signal of found) {
      const at = num(signal.time_ms) ?? nowMs ?? 0;
      const key = `${text(signal.node)} ${text(signal.gpu)} ${text(signal.type)} ${text(signal.code)} ${at}`;
      if (this.signals.has(key)) continue;
      this.signals.set(key, at);
      if (!this.latest || at >= this.latest.time_ms) {
        this.latest = { time_ms: at, sentence: text(signal.sentence) || `${text(signal.type)} on ${text(signal.node)}` };
      }
    }
    if (this.signals.size > 500) this.signals = new Map([...this.signals].slice(-200));
  }
}
