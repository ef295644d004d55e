// Numbers, times and durations as people read them, and readers that make any JSON value safe to show.
// No more digits than are known; every function takes null and answers "–".

export const NONE = "–";
const GAP = "\u202f"; // narrow no-break space between a number and its unit

/** A finite number or null, whatever the API sent. */
export const num = (value) => (typeof value === "number" && Number.isFinite(value) ? value : null);

/** A string, "" for what has no text. */
export const text = (value) => (typeof value === "string" ? value : typeof value === "number" ? String(value) : "");

/** An array, [] for anything else. */
export const list = (value) => (Array.isArray(value) ? value : []);

/** An array of objects: what is not one is left out. */
export const rows = (value) => list(value).filter((row) => row !== null && typeof row === "object" && !Array.isArray(row));

/** An object, {} for anything else. */
export const object = (value) => (value !== null && typeof value === "object" && !Array.isArray(value) ? value : {});

/** 12345 → "12,345". */
export function whole(value) {
  const number = num(value);
  return number === null ? NONE : Math.round(number).toLocaleString("en-US");
}

/** At most three or four significant digits: 1980 → "1,980", 0.4375 → "0.44", 12.34 → "12.3". */
export function figure(value) {
  const number = num(value);
  if (number === null) return NONE;
  const size = Math.abs(number);
  if (size >= 100 || Number.isInteger(number)) return whole(number);
  return size >= 10 ? number.toFixed(1) : number.toFixed(2);
}

/** 3812 → "3.8 k". */
export function short(value) {
  const number = num(value);
  if (number === null) return NONE;
  if (number >= 999_500) return `${(number / 1e6).toFixed(number < 1e7 ? 1 : 0)}${GAP}M`;
  if (number >= 1000) return `${(number / 1000).toFixed(number < 10_000 ? 1 : 0)}${GAP}k`;
  return number >= 10 || Number.isInteger(number) ? whole(number) : number.toFixed(1);
}

const SIZES = [
  [1e12, "T"],
  [1e9, "G"],
  [1e6, "M"],
  [1e3, "k"],
];

/** 4.2e10, "B/s" → "42 GB/s". */
export function amount(value, unit) {
  const number = num(value);
  if (number === null) return NONE;
  const [size, prefix] = SIZES.find(([least]) => Math.abs(number) >= 0.9995 * least) ?? [1, ""];
  const scaled = number / size;
  return `${scaled >= 99.5 || Number.isInteger(scaled) ? Math.round(scaled) : scaled.toFixed(scaled < 9.95 ? 1 : 0)}${GAP}${prefix}${unit}`;
}

/** A probability: 0.123 → "12 %", below one in a hundred "<1 %". */
export function percent(value) {
  const p = num(value);
  if (p === null) return NONE;
  if (p < 0.01) return p <= 0 ? `0${GAP}%` : `<1${GAP}%`;
  return p > 0.99 ? `>99${GAP}%` : `${Math.round(p * 100)}${GAP}%`;
}

/** A share whose tenths count: 0.9653 → "96.5 %". */
export const share = (value) => (num(value) === null ? NONE : `${(100 * value).toFixed(1)}${GAP}%`);

/** A ratio that may pass 1: 1.62 → "1.6×". */
export const times = (value) => (num(value) === null ? NONE : `${value < 10 ? value.toFixed(value < 2 ? 2 : 1) : whole(value)}×`);

const STEPS = [
  ["s", 1, 100],
  ["min", 60, 100 * 60],
  ["h", 3600, 48 * 3600],
  ["d", 86_400, Infinity],
];

function unitOf(seconds) {
  return STEPS.find(([, , limit]) => Math.abs(seconds) < limit) ?? STEPS[3];
}

