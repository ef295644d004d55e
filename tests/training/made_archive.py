"""A small archive: what a service was told of jobs, and kept."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fleetcast.features.store import WindowStore
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import Failed, Finished, JobEvent, NodeEvent, Preempted, Resized, Started, Step, Submitted
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.topology import Topology
from fleetcast.ingest.archive.archive import Archive, ArchiveLimits
from fleetcast.ingest.archive.files import DAY_MS, ArchiveFiles
from fleetcast.ingest.source import Batch
from fleetcast.service.pipeline.state import FleetState

T0 = 1_795_276_800_000
MINUTE_MS = 60_000
KINDS = ("drain", "undrain")


def events_of(days: int, jobs_a_day: int, seed: int = 0) -> list[JobEvent]:
    """Jobs of two pools: some wait, fail, are resized, preempted and started again, or still run at the end."""
    rng = np.random.default_rng(seed)
    events: list[JobEvent] = []
    for number in range(days * jobs_a_day):
        job, queue = f"j{number}", ("train", "serve")[number % 2]
        at = T0 + int(rng.integers(0, days * DAY_MS))
        began = at + int(rng.integers(1, 300)) * MINUTE_MS
        ended = began + int(rng.integers(1, 2000)) * MINUTE_MS
        events += [
            Submitted(job=job, sequence=0, time_ms=at, queue=queue, user=f"u{number % 5}", gpus_per_node=8),
            Started(job=job, sequence=1, time_ms=began, nodes=("n1",)),
            Step(job=job, sequence=2, time_ms=began + 1000, step=1, duration_s=1.0),
        ]
        if number % 7 == 0:
            ranks = tuple(RankPlacement(rank=rank, node=f"n{rank}", gpus=(0, 1)) for rank in range(3))
            events.append(Resized(job=job, sequence=3, time_ms=began + MINUTE_MS, ranks=ranks))
        if number % 5 == 0:
            events.append(Preempted(job=job, sequence=4, time_ms=began + 2 * MINUTE_MS))
            events.append(Started(job=job, attempt=2, sequence=0, time_ms=ended, nodes=("n2",)))
        elif number % 3:
            events.append(Finished(job=job, sequence=4, time_ms=ended))
        elif number % 2:
            events.append(Failed(job=job, sequence=4, time_ms=ended, category="user"))
    end_ms = T0 + days * DAY_MS
    return sorted((event for event in events if event.time_ms < end_ms), key=lambda event: event.time_ms)


def drains_of(days: int, nodes: int = 3) -> list[NodeEvent]:
    """Return one drain and its end a day, of nodes n0, n1, … in turn."""
    said = [(day, kind, day * DAY_MS + hour * 60 * MINUTE_MS) for day in range(days) for hour, kind in enumerate(KINDS)]
    return [
        NodeEvent(node=f"n{day % nodes}", source="s", sequence=row, time_ms=T0 + at_ms, type=kind)
        for row, (day, kind, at_ms) in enumerate(said)
    ]


def live(folder: Path, events: Sequence[JobEvent], node_events: Sequence[NodeEvent] = ()) -> FleetState:
    """Return a service's state after these events, all of them archived in the folder."""
    entities = Entities()
    state = FleetState(entities, WindowStore(entities), Topology.build([]))
    state.archive = Archive(ArchiveFiles(str(folder)), entities, limits=ArchiveLimits(keep_days=0))
    rng = np.random.default_rng(1)
    for first in range(0, len(events), 50):
        some = [events[first + row] for row in rng.permutation(len(events[first : first + 50]))]
        state.apply(Batch(events=(*some, some[0])), T0)
    state.apply(Batch(node_events=tuple(node_events)), T0)
    state.archive.prepare_flush(state.topology, T0)()
    state.archive.close()
    return state
