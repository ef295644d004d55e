// The console: wires the panels to the API. What each panel shows is decided in its own file.

import { Actions } from "./actions.js";
import { request, send, Token } from "./api.js";
import { FleetClock } from "./clock.js";
import { publishScale } from "./colour.js";
import { columnsOf } from "./columns.js";
import { Decisions } from "./decisions.js";
import { Demand } from "./demand.js";
import { byId, say } from "./dom.js";
import { Doors } from "./doors.js";
import { Drawer } from "./drawer.js";
import { Feed } from "./feed.js";
import { Find } from "./find.js";
import { list, num, object, rows, text } from "./format.js";
import { freshness } from "./freshness.js";
import { Ingestion } from "./ingestion.js";
import { FleetMap } from "./map.js";
import * as outlook from "./outlook.js";
import { Queue } from "./queue.js";
import { Queues } from "./queues.js";
import { RiskList } from "./risk.js";
import { Spikes, Use } from "./spikes.js";
import { slowJobs, Stragglers } from "./stragglers.js";
import { Strip } from "./strip.js";
import { themeButton } from "./toggle.js";

publishScale(document.documentElement);

const MOST_BESIDE = 3; // jobs on the same nodes that are asked about
const JOB_PARTS = [
  ["job", "", "update", 2900],
  ["print", "/fingerprint", "print", 2900],
  ["straggler", "/stragglers", "straggler", 2900],
  ["checkpoint", "/checkpoint", "checkpoint", 9900],
];
const RECENT_ACTIONS = 50;

const state = { header: null, columns: null, layout: {}, jobs: null, ingestion: {}, wanted: null };
const clock = new FleetClock();
const token = new Token(byId("ask"));

const acts = {
  open: (name) => openNode(name),
  openJob: (job) => openJob(job),
  why: (request) => openWhy(request),
  again: () => ["timeline", "drain"].forEach((name) => feed.soon(name)),
  openRack: (name, members) => drawer.openRack(name, members, state.columns),
  select: (job) => map.select(job, rows(state.jobs).find((row) => row.job === job), clock.nowMs()),
  closed: () => address(""),
};

const strip = new Strip();
const map = new FleetMap(acts);
const drawer = new Drawer(acts);
const risk = new RiskList({ open: acts.open, hover: point, changed: () => feed.soon("risk") });
const demand = new Demand({ changed: () => ["demand", "record"].forEach((name) => feed.soon(name)) });
const queue = new Queue(acts);
const queues = new Queues();
const stragglers = new Stragglers(acts);
const actions = new Actions({ token, acts, changed: () => feed.soon("actions") });
const decisions = new Decisions();
const doors = new Doors();
const spikes = new Spikes();
const use = new Use({ open: acts.openJob });
const ingestion = new Ingestion();
const feed = new Feed({
  token,
  refused: (why) => token.ask(why),
  hard: (data) => strip.hear(data, clock.nowMs()),
});
new Find({
  names: () => ({ nodes: state.columns?.names ?? [], jobs: state.columns?.jobs ?? [] }),
  open: acts.open,
  select: acts.select,
});

function point(name) {
  document.querySelector(".node.pointed")?.classList.remove("pointed");
  const row = name ? (state.columns?.names.indexOf(name) ?? -1) : -1;
  if (row >= 0) document.querySelector(`.node[data-row="${row}"]`)?.classList.add("pointed");
}

function openNode(name) {
  drawer.openNode(name);
  address(`#node=${encodeURIComponent(name)}`);
  feed.soon("node");
}

function openJob(job) {
  drawer.openJob(job);
  address(`#job=${encodeURIComponent(job)}`);
  ["stops", ...JOB_PARTS.map(([name]) => name)].forEach((name) => feed.soon(name));
}

function openWhy(request) {
  drawer.openWhy(request);
  address(`#why=${encodeURIComponent(request)}`);
  feed.soon("why");
}

/** Say in the address what is open, so that it can be passed on and Back leads to what was open before. */
function address(hash) {
  if (location.hash !== hash) history.pushState(null, "", location.pathname + location.search + hash);
}

/** Open what the address says: when the page begins, after Back, and when an address is pasted into an open tab. */
function follow() {
  const asked = new URLSearchParams(location.hash.slice(1));
  const [node, job, why] = [asked.get("node"), asked.get("job"), asked.get("why")];
  if (node) return node === drawer.node || openNode(node);
  if (job) return job === drawer.job || openJob(job);
  if (why) return why === drawer.request || openWhy(why);
  drawer.close();
}

