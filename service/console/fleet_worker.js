// Fetches and decodes the fleet document beside the page: 10,000 nodes are megabytes of JSON.

import { request } from "./api.js";
import { columnsOf } from "./columns.js";

self.onmessage = async ({ data: { token, known } }) => {
  try {
    const { body, ageS } = await request("/fleet", token);
    const answer = columnsOf(body, known);
    const { p, state, flagged, gpus, busy, loose, bad, start, job } = answer.columns;
    const sent = [p, state, flagged, gpus, busy, loose, bad, start, job];
    self.postMessage({ ageS, ...answer }, sent.map((column) => column.buffer));
  } catch (error) {
    self.postMessage({ error: { kind: error.kind ?? "away", message: error.message } });
  }
};
