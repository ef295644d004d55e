"""Rows to learn node risk from: what the rules said of every node at many moments, and what came of it.

An `Observer` is a replay that is fed with exporter pages, and remembers moments as rows to learn from.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleet.events import JobEvent
from fleet.metrics import metric_row
from fleet.samples import EntityKind, SampleBatch
from fleet.topology import Topology
from ingest.exporters import ExporterResolver
from ingest.text import PageDecoder, Target
from models.rules import RULES
from models.score import Evidence
from models.scores import RISK_KINDS
from models.straggler import find_stragglers
from training.replay import Replay

SCRAPE_UP = metric_row(EntityKind.NODE, "scrape_up")
SCRAPE_DURATION = metric_row(EntityKind.NODE, "scrape_duration_s")
GPUS_REPORTED = metric_row(EntityKind.NODE, "gpus_reported")
# Which kinds of risk a fault of each sort is an instance of.
RISKS_OF = {
    "thermal_throttle": ("slow", "drain"),
    "power_brake": ("slow", "drain"),
    "slow_nic": ("slow",),
    "ib_flap": ("slow", "drain"),
    "pcie_downgrade": ("slow", "drain"),
    "ecc_storm": ("fail", "drain"),
    "gpu_off_bus": ("fail", "drain"),
    "node_lost": ("fail", "drain"),
    "cpu_contention": ("slow",),
}


@dataclass(frozen=True, slots=True)
class Page:
    """One answer of one exporter; `body` None when it did not answer. `took_s`: wall seconds."""

    node: str
    exporter: str  # dcgm | node
    body: bytes | None
    took_s: float = 0.02


@dataclass(frozen=True, slots=True)
class Fault:
    """What really happened; `end_ms` None while it lasts."""

    kind: str
    node: str
    start_ms: int
    end_ms: int | None
    visible: bool = True


@dataclass(frozen=True, slots=True)
class Rows:
    """n moments of nodes. levels: (n, rule) strengths as the risk model sees them; labels: (kind, n) came true."""

    time_ms: NDArray[np.int64]
    node: NDArray[np.int32]
    levels: NDArray[np.float32]
    labels: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.time_ms)

    @classmethod
    def concat(cls, parts: Sequence["Rows"]) -> "Rows":
        return cls(
            np.concatenate([part.time_ms for part in parts]),
            np.concatenate([part.node for part in parts]),
            np.concatenate([part.levels for part in parts]),
            np.concatenate([part.labels for part in parts], axis=1),
        )


class Observer(Replay):
    """Watches a fleet through its pages, a scrape at a time."""

    def __init__(self, topology: Topology, interval_s: float = 15.0) -> None:
        super().__init__(topology, interval_s)
        self._resolver = ExporterResolver(self.entities)
        self._decoders: dict[tuple[str, str], PageDecoder] = {}
        self._moments: list[tuple[int, NDArray[np.float32]]] = []

    def scrape(self, pages: Iterable[Page], events: Iterable[JobEvent], now_ms: int) -> Evidence:
        """Take in one round of pages and the events since the last one; what the rules make of it."""
        batches = [batch for page in pages for batch in self._decode(page, now_ms)]
        return self.evidence(self.take(batches, events, now_ms), now_ms)

    def keep(self, evidence: Evidence, now_ms: int) -> None:
        """Remember this moment of all nodes as rows to learn from."""
        self._moments.append((now_ms, evidence.signals.levels(len(self.topology)).astype(np.float32)))

    def stragglers(self, evidence: Evidence, now_ms: int) -> dict[str, dict[str, object]]:
        return find_stragglers(evidence.gangs, evidence.signals, evidence.gpu, evidence.port, self.memory, now_ms)

    def rows(self, faults: Sequence[Fault], horizon_s: float) -> Rows:
        """The moments kept, labelled by what was the case or began within the horizon."""
        n = len(self.topology)
        times = np.repeat(np.array([time_ms for time_ms, _ in self._moments], np.int64), n)
        node = np.tile(np.arange(n, dtype=np.int32), len(self._moments))
        levels = np.concatenate([row for _, row in self._moments]) if self._moments else np.zeros((0, len(RULES)))
        return Rows(times, node, levels.astype(np.float32), label(times, node, faults, self.topology.names, horizon_s))

    def _decode(self, page: Page, now_ms: int) -> list[SampleBatch]:
        """A page's samples, and those of the scrape itself."""
        if page.body is None:
            return [self._of_scrape(page, None, now_ms)] if page.exporter == "dcgm" else []
        key = (page.node, page.exporter)
        decoder = self._decoders.get(key)
        if decoder is None:
            decoder = self._decoders[key] = PageDecoder(self._resolver, Target(page.node, fixed=True))
        samples = list(decoder.decode(page.body, now_ms).samples)
        if page.exporter == "dcgm":
            reported = sum(count.gpus for count in decoder.reported.values())
            samples.append(self._of_scrape(page, reported, now_ms))
        return samples

    def _of_scrape(self, page: Page, reported: int | None, now_ms: int) -> SampleBatch:
        node = self.entities.node(page.node)
        rows = [(SCRAPE_UP, node, now_ms, float(page.body is not None)), (SCRAPE_DURATION, node, now_ms, page.took_s)]
        if reported is not None:
            rows.append((GPUS_REPORTED, node, now_ms, float(reported)))
        return SampleBatch.of(EntityKind.NODE, rows)


def label(
    time_ms: NDArray[np.int64],
    node: NDArray[np.int32],
    faults: Sequence[Fault],
    names: Sequence[str],
    horizon_s: float,
) -> NDArray[np.bool_]:
    """(kind, n) whether a fault of that kind of risk was active at the moment or began within the horizon after it."""
    rows = {name: row for row, name in enumerate(names)}
    labels = np.zeros((len(RISK_KINDS), len(time_ms)), bool)
    for fault in faults:
        here = node == rows[fault.node]
        comes = time_ms >= fault.start_ms - horizon_s * 1000
        lasts = np.ones(len(time_ms), bool) if fault.end_ms is None else time_ms < fault.end_ms
        for kind in RISKS_OF.get(fault.kind, ()):
            labels[RISK_KINDS.index(kind)] |= here & comes & lasts
    return labels
