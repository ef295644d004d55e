// What a node's timeline shows, as lanes of entries on one time axis. Pure: an answer of the API in, plain objects out.

import { clockTime, count, duration, figure, horizon, num, percent, rows, sentence, text, words } from "./format.js";

export const MOST_SIGNALS = 6;
const MOST_ROWS = 6; // of jobs that run beside each other
const ACTS = { watch: "watch", avoid: "place nothing big", drain_at_job_end: "drain at job end", drain_now: "drain now", replace_part: "replace a part", drained: "out of service" };
const OUTCOMES = { finished: "finished", failed: "failed", preempted: "preempted", moved: "moved elsewhere" };

const horizonName = (seconds) => (seconds === 86_400 ? "24\u202fh" : horizon(seconds));

/** "14:02–14:31 (29 min)", "since 14:02 (29 min)". */
export function when(fromMs, toMs, nowMs) {
  if (toMs === null) return `since ${clockTime(fromMs, nowMs)} (${duration((nowMs - fromMs) / 1000)})`;
  if (toMs - fromMs < 1000) return `at ${clockTime(fromMs, nowMs)}`;
  return `${clockTime(fromMs, nowMs)}–${clockTime(toMs, nowMs)} (${duration((toMs - fromMs) / 1000)})`;
}

/** Entries have {lane, kind, from, to (null: goes on), title, words}; times in Unix ms. */
function entry(kind, row, title, said) {
  return { kind, from: num(row.began_ms) ?? num(row.time_ms), to: "time_ms" in row ? num(row.time_ms) : num(row.ended_ms), title, said };
}

function scoreLane(scores, endMs) {
  const seconds = num(scores.horizon_s);
  const steps = rows(scores.steps).filter((step) => num(step.time_ms) !== null);
  const entries = steps.map((step, at) => ({
    kind: "score",
    from: step.time_ms,
    to: at + 1 < steps.length ? steps[at + 1].time_ms : null,
    p: num(step.p),
    title: num(step.p) === null ? "risk unknown" : `risk ${percent(step.p)} within ${horizonName(seconds)}`,
    said: "",
  }));
  const now = entries.length ? entries.at(-1).p : null;
  return { kind: "score", name: `Risk within ${horizonName(seconds)}`, now, entries, endMs };
}

/** The strongest first: those that go on, then by their share of the score. */
export function strongest(signals) {
  const on = (row) => (num(row.ended_ms) === null ? 1 : 0);
  return rows(signals)
    .filter((row) => num(row.began_ms) !== null)
    .sort((a, b) => on(b) - on(a) || (num(b.share) ?? 0) - (num(a.share) ?? 0) || b.began_ms - a.began_ms);
}

const reading = (row) => {
  const values = rows(row.values).filter((point) => num(point.value) !== null && num(point.time_ms) !== null);
  const unit = text(row.unit) ? ` ${text(row.unit)}` : "";
  const last = values.length ? `${figure(values.at(-1).value)}${unit}` : "";
  const usual = num(row.usual) === null ? "" : `, usual ${figure(row.usual)}${unit}`;
  return { values, said: last ? `${words(row.feature)} of ${text(row.entity)}: ${last}${usual}` : text(row.entity) };
};

function signalLane(row, now) {
  const { values, said } = reading(row);
  const fresh = num(row.ended_ms) === null && now.find((one) => one.feature === row.feature && one.entity === row.entity);
  const title = sentence(fresh ? fresh.sentence : row.sentence) || words(row.feature);
  const made = { ...entry("signal", row, title, said), values, usual: num(row.usual) };
  return { kind: "signal", name: made.title, entries: [made] };
}

function eventLane(events) {
  const entries = rows(events)
    .filter((row) => num(row.time_ms) !== null)
    .map((row) => ({ ...entry(row.type === "fault" || row.type === "xid" ? "fault" : "event", row, sentence(row.sentence), text(row.source) && `reported by ${text(row.source)}`) }));
  return { kind: "event", name: "Faults and events", entries };
}

/** Rows of bars that do not lie over each other. */
function packed(entries, endMs) {
  const ends = [];
  for (const item of [...entries].sort((a, b) => a.from - b.from)) {
    let row = ends.findIndex((end) => end <= item.from);
    if (row < 0) row = ends.length;
    ends[row] = item.to ?? endMs + 1;
    item.row = row;
  }
  return ends.length;
}

