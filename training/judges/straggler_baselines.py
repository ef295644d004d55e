"""Baselines that flag bad nodes by simple rules on the same GPU features that our rules read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.frame import FeatureFrame

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

HOT_C = 85.0
HW_SLOWDOWN = 0x8 | 0x40 | 0x80  # clock event reasons: hardware slowdown, thermal, power brake
REPLAYS_A_10M = 80  # DCGM warns of more than 8 PCIe replays a minute
Z_LIMIT = 3.0
MAD_TO_SIGMA = 1.4826  # of a normal distribution
LEAST_DEVIATION = 0.01  # of the median: most clocks are equal to the digit
PERSISTS_ROUNDS = 4
MINDER_CHANNELS = ("power_w", "sm_active", "tensor_active", "pcie_tx_bytes_per_s", "nvlink_tx_bytes_per_s")
FEWEST_NODES = 3


@dataclass(frozen=True, slots=True)
class BaselineMoment:
    """The input of a rule at one moment: GPU features, the number of nodes, and the nodes of each gang.

    gangs: running job → (k,) node rows.
    """

    gpu: FeatureFrame
    nodes: int
    gangs: Mapping[str, NDArray[np.int64]]

    def column(self, name: str) -> Array:
        """Return (gpu,) the values of one feature."""
        return self.gpu.column(name).astype(np.float64)

    def flag_nodes(self, bad: Mask) -> Mask:
        """Return (node,) whether any GPU of the node is bad. bad: (gpu,)."""
        flagged = np.zeros(self.nodes, bool)
        flagged[self.gpu.node[bad & (self.gpu.node >= 0)]] = True
        return flagged


Rule = Callable[[BaselineMoment], Mask]


def flag_by_thresholds(sight: BaselineMoment) -> Mask:
    """Return (node,) whether an XID was reported or a GPU is hotter than 85 °C."""
    with np.errstate(invalid="ignore"):
        return sight.flag_nodes((sight.column("xid") > 0) | (sight.column("gpu_temp_c") > HOT_C))


def flag_by_health_rules(sight: BaselineMoment) -> Mask:
    """Return (node,) whether one of NVIDIA's passive health watches would report the node.

    Only watches whose fields the exporter reports are checked.
    """
    with np.errstate(invalid="ignore"):
        bad = sight.column("ecc_dbe_volatile_count_10m") > 0
        bad |= sight.column("row_remap_failure") > 0
        bad |= sight.column("retired_pages_pending") > 0
        bad |= sight.column("pcie_replays_count_10m") > REPLAYS_A_10M
        for name in ("nvlink_replay_errors", "nvlink_recovery_errors", "nvlink_crc_data_errors"):
            bad |= sight.column(f"{name}_count_10m") > 0
        reasons = np.nan_to_num(sight.column("clock_event_reasons")).astype(np.int64)
        return sight.flag_nodes(bad | ((reasons & HW_SLOWDOWN) != 0))


class FleetWideZ:
    """A rule that flags a node if one of its GPUs is far below all loaded GPUs of the fleet.

    For 4 rounds, the GPU's clock, power or tensor activity must be 3 robust deviations below the median of these
    GPUs.
    """

    def __init__(self) -> None:
        self._streak = np.zeros(0, np.int64)

    def __call__(self, sight: BaselineMoment) -> Mask:
        """Return (node,) whether a GPU of the node has been far below the others for 4 rounds."""
        busy = np.nan_to_num(sight.column("sm_active")) > 0.2
        self._streak = np.pad(self._streak, (0, len(busy) - len(self._streak)))
        self._streak = np.where(self._find_low_gpus(sight, busy), self._streak + 1, 0)
        return sight.flag_nodes(self._streak >= PERSISTS_ROUNDS)

    def _find_low_gpus(self, sight: BaselineMoment, busy: Mask) -> Mask:
        bad = np.zeros(len(busy), bool)
        if busy.sum() < FEWEST_NODES:
            return bad
        for name in ("sm_clock_mhz", "power_w", "tensor_active"):
            values = sight.column(name)
            known = busy & np.isfinite(values)
            if not known.any():
                continue
            middle = float(np.median(values[known]))
            deviation = MAD_TO_SIGMA * float(np.median(np.abs(values[known] - middle)))
            bad |= known & (values < middle - Z_LIMIT * max(deviation, LEAST_DEVIATION * middle))
        return bad


class Minder:
    """A rule that flags the node of a gang that has been farthest from the other nodes for 4 rounds.

    The rule is Minder (Deng et al., NSDI 2025) without its autoencoder.
    """

    def __init__(self) -> None:
        self._streak: dict[tuple[str, int], int] = {}

    def __call__(self, sight: BaselineMoment) -> Mask:
        """Return (node,) whether the node has been its gang's outlier for long enough."""
        flagged = np.zeros(sight.nodes, bool)
        streak: dict[tuple[str, int], int] = {}
        values = self._compute_channel_means(sight)
        for job, rows in sight.gangs.items():
            worst = _find_outlier(values[rows]) if len(rows) >= FEWEST_NODES else None
            if worst is None:
                continue
            key = (job, int(rows[worst]))
            streak[key] = self._streak.get(key, 0) + 1
            flagged[key[1]] |= streak[key] >= PERSISTS_ROUNDS
        self._streak = streak
        return flagged

    def _compute_channel_means(self, sight: BaselineMoment) -> Array:
        """Return (node, channel) means over the node's GPUs."""
        owned = sight.gpu.node >= 0
        node = sight.gpu.node[owned]
        columns = []
        for name in MINDER_CHANNELS:
            values = np.nan_to_num(sight.column(name)[owned])
            columns.append(np.bincount(node, values, sight.nodes) / np.maximum(np.bincount(node, None, sight.nodes), 1))
        return np.column_stack(columns)


def _find_outlier(values: Array) -> int | None:
    """Return the row that is farthest from the others, or None if it is not far enough.

    A row is far enough if the sum of its distances to the others is more than 1.5 times the median of these sums.
    """
    low, high = values.min(axis=0), values.max(axis=0)
    scaled = (values - low) / np.maximum(high - low, 0.05 * np.maximum(np.abs(high), 1e-9))
    far = np.linalg.norm(scaled[:, None] - scaled[None], axis=-1).sum(axis=1)
    worst = int(far.argmax())
    others = np.delete(far, worst)
    return worst if far[worst] > 1.5 * float(np.median(others)) and far[worst] > 0 else None


def make_baselines() -> dict[str, Rule]:
    """Return name → rule, with new instances of the rules that have a state."""
    return {
        "static thresholds": flag_by_thresholds,
        "NVIDIA health rules": flag_by_health_rules,
        "fleet-wide z": FleetWideZ(),
        "Minder-style distance": Minder(),
    }
