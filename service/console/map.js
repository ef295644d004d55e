// The fleet map: picks how to draw by the number of nodes, and holds the selected job.

import { gangOf } from "./columns.js";
import { byId, h, say } from "./dom.js";
import { count, duration, NONE, num, object, span, text, whole } from "./format.js";
import { CanvasMap, legendOf } from "./map_canvas.js";
import { GridMap } from "./map_grid.js";

const MOST_CELLS = 420; // more nodes than this are drawn on a canvas

const EMPTY = [
  h("p", { class: "big" }, "No node yet"),
  h("p", {}, "No node has reported to Fleetcast yet. Point it at an exporter, no configuration needed:"),
  h("pre", {}, "fleetcast run --scrape http://NODE:9400/metrics"),
];

export class FleetMap {
  constructor(acts) {
    this.acts = acts;
    this.root = byId("map");
    this.gang = new Set();
    byId("legend").replaceChildren(...legendOf());
  }

  update(columns) {
    this.columns = columns;
    this.gang = this.job ? gangOf(columns, this.job) : new Set();
    say(byId("map-sub"), this.summary());
    if (columns.n === 0) return this.empty();
    const Kind = columns.n > MOST_CELLS ? CanvasMap : GridMap;
    if (!(this.map instanceof Kind)) {
      this.map?.destroy();
      this.map = new Kind(this.root, this.acts);
    }
    this.map.update(columns, this.gang);
  }

  empty() {
    this.map?.destroy();
    this.map = null;
    this.root.replaceChildren(h("div", { class: "empty" }, ...EMPTY));
  }

  summary() {
    const racks = new Set(this.columns.racks.filter(Boolean)).size;
    const gpus = this.columns.gpus.reduce((sum, number) => sum + number, 0);
    const parts = [count(this.columns.n, "node"), racks && count(racks, "rack"), `${whole(gpus)} GPUs`];
    return this.columns.n ? parts.filter(Boolean).join(", ") : "";
  }

  /** Select a job ("" for none): its nodes are outlined, and a line says what it is. */
  select(job, facts, nowMs) {
    this.job = job;
    const line = byId("chosen");
    line.hidden = !job;
    if (job) line.replaceChildren(...this.about(job, object(facts), nowMs));
    if (this.columns) this.update(this.columns);
  }

  about(job, facts, nowMs) {
    const left = object(facts.remaining_s);
    const started = num(facts.started_ms);
    const nodes = this.columns ? gangOf(this.columns, job).size : 0;
    const parts = [
      text(facts.user) && `user ${text(facts.user)}`,
      num(facts.gpus) !== null && `${count(facts.gpus, "GPU")} on ${count(nodes, "node")}`,
      started !== null && nowMs !== null ? `running ${duration((nowMs - started) / 1000)}` : text(facts.state) || NONE,
      num(left.p50) !== null && num(left.p90) !== null && `${span(left.p50, left.p90)} left (p50–p90)`,
    ].filter(Boolean);
    return [
      h("b", {}, job),
      ` ${parts.join(" · ")} `,
      h("button", { class: "link", onclick: () => this.acts.openJob(job) }, "open"),
      " ",
      h("button", { class: "link", onclick: () => this.acts.select("") }, "clear"),
    ];
  }

  /** Move the keyboard's place to a node. */
  focus(name, take = true) {
    const row = this.columns?.names.indexOf(name) ?? -1;
    if (row >= 0) this.map?.focus(row, take);
  }
}
