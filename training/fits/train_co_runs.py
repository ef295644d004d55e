"""Training of the interference model on the co-runs in a site's archive, with the gate's verdict.

    archive ─ a minute at a time ─ FleetWatch ─ CoRuns.observe ─> co-runs by time, loads of both jobs alone

A co-run is a pair of jobs that share a GPU. A version is judged on the later half of the co-runs.
The metric is the error of the speed that is predicted from earlier co-runs. It is compared with the error of
the rule alone, which a service without co-runs uses. If a version serves already, it is compared with the
prediction from that version's co-runs.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.co_runs import CoRun, CoRuns, compute_mean_loads
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import FleetcastError
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.samples import EntityKind
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.archive.files import ArchiveFiles
from fleetcast.ingest.archive.read import ArchiveSpan
from fleetcast.ingest.archive.source import ArchiveSource
from fleetcast.models.jobs.co_run_fit import CoRunFit, PastCoRun
from fleetcast.models.jobs.interference import LOADS, Pairs, compute_gpu_prior, fit_residuals, predict_speeds
from fleetcast.models.risk.watch import FleetWatch
from fleetcast.models.versions.card import Card, FitSpan, GateVerdict, make_card_metrics, read_package_versions
from fleetcast.models.versions.registry import Registry
from fleetcast.training.fits.backtest import WIN
from fleetcast.training.fits.retrain import DEPENDENCIES, TrainingOutcome, TrainingPlan
from fleetcast.training.reports.card_page import render_card
from fleetcast.training.reports.results import ResultRow, Results, compute_interval
from fleetcast.training.sites.archive_days import find_archive_span, list_node_names, measure_scrape_interval_s

Say = Callable[[str], None]
Array = NDArray[np.float64]

KIND = "interference"
FEWEST = 50  # co-runs on GPUs of their own
MOST = 512  # newest, of what a service learns from: the cost is cubic
STEP_MS = 60_000
UNKNOWN = (float("nan"),) * len(LOADS)


@dataclass(frozen=True, slots=True)
class SeenCoRun:
    """A co-run with the time at which it became known.

    load, partner_load: the loads of both jobs when they ran alone, as known at that time.
    """

    time_ms: int
    co_run: CoRun
    load: tuple[float, ...]
    partner_load: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SiteCoRuns:
    """The co-runs of a site in order of time, and the measurements of its jobs running alone.

    loads, turns: job key → the job's loads and its step times, as known at the end of the archive.
    """

    seen: tuple[SeenCoRun, ...]
    loads: dict[int, tuple[float, ...]]
    turns: dict[int, tuple[float, ...]]
    first_ms: int
    end_ms: int


def read_co_runs(files: ArchiveFiles, end_ms: int, topology: Topology | None = None) -> SiteCoRuns:
    """Read the co-runs of an archive up to a moment. Raises FleetcastError if it has none."""
    span = find_archive_span(files, end_ms)
    if topology is None:
        topology = Topology.build([NodeSpec(name) for name in list_node_names(files, span)])
    return asyncio.run(_replay_archive(files, span, topology))


async def _replay_archive(files: ArchiveFiles, span: ArchiveSpan, topology: Topology) -> SiteCoRuns:
    watch, co_runs = FleetWatch.from_topology(topology, measure_scrape_interval_s(files, span)), CoRuns()
    options = {"url": files.url, "from_ms": span.first_ms, "to_ms": span.end_ms, "step_ms": STEP_MS}
    source = ArchiveSource(watch.entities, ManualClock(span.end_ms), options)
    seen: dict[tuple[object, object], SeenCoRun] = {}
    while True:
        try:
            batch = await source.next()
        except StopAsyncIteration:
            break
        now_ms = source.position()["at_ms"]
        watch.apply_batch(batch.samples, batch.events, now_ms, batch.node_events)
        running = watch.fold.jobs.list_running()
        frame = watch.extract_frames(topology, now_ms).gpu
        number, rows = _list_held_gpus(running, watch.entities)
        loads = compute_mean_loads(frame, number, rows, len(running))
        co_runs.observe(running, co_runs.keys_of(running), (), loads, now_ms)
        for pair, row in co_runs.newest_co_runs.items():
            if pair not in seen or seen[pair].co_run != row:
                known = [_find_load(co_runs, keys) for keys in (row.keys, row.partner_keys)]
                seen[pair] = SeenCoRun(now_ms, row, *known)
    ordered = tuple(sorted(seen.values(), key=lambda one: one.time_ms))
    return SiteCoRuns(ordered, dict(co_runs.loads_alone), dict(co_runs.step_times_alone), span.first_ms, span.end_ms)


def _list_held_gpus(running: Sequence[JobAttempt], entities: Entities) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the GPUs that running attempts hold, as two columns.

    The first column is (held GPU,) the attempt's index in `running`. The second is (held GPU,) the GPU's row.
    """
    gpus = {name: row for row, name in enumerate(entities[EntityKind.GPU].names)}
    pairs = [
        (at, gpus[f"{rank.node}/{gpu}"])
        for at, attempt in enumerate(running)
        for rank in attempt.ranks
        for gpu in rank.gpus
        if f"{rank.node}/{gpu}" in gpus
    ]
    table = np.array(pairs, np.intp).reshape(-1, 2)
    return table[:, 0], table[:, 1]


