// Actions on running jobs: what is stopped, shrunk or replaced for whom, at what cost and how far it is; and the switches that stop all of it.

import { send } from "./api.js";
import { byId, h, keyed, mark, say, unique } from "./dom.js";
import { clockTime, count, figure, list, num, object, rows, sentence, text } from "./format.js";

const SHOWN = 8;
const SECONDS_PER_HOUR = 3600;
const VERBS = { place: "places", shrink: "shrinks", grow: "grows", preempt: "stops", move: "moves", replace: "replaces nodes of" };
const HAPPENED = { place: "placed", shrink: "shrank", grow: "grew", preempt: "stopped", move: "moved", replace: "replaced nodes of" };
const FAILED = { place: "did not place", shrink: "did not shrink", grow: "did not grow", preempt: "did not stop", move: "did not move", replace: "did not replace nodes of" };
const RECOVERY = "recovery of "; // begins a payer that is no request but a gang which lost nodes
const OPEN = new Set(["proposed", "sent", "accepted"]);
const ORDER = ["accepted", "sent", "proposed"];
const SWITCHES = {
  pause: ["Pause all actions?", "Nothing more is sent until a person resumes. What was sent already is still followed.", "Pause"],
  resume: ["Send actions again?", "Running jobs may be stopped or changed from now on. An open circuit breaker stays open.", "Resume"],
  reset: ["Close the circuit breaker?", "It opened because actions would free too many GPUs within an hour. What was counted before counts no more.", "Close it"],
};

export const isOpen = (row) => OPEN.has(text(row.state));

/** "2.3 GPU-hours lost"; an action that saves more than it costs says so. */
function costOf(row) {
  const cost = num(row.cost_gpu_s);
  if (cost === null) return "cost not known";
  const amount = figure(Math.abs(cost) / SECONDS_PER_HOUR);
  const hours = `${amount} GPU-hour${amount === "1" ? "" : "s"}`;
  return cost < 0 ? `saves ${hours}` : `costs ${hours}`;
}

/** "accepted 14:02, expires 14:05". An action that is only advice has nothing that carries it out. */
function stateOf(row, nowMs) {
  const since = `${text(row.state)} ${clockTime(num(row.since_ms), nowMs)}`;
  if (!isOpen(row)) return since;
  return text(row.executor) === "advice" ? `${since}, advice only` : `${since}, expires ${clockTime(num(row.by_ms), nowMs)}`;
}

/** The reason in words: what follows the colon of the sentence, and why the action is in its state. */
function reasonOf(row) {
  const said = text(row.sentence);
  const at = said.indexOf(": ");
  return [at < 0 ? said : said.slice(at + 2), text(row.why)].filter(Boolean).map(sentence).join(" · ");
}

/** What an action does, or did, to its job. */
function deedOf(row) {
  const verbs = isOpen(row) ? VERBS : text(row.state) === "seen" || text(row.state) === "late" ? HAPPENED : FAILED;
  return `${verbs[text(row.kind)] ?? text(row.kind)} `;
}

/** Rows of one action each, into `root`. `acts`: openJob(job), why(request). `own`: the job or request of the page. */
export function actionRows(root, found, nowMs, acts, own = "") {
  const known = unique(found.filter((row) => text(row.action_id)), (row) => row.action_id);
  keyed(root, known, (row) => row.action_id, (row) => makeRow(row, acts, own), (item, row) => writeRow(item, row, nowMs));
}

function makeRow(row, acts, own) {
  const [job, payer] = [text(row.job), text(row.payer) === own ? "" : text(row.payer)];
  return h(
    "li",
    { class: "row" },
    h("span", { class: "deed" }, h("span"), job === own ? h("b", {}, job) : h("button", { class: "link name", onclick: () => acts.openJob(job) }, job)),
    h("span", { class: "place" }, payer ? "for " : "", payer.startsWith(RECOVERY) ? payer : payer && h("button", { class: "link", onclick: () => acts.why(payer) }, payer)),
    h("span", { class: "cost" }),
    h("span", { class: "state" }),
    h("span", { class: "why" }),
  );
}

function writeRow(item, row, nowMs) {
  const [deed, , cost, state, why] = item.children;
  say(deed.firstChild, deedOf(row));
  item.dataset.state = text(row.state);
  say(cost, `${count(num(row.gpus) ?? 0, "GPU")}, ${costOf(row)}`);
  say(state, stateOf(row, nowMs));
  say(why, reasonOf(row));
}

