// Finding a node or a job by its name: "/" from anywhere.

import { byId, h } from "./dom.js";

const SHOWN = 8;

/** Names that hold `wanted`, those that begin with it first. */
export function matches(names, wanted, most = SHOWN) {
  const begin = [];
  const hold = [];
  for (const name of names) {
    const at = name.toLowerCase().indexOf(wanted);
    if (at === 0) begin.push(name);
    else if (at > 0) hold.push(name);
    if (begin.length >= most) break;
  }
  return [...begin, ...hold].slice(0, most);
}

export class Find {
  /** `names()` gives {nodes, jobs}; `open(node)`, `select(job)`. */
  constructor({ names, open, select }) {
    Object.assign(this, { names, open, select, found: [], at: 0 });
    this.input = byId("find-text");
    this.list = byId("find-list");
    this.input.addEventListener("input", () => this.search());
    this.input.addEventListener("keydown", (event) => this.key(event));
    this.input.addEventListener("blur", () => setTimeout(() => this.show([]), 150));
    byId("find").addEventListener("submit", (event) => {
      event.preventDefault();
      this.choose(this.at);
    });
    document.addEventListener("keydown", (event) => {
      const typing = event.target.closest?.("input, select, textarea, dialog");
      if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      this.input.focus();
      this.input.select();
    });
  }

  search() {
    const wanted = this.input.value.trim().toLowerCase();
    if (!wanted) return this.show([]);
    const { nodes, jobs } = this.names();
    const found = matches(nodes, wanted).map((name) => ["node", name]);
    this.show([...found, ...matches(jobs, wanted, SHOWN - Math.min(found.length, SHOWN / 2)).map((name) => ["job", name])].slice(0, SHOWN));
  }

  show(found) {
    this.found = found;
    this.at = 0;
    const none = this.input.value.trim() && document.activeElement === this.input && !found.length;
    const items = found.map(([kind, name], at) =>
      h(
        "li",
        { role: "option", id: `find-${at}`, "aria-selected": at === 0 ? "true" : "false", onpointerdown: () => this.choose(at) },
        h("span", {}, name),
        h("span", { class: "place" }, kind),
      ),
    );
    this.list.replaceChildren(...(none ? [h("li", { class: "place" }, "Nothing has that name.")] : items));
    this.list.hidden = this.list.children.length === 0;
    this.input.setAttribute("aria-expanded", String(!this.list.hidden));
    this.point();
  }

  point() {
    [...this.list.children].forEach((item, at) => item.setAttribute("aria-selected", String(at === this.at)));
    if (this.found.length) this.input.setAttribute("aria-activedescendant", `find-${this.at}`);
    else this.input.removeAttribute("aria-activedescendant");
  }

  key(event) {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      const last = this.found.length - 1;
      this.at = Math.min(last, Math.max(0, this.at + (event.key === "ArrowDown" ? 1 : -1)));
      this.point();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      this.input.value = "";
      this.show([]);
      this.input.blur();
    }
  }

  choose(at) {
    const found = this.found[at];
    if (!found) return;
    this.input.value = "";
    this.show([]);
    this.input.blur();
    if (found[0] === "node") this.open(found[1]);
    else this.select(found[1]);
  }
}
