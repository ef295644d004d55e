"""The pipeline: sources → decode → write; tick: extract → predict → publish.

All code that writes state runs in one event loop without an await in between, so it needs no locks:

    pump (one task a source)   next batch ─ apply ─ (a hard signal is published at once, and wakes the tick, as do the
                               first samples of a node)
    tick (every tick_s)        extract; score and publish the board, in a thread on copies
    capabilities               add to every tick, and work between ticks (fleetcast.service.pipeline.capabilities)
    snapshot (every snapshot_s) positions first, then state, so that an overlapping replay changes nothing
    archive                    ingested rows are in files before a snapshot covers them (archive_writer.py)

If there are several pipelines, each ingests a share of the nodes (fleetcast.ingest.shares). The first
pipeline applies the events and scores the fleet. For this, it joins the boards of the others
(`reports.py`, `other_pipelines.py`) with its own evidence.
"""

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import Any

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.topology import Topology
from fleetcast.ingest.shares import WHOLE, Share
from fleetcast.ingest.source import Batch, Source
from fleetcast.models.demand.forecaster import DemandForecaster
from fleetcast.service.answers.risk import HardSignal
from fleetcast.service.board.board import BoardWriter, Section
from fleetcast.service.board.urgent import HardSignalDetector, UrgentRows
from fleetcast.service.config import Config
from fleetcast.service.disk_errors import log_disk_errors
from fleetcast.service.pipeline.archive_writer import ArchiveWriter
from fleetcast.service.pipeline.capabilities import CAPABILITIES, Capabilities, CapabilityInputs, Make
from fleetcast.service.pipeline.demand.forecasts import DemandForecasts
from fleetcast.service.pipeline.fleet_scores import FleetScorer
from fleetcast.service.pipeline.guarded_source import GuardedSource, read_batches, wait_for_backlog
from fleetcast.service.pipeline.metrics import PipelineMetrics
from fleetcast.service.pipeline.other_pipelines import OtherPipelines
from fleetcast.service.pipeline.pipeline_clock import PipelineClock
from fleetcast.service.pipeline.reports import make_report_sections
from fleetcast.service.pipeline.resume import restore_pipeline
from fleetcast.service.pipeline.tick import TickInputs
from fleetcast.service.pipeline.tick_inputs import InputCollector
from fleetcast.service.pipeline.tick_rest import TickRest
from fleetcast.service.thread_work import run_in_thread


