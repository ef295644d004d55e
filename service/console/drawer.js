// The side panel: the page of a node, of a job, of a request that waits, or of a rack; opened from anywhere, closed with Esc, and then the focus
// goes back to where it was.

import { shade } from "./colour.js";
import { byId, h, mark, say } from "./dom.js";
import { percent, sentence, text } from "./format.js";
import { jobView } from "./job.js";
import { nodeView } from "./node.js";
import { whyView } from "./why.js";

export class Drawer {
  /** `acts`: open(node), openJob(job), why(request), select(job), again(), closed(). */
  constructor(acts) {
    this.acts = acts;
    this.root = byId("drawer");
    this.node = "";
    this.job = "";
    this.request = "";
    this.title = h("h2", { id: "drawer-title", tabindex: -1 });
    this.notice = h("p", { class: "drawer-notice", hidden: true });
    this.body = h("div", { class: "drawer-body" });
    this.root.append(
      h("div", { class: "drawer-head" }, this.title, h("button", { class: "tool", "aria-label": "Esc: close", onclick: () => this.close() }, "Esc")),
      this.notice,
      this.body,
    );
  }

  get isOpen() {
    return !this.root.hidden;
  }

  path() {
    return this.isOpen && this.node ? `/nodes/${encodeURIComponent(this.node)}` : null;
  }

  timelinePath() {
    return this.isOpen && this.node && this.view ? this.view.timeline.path(this.node) : null;
  }

  drainPath() {
    return this.path() && this.view ? `${this.path()}/drain` : null;
  }

  /** Of the job: "" itself, or what else the API says of it. */
  jobPath(part = "") {
    return this.isOpen && this.job ? `/jobs/${encodeURIComponent(this.job)}${part}` : null;
  }

  stopsPath() {
    return this.isOpen && this.job ? `/actions?order=newest&job=${encodeURIComponent(this.job)}` : null;
  }

  whyPath() {
    return this.isOpen && this.request ? `/queue/${encodeURIComponent(this.request)}/why` : null;
  }

  openNode(name) {
    this.show(name, "node");
    this.node = name;
    this.body.replaceChildren(h("p", { class: "why" }, "Asking for the node …"));
  }

  openJob(name) {
    this.show(name, "job");
    this.job = name;
    this.view = jobView(this.acts);
    this.body.replaceChildren(this.view.element);
  }

  /** Why a request waits. */
  openWhy(request) {
    this.show(request, "wait");
    this.request = request;
    this.view = whyView(this.acts, request);
    this.body.replaceChildren(this.view.element);
  }

  /** A rack: its nodes, riskiest first. */
  openRack(name, members, columns) {
    this.show(name ? `Rack ${name}` : "Nodes without a rack", "rack");
    const order = [...members].sort((a, b) => (columns.p[b] || -1) - (columns.p[a] || -1));
    const items = order.map((row) => {
      const p = Number.isNaN(columns.p[row]) ? null : columns.p[row];
      const chance = h("span", { class: "chance" }, percent(p));
      shade(chance, p);
      return h(
        "li",
        {},
        h(
          "button",
          { class: "row", onclick: () => this.acts.open(columns.names[row]) },
          h("span", { class: "name" }, columns.names[row]),
          h("span", { class: "place" }, sentence(columns.reasons[row])),
          chance,
        ),
      );
    });
    this.body.replaceChildren(h("p", { class: "foot" }, "Probability within 1 h, when this list was opened."), h("ol", { class: "rows" }, ...items));
  }

  /** Whether what is shown can be trusted: the page covers the strip that says so. */
  tell({ state, sentence }) {
    this.notice.hidden = state === "live";
    mark(this.notice, "data-state", state);
    say(this.notice, sentence);
  }

  show(title, kind) {
    if (!this.isOpen) this.opener = document.activeElement;
    Object.assign(this, { node: "", job: "", request: "", view: null });
    this.root.dataset.kind = kind;
    this.root.hidden = false;
    say(this.title, title);
    this.root.scrollTop = 0;
    this.title.focus({ preventScroll: true });
  }

  update(body, context) {
    if (text(body.node) !== this.node) return;
    if (!this.view) {
      this.view = nodeView(this.acts);
      this.body.replaceChildren(this.view.element);
      this.acts.again();
    }
    this.view.update(body, context);
  }

  /** The API does not know the node, or nothing answers. */
  failed(error) {
    if (this.view) return;
    const sentence = error.kind === "missing" ? `There is no node ${this.node}: ${error.message}` : "No answer yet, trying again.";
    this.body.replaceChildren(h("p", { class: "why" }, sentence));
  }

  close() {
    if (!this.isOpen) return;
    this.root.hidden = true;
    Object.assign(this, { node: "", job: "", request: "", view: null });
    if (this.opener?.isConnected) this.opener.focus({ preventScroll: true });
    this.acts.closed();
  }
}