/** Fleet time; before the first answer about the fleet, as of when this answer is. */
const nowOf = (body) => clock.nowMs() ?? num(object(body).as_of_ms) ?? Date.now();

/** The fleet document, decoded beside the page where the browser can. */
const worker = startWorker();

function startWorker() {
  try {
    const started = new Worker(new URL("fleet_worker.js", import.meta.url), { type: "module" });
    started.addEventListener("error", () => (state.noWorker = true));
    return started;
  } catch {
    return null;
  }
}

function fetchFleet(bearer) {
  const known = state.layout.signature ?? null;
  if (!worker || state.noWorker) return request("/fleet", bearer).then(({ body, ageS }) => ({ ageS, body: columnsOf(body, known) }));
  return new Promise((resolve, reject) => {
    worker.onmessage = ({ data }) => (data.error ? reject(Object.assign(new Error(data.error.message), data.error)) : resolve({ ageS: data.ageS, body: data }));
    worker.onerror = () => reject(Object.assign(new Error("no worker"), { kind: "away" }));
    worker.postMessage({ token: bearer, known });
  });
}

function takeFleet({ header, columns }, ageS) {
  if (columns.names) {
    const { names, racks, groups, blocks, signature } = columns;
    state.layout = { names, racks, groups, blocks, signature };
  }
  Object.assign(state, { header, columns: { ...columns, ...state.layout } });
  const asOfMs = num(header.as_of_ms);
  if (asOfMs !== null) clock.note(asOfMs, ageS, num(header.speed) > 0 ? header.speed : 1);
  const began = performance.now();
  strip.update(header);
  map.update(state.columns);
  demand.fleet(header, clock.nowMs());
  performance.measure("fleet update", { start: began, end: performance.now() });
  summarize();
}

/** The four questions and everything that moves with the clock alone. */
function summarize() {
  const nowMs = clock.nowMs();
  const fresh = freshness(state.header, nowMs, feed.away, Date.now());
  strip.tick(state.header, nowMs, fresh);
  drawer.tell(fresh);
  const header = object(state.header);
  outlook.trust(fresh, state.ingestion, { risk: risk.calibration, horizonS: risk.horizonS, demand: state.wanted?.record, queue: object(queue.body).record });
  if (!state.columns) return;
  outlook.health(header, state.columns, state.jobs?.length ? slowJobs(state.jobs).length : null);
  outlook.look(risk.ranking, risk.horizonS, (event, name) => {
    event.preventDefault();
    openNode(name);
  });
  outlook.room(queue.body, nowMs);
}

function note(id) {
  return (error) => (error.kind === "missing" || error.kind === "starting") && say(byId(id), `Not available: ${error.message}`);
}

