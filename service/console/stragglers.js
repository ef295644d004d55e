// Jobs that run slower than they should, and who holds each back.

import { byId, h, keyed, say } from "./dom.js";
import { clockTime, count, figure, list, num, object, rows, sentence, text, times, withoutJobs, words } from "./format.js";

const SHOWN = 6;

/** Names of the jobs that are marked slow. */
export const slowJobs = (jobs) => [...new Set(rows(jobs).filter((row) => row.slow === true).map((row) => text(row.job)))].filter(Boolean);

const KIND = { worker: "", link: "link ", stage: "stage ", node: "node " };

function culprit(row) {
  const who = object(row.culprit);
  const kind = text(who.kind);
  if (!kind || kind === "nobody") return "no member stands out";
  return `${KIND[kind] ?? `${kind} `}${text(who.name)}`;
}

export class Stragglers {
  constructor({ select }) {
    this.select = select;
    this.root = byId("stragglers");
    this.bodies = new Map();
  }

  /** Which jobs to ask for now. header: of the fleet. */
  wanted(jobs, header) {
    this.header = header;
    const names = slowJobs(jobs);
    this.total = rows(jobs).filter((row) => text(row.state) === "running").length;
    for (const name of this.bodies.keys()) if (!names.includes(name)) this.bodies.delete(name);
    this.names = names;
    if (names.length === 0) this.show();
    return names.slice(0, SHOWN);
  }

  update(job, body) {
    this.bodies.set(job, object(body));
    this.show();
  }

  show() {
    const slow = list(this.names).filter((name) => this.bodies.get(name)?.slow !== false); // asked for later than the list
    const found = slow.filter((name) => this.bodies.has(name)).slice(0, SHOWN);
    say(byId("stragglers-sub"), found.length ? `${slow.length} of ${count(this.total, "running job")}` : "");
    keyed(this.root, found, (name) => name, (name) => this.make(name), (item, name) => this.write(item, name, this.bodies.get(name)));
    say(byId("stragglers-foot"), found.length ? "Steps against what the job's own past and its peers say." : this.total ? `No slow job among ${count(this.total, "running job")}.` : withoutJobs(this.header, "No job runs."));
  }

  make(name) {
    const row = h(
      "button",
      { class: "row", onclick: () => this.select(name) },
      h("span", { class: "name" }, name),
      h("span", { class: "place" }),
      h("span", { class: "chance" }),
      h("span", { class: "why" }),
    );
    return h("li", {}, row);
  }

  write(item, name, row) {
    const [, place, ratio, why] = item.firstChild.children;
    const cause = text(row.cause);
    const since = num(row.since_ms) === null ? "" : ` · since ${clockTime(row.since_ms)}`;
    say(place, `${culprit(row)}${cause && cause !== "unknown" ? ` · ${words(cause)}` : ""}${since}`);
    say(ratio, times(num(row.ratio)));
    const usual = num(row.expected_step_s) === null ? "" : `, expected ${figure(row.expected_step_s)} s`;
    const steps = num(row.observed_step_s) === null ? "" : ` Steps take ${figure(row.observed_step_s)} s${usual}.`;
    const said = sentence(row.sentence);
    say(why, /step/i.test(said) ? said : `${said}${said && !/[.!?]$/.test(said) ? "." : ""}${steps}`);
  }
}
