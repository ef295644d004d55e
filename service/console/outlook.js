// Four questions, answered in words from what the other panels show in numbers.

import { STATES } from "./columns.js";
import { byId, h, say } from "./dom.js";
import {
  advice,
  clockTime,
  count,
  duration,
  happening,
  horizon,
  list,
  NONE,
  num,
  object,
  percent,
  rows,
  sentence,
  text,
  whole,
} from "./format.js";
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

const NOW_S = 60; // a start within this time counts as now, as in the placer's sentence

/** "Sampled 40 s ago. ": start times and room are as old as the futures that they were sampled from. */
function sampled(asOfMs, nowMs) {
  if (!(num(asOfMs) > 0)) return "";
  const ageS = (nowMs - asOfMs) / 1000;
  return ageS < 1 ? "Sampled just now. " : `Sampled ${duration(ageS)} ago. `;
}

/** Return the headline for a newcomer of one GPU: what the placer forecasts behind all that wait, here and in other queues. */
function roomLine(forecast, nowMs) {
  const { p50, p90 } = object(forecast.opens_ms);
  if (num(p50) === null || num(p90) === null) return text(forecast.sentence).startsWith("no room") ? "No" : "Not known yet";
  const isNow = p90 - num(forecast.as_of_ms) < 1000 * NOW_S && num(forecast.free_gpus) > 0;
  if (isNow) return `Yes: ${count(forecast.free_gpus, "GPU")} free now`;
  const { line } = startOf(forecast.opens_ms, nowMs);
  return line.charAt(0).toUpperCase() + line.slice(1);
}

/** Return {line, detail} of requests that wait in this engine's queue, by the start times of its rows. */
export function roomOfQueue(waiting, forecast, nowMs) {
  const known = waiting.map((row) => object(row.start_ms)).filter(({ p50, p90 }) => num(p50) !== null && num(p90) !== null);
  const free = num(forecast.free_gpus);
  const wait = `${count(waiting.length, "job")} ${waiting.length === 1 ? "waits" : "wait"}${free === null ? "" : `, ${count(free, "GPU")} ${free === 1 ? "is" : "are"} free`}.`;
  const said = text(forecast.sentence);
  if (known.length === 0) {
    const why = num(object(forecast.opens_ms).p50) === null && said ? `Room: ${said}.` : `When ${waiting.length === 1 ? "it starts" : "they start"} is not known yet.`;
    return { line: "Not known yet", detail: `${wait} ${why}` };
  }
  const order = known.sort((a, b) => a.p50 - b.p50);
  const last = order.at(-1);
  const unknown = waiting.length - known.length;
  const opens = object(forecast.opens_ms);
  const more = num(opens.p50) === null ? "" : ` One more GPU after them: ${startOf(opens, nowMs).line}.`;
  const end = waiting.length === 1 ? more : ` The last starts ${clockTime(last.p50, nowMs)}–${clockTime(last.p90, nowMs)} (p50–p90).${more}`;
  return {
    line: `${waiting.length === 1 ? "For the job that waits" : "For the next job"} ${startOf(order[0], nowMs).line}`,
    detail: wait + end + (unknown ? ` When ${whole(unknown)} of them ${unknown === 1 ? "starts" : "start"} is not known.` : ""),
  };
}

/** Show whether there is room. The answer of `GET /v1/queue` decides alone: nothing here computes room a second time. */
export function room(queue, nowMs) {
  const [line, detail] = [byId("room"), byId("room-detail")];
  const forecast = object(object(queue).room);
  const waiting = rows(object(queue).rows);
  if (nowMs === null || (!text(forecast.sentence) && !waiting.length)) {
    say(line, NONE);
    return say(detail, object(queue).rows === undefined ? "The placer has not answered yet." : "The placer has not forecast any room yet.");
  }
  const said = waiting.length ? roomOfQueue(waiting, forecast, nowMs) : { line: roomLine(forecast, nowMs), detail: `${sentence(forecast.sentence)}.` };
  say(line, said.line);
  return say(detail, sampled(forecast.as_of_ms ?? object(queue).starts_as_of_ms, nowMs) + said.detail);
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
