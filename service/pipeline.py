"""The pipeline: sources → decode → write; tick: extract → predict → publish.

Everything that writes state runs in one event loop with no await in between, so there are no locks:

    pump (one task a source)   next batch ─ apply ─ (a hard signal is published at once, and wakes the tick)
    tick (every tick_s)        extract; score and publish the board, in a thread on copies
    demand (every minute)      forecasts, in a thread on copied series
    runs (every ten seconds)   run times of new jobs and what is left of running ones, in a thread
    fingerprints (every 5 s)   what some of the running jobs look like, in a thread on copied windows
    snapshot (every snapshot_s) positions first, then state, so that an overlapping replay changes nothing
    archive                    what was taken is in files before a snapshot says so (service.history)

Of several pipelines each takes a share of the nodes (ingest.shares). The first folds the events, joins what the others
publish on boards of their own (service.locals, service.siblings) to what it knows, and scores the fleet.
"""

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from features.extract import extract
from features.mig import mig_instances
from features.serving import served_instances
from features.similarity import tell_history
from fleet.clock import Clock
from fleet.entities import Entities
from fleet.errors import SourceError
from fleet.topology import Topology
from ingest.inbox import InboxSource
from ingest.shares import WHOLE, OwnRows, Share
from ingest.source import Batch, Source
from models.hazard import load_history
from models.node_risk import load_fit
from models.registry import Registry
from models.score import score_fleet, score_local
from service.board import Board, BoardReader, BoardWriter, Section
from service.config import Config
from service.demand_forecasts import DemandForecasts
from service.disk_trouble import said
from service.fleet_metrics import fleet_page
from service.guarded_source import guarded, unread_inbox
from service.history import History
from service.job_watch import Ended, JobWatch, lay_to_rest
from service.lineage import Lineage
from service.locals import About, local_sections
from service.model_watch import ModelWatch
from service.occupancy import UNKNOWN, running_on
from service.pipeline_metrics import PipelinePage
from service.publish import (
    Given,
    Tick,
    encode,
    fleet_document,
    score_sections,
    tick_of,
    topology_sections,
    usable_gpus,
)
from service.risk_watch import calibration_document, calibration_page, refit_forever
from service.run_forecasts import RunForecasts, peak_sections
from service.run_model import ServedRunModel
from service.served_models import served_document, served_page
from service.siblings import Siblings
from service.snapshot import Snapshot
from service.source_facts import caught_up, gpu_models
from service.thread_work import in_thread
from service.timekeeper import Timekeeper
from service.urgent import HardSignals, UrgentRows
from service.vitals import Vitals

logger = logging.getLogger(__name__)

WARM_S = 1800.0
SHORTEST_TICK_WALL_S = 0.2
LOOK_WALL_S = 0.1  # at the boards of other pipelines