class Pipeline:
    """One pipeline process. `sources` makes its sources from the entities of the snapshot."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        topology: Topology,
        sources: Callable[[Entities], Sequence[Source]],
        share: Share = WHOLE,
        makes: Sequence[Make] = CAPABILITIES,
    ) -> None:
        self.config, self.clock, self.share = config, clock, share
        self._wake, self._has_caught_up, self.has_published = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._memory_free, self._saving = asyncio.Lock(), asyncio.Lock()  # a thread writes the memory while it scores
        resumed = restore_pipeline(config, clock, topology, sources, share)
        self.saved, self.snapshot, self.sources = resumed.saved, resumed.snapshot, resumed.sources
        self.state_monitor = resumed.state_monitor
        self.state, self.memory = self.saved.state, self.saved.state.memory
        self.forecaster = self.saved.parts[DemandForecaster]
        self._scorer = FleetScorer(config, self.saved, share)
        self.archive_writer = ArchiveWriter(config, self.state, clock, share, self.saved.saved_ms)
        self.time = PipelineClock(clock, self.saved, round(config.scrape.interval_s * 1000), self._wake)
        self.time.adapt_after_restore(misses=any(source.misses for source in self.sources))
        first, folder = share.is_first, config.get_pipeline_folder(share.instance)
        self.board = BoardWriter(config.board if first else folder / "board")
        self.metrics, self.urgent = PipelineMetrics(), UrgentRows(self.board)
        self.others = OtherPipelines(config, clock, self._publish_urgent_signals, self._wake) if first else None
        self._hard = HardSignalDetector(self.state.entities)
        self._rest = TickRest(self.state.entities, self._wake)
        given = self.archive_writer, self.others, self.metrics
        self._inputs = InputCollector(config, clock, self.saved, self.sources, *given)
        locks = self._memory_free, self._has_caught_up
        setting = CapabilityInputs(config, clock, self.saved, self.sources, resumed.board, self.others, *locks)
        self.capabilities = Capabilities(setting, makes)

    async def run(self) -> None:
        """Run until cancelled. A bug outside the sources ends the process."""
        async with asyncio.TaskGroup() as group:
            for work in self._make_tasks():
                group.create_task(work)

    def _make_tasks(self) -> Iterator[Coroutine[Any, Any, None]]:
        yield from (self._fold_source_batches(source) for source in self.sources)
        yield from (self._tick_forever(), self._snapshot_forever(), self.time.check_standstill_forever())
        yield from (self.archive_writer.flush_forever(), self.archive_writer.compact_archive_forever())
        if self.share.is_first:
            yield from (each.work(self.state) for each in self.capabilities)

    async def _fold_source_batches(self, source: GuardedSource) -> None:
        async for batch in read_batches(source, self.archive_writer.wait_for_room):
            self.apply_batch(batch)
            await asyncio.sleep(0)

    def apply_batch(self, batch: Batch) -> None:
        """Apply one batch. Wake the tick if the batch has a hard signal or the first samples of a node."""
        now_ms = self.time.check_clock_ms()
        if not self.share.is_first:  # the first pipeline folds the events
            batch = replace(batch, events=(), node_events=())
        fresh = self.state.apply(batch, now_ms)
        if batch.samples:
            self.metrics.record_arrival()
            self._rest.record_samples(batch.samples)
        if hard := self._hard.detect_signals(fresh, batch.samples):
            self._publish_urgent_signals(hard)
            self._wake.set()

    def _publish_urgent_signals(self, hard: Sequence[HardSignal]) -> None:
        self.urgent.publish(hard, self.time.check_clock_ms())

    async def _tick_forever(self) -> None:
        await wait_for_backlog(self.sources, lambda: self.archive_writer.delays_sources)
        self._has_caught_up.set()
        while True:
            self._rest.begin_tick()
            self.time.record_standstill()
            await self.tick()
            self.has_published.set()
            await self._rest.rest_until_due(self.clock.convert_to_wall_s(self.config.pipeline.tick_s))

    async def tick(self) -> None:
        """Extract features, score the fleet, and publish the board once."""
        began = time.perf_counter()
        self._inputs.refresh_topology()
        arrived = self.metrics.pop_arrivals()
        self._inputs.apply_label_jobs(self.time.check_clock_ms())
        inputs = self._inputs.collect_inputs(self.time.check_clock_ms())
        async with self._memory_free:
            self.time.shift_part_times()
            sections = await run_in_thread(functools.partial(self._score, inputs))
        with log_disk_errors("publish the board", "readers keep the last one"):
            await run_in_thread(functools.partial(self._publish, sections, inputs))
        if self.others:
            self.others.republish_unscored_signals()
        self.metrics.record_tick((time.perf_counter() - began) * 1000, arrived)

    def _score(self, inputs: TickInputs) -> list[Section]:
        """Run the slow part of a tick in a thread. Meanwhile, the event loop publishes new hard signals."""
        local = self._scorer.compute_local_evidence(inputs)
        if self.others is None:
            return make_report_sections(local, inputs, self.share)
        return self.capabilities.make_sections(self._scorer.score_tick(inputs, local, self.others))

    def _publish(self, sections: Sequence[Section], inputs: TickInputs) -> None:
        """Publish the board in a thread. Only the board of the first pipeline has a standing."""
        standing = None
        if self.state_monitor is not None:
            newest = max(self.snapshot.whole, default=0)
            standing = self.state_monitor.check_parts(dict(inputs.inbox), self.board.sequence, newest, inputs.now_ms)
        self.board.publish(sections, inputs.now_ms, standing)

    async def _snapshot_forever(self) -> None:
        while True:
            await self.clock.sleep(self.config.pipeline.snapshot_s)
            with log_disk_errors("save a snapshot", "the last one and the inbox stay as they are"):
                await self.save()

    async def save(self) -> None:
        """Save a snapshot after the archive has everything that the positions cover. Raises OSError."""
        async with self._saving:
            async with self.capabilities.freeze_state(), self.archive_writer.still:  # flushes go on until then
                async with self._memory_free:
                    self.time.shift_part_times()
                    self.state.pack_old_jobs(self.clock.now_ms(), self.config.pipeline.history_days)
                    flush = self.archive_writer.prepare_flush()
                    positions = {source.name: source.position() for source in self.sources}
                    generation, saved_ms = self.state.topology.generation, self.time.check_clock_ms()
                    saved = replace(self.saved, positions=positions, generation=generation, saved_ms=saved_ms)
                    if self.state_monitor is not None:
                        saved = replace(saved, identity=self.state_monitor.identity, seen=self.state_monitor.seen)
                    writing = self.snapshot.save(saved, self.capabilities[DemandForecasts].dumped)
                try:
                    await self.archive_writer.run_flush(flush)
                except BaseException:
                    writing.close()
                    raise
            covered = await writing
            if self.state_monitor is not None:
                await run_in_thread(functools.partial(self.state_monitor.record_seen_parts, saved.seen))
            for source in self.sources:
                if covered is not None and source.name in covered:
                    await asyncio.to_thread(source.prune, covered[source.name])

    async def close(self) -> None:
        for source in self.sources:
            await source.close()
        self.archive_writer.close()
