// One time axis for a node: its risk as the page saw it, since when each reason holds, since when each job runs.

import { h, s } from "./dom.js";
import { clockTime, num, text } from "./format.js";
import { riskPath } from "./seen.js";

const SPAN_MS = 3_600_000;
const WIDTH = 480;
const LANE = 20;
const TOP = 26;

/** [label, from ms] of each lane with a bar from then until now. */
function lanesOf(reasons, jobs) {
  return [
    ...reasons.filter((row) => num(row.since_ms) !== null).map((row) => [text(row.feature).replaceAll("_", " "), row.since_ms, "reason"]),
    ...jobs.filter((row) => num(row.started_ms) !== null).map((row) => [text(row.job), row.started_ms, "job"]),
  ].slice(0, 8);
}

export function timeline() {
  const svg = s("svg", { class: "timeline", role: "img" });
  const element = h("div", {}, svg);
  const update = ({ reasons, risk, jobs, nowMs }) => {
    if (nowMs === null) return;
    const fromMs = nowMs - SPAN_MS;
    const x = (time) => Math.max(0, Math.min(1, (time - fromMs) / SPAN_MS)) * WIDTH;
    const lanes = lanesOf(reasons, jobs);
    const height = TOP + lanes.length * LANE + 18;
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
    svg.setAttribute("aria-label", `Risk over the last hour and ${lanes.length} reasons and jobs on the same axis`);
    const marks = [0, 15, 30, 45].map((minutes) => {
      const time = nowMs - minutes * 60_000;
      return s("text", { class: "axis", x: Math.min(WIDTH - 1, x(time)), y: height - 3, "text-anchor": minutes ? "middle" : "end" }, clockTime(time));
    });
    const bars = lanes.flatMap(([label, since, kind], at) => {
      const y = TOP + at * LANE;
      const left = x(since);
      const before = since < fromMs ? "← " : "";
      return [
        s("rect", { class: `lane lane-${kind}`, x: left, y: y + 14, width: Math.max(2, WIDTH - left), height: 3, rx: 1 }),
        s("text", { class: "lane-name", x: Math.min(left, WIDTH * 0.62), y: y + 11 }, `${before}${label}`),
      ];
    });
    svg.replaceChildren(
      s("text", { class: "lane-name", x: 0, y: 9 }, risk.length > 1 ? "risk within 1 h" : "risk within 1 h: being watched since this page was opened"),
      s("path", { class: "spark-base", d: `M0 ${TOP - 2.5}H${WIDTH}` }),
      s("path", { class: "spark-line", d: riskPath(risk, fromMs, nowMs, WIDTH, TOP - 2) }),
      ...bars,
      ...marks,
    );
  };
  return { element, update };
}
