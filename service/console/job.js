// One job: what it looks like, when it pauses next, who holds it back, how often it should checkpoint, whom it meets.

import { actionRows, isOpen } from "./actions.js";
import { h, keyed, say } from "./dom.js";
import { amount, clockTime, count, duration, figure, list, NONE, num, object, percent, rows, sentence, share, span, text, times, words } from "./format.js";

const METRICS = { power_w: ["power", "W"], nvlink_tx_bytes_per_s: ["NVLink traffic", "B/s"], ib_tx_bytes_per_s: ["network traffic", "B/s"] };
const DEEDS = new Map([["preempt", "stopped"], ["shrink", "shrunk"], ["grow", "grown"], ["move", "moved"], ["replace", "nodes replaced"], ["place", "placed"]]);
const ASKING = "Asking …";

const section = (title, ...children) => h("section", {}, h("h3", {}, title), ...children);

/** "14:20 (14:18–14:31)": the median and the 10 to 90 % interval. */
export function interval(told, nowMs) {
  const { p10, p50, p90 } = object(told);
  if (num(p50) === null) return "";
  const range = num(p10) === null || num(p90) === null ? "" : ` (${clockTime(p10, nowMs)}–${clockTime(p90, nowMs)}, 10 to 90 %)`;
  return `${clockTime(p50, nowMs)}${range}`;
}

function factsOf(body, nowMs) {
  const left = object(body.remaining_s);
  const started = num(body.started_ms);
  return [
    text(body.state),
    text(body.user) && `user ${text(body.user)}`,
    num(body.gpus) !== null && `${count(body.gpus, "GPU")} on ${count(list(body.nodes).length, "node")}`,
    started !== null && `started ${clockTime(started, nowMs)}${text(body.state) === "running" ? `, ${duration((nowMs - started) / 1000)} ago` : ""}`,
    num(left.p50) !== null && num(left.p90) !== null && `${span(left.p50, left.p90)} left (p50–p90)`,
  ]
    .filter(Boolean)
    .join(" · ");
}

/** [name, value] rows; a value that is not known says why. */
function printRows(body, nowMs) {
  const told = text(body.class_told);
  const seen = text(body.class);
  const sure = num(body.class_p) === null ? "" : `, ${percent(body.class_p)} sure`;
  const period = num(body.period_s);
  const basis = text(body.period_basis) === "steps" ? "from its steps" : "from telemetry";
  const cost = num(body.checkpoint_cost_s) === null ? "" : `, ${duration(body.checkpoint_cost_s)} each (${text(body.checkpoint_cost_basis) || "told"})`;
  return [
    ["Looks like", `${seen ? `${words(seen)}${sure}` : "not known"}${told && told !== seen ? `; submitted as ${words(told)}` : ""}`],
    ["Iteration", period === null ? `unknown: ${text(body.period_reason) || "no reason is given"}` : `${figure(period)} s, ${basis}`],
    ["Phase now", text(body.phase) ? `${words(body.phase)}${num(body.phase_since_ms) === null ? "" : ` since ${clockTime(body.phase_since_ms, nowMs)}`}` : "not known"],
    ["Phase ends", interval(body.phase_ends_ms, nowMs) || "not known"],
    ["Next checkpoint", `${interval(body.next_checkpoint_ms, nowMs) || "not known"}${num(body.checkpoint_every_s) === null ? "" : `; every ${duration(body.checkpoint_every_s)}${text(body.checkpoint_every_basis) === "telemetry" ? " by its pauses in telemetry" : ""}${cost}`}`],
    ["Pauses seen", num(body.pause_every_s) === null ? `no rhythm: ${text(body.pause_reason) || "not known"}` : `every ${duration(body.pause_every_s)}`],
    ["Next evaluation", interval(body.next_evaluation_ms, nowMs) || "not known"],
    ...expectedRows(rows(body.expected)),
  ];
}

