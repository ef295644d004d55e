// When to ask for what. The stream says when a new board is out; each document is asked for at most as often as it
// is worth it, never twice at once; without the stream everything is polled.

import { request } from "./api.js";
import { listen } from "./stream.js";

const POLL_MS = 2000;
const BEAT_MS = 500;
const HIDDEN_MS = 15_000; // a page in the background asks rarely
const LONGEST_MS = 10_000; // ask after this long even if no board was announced
const SLOW_MS = 2000; // an answer that takes longer is an absence, for as long as it takes

export class Feed {
  /** `token`: a Token; `refused(why)` is called when the API asks for one; `hard(rows)` with hard signals. */
  constructor({ token, refused, hard }) {
    Object.assign(this, { token, refused, hard, entries: [], boards: 1, away: null, streaming: false });
  }

  /**
   * Ask for a document: {path() (null: not now), everyMs, apply(body, ageS), failed?(error), fetch?(token)}.
   * `core: true` marks the one whose absence means that the API is away.
   */
  add(entry) {
    this.entries.push({ ...entry, last: -Infinity, board: 0, busy: false });
  }

  start() {
    this.listen();
    this.timer = setInterval(() => this.beat(), BEAT_MS);
    document.addEventListener("visibilitychange", () => this.beat());
    this.beat();
  }

  /** Ask for one document (by its name) at the next beat. */
  soon(name) {
    for (const entry of this.entries) if (entry.name === name) entry.last = -Infinity;
    this.beat();
  }

  listen() {
    listen("/stream", {
      token: this.token,
      state: (open) => {
        this.streaming = open;
        if (open) ["actions", "stops"].forEach((entry) => this.soon(entry)); // they may have changed meanwhile
      },
      heard: (name, data) => {
        this.boards++;
        if (name === "hard") this.hard(data);
        if (name === "action") ["actions", "stops"].forEach((entry) => this.soon(entry));
        this.beat();
      },
    });
  }

  beat() {
    const now = performance.now();
    this.noteSilence(now);
    for (const entry of this.entries) if (this.isDue(entry, now)) this.ask(entry, now);
  }

  isDue(entry, now) {
    if (entry.busy) return false;
    const since = now - entry.last;
    if (since === Infinity) return true;
    if (document.hidden) return since >= HIDDEN_MS;
    if (this.away) return entry.core === true && since >= POLL_MS;
    const fresh = this.streaming ? entry.board < this.boards || since >= LONGEST_MS : since >= POLL_MS;
    return fresh && since >= entry.everyMs;
  }

  /** The document that the page cannot do without is asked for, and nothing comes: the API hangs. */
  noteSilence(now) {
    const core = this.entries.find((entry) => entry.core && entry.busy);
    if (!core || this.away || now - core.last < SLOW_MS) return;
    this.away = { sinceMs: Date.now() - (now - core.last), detail: "no answer yet", kind: "away" };
  }

  async ask(entry, now) {
    const path = entry.path();
    if (path === null) return;
    const used = this.token.value;
    Object.assign(entry, { busy: true, last: now, board: this.boards });
    try {
      const { body, ageS } = await (entry.fetch ? entry.fetch(used) : request(path, used));
      if (entry.core) this.away = null;
      if (entry.path() === path) entry.apply(body, ageS);
    } catch (error) {
      if (error.kind === "refused" && used !== this.token.value) entry.last = -Infinity; // asked before the token was given
      else this.failed(entry, error);
    } finally {
      entry.busy = false;
    }
  }

  failed(entry, error) {
    if (!error.kind) throw error; // a fault of the page, not of the API: let it be seen
    if (error.kind === "refused") this.refused(error.message);
    else if (entry.core && (error.kind === "away" || error.kind === "starting")) {
      this.away = { sinceMs: this.away?.sinceMs ?? Date.now(), detail: error.message, kind: error.kind };
    }
    entry.failed?.(error);
  }
}
