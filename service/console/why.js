// Why a request waits: the ladder from who is before it to what would let it start, and when.

import { actionRows } from "./actions.js";
import { h, keyed, say } from "./dom.js";
import { clockTime, list, num, object, rows, sentence, text, whole, words } from "./format.js";
import { interval } from "./job.js";
import { brief } from "./queues.js";

const STEPS = {
  before: "Who is before it",
  limit: "The limit of its queue",
  lent_out: "What its queue may borrow",
  window: "A reservation or maintenance",
  room: "What is short",
  kept: "What is reserved for others",
  untried: "Not looked at in the last pass",
  gone: "Its queue is gone",
  reclaim: "Who would be stopped for it",
  ends: "What would let it start",
  stale: "Nothing is placed now",
  start: "When it starts",
};
const ASKING = "Asking …";

function factsOf(body) {
  const [position, own, share] = [num(body.position), num(body.position_in_queue), num(body.share)];
  return [
    text(body.queue) ? `queue ${text(body.queue)}` : "no queue of the file",
    position !== null && `number ${whole(position)} in the order`,
    own !== null && `number ${whole(own)} in its queue`,
    share !== null && `its queue's share is ${brief(share)}`,
  ]
    .filter(Boolean)
    .join(" · ");
}

/** {element, update(body, context), failed(error)}. `acts`: why(request), openJob(job). */
export function whyView(acts, request) {
  const facts = h("p", { class: "facts" }, ASKING);
  const action = h("p", { class: "action", hidden: true });
  const ladder = h("ol", { class: "ladder" });
  const taken = h("section", { hidden: true }, h("h3", {}, "What is done to running jobs for it"), h("ol", { class: "rows actions" }));
  const starts = h("p", { class: "why starts" });
  const foot = h("p", { class: "foot" });
  const element = h("div", { class: "page" }, facts, action, h("section", {}, h("h3", {}, "Step by step"), ladder), taken, starts, foot);
  const link = (name) => h("button", { class: "link", onclick: () => acts.why(name) }, name);

  function write(item, step) {
    const [title, said, names] = item.children;
    say(title, STEPS[text(step.code)] ?? words(step.code));
    say(said, sentence(step.sentence));
    keyed(names, [...new Set(list(step.requests).map(text).filter(Boolean))], (name) => name, link, () => {});
  }

  return {
    element,
    update(answer, { nowMs, actions = [] }) {
      const body = object(answer);
      const steps = rows(body.ladder);
      say(facts, factsOf(body));
      action.hidden = !text(body.sentence);
      say(action, sentence(body.sentence));
      keyed(ladder, steps, (step) => `${steps.indexOf(step)} ${text(step.code)}`, () => h("li", {}, h("h4"), h("p"), h("p", { class: "chips" })), write);
      taken.hidden = !actions.length;
      actionRows(taken.lastChild, actions, nowMs, acts, request);
      const when = interval(body.start_ms, nowMs);
      say(starts, when ? `Starts ${when}.` : "When it starts is not known yet.");
      say(foot, `as of ${clockTime(num(body.as_of_ms))} UTC`);
    },
    failed(error) {
      if (error.kind !== "missing") {
        if (facts.textContent === ASKING) say(facts, `Not available: ${text(error.message) || "no answer"}`);
        return;
      }
      action.hidden = true;
      ladder.replaceChildren();
      facts.replaceChildren("It waits no more: it was placed, refused or withdrawn. ", h("button", { class: "link", onclick: () => acts.openJob(request) }, "Its job"));
      say(starts, "");
    },
  };
}
