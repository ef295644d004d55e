// The small card beside a hovered or focused node.

import { bits, jobsOf, STATES } from "./columns.js";
import { byId, h } from "./dom.js";
import { NONE, percent, sentence } from "./format.js";

const EDGE = 8;

/** What is known of one node, in words: also what a screen reader says. */
export function describe(columns, row) {
  const p = columns.p[row];
  const state = STATES[columns.state[row]];
  const busy = bits(columns.busy[row]);
  const jobs = jobsOf(columns, row);
  const names = jobs.length > 2 ? `${jobs.slice(0, 2).join(", ")} and ${jobs.length - 2} more` : jobs.join(", ");
  const bad = bits(columns.bad[row]);
  const loose = bits(columns.loose[row]);
  return {
    title: columns.names[row],
    place: [columns.racks[row], columns.groups[row], columns.blocks[row]].filter(Boolean).join(" · ") || "unplaced",
    risk: Number.isNaN(p) ? "risk unknown" : `${percent(p)} within 1 h`,
    state,
    reason: sentence(columns.reasons[row]) || (state === "ok" ? "Nothing unusual." : ""),
    gpus:
      `${busy} of ${columns.gpus[row]} GPUs busy` + (loose ? `, ${loose} of them by no known job` : "") + (bad ? `, ${bad} out` : "") + (names ? `: ${names}` : ""),
  };
}

/** `seen`: what stands beside its name, which the label begins with. */
export const label = (columns, row, seen = "") => {
  const about = describe(columns, row);
  return [`${about.title}${seen ? ` ${seen}` : ""}: ${about.risk}`, about.state, about.gpus, about.reason].filter(Boolean).join(". ");
};

/** Show the card of a node beside `box` (a client rectangle). */
export function showTip(columns, row, box) {
  const tip = byId("tip");
  const about = describe(columns, row);
  tip.replaceChildren(
    h("p", { class: "tip-title" }, h("b", {}, about.title), ` ${about.place}`),
    h("p", {}, h("b", {}, about.risk), about.state === "ok" ? "" : ` · ${about.state}`),
    h("p", { class: "tip-reason" }, about.reason || NONE),
    h("p", { class: "tip-place" }, about.gpus),
  );
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const right = box.right + EDGE + width <= innerWidth;
  const left = right ? box.right + EDGE : Math.max(EDGE, Math.min(box.left, innerWidth - width - EDGE));
  const beside = right ? box.top : box.bottom + EDGE;
  const top = Math.max(EDGE, Math.min(beside, innerHeight - height - EDGE));
  tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
}

export function hideTip() {
  byId("tip").hidden = true;
}
