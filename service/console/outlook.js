// Four questions, answered in words from what the other panels show in numbers.

import { STATES } from "./columns.js";
import { byId, h, say } from "./dom.js";
import {
  advice,
  clockTime,
  count,
  duration,
  figure,
  happening,
  horizon,
  list,
  NONE,
  num,
  object,
  percent,
  rows,
  sentence,
  span,
  text,
  whole,
} from "./format.js";
import { quantileOf } from "./demand.js";
import { start as startOf } from "./queue.js";
import { verdict as verdictOf } from "./trust.js";

/** How many nodes are in each state: {ok: 128, …}. */
function tally(columns) {
  const found = new Array(STATES.length).fill(0);
  for (const state of columns.state) found[state]++;
  return STATES.map((state, at) => [state, found[at]]).filter(([, number]) => number > 0);
}

/** Only what is known to be well is called well. */
function verdict(risky, columns) {
  const known = columns.p.reduce((sum, p) => sum + (Number.isNaN(p) ? 0 : 1), 0);
  if (columns.n === 0) return "No node yet";
  if (risky) return `${whole(risky)} of ${count(columns.n, "node")} at risk`;
  if (known === 0) return `Nothing known yet of ${count(columns.n, "node")}`;
  return known === columns.n ? `No node of ${whole(columns.n)} at risk` : `None at risk of the ${whole(known)} known`;
}

export function health(header, columns, slowJobs) {
  say(byId("health"), verdict(num(header.at_risk) ?? 0, columns));
  const parts = tally(columns).map(([state, number]) => `${whole(number)} ${state}`);
  if (slowJobs !== null) parts.push(slowJobs === 0 ? "no job runs slow" : `${count(slowJobs, "job")} ${slowJobs === 1 ? "runs" : "run"} slow`);
  say(byId("health-detail"), columns.n ? parts.join(" · ") : "");
}

/** The riskiest node that somebody should act on. */
export function look(ranking, horizonS, open) {
  const [first] = rows(ranking);
  const p = num(first?.p);
  const acts = first && p !== null && (text(first.reason) || p >= 0.05);
  const line = byId("look");
  if (!acts) {
    say(line, p === null ? NONE : "Nowhere in particular");
    say(byId("look-detail"), p === null ? "No node has a score yet." : `The riskiest node, ${text(first.node)}, stands at ${percent(p)} within ${horizon(horizonS)}.`);
    return;
  }
  const name = text(first.node);
  const risk = ` ${happening(first.kind)} within ${horizon(horizonS)}: ${percent(p)}`;
  if (line.textContent !== name + risk) {
    line.replaceChildren(h("a", { href: `#node=${encodeURIComponent(name)}`, class: "name", onclick: (event) => open(event, name) }, name), risk);
  }
  say(byId("look-detail"), sentence(first.reason) || advice(first.action, ""));
}

/** The two horizons [after, by] between which a path first comes to the line or below it; null when it does not. */
function firstBelow(path, limit) {
  const at = path.findIndex(([, value], index) => index > 0 && value <= limit);
  return at < 0 ? null : [path[at - 1][0], path[at][0]];
}

/** "In 30–60 min": no finer than the horizons, between which nothing is forecast. */
function between([after, by], nowMs) {
  const [soon, late] = [Math.max(0, (after - nowMs) / 1000), (by - nowMs) / 1000];
  if (late <= 600) return "Any moment";
  return soon === 0 ? `Within ${duration(late)}` : `In ${span(soon, late)}`;
}

/** Why no start time is known: the placer's own reason, where it gives one. */
function unknownStart(waiting, room) {
  const { opens_ms: opens, sentence: said } = object(room);
  return opens === null && text(said) ? `Room: ${text(said)}.` : `When ${waiting.length === 1 ? "it starts" : "they start"} is not known yet.`;
}

/** When the next and the last of those who wait start, and one more: the queue's own forecasts (`room` of its answer). */
export function roomOfQueue(waiting, free, nowMs, room) {
  const known = waiting.map((row) => object(row.start_ms)).filter(({ p50, p90 }) => num(p50) !== null && num(p90) !== null);
  const wait = `${count(waiting.length, "job")} ${waiting.length === 1 ? "waits" : "wait"}, ${count(free ?? 0, "GPU")} ${free === 1 ? "is" : "are"} free.`;
  if (known.length === 0) return { line: "Not known yet", detail: `${wait} ${unknownStart(waiting, room)}` };
  const order = known.sort((a, b) => a.p50 - b.p50);
  const last = order.at(-1);
  const unknown = waiting.length - known.length;
  const opens = object(object(room).opens_ms);
  const more = num(opens.p50) === null ? "" : ` One more GPU after them: ${startOf(opens, nowMs).line}.`;
  const end = waiting.length === 1 ? more : ` The last starts ${clockTime(last.p50, nowMs)}–${clockTime(last.p90, nowMs)} (p50–p90).${more}`;
  return {
    line: `${waiting.length === 1 ? "For the job that waits" : "For the next job"} ${startOf(order[0], nowMs).line}`,
    detail: wait + end + (unknown ? ` When ${whole(unknown)} of them ${unknown === 1 ? "starts" : "start"} is not known.` : ""),
  };
}

