// One node: what to do, why, what happened on one time axis, what runs there and what a drain would change.

import { shade } from "./colour.js";
import { h, keyed, mark, say } from "./dom.js";
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
  unknownUse,
  whole,
} from "./format.js";
import { drainView } from "./drain.js";
import { Timeline } from "./timeline.js";

const KINDS = ["fail", "drain", "slow"];
const GPU_COLUMNS = [
  ["power_w", "power", "W", whole],
  ["gpu_temp_c", "temp.", "°C", whole],
  ["sm_clock_mhz", "SM clock", "MHz", whole],
  ["sm_active", "SM busy", "", percent],
  ["tensor_active", "tensor", "", percent],
  ["xid", "XID", "", (value) => (value ? whole(value) : NONE)],
];

const section = (title, ...children) => h("section", {}, h("h3", {}, title), ...children);

/** A table that scrolls by itself where the page is too narrow for it. */
const scrolled = (label, table) => h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, table);

/** {element, timeline, drain, update(body, context)}. context: {nowMs, jobs: rows of /jobs}. `acts`: openJob, again. */
export function nodeView(acts) {
  const parts = {
    facts: h("p", { class: "facts" }),
    action: h("p", { class: "action" }),
    reasons: h("ol", { class: "reasons" }),
    risk: h("table", { class: "grid" }),
    idle: h("p", { class: "why" }, "Nothing runs here."),
    jobs: h("ul", { class: "jobs" }),
    gpus: h("table", { class: "grid gpus" }),
    foot: h("p", { class: "foot" }),
  };
  const timeline = new Timeline({ changed: acts.again, open: acts.openJob });
  const drain = drainView(acts.openJob);
  const element = h(
    "div",
    { class: "page" },
    parts.facts,
    parts.action,
    section("What happened here", timeline.element),
    h(
      "div",
      { class: "columns" },
      h("div", {}, section("Why", parts.reasons), section("Risk", scrolled("Risk of this node", parts.risk))),
      h("div", {}, section("If it were drained now", drain.element), section("Jobs here", parts.idle, parts.jobs)),
    ),
    section("GPUs", scrolled("GPUs of this node", parts.gpus)),
    parts.foot,
  );
  const update = (body, context) => {
    const answer = object(body);
    const held = list(answer.jobs).map(text).filter(Boolean);
    const known = new Map(rows(context.jobs).map((row) => [text(row.job), row]));
    const gpus = rows(answer.gpus);
    say(parts.facts, factsOf(answer, gpus));
    const action = object(answer.action);
    say(parts.action, advice(action, text(rows(answer.reasons)[0]?.sentence)) || "Nothing to do");
    parts.action.hidden = text(action.code) === "none";
    const isKnown = rows(answer.risk).some((row) => num(row.p) !== null);
    showReasons(parts.reasons, alike(rows(answer.reasons)), context.nowMs, isKnown);
    timeline.reasons = rows(answer.reasons);
    showRisk(parts.risk, rows(answer.risk));
    say(parts.idle, unexplained(gpus) || "Nothing runs here.");
    parts.idle.hidden = held.length > 0 && !unexplained(gpus);
    showJobs(parts.jobs, held, known, context.nowMs, acts);
    showGpus(parts.gpus, gpus, new Set(rows(answer.reasons).map((reason) => text(reason.entity))), text(answer.node));
    say(parts.foot, `model ${text(answer.model) || "unknown"} · as of ${clockTime(num(answer.as_of_ms))} UTC`);
  };
  return { element, timeline, drain, update };
}

/** Return what uses the GPUs that no running job holds: unknown work and promises. */
function unexplained(gpus) {
  const without = gpus.filter((gpu) => !text(gpu.job));
  const promised = without.filter((gpu) => gpu.held_by === "promise");
  const requests = [...new Set(promised.map((gpu) => text(gpu.request)))].join(", ");
  const unknown = unknownUse(without.filter((gpu) => gpu.held_by === "unknown").length);
  return [unknown, promised.length && `${count(promised.length, "GPU")} ${promised.length === 1 ? "is" : "are"} promised to ${requests}`].filter(Boolean).map((line) => `${line}.`).join(" ");
}

const USES = { unknown: "in use, no job known", window: "held free for maintenance", reservation: "reserved" };

function useOf(gpu) {
  return gpu.held_by === "promise" ? `promised to ${text(gpu.request) || "a request"}` : (USES[gpu.held_by] ?? "free");
}

function factsOf(answer, gpus) {
  const busy = gpus.filter((gpu) => text(gpu.job) || gpu.held_by === "unknown").length;
  const place = answer.placed === false ? "unplaced: no topology names it" : text(answer.rack) && `rack ${text(answer.rack)}`;
  return [text(answer.state), text(answer.withheld), place, `${gpus.length} × ${text(answer.gpu_model) || "GPU"}`, `${busy} busy`].filter(Boolean).join(" · ");
}

/** Reasons that say the same of several GPUs or ports as one, with their shares added: a hot node heats all its GPUs. */
function alike(reasons) {
  const groups = new Map();
  for (const reason of reasons) {
    const about = text(reason.sentence).replace(/^(GPU|port) [^:]+: /, "");
    const key = `${text(reason.feature)}|${about}`;
    const group = groups.get(key);
    if (group) group.push(reason);
    else groups.set(key, [reason]);
  }
  return [...groups.values()].map((group) => ({
    ...group[0],
    entities: group.map((reason) => text(reason.entity)),
    share: group.reduce((sum, reason) => sum + (num(reason.share) ?? 0), 0) || null,
  }));
}