feed.add({ name: "fleet", core: true, everyMs: 900, path: () => "/fleet", fetch: fetchFleet, apply: takeFleet });
feed.add({ name: "risk", everyMs: 900, path: () => risk.path(), apply: (body) => risk.update(object(body)), failed: note("risk-foot") });
feed.add({
  name: "node",
  everyMs: 1500,
  path: () => drawer.path(),
  apply: (body) => drawer.update(object(body), { nowMs: nowOf(body), jobs: state.jobs }),
  failed: (error) => drawer.failed(error),
});
feed.add({
  name: "timeline",
  everyMs: 2900,
  path: () => drawer.timelinePath(),
  apply: (body) => drawer.view?.timeline?.update(body, nowOf(body)),
  failed: (error) => drawer.view?.timeline?.fail(error),
});
feed.add({
  name: "drain",
  everyMs: 9900,
  path: () => drawer.drainPath(),
  apply: (body) => drawer.view?.drain?.update(body, nowOf(body)),
  failed: (error) => drawer.view?.drain?.fail(error),
});
for (const [name, path, part, everyMs] of JOB_PARTS) {
  feed.add({
    name,
    everyMs,
    path: () => drawer.jobPath(path),
    apply: (body) => {
      if (!drawer.job) return;
      drawer.view[part](body, { nowMs: nowOf(body) });
      if (part === "update") showBeside();
    },
    failed: (error) => drawer.job && drawer.view.failed(part === "update" ? "facts" : part, error),
  });
}
feed.add({ name: "spikes", everyMs: 4900, path: () => "/spikes", apply: (body) => spikes.update(body, nowOf(body), state.header), failed: note("spikes-foot") });
feed.add({ name: "use", everyMs: 4900, path: () => "/utilisation", apply: (body) => use.update(body, state.header), failed: note("use-foot") });
feed.add({ name: "queue", everyMs: 1900, path: () => "/queue", apply: (body) => queue.update(body, clock.nowMs(), state.header), failed: note("queue-foot") });
feed.add({ name: "queues", everyMs: 4900, path: () => "/queues", apply: (body) => queues.update(body), failed: note("queues-foot") });
feed.add({
  name: "actions",
  everyMs: 1900,
  path: () => `/actions?order=newest&limit=${RECENT_ACTIONS}`,
  apply: (body) => actions.update(body, nowOf(body)),
  failed: note("actions-foot"),
});
feed.add({
  name: "stops",
  everyMs: 2900,
  path: () => drawer.stopsPath(),
  apply: (body) => drawer.job && drawer.view.stops(body, { nowMs: nowOf(body) }),
  failed: (error) => drawer.job && drawer.view.failed("stops", error),
});
feed.add({
  name: "why",
  everyMs: 1900,
  path: () => drawer.whyPath(),
  apply: (body) => drawer.request && drawer.view.update(body, { nowMs: nowOf(body), actions: actions.ofPayer(drawer.request) }),
  failed: (error) => drawer.request && drawer.view.failed(error),
});
feed.add({
  name: "placements",
  everyMs: 1900,
  path: () => decisions.path(),
  apply: (body) => decisions.update(body, clock.nowMs()) && feed.soon("placements"),
  failed: note("decisions-foot"),
});
feed.add({ name: "doors", everyMs: 4900, path: () => "/adapters", apply: (body) => doors.update(body, clock.nowMs()), failed: note("doors-foot") });
feed.add({
  name: "ingestion",
  everyMs: 1900,
  path: () => "/ingestion",
  apply: (body) => {
    state.ingestion = object(body);
    ingestion.update(body);
  },
  failed: note("ingestion-foot"),
});
feed.add({
  name: "jobs",
  everyMs: 2900,
  path: () => "/jobs",
  apply: (body) => {
    state.jobs = rows(object(body).rows);
    for (const job of stragglers.wanted(state.jobs, state.header)) askStraggler(job);
    if (map.job) acts.select(map.job);
  },
  failed: note("stragglers-foot"),
});
feed.add({ name: "demand", everyMs: 4900, path: () => demand.path(), apply: (body) => demand.update(body), failed: note("demand-foot") });
feed.add({ name: "record", everyMs: 4900, path: () => demand.recordPath(), apply: (body) => demand.updateRecord(body) });
feed.add({
  name: "pools",
  everyMs: 30_000,
  path: () => "/demand?group=all",
  apply: (body) => {
    demand.pools(body);
    const series = rows(object(body).series);
    const isFleet = (row) => (text(row.queue) || "all") === "all" && (text(row.pool) || "all") === "all" && (text(row.class) || "all") === "all";
    state.wanted = series.find((row) => row.target === "wanted" && isFleet(row)) ?? null;
  },
});

/** Jobs that run on nodes of the one that is open, those with the most of them first: [{job, nodes}]. */
function besideOf(job) {
  const own = new Set(list(rows(state.jobs).find((row) => row.job === job)?.nodes));
  return rows(state.jobs)
    .filter((row) => row.job !== job && text(row.state) === "running")
    .map((row) => ({ job: text(row.job), nodes: list(row.nodes).filter((name) => own.has(name)).length }))
    .filter((row) => row.nodes > 0)
    .sort((a, b) => b.nodes - a.nodes)
    .slice(0, MOST_BESIDE);
}

async function showBeside() {
  if (state.jobs === null) return;
  const { job, view } = drawer;
  const found = besideOf(job);
  const said = found.map((row) => `${row.job} ${row.nodes}`).join(" ");
  if (view.asked === said) return;
  view.asked = said;
  for (const row of found) {
    try {
      const { body } = await send("/interference", { a: job, b: row.job, share: "nic" }, token.value);
      row.sentence = text(body.sentence);
    } catch (error) {
      if (!error.kind) throw error;
      row.sentence = `What they do to each other is not known: ${error.message}.`;
    }
  }
  if (drawer.view === view) view.beside(found);
}

async function askStraggler(job) {
  try {
    const { body } = await request(`/jobs/${encodeURIComponent(job)}/stragglers`, token.value);
    stragglers.update(job, body);
  } catch (error) {
    if (!error.kind) throw error;
  }
}

byId("ask").addEventListener("close", () => feed.beat());
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
  if (drawer.isOpen) drawer.close();
  else if (map.job) acts.select("");
});
themeButton(byId("theme"), () => state.columns && map.update(state.columns));

addEventListener("popstate", follow); // a pasted #node=… too
feed.start();
follow();
setInterval(summarize, 500);
