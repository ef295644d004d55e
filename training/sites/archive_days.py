"""Daily rows of a site's nodes (SiteDays), replayed from its archive through the code that serves.

    archive ─ a minute at a time ─ FleetWatch ─ every EVERY_MS: update_fleet_evidence ─ once a day: SiteRecorder

There is one row for each node and day. If no data arrived at a moment, a rule keeps its last level.
Nodes are those that sent samples at the beginning, in the middle or at the end, and those that node
events name.
"""

import asyncio
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.clock import ManualClock, format_moment
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import FleetcastError
from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.samples import EntityKind
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.archive.files import ArchiveFiles, parse_day_ms
from fleetcast.ingest.archive.read import NOTHING_MS, ArchiveSpan, find_newest_ms, read_events, read_samples
from fleetcast.ingest.archive.rows import NameLookups, make_row_lookup
from fleetcast.ingest.archive.source import ArchiveSource
from fleetcast.models.risk.rules import RULES
from fleetcast.models.risk.score import update_fleet_evidence
from fleetcast.models.risk.watch import FleetWatch
from fleetcast.training.sites.site_days import DAY_MS, SiteDays, SiteRecorder

Say = Callable[[str], None]

EVERY_MS = 300_000  # between two looks at the evidence
STEP_MS = 60_000
CHECK_INTERVAL_MS = 900_000
USUAL_INTERVAL_S = 15.0


def read_days(
    files: ArchiveFiles, end_ms: int, say: Say = lambda line: None, topology: Topology | None = None
) -> SiteDays:
    """Read the daily rows of an archive up to `end_ms`.

    Raises FleetcastError if the archive has no data before `end_ms`.

    topology: the site's topology. Without it, the nodes are those of the archive, without racks and
    other domains.
    """
    span = find_archive_span(files, end_ms)
    if topology is None:
        topology = Topology.build([NodeSpec(name) for name in list_node_names(files, span)])
    if not len(topology):
        raise FleetcastError(f"{files.url}: no node reports and no event names one")
    return asyncio.run(_replay_archive(files, span, topology, say))


def find_archive_span(files: ArchiveFiles, end_ms: int) -> ArchiveSpan:
    """Return the time span of an archive's samples and events up to `end_ms`.

    Raises FleetcastError if there are none.
    """
    days = [parse_day_ms(day) for dataset in ("samples", "events") for day in files.list_days(dataset)]
    begun_ms = [time_ms for time_ms in days if time_ms < end_ms]
    if not begun_ms:
        raise FleetcastError(f"{files.url}: no samples and no events there before {format_moment(min(end_ms, 2**42))}")
    newest = max(find_newest_ms(files), find_newest_ms(files, "events"))
    return ArchiveSpan(min(begun_ms), min(end_ms, newest + 1))


def list_node_names(files: ArchiveFiles, span: ArchiveSpan) -> list[str]:
    """Return the names of the nodes that sent samples in some short spans, and of those in node events."""
    entities = Entities()
    names = {event.node for event in read_events(files, span)[0] if isinstance(event, NodeEvent)}
    newest = find_newest_ms(files)
    middle = (span.first_ms + span.end_ms) // 2
    for at in (
        {span.first_ms, _find_first_sample_ms(files, span), middle, newest - CHECK_INTERVAL_MS}
        if newest != NOTHING_MS
        else ()
    ):
        read_samples(
            files,
            ArchiveSpan(max(at, span.first_ms), min(at + CHECK_INTERVAL_MS, span.end_ms)),
            NameLookups(make_row_lookup(entities)),
        )
    return sorted(names | set(entities[EntityKind.NODE].names))


def _find_first_sample_ms(files: ArchiveFiles, span: ArchiveSpan) -> int:
    return min((name.first_ms for name in span.list_files(files, "samples")), default=span.first_ms)


def measure_scrape_interval_s(files: ArchiveFiles, span: ArchiveSpan) -> float:
    """Return the usual number of seconds between two samples of a series.

    With too few samples, the result is the usual interval of most exporters.
    """
    first_ms = _find_first_sample_ms(files, span)
    rows = read_samples(
        files, ArchiveSpan(first_ms, first_ms + CHECK_INTERVAL_MS), NameLookups(make_row_lookup(Entities()))
    )
    order = np.lexsort((rows.time_ms, rows.series))
    gaps = np.diff(rows.time_ms[order])[np.diff(rows.series[order]) == 0]
    gaps = gaps[gaps > 0]
    return float(np.median(gaps)) / 1000 if len(gaps) >= 8 else USUAL_INTERVAL_S


async def _replay_archive(files: ArchiveFiles, span: ArchiveSpan, topology: Topology, say: Say) -> SiteDays:
    watch, recorder = (
        FleetWatch.from_topology(topology, measure_scrape_interval_s(files, span)),
        SiteRecorder(topology.names),
    )
    options = {"url": files.url, "from_ms": span.first_ms, "to_ms": span.end_ms, "step_ms": STEP_MS}
    source = ArchiveSource(watch.entities, ManualClock(span.end_ms), options)
    levels: NDArray[np.float64] = np.zeros((len(topology), len(RULES)))
    next_row, looked_ms = (span.first_ms // DAY_MS + 1) * DAY_MS, 0
    while True:
        try:
            batch = await source.next()
        except StopAsyncIteration:
            break
        now_ms = source.position()["at_ms"]
        while next_row < now_ms:  # of what was known before this batch
            recorder.record_moment(watch.memory, watch.nodes.nodes, levels, next_row)
            say(f"{format_moment(next_row)}: {len(watch.memory.faults.faults)} faults so far")
            next_row += DAY_MS
        watch.apply_batch(batch.samples, batch.events, now_ms, batch.node_events)
        _record_events(recorder, batch.node_events)
        if batch.node_events or now_ms - looked_ms >= EVERY_MS:
            frames = watch.extract_frames(topology, now_ms)
            seen = update_fleet_evidence(watch.make_moment(frames, topology, now_ms), watch.memory)
            levels, looked_ms = seen.signals.compute_levels(len(topology)), now_ms
    return recorder.make_site_days(watch.memory.faults, span.end_ms)


def _record_events(recorder: SiteRecorder, events: Iterable[NodeEvent]) -> None:
    for event in sorted(events, key=lambda event: event.time_ms):
        recorder.record_event(event)
