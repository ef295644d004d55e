// The tree of queues: what each is owed and holds, who borrows and who lends, its part of seven days, and who waits.

import { byId, h, keyed, mark, s, say, unique } from "./dom.js";
import { count, list, NONE, num, object, percent, rows, sentence, span, text, whole } from "./format.js";

const DAY = { width: 9, gap: 2, height: 18 };
const SHOWN = 40;
const KEYS = ["guaranteed", "used", "borrowed", "lent", "limit"];

/** GPUs of any model, or of all that are named. */
function gpus(amounts) {
  const found = object(amounts);
  if (num(found.gpu) !== null) return found.gpu;
  const models = Object.values(found).filter((value) => num(value) !== null);
  return models.length ? models.reduce((sum, value) => sum + value, 0) : null;
}

/** A share in two digits: of a queue of weight 40 it is small. */
export const brief = (value) => (num(value) === null ? NONE : value === 0 ? "0" : value.toPrecision(2));

/** Rows with their depth, parents first, each followed by what is below it. */
export function inDepth(found) {
  const below = new Map();
  const names = new Set(found.map((row) => row.queue));
  for (const row of found) {
    const parent = names.has(row.parent) ? row.parent : "";
    below.set(parent, [...(below.get(parent) ?? []), row]);
  }
  const walk = (parent, depth) => (below.get(parent) ?? []).flatMap((row) => [{ ...row, depth }, ...walk(row.queue, depth + 1)]);
  return walk("", 0);
}

/** What is beyond its guarantee; one without, below another, holds of what that one has. */
const borrows = (row) => (row.depth > 0 && !gpus(row.guaranteed) ? 0 : (gpus(row.borrowed) ?? 0));

/** "620 of 400 GPUs, borrows 220", "40 of 64 GPUs, lends 24". */
function holds(row) {
  const [held, owed, lent, limit] = [row.held, row.guaranteed, row.lent, row.limit].map(gpus);
  const borrowed = borrows(row);
  const parts = [owed ? `${whole(held ?? 0)} of ${count(owed, "GPU")}` : count(held ?? 0, "GPU")];
  if (borrowed) parts.push(owed ? `borrows ${whole(borrowed)}` : "all borrowed");
  if (lent) parts.push(`lends ${whole(lent)}`);
  if (limit !== null) parts.push(`limit ${whole(limit)}`);
  return parts.join(", ");
}

function waits(row) {
  const { p50, p90 } = object(row.wait_s);
  const parts = [`${whole(num(row.running) ?? 0)} run`, `${whole(num(row.waiting) ?? 0)} wait`];
  if (num(row.waiting)) parts[1] += ` (${count(num(row.waiting_gpus) ?? 0, "GPU")})`;
  if (num(p50) !== null && num(p90) !== null) parts.push(p90 < 1 ? "placed at once" : `waited ${span(p50, p90)}`);
  return parts.join(" · ");
}

export class Queues {
  constructor() {
    this.root = byId("queues");
    byId("queues-legend").replaceChildren(...KEYS.map((name) => h("span", { class: `key key-${name}` }, name)));
  }

  update(answer) {
    const body = object(answer);
    const named = unique(rows(body.rows).filter((row) => text(row.queue)), (row) => row.queue);
    const tree = inDepth(named);
    const most = Math.max(1, ...tree.map((row) => Math.max(gpus(row.held) ?? 0, gpus(row.guaranteed) ?? 0)));
    const weights = new Map();
    for (const row of tree) weights.set(text(row.parent), (weights.get(text(row.parent)) ?? 0) + (num(row.weight) ?? 0));
    keyed(this.root, tree.slice(0, SHOWN), (row) => row.queue, () => this.make(), (item, row) => this.write(item, row, most, weights));
    const capacity = gpus(body.capacity);
    say(byId("queues-sub"), tree.length ? `${count(tree.length, "queue")}${capacity === null ? "" : ` share ${count(capacity, "GPU")}`}` : "");
    say(byId("queues-foot"), this.foot(body, tree));
    mark(byId("queues-refused"), "hidden", !text(body.refused));
    say(byId("queues-refused"), text(body.refused) && `A newer file is refused, the one before it serves: ${text(body.refused)}`);
  }

