// The side panel: one node or one rack, opened from anywhere, closed with Esc; focus goes back to where it was.

import { shade } from "./colour.js";
import { byId, h, say } from "./dom.js";
import { percent, sentence, text } from "./format.js";
import { nodeView } from "./node.js";

export class Drawer {
  /** `acts`: open(name), select(job), closed(). */
  constructor(acts) {
    this.acts = acts;
    this.root = byId("drawer");
    this.node = "";
    this.title = h("h2", { id: "drawer-title", tabindex: -1 });
    this.body = h("div", { class: "drawer-body" });
    this.root.append(
      h("div", { class: "drawer-head" }, this.title, h("button", { class: "tool", "aria-label": "Close", onclick: () => this.close() }, "Esc")),
      this.body,
    );
  }

  get isOpen() {
    return !this.root.hidden;
  }

  path() {
    return this.isOpen && this.node ? `/nodes/${encodeURIComponent(this.node)}` : null;
  }

  openNode(name) {
    this.show(name);
    this.node = name;
    this.view = null;
    this.body.replaceChildren(h("p", { class: "why" }, "Asking for the node …"));
  }

  /** A rack: its nodes, riskiest first. */
  openRack(name, members, columns) {
    this.show(name ? `Rack ${name}` : "Nodes without a rack");
    this.node = "";
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

  show(title) {
    if (!this.isOpen) this.opener = document.activeElement;
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
    this.node = "";
    if (this.opener?.isConnected) this.opener.focus({ preventScroll: true });
    this.acts.closed();
  }
}
