// The fleet document as columns: what the map needs, small enough to hand from a worker to the page.
//
//   p (n) NaN unknown · state (n) index into STATES · flagged (n) · gpus (n) how many · busy, loose, bad (n) a bit a GPU:
//   loose ones are busy, and no job is known that holds them
//   job (GPUs of all nodes, one after the other from start[row]) index into jobs, -1 free · start (n + 1)
//   names, racks, groups, blocks (n) and jobs, reasons {row: sentence}

import { list, num, object, rows, text } from "./format.js";

export const STATES = ["ok", "degraded", "drained", "lost", "stale", "unknown", "withheld"];
const UNKNOWN = STATES.indexOf("unknown");
const TICKS = 31; // GPUs of a node that the map can show

function layoutOf(nodes) {
  return {
    names: nodes.map((node) => text(node.node)),
    racks: nodes.map((node) => text(node.rack)),
    groups: nodes.map((node) => text(node.rail_group)),
    blocks: nodes.map((node) => text(node.block)),
  };
}

/** A number that changes with any name or place: the layout is sent again only then. */
function signature(layout) {
  let hash = 7;
  for (const column of Object.values(layout)) {
    for (const name of column) {
      for (let at = 0; at < name.length; at++) hash = (hash * 31 + name.charCodeAt(at)) | 0;
      hash = (hash * 31 + 10) | 0;
    }
  }
  return hash;
}

/** Columns of a fleet document; `known` is the signature of the layout that the receiver has already. */
export function columnsOf(document, known = null) {
  const nodes = rows(object(document).nodes).filter((node) => text(node.node));
  const n = nodes.length;
  const layout = layoutOf(nodes);
  const columns = {
    n,
    signature: signature(layout),
    p: new Float32Array(n),
    state: new Uint8Array(n),
    flagged: new Uint8Array(n),
    gpus: new Uint8Array(n),
    busy: new Int32Array(n),
    loose: new Int32Array(n),
    bad: new Int32Array(n),
    start: new Int32Array(n + 1),
    reasons: {},
  };
  const index = new Map();
  const held = [];
  nodes.forEach((node, row) => {
    const gpus = rows(node.gpus).slice(0, TICKS);
    const state = STATES.indexOf(text(node.state));
    columns.p[row] = num(node.p) ?? NaN;
    columns.state[row] = state < 0 ? UNKNOWN : state;
    columns.flagged[row] = node.flagged === true ? 1 : 0;
    columns.gpus[row] = gpus.length;
    gpus.forEach((gpu, at) => {
      const job = text(gpu.job);
      if (job && !index.has(job)) index.set(job, index.size);
      held.push(job ? index.get(job) : -1);
      if (job || gpu.held_by === "unknown") columns.busy[row] |= 1 << at;
      if (gpu.held_by === "unknown") columns.loose[row] |= 1 << at;
      if (gpu.usable === false) columns.bad[row] |= 1 << at;
    });
    columns.start[row + 1] = held.length;
    if (text(node.reason)) columns.reasons[row] = text(node.reason);
  });
  columns.job = Int32Array.from(held);
  columns.jobs = [...index.keys()];
  const { nodes: _nodes, rows: _rows, ...header } = object(document);
  return { header, columns: known === columns.signature ? columns : { ...columns, ...layout } };
}

/** How many bits of a mask are set. */
export function bits(mask) {
  let found = 0;
  for (let rest = mask; rest; rest &= rest - 1) found++;
  return found;
}

/** Names of the jobs on a node. */
export function jobsOf(columns, row) {
  const held = new Set(list([...columns.job.subarray(columns.start[row], columns.start[row + 1])]));
  held.delete(-1);
  return [...held].map((job) => columns.jobs[job]);
}

/** Rows of the nodes on which a job runs. */
export function gangOf(columns, name) {
  const job = columns.jobs.indexOf(name);
  const members = new Set();
  if (job < 0) return members;
  for (let row = 0; row < columns.n; row++) {
    for (let at = columns.start[row]; at < columns.start[row + 1]; at++) if (columns.job[at] === job) members.add(row);
  }
  return members;
}
