// What comes in: sources with their rates and lags, and what was skipped, by reason.

import { byId, h, keyed, say } from "./dom.js";
import { count, duration, list, NONE, num, object, rows, short, text, whole, words } from "./format.js";

/** Whether a source answers: one that reads many targets says how many do. */
function up(row) {
  if (row.failing) return "fails";
  if (num(row.up) === null) return row.up === false ? "away" : row.up === true ? "up" : NONE;
  return num(row.down) ? `${whole(row.up)} up, ${whole(row.down)} down` : `${whole(row.up)} up`;
}

export class Ingestion {
  constructor() {
    this.sources = h("tbody");
    this.bad = h("dl", { class: "bad" });
    this.none = h("p", { class: "why" }, "No bad record so far.");
    this.failing = h("ul", { class: "why" });
    this.unread = h("p", { class: "why" });
    byId("ingestion").replaceChildren(
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, ...["source", "state", "per s", "lag", "bad", "unread"].map((name, at) => h("th", { scope: "col", class: at > 1 ? "number" : null }, name)))),
        this.sources,
      ),
      this.failing,
      this.unread,
      h("h3", {}, "Skipped, by reason"),
      this.bad,
      this.none,
    );
  }

  update(body) {
    const answer = object(body);
    const targets = object(answer.targets);
    const total = num(targets.up) === null ? null : targets.up + (num(targets.down) ?? 0);
    say(byId("ingestion-sub"), total === null ? "" : `${whole(targets.up)} of ${count(total, "target")} answer`);
    keyed(this.sources, rows(answer.sources), (row) => `${text(row.name)} ${text(row.kind)}`, () => this.make(), (item, row) => this.write(item, row));
    this.tellUnread(rows(answer.sources));
    const reasons = Object.entries({ ...object(answer.noted), ...object(answer.bad_records) })
      .map(([reason, number]) => [reason, num(number) ?? 0])
      .sort((a, b) => b[1] - a[1] || a[0].localeCompare(b[0]));
    const examples = object(answer.bad_examples);
    const most = Math.max(1, ...reasons.map(([, number]) => number));
    this.none.hidden = reasons.length > 0;
    keyed(
      this.bad,
      reasons.slice(0, 8),
      ([reason]) => reason,
      ([reason]) => h("div", {}, h("dt", {}, words(reason)), h("dd", {}, h("span", { class: "gauge" }), h("span", { class: "amount" }))),
      (item, [reason, number]) => {
        item.title = text(examples[reason]);
        item.lastChild.firstChild.style.width = `${Math.max(2, (100 * number) / most)}%`;
        say(item.lastChild.lastChild, whole(number));
      },
    );
    const tick = object(answer.tick_ms);
    const lag = object(answer.lag_ms);
    const parts = [
      num(answer.events_per_s) !== null && `${short(answer.events_per_s)} job events/s`,
      num(tick.p50) !== null && `tick ${whole(tick.p50)} ms (p99 ${whole(tick.p99)})`,
      num(lag.p50) !== null && `arrival to board ${whole(lag.p50)} ms (p99 ${whole(lag.p99)})`,
    ];
    say(byId("ingestion-foot"), list(parts).filter(Boolean).join(" · "));
  }

  /** Targets that fail or have refused lines, with the reasons, and the names that nothing reads of the source with most of them. */
  tellUnread(sources) {
    const refused = sources.flatMap((row) => rows(row.targets_refused)).map((row) => ({ ...row, reason: `${count(row.lines, "line")} refused at every scrape: ${text(row.reason)}` }));
    const failing = [...sources.flatMap((row) => rows(row.targets_failing)), ...refused].slice(0, 3);
    keyed(this.failing, failing, (row) => text(row.target), () => h("li"), (item, row) => say(item, `${text(row.target)}: ${text(row.reason)}`));
    this.failing.hidden = failing.length === 0;
    const unread = (row) => num(object(row.records).unread) ?? 0;
    const most = sources.reduce((a, b) => (unread(b) > unread(a) ? b : a), {});
    const names = list(object(most.records).unread_names).map(text);
    this.unread.hidden = !unread(most);
    say(this.unread, unread(most) ? `Nothing reads ${whole(unread(most))} records of ${text(most.name)}: ${names.slice(0, 5).join(", ")}${names.length > 5 ? ", …" : ""}` : "");
  }

  make() {
    const number = () => h("td", { class: "number" });
    return h("tr", {}, h("th", { scope: "row" }), h("td"), number(), number(), number(), number());
  }

  write(item, row) {
    const [name, state, rate, lag, bad, unread] = item.children;
    say(name, text(row.name) || text(row.kind));
    say(state, up(row));
    item.title = num(row.errors) ? `${count(row.errors, "error")}, the last one: ${text(row.last_error)}` : "";
    say(rate, short(num(row.rate_per_s)));
    say(lag, duration(num(row.lag_s)));
    say(bad, whole(num(row.bad)));
    const records = object(row.records);
    say(unread, num(records.all) === null ? NONE : whole(num(records.unread)));
    unread.title = num(records.all) === null ? "" : `${whole(records.all)} records: ${whole(records.read)} read, ${whole(records.refused)} refused, ${whole(records.ignored)} left out by a rule, ${whole(records.unread)} unread`;
  }
}