function expectedRows(expected) {
  const metrics = [...new Set(expected.map((row) => text(row.metric)))].filter(Boolean);
  return metrics.map((metric) => {
    const [name, unit] = METRICS[metric] ?? [words(metric), ""];
    const parts = expected
      .filter((row) => row.metric === metric && num(row.p50) !== null)
      .map((row) => `in ${duration(row.horizon_s)} ${amount(row.p50, unit)} (p90 ${amount(row.p90, unit)})`);
    return [`Expected ${name}`, parts.join(", ") || "not known"];
  });
}

/** When telemetry was looked at, if it was; and why it tells nothing, where it does not. */
function lookedLine(body, nowMs) {
  const looked = num(body.looked_ms) === null ? "" : `Looked at ${clockTime(body.looked_ms, nowMs)} UTC, ${duration(Math.max(0, (nowMs - body.looked_ms) / 1000))} ago.`;
  const unheard = text(body.unheard_reason) && `Telemetry reports nothing of it: ${text(body.unheard_reason)}.`;
  return [looked, unheard].filter(Boolean).join(" ");
}

function facts(root, pairs) {
  keyed(
    root,
    pairs,
    ([name]) => name,
    ([name]) => h("div", {}, h("dt", {}, name), h("dd")),
    (item, [, value]) => say(item.lastChild, value),
  );
}

function stragglerLines(body, nowMs) {
  const who = object(body.culprit);
  const nobody = !text(who.kind) || text(who.kind) === "nobody";
  const judged = num(body.judged_ms);
  const then = judged !== null && judged < (num(body.as_of_ms) ?? judged) ? `As of ${clockTime(judged, nowMs)}: ` : "";
  if (body.slow === true) {
    const since = num(body.since_ms) === null ? "" : ` since ${clockTime(body.since_ms, nowMs)}`;
    const steps = num(body.observed_step_s) === null ? "" : ` Steps take ${figure(body.observed_step_s)} s${num(body.expected_step_s) === null ? "" : `, expected ${figure(body.expected_step_s)} s`}${num(body.ratio) === null ? "" : ` (${times(body.ratio)})`}.`;
    const blame = nobody ? "No single worker or link holds it back." : `Held back by ${text(who.kind)} ${text(who.name)}${num(who.share) === null ? "" : `, ${percent(who.share)} of the delay`}.`;
    return [`${then}Slow${since}.${steps}`, `${blame} Cause: ${words(body.cause) || "unknown"}. ${sentence(body.sentence)}`];
  }
  if (body.slow === false) return [`${then}Not slow.`, num(body.observed_step_s) === null ? "" : `Steps take ${figure(body.observed_step_s)} s.`];
  return [sentence(body.sentence) || "Nothing is known of its steps.", ""];
}

function checkpointRows(body) {
  const basis = text(body.cost_basis);
  return [
    ["Best interval", num(body.interval_s) === null ? "not known" : duration(body.interval_s)],
    ["Interval now", num(body.every_s) === null ? "not known" : duration(body.every_s)],
    ["A checkpoint takes", num(body.checkpoint_cost_s) === null ? "not known" : `${duration(body.checkpoint_cost_s)}${basis ? ` (${basis})` : ""}`],
    ["Its nodes fail", num(body.failure_rate_per_day) === null ? "not known" : `${figure(body.failure_rate_per_day)} times a day together`],
    ["Time that is work", `${num(body.ettr_now) === null ? "not known" : share(body.ettr_now)} now, ${num(body.expected_ettr) === null ? "not known" : share(body.expected_ettr)} at best`],
  ];
}

/** "Stopped twice, shrunk once; 1 action is open." */
function stopsLine(found) {
  if (!found.length) return "It was not stopped, shrunk or moved.";
  const done = found.filter((row) => text(row.state) === "seen" || text(row.state) === "late");
  const often = [...DEEDS].map(([kind, word]) => [word, done.filter((row) => text(row.kind) === kind).length]).filter(([, number]) => number);
  const open = found.filter(isOpen).length;
  const said = often.map(([word, number]) => `${word} ${count(number, "time")}`).join(", ");
  return `${said ? sentence(said) : "Nothing was done to it yet"}; ${open ? `${count(open, "action")} open` : "none is open"}.`;
}

