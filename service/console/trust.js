// Can I trust this? What the forecasts' own records say, in one verdict: no number beside it may say otherwise.

import { NONE, count, horizon, num, object, percent, rows, share, times, whole } from "./format.js";

const FEWEST_EVENTS = 5; // predicted or observed: with fewer, chance alone explains any ratio
const FEWEST_FORECASTS = 20;
const WARNING = 0.05; // a forecast below it announces nothing, so only those above it can be right or wrong
const RATIO = 2; // between what was predicted and what was observed
const BAND = [0.65, 0.93]; // how often a band of 80 % may hold
const BY_P90 = 0.75; // of the jobs should have started by their p90
const BY_P50 = [0.25, 0.75];

/** Return how many matured forecasts were above WARNING. */
const warnings = (row) => rows(row.bins).filter((bin) => num(bin.low) >= WARNING).reduce((sum, bin) => sum + (num(bin.n) ?? 0), 0);

/** {known, holds, missed, sentence, figures} of a horizon's record of failures; null where none has matured. */
export function failures(row) {
  const [matured, predicted, observed] = [num(row?.matured), num(row?.mean_p), num(row?.observed)];
  if (!(matured > 0) || predicted === null || observed === null) return null;
  const above = warnings(row);
  const isJudged = above >= FEWEST_FORECASTS;
  const known = isJudged && matured * Math.max(predicted, observed) >= FEWEST_EVENTS;
  const came = Math.round(matured * observed);
  const often = observed > predicted * RATIO ? observed / predicted : observed * RATIO < predicted ? predicted / observed : 1;
  const howOften = Number.isFinite(often) ? `${times(often)} as ${observed > predicted ? "often" : "rarely"} as predicted` : observed > 0 ? "though none was predicted" : "not, though predicted";
  return {
    known,
    holds: often === 1,
    missed: !isJudged && often !== 1 && came >= FEWEST_EVENTS ? `${count(came, "failure")}, ${above ? whole(above) : "no"} forecast${above === 1 ? "" : "s"} above ${percent(WARNING)}` : "",
    sentence: `failures came ${howOften}`,
    figures: `failures within ${horizon(row.horizon_s)}: ${share(predicted)} predicted, ${share(observed)} observed (of ${whole(matured)}${isJudged ? "" : `; ${above ? whole(above) : "none"} above ${percent(WARNING)}, too few to judge`})`,
  };
}

/** The same of a demand series' bands. */
export function bands(record) {
  const [origins, held] = [num(object(record).origins), num(object(record).coverage_80)];
  if (held === null) return null;
  const said = `80 % bands of demand held ${percent(held)}`;
  return { known: origins === null || origins >= FEWEST_FORECASTS, holds: held >= BAND[0] && held <= BAND[1], sentence: said, figures: said };
}

/** The same of the first start times, by which users plan. Each quantile has the requests whose time for it has passed. */
export function starts(record) {
  const first = object(object(record).first);
  const said = (share, n, words) => (num(share) === null ? "" : `${percent(share)} of ${count(n, "job")} ${words}`);
  const figures = [said(first.by_p50, first.n_p50, "started by the p50 of their first answer"), said(first.by_p90, first.n_p90, "by its p90")].filter(Boolean).join(", ");
  if (!figures) return null;
  const [judges50, judges90] = [first.n_p50 >= FEWEST_FORECASTS, first.n_p90 >= FEWEST_FORECASTS];
  const early = (judges90 && first.by_p90 < BY_P90) || (judges50 && first.by_p50 < BY_P50[0]);
  const late = judges50 && first.by_p50 > BY_P50[1];
  return {
    known: judges90 || early || late,
    holds: !early && !late,
    sentence: early ? "jobs start later than predicted" : "jobs start earlier than predicted",
    figures,
  };
}

/** {headline, figures: [..]} of all records: {risk: calibration rows, horizonS, demand, queue}. */
export function verdict({ risk, horizonS, demand, queue }) {
  const row = rows(risk).find((one) => one.horizon_s === horizonS);
  const failing = failures(row);
  const found = [failing, starts(queue), bands(demand)].filter(Boolean);
  const broken = found.filter(({ known, holds }) => known && !holds);
  const held = found.some(({ known, holds }) => known && holds);
  const yes = failing && !failing.known ? "Yes, failures not judged yet" : "Yes, live";
  const headline = broken.length ? `No: ${broken[0].sentence}` : failing?.missed ? `Not yet: ${failing.missed}` : held ? yes : "Live, no record yet";
  return { headline, figures: found.map((one) => one.figures || NONE) };
}