/**
 * Whether there is room. Where jobs wait in this engine's queue: when they start. Else when demand (running plus queued)
 * fits in what is in service. `series`: the "wanted" forecast of all pools; `queue`: its answer.
 */
export function room(header, series, queue, nowMs) {
  const waiting = rows(object(queue).rows);
  if (waiting.length && nowMs !== null) {
    const { line, detail } = roomOfQueue(waiting, num(object(header.gpus).free), nowMs, object(queue).room);
    say(byId("room"), line);
    return say(byId("room-detail"), detail);
  }
  const gpus = object(header.gpus);
  const free = num(gpus.free);
  const capacity = (num(gpus.running) ?? 0) + (free ?? 0);
  const queued = num(header.queued_gpus) ?? 0;
  const [line, detail] = [byId("room"), byId("room-detail")];
  const median = series ? quantileOf(series, 0.5) : [];
  const path = nowMs === null || num(gpus.running) === null ? [] : [[nowMs, gpus.running + queued], ...median.filter(([at]) => at > nowMs)];
  if (path.length < 2) {
    say(line, free === null || !num(gpus.total) ? NONE : `${count(free, "GPU")} free now`);
    say(detail, "No forecast yet.");
    return;
  }
  const ends = path.at(-1)[0];
  const within = `the next ${duration((ends - nowMs) / 1000)}`;
  const full = path[0][1] > capacity || queued > (free ?? 0);
  if (full) {
    const at = firstBelow(path, capacity);
    const early = firstBelow([[path[0][0], path[0][1]], ...quantileOf(series, 0.05)], capacity);
    const late = firstBelow([[path[0][0], path[0][1]], ...quantileOf(series, 0.95)], capacity);
    say(line, at === null ? `${early === null ? "Not" : "Perhaps not"} in ${within}` : between(at, nowMs));
    const opens = late === null ? `after ${clockTime(ends, nowMs)}` : clockTime(late[1], nowMs);
    const range = `It opens between ${clockTime(Math.max(early?.[0] ?? nowMs, nowMs), nowMs)} and ${opens} (90 %, to the horizons of the forecast).`;
    say(detail, `${whole(queued)} GPUs wait, ${whole(free)} are free. ${early === null ? "Demand stays above what is in service, even at its 5 % quantile." : range}`);
    return;
  }
  const peak = path.reduce((most, point) => (point[1] > most[1] ? point : most));
  const fills = peak[1] > capacity;
  say(line, fills ? `Yes, until about ${clockTime(path.find(([, value]) => value > capacity)[0], nowMs)}` : `Yes: ${count(free, "GPU")} free now`);
  say(detail, fills ? `The median forecast passes the ${whole(capacity)} GPUs in service then.` : `The median forecast peaks at ${figure(peak[1])} of ${whole(capacity)} GPUs near ${clockTime(peak[0], nowMs)}, within ${within}.`);
}

/** `records`: of trust.js. Old or missing data decide before any record does. */
export function trust(fresh, ingestion, records) {
  const { headline, figures } = verdictOf(records);
  say(byId("trust"), fresh.state === "live" ? headline : fresh.short);
  if (fresh.state === "broken" || fresh.state === "starting" || fresh.state === "stale") {
    say(byId("trust-detail"), fresh.sentence);
    return;
  }
  const targets = object(ingestion.targets);
  const up = num(targets.up);
  const all = up === null ? null : up + (num(targets.down) ?? 0);
  const bad = Object.values(object(ingestion.bad_records)).reduce((sum, value) => sum + (num(value) ?? 0), 0);
  const parts = [
    fresh.state === "warming" && fresh.sentence.split(".")[0].replace("Warming: ", ""),
    all ? `${whole(up)} of ${count(all, "exporter")} answer` : fresh.state === "empty" && "no exporter answers",
    bad ? `${count(bad, "bad record")} skipped` : list(ingestion.sources).length > 0 && "no bad record",
    ...figures,
  ];
  say(byId("trust-detail"), parts.filter(Boolean).join(" · "));
}