def _find_load(co_runs: CoRuns, keys: tuple[int, int]) -> tuple[float, ...]:
    return next((co_runs.loads_alone[key] for key in keys if key in co_runs.loads_alone), UNKNOWN)


def make_training_pairs(rows: Sequence[SeenCoRun]) -> tuple[Pairs, Array]:
    """Return the inputs of the interference model for these co-runs, and their measured speeds."""
    predicted = [(row.load, row.partner_load, row.co_run.keys, row.co_run.partner_keys) for row in rows]
    return Pairs.from_rows(predicted), np.array([row.co_run.speed for row in rows], np.float64)


def compute_errors(known: Sequence[SeenCoRun], later: Sequence[SeenCoRun]) -> Array:
    """Return (later,) the absolute errors of the speeds predicted from the known co-runs."""
    past, speed = make_training_pairs(known[-MOST:])
    taught = fit_residuals(past, speed - np.nan_to_num(compute_gpu_prior(past), nan=1.0))
    pairs, came = make_training_pairs(later)
    predicted = predict_speeds(pairs, compute_gpu_prior(pairs), taught).p50
    return np.abs(np.where(np.isnan(predicted), 1.0, predicted) - came)


def train_interference(
    site: SiteCoRuns, plan: TrainingPlan, registry: Registry, now_ms: int, *, promote: bool = True
) -> TrainingOutcome:
    """Train a version and add it to the registry.

    The version serves if its predictions of later co-runs are better than those of the serving version, or of the
    rule if no version serves. promote: if False, the version is only added.
    """
    on_gpu = [row for row in site.seen if row.co_run.share == "gpu"]
    version = registry.find_current_version(KIND)
    since_ms = registry.read_version_card(KIND, version).fitted_until_ms if version else site.first_ms
    results, gate = judge_co_runs(on_gpu, version, since_ms)
    rows = [PastCoRun(one.share, one.keys, one.partner_keys, one.speed) for one in (row.co_run for row in site.seen)]
    loads = {key: tuple(value if np.isfinite(value) else None for value in row) for key, row in site.loads.items()}
    card = Card(
        kind=KIND,
        created_ms=now_ms,
        made_by=plan.made_by,
        seed=plan.seed,
        fitted_until_ms=site.end_ms,
        data=(FitSpan("archive", site.first_ms, site.end_ms, len(site.seen)),),
        features=LOADS,
        settings={"fewest": FEWEST, "most": MOST},
        metrics=make_card_metrics(results.rows),
        gate=gate,
        dependencies=read_package_versions(*DEPENDENCIES),
    )
    added = registry.add_version(KIND, CoRunFit(tuple(rows[-MOST:]), loads, site.turns).save, card, render_card)
    objection = "it was not asked for (--no-promote)"
    if promote:
        try:
            registry.promote(KIND, added)
            objection = ""
        except FleetcastError as error:
            objection = str(error)
    return TrainingOutcome(added, registry.read_version_card(KIND, added), results, objection)


def judge_co_runs(rows: Sequence[SeenCoRun], version: str | None, since_ms: int) -> tuple[Results, GateVerdict]:
    """Evaluate predictions of the later half of the co-runs, made from the earlier half.

    The rival is the rule alone. If a version serves, only co-runs after `since_ms` are judged, and the rival is a
    prediction from the version's own co-runs.
    """
    results = Results(KIND)
    if len(rows) < FEWEST:
        sentence = f"{len(rows)} co-runs on GPUs, {FEWEST} needed"
        return results, GateVerdict(False, sentence, "mae", "rule", 0.0, 0.0, 0)
    half = len(rows) // 2
    rival, known, later = "rule", rows[:0], rows[half:]
    if version is not None:
        rival, known = f"version {version}", [row for row in rows if row.time_ms <= since_ms]
        fresh = [row for row in rows if row.time_ms > since_ms]
        half, later = len(known) + len(fresh) // 2, fresh[len(fresh) // 2 :]
        if len(fresh) < FEWEST:
            sentence = f"{len(fresh)} co-runs since the data of {rival} ended, {FEWEST} needed to compare them"
            return results, GateVerdict(False, sentence, "mae", rival, 0.0, 0.0, 0)
    ours, theirs = compute_errors(rows[:half], later), compute_errors(known, later)
    for method, found in (("ours", ours), (rival, theirs)):
        given = ("archive", "speed", "all", None, method, "co_runs" if method == "ours" else "", "mae")
        results.rows.append(ResultRow(*given, *compute_interval(found, block=4), len(later)))
    own, other = float(ours.mean()), float(theirs.mean())
    sentence = (
        f"error of the speed {own:.3f} with {half} co-runs known, {rival} {other:.3f}, over {len(later)} later ones; "
        f"{1 - WIN:.0%} below is asked for"
    )
    return results, GateVerdict(own <= WIN * other, sentence, "mae", rival, own, other, len(later))
