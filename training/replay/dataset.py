"""Training rows of node risk: the rule levels of nodes at many moments, labelled by later faults."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.events import JobEvent
from fleetcast.fleet.samples import SampleBatch
from fleetcast.fleet.topology import Topology
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.pages.scrape_samples import PageTarget, ScrapeSamples
from fleetcast.ingest.pages.text import PageDecoder, Target
from fleetcast.models.risk.rules import RULES
from fleetcast.models.risk.score import Evidence, FleetMoment
from fleetcast.models.risk.scores import RISK_KINDS
from fleetcast.models.risk.watch import FleetWatch
from fleetcast.models.stragglers.straggler import find_stragglers

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
class ExporterPage:
    """The answer of one exporter to one scrape.

    body: None if the exporter did not answer. took_s: seconds that the scrape took.
    """

    node: str
    exporter: str  # dcgm | node
    body: bytes | None
    took_s: float = 0.02


@dataclass(frozen=True, slots=True)
class LabelledFault:
    """A fault that really happened in a run. `end_ms` is None while the fault lasts."""

    kind: str
    node: str
    start_ms: int
    end_ms: int | None
    visible: bool = True


@dataclass(frozen=True, slots=True)
class RiskRows:
    """A table of n rows, each a node at one moment.

    levels: (n, rule) strengths as the risk model receives them. labels: (kind, n) whether the kind of risk came
    true for the node.
    """

    time_ms: NDArray[np.int64]
    node: NDArray[np.int32]
    levels: NDArray[np.float32]
    labels: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.time_ms)

    @classmethod
    def concat(cls, parts: Sequence["RiskRows"]) -> "RiskRows":
        return cls(
            np.concatenate([part.time_ms for part in parts]),
            np.concatenate([part.node for part in parts]),
            np.concatenate([part.levels for part in parts]),
            np.concatenate([part.labels for part in parts], axis=1),
        )


class PageObserver:
    """A reader of exporter pages that builds a fleet's features and stores training rows.

    The caller passes one scrape of all pages at a time.
    """

    def __init__(self, topology: Topology, interval_s: float = 15.0) -> None:
        self.topology = topology
        self.watch = FleetWatch.from_topology(topology, interval_s)
        self._resolver = ExporterResolver(self.watch.entities)
        self._targets: dict[tuple[str, str], PageTarget] = {}
        self._scrapes = ScrapeSamples(self.watch.entities)
        self._moments: list[tuple[int, NDArray[np.float32]]] = []

    def apply_pages(self, pages: Iterable[ExporterPage], events: Iterable[JobEvent], now_ms: int) -> FleetMoment:
        """Apply one round of pages, and the events since the last round."""
        self.watch.apply_batch([batch for page in pages for batch in self._decode_page(page, now_ms)], events, now_ms)
        return self.watch.make_moment(self.watch.extract_frames(self.topology, now_ms), self.topology, now_ms)

    def add_training_rows(self, evidence: Evidence, now_ms: int) -> None:
        """Store the rule levels of all nodes at this moment as training rows."""
        self._moments.append((now_ms, evidence.signals.compute_levels(len(self.topology)).astype(np.float32)))

    def detect_stragglers(self, evidence: Evidence, now_ms: int) -> dict[str, dict[str, object]]:
        paces = self.watch.memory.paces
        return find_stragglers(evidence.gangs, evidence.signals, evidence.gpu, evidence.port, paces, now_ms)

    def make_risk_rows(self, faults: Sequence[LabelledFault], horizon_s: float) -> RiskRows:
        """Return the stored rows with their labels.

        A row's label is whether a fault was active at its moment, or began within `horizon_s` after it.
        """
        n = len(self.topology)
        times = np.repeat(np.array([time_ms for time_ms, _ in self._moments], np.int64), n)
        node = np.tile(np.arange(n, dtype=np.int32), len(self._moments))
        levels = np.concatenate([row for _, row in self._moments]) if self._moments else np.zeros((0, len(RULES)))
        return RiskRows(
            times, node, levels.astype(np.float32), label_rows(times, node, faults, self.topology.names, horizon_s)
        )

    def _decode_page(self, page: ExporterPage, now_ms: int) -> tuple[SampleBatch, ...]:
        """Return the samples of a page, and samples about the scrape itself."""
        key = (page.node, page.exporter)
        if key not in self._targets:
            decoder = PageDecoder(self._resolver, Target(page.node, fixed=True))
            self._targets[key] = PageTarget(decoder=decoder)
        return self._scrapes.decode(self._targets[key], page.body, page.took_s, now_ms)


def label_rows(
    time_ms: NDArray[np.int64],
    node: NDArray[np.int32],
    faults: Sequence[LabelledFault],
    names: Sequence[str],
    horizon_s: float,
) -> NDArray[np.bool_]:
    """Return (kind, n) whether a fault of the kind was active at each row's time, or began within `horizon_s`."""
    rows = {name: row for row, name in enumerate(names)}
    labels = np.zeros((len(RISK_KINDS), len(time_ms)), bool)
    for fault in faults:
        here = node == rows[fault.node]
        comes = time_ms >= fault.start_ms - horizon_s * 1000
        lasts = np.ones(len(time_ms), bool) if fault.end_ms is None else time_ms < fault.end_ms
        for kind in RISKS_OF.get(fault.kind, ()):
            labels[RISK_KINDS.index(kind)] |= here & comes & lasts
    return labels
