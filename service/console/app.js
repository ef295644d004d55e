// The console: wires the panels to the API. What each panel shows is decided in its own file.

import { request, Token } from "./api.js";
import { FleetClock } from "./clock.js";
import { publishScale } from "./colour.js";
import { columnsOf } from "./columns.js";
import { Decisions } from "./decisions.js";
import { Demand } from "./demand.js";
import { byId, say } from "./dom.js";
import { Drawer } from "./drawer.js";
import { Feed } from "./feed.js";
import { Find } from "./find.js";
import { num, object, rows, text } from "./format.js";
import { freshness } from "./freshness.js";
import { Ingestion } from "./ingestion.js";
import { FleetMap } from "./map.js";
import * as outlook from "./outlook.js";
import { Queue } from "./queue.js";
import { RiskList } from "./risk.js";
import { Seen } from "./seen.js";
import { slowJobs, Stragglers } from "./stragglers.js";
import { Strip } from "./strip.js";
import { themeButton } from "./toggle.js";

publishScale(document.documentElement);

const state = { header: null, columns: null, layout: {}, jobs: null, ingestion: {}, room: null };
const clock = new FleetClock();
const seen = new Seen();
const token = new Token(byId("ask"));

const acts = {
  open: (name) => openNode(name),
  openRack: (name, members) => drawer.openRack(name, members, state.columns),
  select: (job) => map.select(job, rows(state.jobs).find((row) => row.job === job), clock.nowMs()),
  closed: () => history.replaceState(null, "", location.pathname + location.search),
};

const strip = new Strip();
const map = new FleetMap(acts);
const drawer = new Drawer(acts);
const risk = new RiskList({ open: acts.open, hover: point, changed: () => feed.soon("risk") });
const demand = new Demand({ changed: () => ["demand", "record"].forEach((name) => feed.soon(name)) });
const queue = new Queue(acts);
const stragglers = new Stragglers(acts);
const decisions = new Decisions();
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
  history.replaceState(null, "", `#node=${encodeURIComponent(name)}`);
  feed.soon("node");
}

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
  if (columns.n <= 2000) state.columns.names.forEach((name, row) => seen.note(name, asOfMs ?? 0, columns.p[row]));
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
  const header = object(state.header);
  outlook.trust(fresh, header, state.ingestion, state.room);
  if (!state.columns) return;
  outlook.health(header, state.columns, state.jobs === null ? null : slowJobs(state.jobs).length);
  outlook.look(risk.ranking, risk.horizonS, (event, name) => {
    event.preventDefault();
    openNode(name);
  });
  outlook.room(header, state.room, nowMs);
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
  apply: (body) => drawer.update(object(body), { nowMs: clock.nowMs(), risk: seen.of(text(object(body).node)), jobs: state.jobs }),
  failed: (error) => drawer.failed(error),
});
feed.add({ name: "queue", everyMs: 1900, path: () => "/queue", apply: (body) => queue.update(body, clock.nowMs(), state.header), failed: note("queue-foot") });
feed.add({
  name: "placements",
  everyMs: 1900,
  path: () => decisions.path(),
  apply: (body) => decisions.update(body, clock.nowMs()) && feed.soon("placements"),
  failed: note("decisions-foot"),
});
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
    for (const job of stragglers.wanted(state.jobs)) askStraggler(job);
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
    const isFleet = (row) => (text(row.pool) || "all") === "all" && (text(row.class) || "all") === "all";
    state.room = series.find((row) => row.target === "wanted" && isFleet(row)) ?? null;
  },
});

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
  if (event.key !== "Escape" || byId("ask").open) return;
  if (drawer.isOpen) drawer.close();
  else if (map.job) acts.select("");
});
themeButton(byId("theme"), () => state.columns && map.update(state.columns));

const asked = new URLSearchParams(location.hash.slice(1)).get("node");
feed.start();
if (asked) openNode(asked);
setInterval(summarize, 500);