/** 45 → "45 s", 1500 → "25 min", 11700 → "3.3 h". */
export function duration(seconds) {
  const value = num(seconds);
  if (value === null) return NONE;
  const [unit, size] = unitOf(value);
  const amount = value / size;
  return `${size > 60 && Math.abs(amount) < 10 ? amount.toFixed(1).replace(/\.0$/, "") : Math.round(amount)}${GAP}${unit}`;
}

/** Two durations in the unit of the longer: (720, 3300) → "12–55 min". */
export function span(low, high) {
  const [unit, size] = unitOf(Math.max(low, high));
  const digits = size > 60 && high / size < 10 ? 1 : 0;
  const [a, b] = [low, high].map((value) => (value / size).toFixed(digits).replace(/\.0$/, ""));
  return a === b ? `${a}${GAP}${unit}` : `${a}–${b}${GAP}${unit}`;
}

const DAY_MS = 86_400_000;
const two = (value) => String(value).padStart(2, "0");
const DAYS = ["Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"];
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/** "19:34", with the weekday when it is not the day of `nowMs`. */
export function clockTime(ms, nowMs = null) {
  if (num(ms) === null || Math.abs(ms) > 8e15) return NONE;
  const at = new Date(ms);
  const time = `${two(at.getUTCHours())}:${two(at.getUTCMinutes())}`;
  if (num(nowMs) === null || Math.floor(nowMs / DAY_MS) === Math.floor(ms / DAY_MS)) return time;
  const near = Math.abs(ms - nowMs) < 6 * 86_400_000;
  return near ? `${DAYS[at.getUTCDay()]} ${time}` : `${at.getUTCDate()} ${MONTHS[at.getUTCMonth()]} ${time}`;
}

/** "Fri 20 Nov 19:34:10". */
export function fullTime(ms) {
  if (num(ms) === null || Math.abs(ms) > 8e15) return NONE;
  const at = new Date(ms);
  return `${DAYS[at.getUTCDay()]} ${at.getUTCDate()} ${MONTHS[at.getUTCMonth()]} ${clockTime(ms)}:${two(at.getUTCSeconds())}`;
}

/** "1 node", "2 nodes". */
export const count = (number, noun) => `${whole(number)} ${noun}${number === 1 ? "" : "s"}`;

/** "8 GPUs are at work; no event says for whom": the words of the drain preview and of the readiness check. */
export const unknownUse = (gpus) => (num(gpus) > 0 ? `${count(gpus, "GPU")} ${gpus === 1 ? "is" : "are"} at work; no event says for whom` : "");

/** Return the line of a panel that has no job to show: if GPUs are at work for unknown jobs, it says so. */
export const withoutJobs = (header, otherwise) => {
  const { running, unknown_use: unknown } = object(object(header).gpus);
  return num(unknown) > 0 && unknown === running ? `No running job is known: ${unknownUse(unknown)}.` : otherwise;
};

const HORIZONS = new Map([
  [3600, "1 h"],
  [18_000, "5 h"],
  [86_400, "1 d"],
  [604_800, "7 d"],
]);

export const horizon = (seconds) => (HORIZONS.get(seconds) ?? duration(seconds)).replace(" ", GAP);

const KINDS = { fail: "fails", drain: "is drained", slow: "slows its job" };

/** What a probability is of: "fail" → "fails". */
export const happening = (kind) => KINDS[kind] ?? text(kind);



/** A sentence as a line of its own: a plain first word gets its capital, a name such as n042 stays as it is. */
export const sentence = (value) => text(value).replace(/^[a-z](?=[a-z]*[ ,:])/, (letter) => letter.toUpperCase());

/** What to do, without the reason that stands beside it already. */
export function advice(action, reason) {
  const full = sentence(object(action).sentence) || sentence(action);
  return (reason && full.includes(reason) ? full.slice(0, full.indexOf(reason)) : full).replace(/[:;,.\s]+$/, "");
}

/** A code as words: "not_a_number" → "not a number". */
export const words = (code) => text(code).replaceAll("_", " ");