/** What the policy lets actions do, or "" if they may be sent in all queues. */
function modeLine(switches) {
  const [mode, queues] = [text(switches.mode), list(switches.act_in).map(text).filter(Boolean)];
  if (mode === "off") return "Nothing is proposed or sent: reclaim is off in the policy of the queues.";
  if (mode === "advise") return "Advice only: no action is sent, because reclaim is “advise” in the policy of the queues.";
  return mode === "act" && queues.length ? `Actions are sent only for jobs of ${queues.join(", ")}. Elsewhere they are advice.` : "";
}

/** Since when nothing is sent, or "". */
function pausedLine(switches, nowMs) {
  if (num(switches.paused_ms) === null) return "";
  return `Paused since ${clockTime(switches.paused_ms, nowMs)}${text(switches.paused_by) ? ` by ${text(switches.paused_by)}` : ""}: no action is sent.`;
}

function breakerLine(switches, nowMs) {
  if (num(switches.opened_ms) === null) return "";
  const why = text(switches.why);
  return `The circuit breaker is open since ${clockTime(switches.opened_ms, nowMs)}: nothing is sent until it is reset.${why ? ` ${sentence(why)}.` : ""}`;
}

export class Actions {
  /** `acts`: openJob(job), why(request); `changed()` after a switch was used. */
  constructor({ token, acts, changed }) {
    Object.assign(this, { token, acts, changed, found: [] });
    this.root = byId("actions");
    this.refused = byId("actions-refused");
    this.dialog = byId("confirm");
    this.paused = h("p", { class: "refused", hidden: true }, h("span"), " ", this.button("resume", "Resume"));
    this.breaker = h("p", { class: "refused", hidden: true }, h("span"), " ", this.button("reset", "Reset"));
    this.mode = h("p", { class: "actions-mode", hidden: true });
    byId("actions-switches").append(this.mode, this.paused, this.breaker);
    this.pause = this.button("pause", "Pause all actions");
    byId("actions-pause").append(this.pause);
  }

  button(verb, label) {
    return h("button", { class: "tool", onclick: () => this.confirm(verb) }, label);
  }

  update(body, nowMs) {
    const answer = object(body);
    this.found = rows(answer.rows).reverse();
    const open = this.found.filter(isOpen);
    const byState = open.sort((a, b) => ORDER.indexOf(text(a.state)) - ORDER.indexOf(text(b.state)));
    const shown = [...byState, ...this.found.filter((row) => !isOpen(row))].slice(0, SHOWN);
    actionRows(this.root, shown, nowMs, this.acts);
    const ended = this.found.length - open.length;
    say(byId("actions-sub"), this.found.length ? `${open.length} open, ${ended} ended lately` : "");
    const more = this.found.length > shown.length ? ` · ${shown.length} of the latest ${this.found.length} are shown: GET /v1/actions has all` : "";
    say(byId("actions-foot"), this.found.length ? `Cost: work since the last checkpoint, restart, and the wait of a gang that lost nodes${more}` : "No action on a running job: none was stopped, shrunk or moved.");
    this.writeSwitches(object(answer.switches), nowMs);
  }

  writeSwitches(switches, nowMs) {
    const [mode, paused, open] = [modeLine(switches), pausedLine(switches, nowMs), breakerLine(switches, nowMs)];
    mark(this.mode, "hidden", !mode);
    say(this.mode, mode);
    mark(this.paused, "hidden", !paused);
    say(this.paused.firstChild, paused);
    mark(this.breaker, "hidden", !open);
    say(this.breaker.firstChild, open);
    this.pause.hidden = Boolean(paused);
  }

  /** Ask before a switch is used; Esc and Cancel leave it. */
  confirm(verb) {
    const [title, said, label] = SWITCHES[verb];
    const [heading, line, confirm] = [byId("confirm-title"), byId("confirm-text"), byId("confirm-yes")];
    say(heading, title);
    say(line, said);
    say(confirm, label);
    this.dialog.returnValue = "";
    this.dialog.addEventListener("close", () => this.dialog.returnValue === "yes" && this.use(verb), { once: true });
    this.dialog.showModal();
  }

  async use(verb) {
    try {
      await send(`/actions/${verb}`, null, this.token.value);
      this.refuse("");
    } catch (error) {
      if (!error.kind) throw error;
      this.refuse(`Not done: ${error.message}.${error.kind === "refused" ? " It needs a token with the scope admin." : ""}`);
    }
    this.changed();
  }

  refuse(why) {
    mark(this.refused, "hidden", !why);
    say(this.refused, why);
  }

  /** The known actions that serve a request. */
  ofPayer(request) {
    return this.found.filter((row) => text(row.payer) === request);
  }
}