/** "GPU 0: SM clock …" of eight GPUs is "GPU 0 and 7 more: SM clock …". */
function headline(reason) {
  const more = list(reason.entities).length - 1;
  const line = sentence(reason.sentence) || text(reason.feature);
  return more > 0 ? line.replace(/^(GPU|Port) [^:]+/, (name) => `${name} and ${more} more`) : line;
}

function namesOf(reason) {
  const names = list(reason.entities);
  return names.length > 2 ? `${names[0]} and ${names.length - 1} more` : names.join(" and ");
}

/** "990 MHz, usual 1,980": the number behind the sentence, with the metric's name. */
function evidence(reason, nowMs) {
  const unit = text(reason.unit);
  const usual = num(reason.usual) === null ? "" : `, usual ${figure(reason.usual)}`;
  const since = num(reason.since_ms) === null ? "" : ` · since ${clockTime(reason.since_ms, nowMs)} (${duration((nowMs - reason.since_ms) / 1000)})`;
  return `${figure(num(reason.value))}${unit ? ` ${unit}` : ""}${usual}${since}`;
}

function showReasons(root, reasons, nowMs, isKnown) {
  const none = isKnown ? "Nothing unusual: the probability is what such nodes show on average." : "Nothing is known of it now: no exporter reports it.";
  const shown = reasons.length ? reasons : [{ sentence: none, feature: "", entity: "" }];
  keyed(
    root,
    shown.map((reason, at) => ({ ...reason, key: `${text(reason.feature)} ${text(reason.entity)} ${at}` })),
    (reason) => reason.key,
    () => h("li", {}, h("p", { class: "sentence" }), h("p", { class: "evidence" }), h("p", { class: "code" }), h("span", { class: "gauge" })),
    (item, reason) => {
      const [line, value, code, bar] = item.children;
      say(line, headline(reason));
      say(value, text(reason.feature) ? evidence(reason, nowMs) : "");
      const share = num(reason.share);
      say(code, text(reason.feature) ? `${text(reason.feature)} of ${namesOf(reason)}${share === null ? "" : ` · ${percent(share)} of the score`}` : "");
      bar.style.width = `${Math.round(100 * Math.min(1, share ?? 0))}%`;
      bar.hidden = share === null;
    },
  );
}

function showRisk(table, risk) {
  const horizons = [...new Set(risk.map((row) => num(row.horizon_s)).filter((seconds) => seconds !== null))].sort((a, b) => a - b);
  const kinds = [...new Set([...KINDS, ...risk.map((row) => text(row.kind))])].filter(Boolean);
  const shape = `${horizons} ${kinds}`;
  if (table.dataset.shape !== shape) {
    table.dataset.shape = shape;
    const head = h("tr", {}, h("td"), ...horizons.map((seconds) => h("th", { scope: "col" }, `within ${horizon(seconds)}`)));
    const body = kinds.map((kind) => h("tr", {}, h("th", { scope: "row" }, happening(kind)), ...horizons.map(() => h("td", {}, h("span", { class: "chance" })))));
    table.replaceChildren(h("thead", {}, head), h("tbody", {}, ...body));
  }
  kinds.forEach((kind, at) => {
    horizons.forEach((seconds, column) => {
      const found = risk.find((row) => row.kind === kind && row.horizon_s === seconds);
      const chip = table.tBodies[0].rows[at].cells[column + 1].firstChild;
      shade(chip, num(found?.p));
      say(chip, percent(found?.p));
    });
  });
}

function jobLine(row, nowMs) {
  if (!row) return "";
  const left = object(row.remaining_s);
  const parts = [
    text(row.user),
    num(row.gpus) !== null && `${count(row.gpus, "GPU")} on ${count(list(row.nodes).length, "node")}`,
    num(row.started_ms) !== null && `running ${duration((nowMs - row.started_ms) / 1000)}`,
    num(left.p50) !== null && num(left.p90) !== null && `${span(left.p50, left.p90)} left (p50–p90)`,
    row.slow === true && "runs slow",
  ];
  return parts.filter(Boolean).join(" · ");
}

function showJobs(root, held, known, nowMs, acts) {
  keyed(
    root,
    held,
    (job) => job,
    (job) => h("li", {}, h("button", { class: "link name", onclick: () => acts.openJob(job) }, job), h("span", { class: "place" })),
    (item, job) => say(item.lastChild, jobLine(known.get(job), nowMs)),
  );
}

/** `named`: entities that a reason names ("n042/3"); their rows stand out. */
function showGpus(table, gpus, named, node) {
  if (!table.tBodies.length) {
    const names = ["GPU", "job", ...GPU_COLUMNS.map(([, name, unit]) => (unit ? `${name}, ${unit}` : name)), "age"];
    table.append(h("thead", {}, h("tr", {}, ...names.map((name) => h("th", { scope: "col" }, name)))), h("tbody"));
  }
  keyed(
    table.tBodies[0],
    gpus.map((gpu, at) => ({ ...gpu, at })),
    (gpu) => gpu.at,
    () => h("tr", {}, h("th", { scope: "row" }), h("td"), ...GPU_COLUMNS.map(() => h("td")), h("td")),
    (row, gpu) => {
      say(row.cells[0], whole(num(gpu.index) ?? gpu.at));
      say(row.cells[1], text(gpu.job) || useOf(gpu));
      GPU_COLUMNS.forEach(([name, , , show], at) => say(row.cells[at + 2], show(num(gpu[name]))));
      say(row.cells[row.cells.length - 1], duration(num(gpu.age_s)));
      mark(row, "data-named", named.has(`${node}/${num(gpu.index) ?? gpu.at}`));
      mark(row, "data-old", num(gpu.age_s) !== null && gpu.age_s > 60);
    },
  );
}
