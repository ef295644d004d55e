"""A small fleet whose features a test sets by hand."""

from collections.abc import Callable

import numpy as np
import pytest

from fleetcast.features.extract import GPU_FEATURES, NODE_FEATURES, PORT_FEATURES, Frames
from fleetcast.features.frame import FeatureFrame
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import Started, Submitted
from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.nodes import NodeTable
from fleetcast.fleet.requests import Gang, RankPlacement
from fleetcast.fleet.samples import EntityKind
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.models.risk.local import score_own_nodes
from fleetcast.models.risk.score import FleetMoment, FoldedEvents, ScoredFleet, score_fleet
from fleetcast.models.risk.state import RiskState

START_MS = 1_750_000_000_000
FEATURES = {EntityKind.GPU: GPU_FEATURES, EntityKind.PORT: PORT_FEATURES, EntityKind.NODE: NODE_FEATURES}
HEALTHY_GPU = {
    "sm_clock_mhz": 1980.0,
    "sm_clock_mhz_mean_2m": 1980.0,
    "max_sm_clock_mhz": 1980.0,
    "clock_event_reasons": 4.0,  # software power cap: normal under load
    "gpu_temp_c": 62.0,
    "power_w": 650.0,
    "gpu_util": 0.99,
    "sm_active": 0.8,
    "tensor_active": 0.4,
    "xid": 0.0,
    "pcie_link_width": 16.0,
    "pcie_max_link_width": 16.0,
    "pcie_link_gen": 5.0,
    "pcie_max_link_gen": 5.0,
    "ecc_sbe_volatile_count_10m": 0.0,
    "ecc_dbe_volatile_count_30m": 0.0,
    "pcie_replays_count_10m": 0.0,
    "nvlink_replay_errors_count_10m": 0.0,
    "nvlink_recovery_errors_count_10m": 0.0,
    "row_remap_failure": 0.0,
    "retired_pages_pending": 0.0,
    "remapped_rows_uncorrectable": 0.0,
    "age_s": 1.0,
    "silent_s": 0.0,
    "frozen_s": 0.0,
    "first_seen_s": 7200.0,
}
HEALTHY_PORT = {
    "state": 4.0,
    "speed_bytes_per_s": 50e9,
    "max_speed_bytes_per_s": 50e9,
    "rx_bytes_per_s": 10e9,
    "tx_bytes_per_s": 10e9,
    "rx_bytes_per_s_mean_2m": 10e9,
    "tx_bytes_per_s_mean_2m": 10e9,
    "rx_bytes_per_s_mean_30m": 10e9,
    "tx_bytes_per_s_mean_30m": 10e9,
    "link_downed_count_30m": 0.0,
    "link_recoveries_count_30m": 0.0,
    "symbol_errors_count_10m": 0.0,
    "age_s": 1.0,
}
HEALTHY_NODE = {
    "scrape_up": 1.0,
    "scrape_duration_s": 0.02,
    "scrape_duration_s_mean_30m": 0.02,
    "scrape_duration_s_std_30m": 0.005,
    "gpus_reported": 8.0,
    "max_gpus_reported": 8.0,
    "age_s": 1.0,
}


class SmallFleet:
    """n nodes with 8 GPUs and 8 ports each (`ports`: whether anybody tells of them); `gpu`, `port`, `node` are columns
    (entity,) to be changed by a test."""

    def __init__(self, nodes: int = 4, names: list[str] | None = None, ports: bool = True) -> None:
        self.names = names or [f"n{row + 1:03}" for row in range(nodes)]
        self.entities = Entities()
        for name in self.names:
            for index in range(8):
                self.entities.add_to_node(EntityKind.GPU, name, index)
                if ports:
                    self.entities.add_to_node(EntityKind.PORT, name, f"mlx5_{index}", 1)
        self.topology = Topology.build([NodeSpec(name, gpus=8, gpu_model="H100") for name in self.names])
        n = len(self.names)
        self.gpu = {name: np.full(8 * n, value) for name, value in HEALTHY_GPU.items()}
        self.port = {name: np.full(8 * n * ports, value) for name, value in HEALTHY_PORT.items()}
        self.node = {name: np.full(n, value) for name, value in HEALTHY_NODE.items()}
        self.gpu_since = {name: np.zeros(8 * n, np.int64) for name in HEALTHY_GPU}
        self.node_since = {name: np.zeros(n, np.int64) for name in HEALTHY_NODE}
        self.jobs = JobTable()
        self.node_events = NodeTable()
        self.memory = RiskState()
        self.now_ms = START_MS

    def row(self, node: str, gpu: int) -> int:
        row = self.entities[EntityKind.GPU].find_row(f"{node}/{gpu}")
        assert row is not None
        return row

    def start(self, job: str, nodes: list[str], gpus: tuple[int, ...] = tuple(range(8))) -> None:
        gang = Gang(len(nodes), len(nodes))
        began_ms = START_MS - 3_600_000
        self.jobs.apply(Submitted(job=job, sequence=0, time_ms=began_ms, gang=gang, gpus_per_node=len(gpus)))
        ranks = tuple(RankPlacement(rank, node, gpus) for rank, node in enumerate(nodes))
        self.jobs.apply(Started(job=job, sequence=1, time_ms=began_ms, ranks=ranks))

    def frames(self) -> Frames:
        return Frames(
            self._frame(EntityKind.GPU, self.gpu, self.gpu_since),
            self._frame(EntityKind.PORT, self.port, {}),
            self._frame(EntityKind.NODE, self.node, self.node_since),
        )

    def _frame(self, kind: EntityKind, columns: dict[str, np.ndarray], since: dict[str, np.ndarray]) -> FeatureFrame:
        """All features; those that no test has set are unknown."""
        names, node = FEATURES[kind], self.entities[kind].node.copy()
        values = np.full((len(node), len(names)), np.nan, np.float32)
        changed = np.zeros(values.shape, np.int64)
        for name, column in columns.items():
            values[:, names.index(name)] = column
        for name, times in since.items():
            changed[:, names.index(name)] = times
        return FeatureFrame(kind, names, values, node, changed, self.now_ms)

    def tick(self, times: int = 1, every_s: float = 15.0) -> ScoredFleet:
        """Score `times` scrapes in a row; the last answer."""
        for _ in range(times):
            self.now_ms += int(every_s * 1000)
            local = score_own_nodes(self.frames(), self.entities, self.topology, self.memory, self.now_ms)
            events = FoldedEvents(running=self.jobs.list_running(), ended=(), nodes=self.node_events.nodes)
            answer = score_fleet(FleetMoment(self.now_ms, self.topology, [local], events), self.memory)
        return answer

    def flagged(self, answer: ScoredFleet) -> list[str]:
        return [self.names[row] for row, action in answer.risk.actions.items() if action.code not in ("none", "watch")]

    def sentences(self, answer: ScoredFleet, node: str) -> list[str]:
        return [reason.sentence for reason in answer.risk.reasons.get(self.names.index(node), ())]

    def throttle(self, node: str, gpu: int, clock: float = 990.0) -> None:
        row = self.row(node, gpu)
        self.gpu["sm_clock_mhz"][row] = self.gpu["sm_clock_mhz_mean_2m"][row] = clock
        self.gpu["clock_event_reasons"][row] = 32 + 4
        self.gpu_since["clock_event_reasons"][row] = self.now_ms


@pytest.fixture
def small_fleet() -> Callable[..., SmallFleet]:
    return SmallFleet
