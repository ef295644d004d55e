// Can I trust what I see? One state for the whole page, with the sentence that goes with it.

import { clockTime, duration, num, object, text } from "./format.js";

const STALE_S = 60; // fleet seconds without a new sample or board, where the service does not say how many
const AWAY_MS = 2500; // one slow answer is not an outage

const minutes = (seconds) => Math.floor(Math.max(0, num(seconds) ?? 0) / 60);

/**
 * {state, sentence, short}. `header`: the last fleet document without its nodes, or null; `nowMs`: fleet time;
 * `away`: null or {sinceMs, detail} in this machine's time, `wallMs` the same clock's now.
 */
export function freshness(header, nowMs, away, wallMs) {
  if (away && (header === null || wallMs - away.sinceMs > AWAY_MS)) return outage(header, away, wallMs);
  if (header === null) return { state: "starting", short: "Starting", sentence: "Starting: waiting for the first board." };
  const newestMs = num(header.newest_sample_ms);
  const staleS = num(header.stale_after_s) ?? STALE_S;
  const boardS = (nowMs - (num(header.as_of_ms) ?? nowMs)) / 1000;
  if (newestMs === null) {
    const why = text(header.no_telemetry) || "No sample has arrived yet: no exporter, or none that answers.";
    return { state: "empty", short: "Nothing to trust yet", sentence: why };
  }
  if (text(header.no_telemetry)) return { state: "stale", short: "No exporter is read", sentence: text(header.no_telemetry) };
  if (boardS > staleS) return old("board", header.as_of_ms, nowMs);
  if ((nowMs - newestMs) / 1000 > staleS) return old("sample", newestMs, nowMs);
  const warming = object(header.warming);
  if (num(warming.have_s) !== null && num(warming.need_s) !== null) {
    const have = `${minutes(warming.have_s)} of ${minutes(warming.need_s)} minutes of history`;
    return { state: "warming", short: "Warming", sentence: `Warming: ${have}. Hard signals count already; usual values are still being learnt.` };
  }
  return { state: "live", short: "Live", sentence: "Live." };
}

function old(what, sinceMs, nowMs) {
  const since = `${clockTime(sinceMs, nowMs)} UTC (${duration((nowMs - sinceMs) / 1000)})`;
  const cause = what === "board" ? "the pipeline publishes nothing" : "no exporter delivers anything";
  return { state: "stale", short: "No, it is old", sentence: `Stale: no new ${what} since ${since}; ${cause}.` };
}

function outage(header, { sinceMs, detail }, wallMs) {
  const at = new Date(sinceMs).toTimeString().slice(0, 8);
  const sentence = `The API does not answer since ${at} local time (${duration((wallMs - sinceMs) / 1000)}): ${detail}.`;
  const rest = header === null ? " Trying again every 2 s." : " Below is what was known then; trying again every 2 s.";
  return { state: "broken", short: "No, the API is away", sentence: sentence + rest };
}
