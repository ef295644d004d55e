"""A tick of a small fleet, as the tests of its readers want it."""

from collections.abc import Mapping, Sequence

import numpy as np

from fleetcast.features.extract import Frames, extract_frames
from fleetcast.features.store import WindowStore
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.nodes import NodeRecord
from fleetcast.fleet.topology import Topology
from fleetcast.models.risk.score import ScoredFleet
from fleetcast.service.answers.fleet import BoardMeta
from fleetcast.service.pipeline.metrics import PipelineMetrics
from fleetcast.service.pipeline.state import Counts, EventView
from fleetcast.service.pipeline.tick import Tick

GPUS = 8


def no_samples(now_ms: int) -> Frames:
    """Frames of a fleet whose telemetry nobody has heard yet."""
    return extract_frames(WindowStore(Entities(), interval_s=15.0), now_ms)


def tick_of(
    now_ms: int,
    topology: Topology,
    fleet: ScoredFleet,
    running: Sequence[JobAttempt] = (),
    queued: Sequence[JobAttempt] = (),
    ended: Sequence[JobAttempt] = (),
    nodes: Mapping[str, NodeRecord] | None = None,
) -> Tick:
    """A tick of nodes with GPUS each, from which no sample came."""
    return Tick(
        now_ms=now_ms,
        topology=topology,
        entities=Entities(),
        frames=no_samples(now_ms),
        gpu_rows=np.full((len(topology), GPUS), -1, np.int32),
        events=EventView(running=running, queued=queued, ended=ended, nodes=nodes or {}, durations={}, position=0),
        interval_s=15.0,
        meta=BoardMeta("test", 1, now_ms, 1.0, 15.0, True, "", {}, None),
        ingestion=PipelineMetrics().make_ingestion_document(now_ms, Counts(), []),
        fleet=fleet,
    )
