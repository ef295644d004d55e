// Server-sent events over fetch: EventSource cannot send a token.

import { headersOf } from "./api.js";

const AGAIN_MS = 2000;

/** Events as they come, for as long as the page lives: `heard(name, data)`; `state(open)` when the stream comes or goes. */
export async function listen(path, { token, heard, state }) {
  for (;;) {
    await once(path, token.value, heard, state);
    state(false);
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

/** One connection, to its end. */
async function once(path, token, heard, state) {
  try {
    const response = await fetch(`/v1${path}`, { headers: headersOf(token), cache: "no-store" });
    if (!response.ok || !response.body) {
      await response.body?.cancel();
      return;
    }
    state(true);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const events = (rest + part.value).split("\n\n");
      rest = events.pop();
      for (const event of events) tell(event, heard);
    }
  } catch {
    // the connection broke: the next one comes soon
  }
}

/** Tell of one event: its lines `event: NAME` and `data: JSON`; others (comments, ids) say nothing to us. */
function tell(event, heard) {
  const lines = event.split("\n");
  const of = (field) => lines.filter((line) => line.startsWith(`${field}: `)).map((line) => line.slice(field.length + 2));
  const data = of("data").join("\n");
  if (!data) return;
  try {
    heard(of("event")[0] ?? "message", JSON.parse(data));
  } catch {
    // not JSON: nothing to say
  }
}