/** {element, update(body, context), stops, print, straggler, checkpoint, beside, failed(part, error)}. */
export function jobView(acts) {
  const parts = {
    facts: h("p", { class: "facts" }, ASKING),
    straggler: [h("p", { class: "sentence" }, ASKING), h("p", { class: "why" })],
    print: [h("p", { class: "why" }, ASKING), h("dl", { class: "facts-grid" })],
    checkpoint: [h("p", { class: "sentence" }, ASKING), h("dl", { class: "facts-grid" })],
    beside: [h("p", { class: "why" }, ASKING), h("ul", { class: "jobs" })],
    stops: [h("p", { class: "why" }, ASKING), h("ol", { class: "rows actions" })],
    nodes: h("ul", { class: "chips" }),
    foot: h("p", { class: "foot" }),
  };
  const outline = h("button", { class: "link", onclick: () => acts.select(parts.name) }, "outline its nodes on the map");
  const element = h(
    "div",
    { class: "page" },
    parts.facts,
    h("p", { class: "why" }, outline),
    section("Its stops and what else was done to it", ...parts.stops),
    h(
      "div",
      { class: "columns" },
      h("div", {}, section("Who holds it back", ...parts.straggler), section("Fingerprint", ...parts.print)),
      h("div", {}, section("Checkpoints", ...parts.checkpoint), section("Who shares its nodes", ...parts.beside), section("Its nodes", parts.nodes)),
    ),
    parts.foot,
  );
  const view = { element };
  view.update = (answer, { nowMs }) => {
    const body = object(answer);
    parts.name = text(body.job);
    say(parts.facts, factsOf(body, nowMs));
    const nodes = list(body.nodes).map(text).filter(Boolean);
    keyed(parts.nodes, nodes.slice(0, 64), (name) => name, (name) => h("li", {}, h("button", { class: "link", onclick: () => acts.open(name) }, name)), () => {});
    say(parts.foot, `${nodes.length > 64 ? `64 of ${count(nodes.length, "node")} are listed · ` : ""}as of ${clockTime(num(body.as_of_ms))} UTC`);
  };
  view.stops = (answer, { nowMs }) => {
    const found = rows(object(answer).rows).reverse();
    say(parts.stops[0], stopsLine(found));
    actionRows(parts.stops[1], found, nowMs, acts, text(object(found[0]).job));
  };
  view.print = (answer, { nowMs }) => {
    const body = object(answer);
    say(parts.print[0], lookedLine(body, nowMs));
    facts(parts.print[1], printRows(body, nowMs));
  };
  view.straggler = (answer, { nowMs }) => stragglerLines(object(answer), nowMs).forEach((line, at) => say(parts.straggler[at], line));
  view.checkpoint = (answer) => {
    say(parts.checkpoint[0], sentence(object(answer).sentence) || "The API does not say.");
    facts(parts.checkpoint[1], checkpointRows(object(answer)));
  };
  /** found: [{job, nodes, sentence}] of those beside it. */
  view.beside = (found) => {
    say(parts.beside[0], found.length ? "On the network of a node that both use, each next to the other:" : "No other running job has a GPU on its nodes.");
    keyed(
      parts.beside[1],
      found,
      (row) => row.job,
      (row) => h("li", {}, h("button", { class: "link name", onclick: () => acts.openJob(row.job) }, row.job), h("span", { class: "place" }), h("p", { class: "why" })),
      (item, row) => {
        say(item.children[1], `on ${count(row.nodes, "node")} of it`);
        say(item.children[2], row.sentence || NONE);
      },
    );
  };
  view.failed = (part, error) => {
    const line = part === "facts" ? parts.facts : parts[part][0];
    if (line.textContent === ASKING || error.kind === "missing") say(line, `Not available: ${text(error.message) || "no answer"}`);
  };
  return view;
}