function jobLane(jobs, endMs) {
  const entries = rows(jobs)
    .filter((row) => num(row.began_ms) !== null && text(row.job))
    .map((row) => {
      const here = num(row.gpus) === null ? "" : `${count(row.gpus, "GPU")} here`;
      const attempt = num(row.attempt) > 1 ? `attempt ${row.attempt}` : "";
      const outcome = num(row.ended_ms) === null ? "runs" : OUTCOMES[text(row.outcome)] ?? "ended, reason not reported";
      return { ...entry("job", row, text(row.job), [here, attempt, outcome].filter(Boolean).join(" · ")), failed: row.outcome === "failed" };
    });
  const high = packed(entries, endMs);
  return { kind: "job", name: "Jobs", entries: entries.filter((item) => item.row < MOST_ROWS), left: entries.filter((item) => item.row >= MOST_ROWS), high: Math.min(high, MOST_ROWS) };
}

function actionLane(actions, endMs) {
  const entries = rows(actions)
    .filter((row) => num(row.began_ms) !== null)
    .map((row) => ({ ...entry("action", row, ACTS[text(row.code)] ?? words(row.code), sentence(row.sentence)), taken: row.taken === true }));
  for (const item of entries) item.title = item.taken ? `Done: ${item.title}` : `Advised: ${item.title}`;
  return { kind: "action", name: "Actions", entries, high: packed(entries, endMs) };
}

/** {fromMs, endMs, knownMs, lanes, more: entries that no lane has room for}. reasons: of now, whose words are newer. */
export function lanesOf(body, reasons) {
  const now = rows(reasons);
  const endMs = num(body.as_of_ms) ?? 0;
  const fromMs = num(body.from_ms) ?? endMs - 3_600_000;
  const signals = strongest(body.signals);
  const jobs = jobLane(body.jobs, endMs);
  const hidden = signals.slice(MOST_SIGNALS).map((row) => signalLane(row, now).entries[0]);
  const shown = signals.slice(0, MOST_SIGNALS).map((row) => signalLane(row, now));
  const none = { kind: "signal", name: "Signals", entries: [], none: "No signal rose." };
  const lanes = [...rows(body.scores).map((row) => scoreLane(row, endMs)), ...(shown.length ? shown : [none]), eventLane(body.events), jobs, actionLane(body.actions, endMs)];
  lanes.forEach((lane) => lane.entries.forEach((item) => (item.lane = lane)));
  return { fromMs, endMs, knownMs: num(body.known_since_ms), lanes, more: [...hidden, ...jobs.left], states: rows(body.states) };
}

/** All entries but scores, oldest first: what the list below the picture says. */
export function told(view) {
  const all = [...view.lanes.flatMap((lane) => (lane.kind === "score" ? [] : lane.entries)), ...view.more];
  return all.sort((a, b) => a.from - b.from);
}

/** What the picture as a whole says of what it knows: "" where nothing is out of the ordinary. */
export function stateOf(view, { nowMs, failed, minutes }) {
  const spanned = duration(minutes * 60);
  const parts = [];
  const ageS = nowMs === null ? 0 : (nowMs - view.endMs) / 1000;
  if (failed) parts.push(`No answer about this timeline now (${failed}); this is what was known at ${clockTime(view.endMs, nowMs)}.`);
  else if (ageS > 60) parts.push(`Stale: this is as of ${clockTime(view.endMs, nowMs)}, ${duration(ageS)} ago.`);
  if (view.knownMs !== null && view.knownMs > view.fromMs + 1000)
    parts.push(`Warming: watched since ${clockTime(view.knownMs, view.endMs)}, ${duration((view.endMs - view.knownMs) / 1000)} of these ${spanned}; what was before is not known.`);
  const dark = view.states.filter((row) => row.state === "unknown");
  const darkS = dark.reduce((sum, row) => sum + (row.ended_ms ?? view.endMs) - Math.max(row.began_ms, view.fromMs), 0) / 1000;
  if (darkS >= 1) parts.push(`It is unknown what was here for ${duration(darkS)} of these ${spanned}.`);
  if (told(view).length === 0 && darkS < 1) parts.push(`Nothing happened here in these ${spanned}: no signal, no event, no job, no action.`);
  return parts.join(" ");
}

/** "risk 12 % within 1 h, 20 % within 24 h" at a moment. */
export function riskAt(view, timeMs) {
  const parts = view.lanes
    .filter((lane) => lane.kind === "score")
    .map((lane) => {
      const held = lane.entries.findLast((item) => item.from <= timeMs);
      return held ? held.title : "";
    })
    .filter(Boolean);
  return parts.length ? parts.join(", ").replace(/, risk /g, ", ") : "risk not known";
}