  foot(body, tree) {
    const notes = list(body.notes).map(text).filter(Boolean).map(sentence);
    if (!tree.length) return notes.join(" · ") || "No queue is known.";
    const more = tree.length > SHOWN ? [`${count(tree.length - SHOWN, "queue")} more: GET /v1/queues has all`] : [];
    return ["Share: of the fleet beyond the guarantee, by weight; the least is next. Days: its part of what its peers held, the line is its weight", ...more, ...notes].join(" · ");
  }

  make() {
    const bar = h("span", { class: "bar-of", "aria-hidden": true }, ...KEYS.map((name) => h("i", { class: `part-${name}` })));
    return h(
      "li",
      { class: "row" },
      h("span", { class: "name" }),
      bar,
      h("span", { class: "holds" }),
      h("span", { class: "chance" }),
      s("svg", { class: "days", width: 7 * (DAY.width + DAY.gap), height: DAY.height, role: "img" }),
      h("span", { class: "place" }),
    );
  }

  write(item, row, most, weights) {
    const [name, bar, held, share, days, place] = item.children;
    name.style.paddingLeft = `${16 * row.depth}px`;
    say(name, row.queue.split("/").pop());
    mark(name, "title", row.queue);
    this.drawBar(bar, row, most);
    say(held, holds(row));
    say(share, `share ${brief(row.share)}`);
    this.drawDays(days, list(row.share_days), (num(row.weight) ?? 0) / (weights.get(text(row.parent)) || 1), num(row.share_7d));
    const class_ = text(row.class) ? `class ${text(row.class)} · ` : "";
    const bank = num(row.banked) ? ` · ${whole(row.banked / 3600)} GPU-hours in the bank` : "";
    say(place, `${class_}${waits(row)}${bank}`);
  }

  drawBar(bar, row, most) {
    const [owedPart, used, over, lentPart, end] = bar.children;
    const [held, owed, lent, limit] = [row.held, row.guaranteed, row.lent, row.limit].map((amounts) => gpus(amounts) ?? 0);
    const place = (part, from, to) => {
      part.style.left = `${(100 * from) / most}%`;
      part.style.width = `${(100 * Math.max(0, to - from)) / most}%`;
    };
    place(owedPart, 0, owed);
    place(used, 0, held - borrows(row));
    place(over, held - borrows(row), held);
    place(lentPart, Math.max(held, owed - lent), lent ? owed : 0);
    end.hidden = gpus(row.limit) === null || limit > most;
    end.style.left = `${(100 * Math.min(limit, most)) / most}%`;
  }

  drawDays(svg, days, part, whole7) {
    const known = days.filter((value) => num(value) !== null);
    const said = known.length ? `of its peers' GPU time ${percent(whole7)} in 7 days; by day ${days.map((value) => percent(value)).join(", ")}` : "nothing was held in 7 days";
    mark(svg, "aria-label", said);
    const drawn = JSON.stringify([days, part]);
    if (svg.dataset.drawn === drawn) return;
    svg.dataset.drawn = drawn;
    const bars = days.slice(0, 7).map((value, day) => {
      const height = num(value) === null ? DAY.height : Math.max(1, Math.min(1, value) * DAY.height);
      const x = day * (DAY.width + DAY.gap);
      return s("rect", { class: num(value) === null ? "day-unknown" : "day", x, y: DAY.height - height, width: DAY.width, height });
    });
    const y = DAY.height * (1 - Math.min(1, part));
    const line = bars.length ? s("path", { class: "day-part", d: `M0 ${y}H${7 * (DAY.width + DAY.gap)}` }) : null;
    svg.replaceChildren(...[s("title", {}, said), ...bars, line].filter(Boolean));
  }
}