class Pipeline:
    """One pipeline process. `sources` makes its sources once the entities of a snapshot are known."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        topology: Topology,
        sources: Callable[[Entities], Sequence[Source]],
        share: Share = WHOLE,
    ) -> None:
        self.config = config
        self.clock = clock
        self.share = share
        self.siblings = Siblings(config, config.stale_after_s(clock)) if self.share.first else None
        self._wake = asyncio.Event()
        self._has_caught_up = asyncio.Event()  # with the events that were on disk at the start
        self.fit = load_fit(Path(config.pipeline.models)) if config.pipeline.models else None
        home = config.home(self.share.instance)
        board = config.board if self.share.first else home / "board"
        self.snapshot = Snapshot(home / "snapshot")
        self.kept = self.snapshot.restore(config, topology, clock.now_ms())
        self.state, self.memory, self.desk = self.kept.state, self.kept.memory, self.kept.desk
        if config.pipeline.models:
            self.memory.faults.prior = load_history(Path(config.pipeline.models))
        self.lineage = Lineage(config, self.kept, clock.now_ms()) if self.share.first else None
        self.sources = guarded(sources, self.state.entities)
        for source in self.sources:
            if source.name in self.kept.positions:
                source.seek(self.kept.positions[source.name])
        self.history = History(config, self.state, clock, self.share, self.kept.saved_ms)
        self._own_rows = OwnRows(self.share, self.state.entities)
        last = BoardReader(board).latest() if self.share.first else None
        if self.share.first:
            self._go_on_from(last)
        self.time = Timekeeper(clock, self.kept, round(config.scrape.interval_s * 1000), self._wake)
        self.time.start(misses=any(source.misses for source in self.sources))
        self.board = BoardWriter(board)
        self.vitals = Vitals()
        self.urgent = UrgentRows(self.board)
        self._hard = HardSignals(self.state.entities)
        self.demand = DemandForecasts(self.desk, clock, last)
        self.watch = JobWatch(self.kept, clock)
        self.models = ModelWatch.of(config)
        self.runs = RunForecasts(self.kept.book, ServedRunModel(Registry(config.models_folder, clock)), clock)
        self._memory_free = asyncio.Lock()  # a thread writes the memory of the rules and peaks while it scores
        self._saving = asyncio.Lock()
        self._ended = Ended(self.state.jobs, clock.now_ms())
        self._published_generation = -1
        self._models: dict[str, str] = {}  # node -> GPU model
        self._own_page = PipelinePage(config.folder)

    def _go_on_from(self, board: Board | None) -> None:
        """Take up what the process before left: generations go on, and what ran is not forgotten with its events."""
        kept, state = self.kept, self.state
        shown = board.json("meta")["generation"] if board is not None and "meta" in board else 0
        state.topology = replace(state.topology, generation=max(shown, kept.generation) + 1)
        if not kept.saved_ms and not all(source.begins() for source in self.sources):
            running = None if board is None else running_on(board)
            accepted = self.lineage is not None and self.lineage.is_accepted
            kept.occupancy_known = running is not None or accepted
            then = UNKNOWN if running is None else f"the last board tells what runs: {len(running)} attempts"
            logger.error("no snapshot can be used, and the inbox does not reach back to its beginning: %s", then)
            if self.lineage is not None:
                self.lineage.judge_occupancy()
            for attempt in running or ():
                state.jobs.put(attempt)
                state.demand.update(attempt)
                tell_history(state.runs, attempt)

    async def run(self) -> None:
        """Until cancelled. A bug ends the process, which is restarted and replays, unless it is one of a source."""
        async with asyncio.TaskGroup() as group:
            for source in self.sources:
                group.create_task(self._pump(source))
            group.create_task(self._tick_forever())
            group.create_task(self.time.beat_forever())
            group.create_task(self._snapshot_forever())
            group.create_task(self.history.flush_forever())
            group.create_task(self.history.tidy_forever())
            if self.share.first:
                group.create_task(self._forecast_forever())
                group.create_task(refit_forever(self.memory, self._memory_free, self.state, self.clock))
                group.create_task(self.runs.forecast_forever(self.state))
                group.create_task(self.watch.fingerprints.look_forever(self.state))
            if self.siblings:
                group.create_task(self._look_forever(self.siblings))

    async def _forecast_forever(self) -> None:
        """What gates learn from must be whole: an event that comes in later is no outcome any more."""
        await self._has_caught_up.wait()
        await self.demand.forecast_forever(self.state)

    async def _pump(self, source: Source) -> None:
        said = ""  # what is told once while it lasts
        while True:
            await self.history.room()
            try:
                batch = await source.next()
            except SourceError as error:
                if str(error) != said:
                    said = str(error)
                    logger.warning("%s: %s, trying again every %.0f s", source.name, said, error.retry_after_s)
                await asyncio.sleep(error.retry_after_s)
                continue
            except StopAsyncIteration:
                logger.info("%s: at its end", source.name)
                return
            if said:
                said = ""
                logger.info("%s: answers again", source.name)
            self.take(batch)
            await asyncio.sleep(0)

    def take(self, batch: Batch) -> None:
        """Apply one batch and wake the tick when it holds a hard signal."""
        now_ms = self.time.now_ms()
        if not self.share.first:  # the first pipeline folds the events
            batch = replace(batch, events=(), node_events=())
        fresh = self.state.apply(batch, now_ms)
        if batch.samples:
            self.vitals.note_arrival()
        self._ended.note(self.state.jobs, batch.events, now_ms)
        hard = self._hard.rows(fresh, batch.samples)
        if hard:
            self.urgent.tell(hard, now_ms)
            self._wake.set()

    async def _look_forever(self, siblings: Siblings) -> None:
        """Hard signals of the other pipelines are published at once, and scored when their scores know of them."""
        while True:
            await asyncio.sleep(LOOK_WALL_S)
            if self._look(siblings):
                self._wake.set()

    def _look(self, siblings: Siblings) -> bool:
        """Whether scores came of hard signals that were published before."""
        rows, scored = siblings.look()
        if rows:
            self.urgent.tell(rows, self.time.now_ms())
        return scored

    async def _tick_forever(self) -> None:
        await caught_up(self.sources, lambda: self.history.holds_up)
        self._has_caught_up.set()
        while True:
            began = time.monotonic()
            self._wake.clear()  # before the tick: what arrives while it scores is for the next one, at once
            self.time.beat()
            await self.tick()
            await asyncio.sleep(SHORTEST_TICK_WALL_S)  # a flood of hard signals leaves time for everything else
            rest_s = self.clock.wall_s(self.config.pipeline.tick_s) - (time.monotonic() - began)
            if rest_s > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), rest_s)

    async def tick(self) -> None:
        """Extract, score and publish once."""
        began = time.perf_counter()
        self._refresh_topology()
        arrived = self.vitals.arrivals()
        given = self._given(self.time.now_ms())
        documents = self._documents(given.now_ms)
        async with self._memory_free:
            self.time.settle()
            sections = await in_thread(functools.partial(self._score, given, documents))
        with said("publish the board", "readers keep the last one"):
            await in_thread(functools.partial(self._publish, sections, given))
        if self.siblings and (unscored := self.siblings.unscored()):
            self.urgent.tell(unscored, self.time.now_ms())
        self.vitals.note_tick((time.perf_counter() - began) * 1000, arrived)

    def _refresh_topology(self) -> None:
        """Nodes, GPUs and models that telemetry has told of since, here or elsewhere."""
        self._models, gpus = gpu_models(self.sources), {}
        if self.siblings:
            self._look(self.siblings)
            self.state.learn_nodes(self.siblings.nodes())
            self._models, gpus = {**self.siblings.models(), **self._models}, self.siblings.gpus()
        self.state.refresh_topology(self._models, gpus)

    def _given(self, now_ms: int) -> Given:
        state = self.state
        return Given(
            now_ms=now_ms,
            topology=state.topology,
            entities=state.entities,
            frames=extract(state.store, now_ms, state.topology.generation),
            gpu_rows=state.gpu_rows(),
            told=state.told(self._ended.lately(now_ms)),
            interval_s=self.config.scrape.interval_s,
            served=served_instances(state.store, now_ms),
            mig=mig_instances(state.store, now_ms),
            told_runs=self.runs.told,
            inbox=self._folded(),
        )

    def _folded(self) -> dict[str, int]:
        """How far the inbox is folded now."""
        return dict(*[source.position() for source in self.sources if source.name == InboxSource.name])

    def _publish(self, sections: Sequence[Section], given: Given) -> None:
        """In a thread. Only the first pipeline folds events, so that its board alone has a standing."""
        standing = None
        if self.lineage is not None:
            newest = max(self.snapshot.whole, default=0)
            standing = self.lineage.look(dict(given.inbox), self.board.sequence, newest, given.now_ms)
        self.board.publish(sections, given.now_ms, standing)

    def _score(self, given: Given, documents: dict[str, Any]) -> list[Section]:
        """All of a tick that takes its time, in a thread: signals that arrive meanwhile are published by the loop."""
        now_ms, topology, told = given.now_ms, given.topology, given.told
        local = score_local(given.frames, given.entities, topology, self.memory, now_ms)
        if self.share.instances > 1:
            local = replace(local, own=self._own_rows.own()[: len(local.nodes)])
        if self.siblings is None:
            ingestion = documents["doc.ingestion"]
            about = About(
                self.share.instance, self.share.instances, self._models, ingestion, list(given.served), given.mig
            )
            return local_sections(local, given, about)
        given, locals = self.siblings.join(given, local)
        self.memory.outcomes.note(told.ended, now_ms)
        fleet = score_fleet(locals, told.running, told.nodes, topology, now_ms, self.memory, self.fit)
        tick = tick_of(given, fleet)
        self.demand.watch(tick, given.served)
        sections = [*score_sections(tick), *self.demand.sections]
        sections += [*self.runs.sections, *peak_sections(self.kept.peaks, tick)]
        sections += self.watch.sections(tick, given.mig) + self.kept.pasts.sections(tick, told.nodes)
        if topology.generation != self._published_generation:
            sections += topology_sections(topology, now_ms)
            self._published_generation = topology.generation
        documents["meta"]["models"]["risk"] = fleet.risk.model
        documents["doc.fleet"] = fleet_document(tick, usable_gpus(tick), documents["doc.fleet"])
        loaded = {"demand": self.demand.version, "duration": self.runs.model.name}
        documents["doc.models"] = self.models.look(
            self.demand.rows, now_ms, self.demand.shadow, self.runs.recent, loaded
        )
        served = documents["doc.served_models"] = served_document(given.served, now_ms)
        true = documents["doc.risk_calibration"] = calibration_document(self.memory)
        sections += [Section(name, encode(value), now_ms) for name, value in documents.items()]
        pages = self._metrics(tick) + served_page(served) + calibration_page(true["rows"])
        return [*sections, Section("metrics.fleet", pages, now_ms)]

    def _documents(self, now_ms: int) -> dict[str, Any]:
        """What the loop alone knows; `doc.fleet` is the header of what the tick makes of it."""
        counts, vitals = self.state.counts, self.vitals
        vitals.rates.note(now_ms, counts.samples, counts.events)
        meta = self._meta(now_ms)
        ingestion = vitals.ingestion(now_ms, counts, self.sources)
        ingestion |= {"archive": self.history.health(), "limits": self.state.used()}
        if self.siblings:
            ingestion = self.siblings.ingestion(ingestion)
        header = {
            "name": self.config.fleet.name,
            "speed": self.config.clock.speed,
            "samples_per_s": ingestion["samples_per_s"],
            "newest_sample_ms": ingestion["newest_sample_ms"],
            "warming": meta["warming"],
        }
        return {
            "meta": meta,
            "doc.ingestion": ingestion,
            "doc.fleet": header,
        }

    def _metrics(self, tick: Tick) -> bytes:
        inbox_bytes = sum(source.backlog_bytes() for source in self.sources if source.name == InboxSource.name)
        others = self.siblings.page(tick.now_ms) if self.siblings else b""
        pages = fleet_page(tick) + self.demand.page + self.runs.page + self.models.page
        pages += self.watch.page(tick)
        return pages + others + self._own_page.encode(inbox_bytes)

    def _meta(self, now_ms: int) -> dict[str, Any]:
        have_s = (now_ms - self.kept.began_ms) / 1000
        unknown = unread_inbox(self.sources) if self.kept.occupancy_known else UNKNOWN
        return {
            "fleet": self.config.fleet.name,
            "generation": self.state.topology.generation,
            "now_ms": now_ms,
            "speed": self.config.clock.speed,
            "tick_s": self.config.pipeline.tick_s,
            "occupancy_known": not unknown,
            "occupancy_unknown": unknown,
            "models": {"risk": "", "demand": "gate", "straggler": "peers"},
            "warming": {"have_s": round(have_s), "need_s": WARM_S} if have_s < WARM_S else None,
        }

    async def _snapshot_forever(self) -> None:
        while True:
            await self.clock.sleep(self.config.pipeline.snapshot_s)
            with said("save a snapshot", "the last one and the inbox stay as they are"):
                await self.save()

    async def save(self) -> None:
        """Positions and tables of one moment, then the rings: what is replayed changes nothing. Raises OSError.

        What was taken up to that moment is in the archive's files before there is a snapshot that holds the positions.
        """
        async with self._saving, self.history.still:
            async with self.demand.free:
                desk = await in_thread(self.desk.dump)
                async with self.runs.free, self._memory_free:
                    self.time.settle()
                    lay_to_rest(self.state, self.clock.now_ms(), self.config.pipeline.history_days)
                    flush = self.history.hand_over()
                    positions = {source.name: source.position() for source in self.sources}
                    generation = self.state.topology.generation
                    kept = replace(self.kept, positions=positions, generation=generation, saved_ms=self.time.now_ms())
                    if self.lineage is not None:
                        kept = replace(kept, identity=self.lineage.identity, seen=self.lineage.seen)
                    writing = self.snapshot.save(kept, desk)
            try:
                await in_thread(flush)
            except BaseException:
                writing.close()
                raise
            covered = await writing
            if self.lineage is not None:
                await in_thread(functools.partial(self.lineage.note, kept.seen))
            for source in self.sources:
                if covered is not None and source.name in covered:
                    await asyncio.to_thread(source.prune, covered[source.name])

    async def close(self) -> None:
        for source in self.sources:
            await source.close()
        self.history.close()
