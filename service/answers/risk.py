"""Node risk: the ranking of all nodes, one node in full, and hard signals newer than the scores.

NaN means unknown, and becomes null in JSON. UNSET fields are left out.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from fleetcast.models.risk.part_risk import UsualPart
from fleetcast.models.risk.record import Calibration
from fleetcast.models.risk.scores import Action, PartRisk

RiskKind = Literal["fail", "drain", "slow"]
StateName = Literal["ok", "degraded", "drained", "lost", "stale", "unknown", "withheld"]


class RankedNode(msgspec.Struct):
    """A node in the ranking, without its probability.

    `parts`: the GPUs, links, ports and rails of the node that show signs of trouble.
    """

    node: str
    rack: str | None
    state: StateName
    placed: bool
    reason: str | None
    action: Action
    parts: Sequence[PartRisk] = ()


class RiskRow(RankedNode, kw_only=True):
    """The risk of one node at one horizon. `p` is null if it is unknown."""

    p: float | None
    kind: RiskKind | None
    horizon_s: int


class RiskNodes(msgspec.Struct):
    """The ranking of nodes by risk.

    `calibration`: the accuracy of the service's own forecasts. `usual`: for each kind of part, the
    probability of trouble without any warning sign.
    """

    as_of_ms: int
    model: str
    rows: list[RiskRow]
    usual: list[UsualPart] = []
    calibration: list[Calibration] = []
    history: dict[str, Any] = {}


class CalibrationRecord(msgspec.Struct):
    """The accuracy of the service's own risk forecasts.

    `rows`: one for each horizon. `history`: the data from which the failure rate of nodes with past faults
    was fitted. Until the site has its own fit, `times` in `history` is the factor that adapts this rate to
    the faults of the fleet.
    """

    rows: Sequence[Calibration]
    history: Mapping[str, Any]


class NodeRisk(msgspec.Struct, gc=False):
    """The probability that a node fails, is drained or becomes slow within one horizon."""

    kind: RiskKind
    horizon_s: int
    p: float | None


class NodeReason(msgspec.Struct):
    """A measured value that indicates a risk, with its usual value."""

    feature: str
    entity: str
    value: float | None
    usual: float | None
    unit: str
    share: float
    since_ms: int | None
    sentence: str


class HardSignal(msgspec.Struct, kw_only=True, frozen=True):
    """A node event or an XID that the scores do not cover yet. `taken_ms`: when it came onto the board."""

    node: str
    gpu: int | None = None
    type: str
    code: int | str | None = None
    time_ms: int = 0
    sentence: str = ""
    fatal: bool = False
    advice: str = ""
    taken_ms: int = 0

    @property
    def identity(self) -> tuple[str, int | None, str, int | str | None, int]:
        """The identity of the signal. A repetition of the signal has the same identity."""
        return self.node, self.gpu, self.type, self.code, self.time_ms


class UrgentSignals(msgspec.Struct):
    """The board section `doc.urgent`: the latest hard signals."""

    as_of_ms: int = 0
    rows: Sequence[HardSignal] = ()


HeldBy = Literal["unknown", "promise", "window", "reservation"]


class GpuAnswer(msgspec.Struct, gc=False):
    """The present state of one GPU of a node. It has no readings if telemetry never reported the GPU.

    held_by, request: as in `fleet.FleetGpu`.
    """

    index: int
    job: str | None
    age_s: float | UnsetType = UNSET
    power_w: float | UnsetType = UNSET
    gpu_temp_c: float | UnsetType = UNSET
    sm_clock_mhz: float | UnsetType = UNSET
    gpu_util: float | UnsetType = UNSET
    sm_active: float | UnsetType = UNSET
    tensor_active: float | UnsetType = UNSET
    xid: float | UnsetType = UNSET
    held_by: HeldBy | UnsetType = UNSET
    request: str | UnsetType = UNSET


class HostAnswer(msgspec.Struct, gc=False):
    """The host's readings from node_exporter. Shares are parts of the time, and rates are per second."""

    cpu_idle: float | UnsetType = UNSET
    cpu_steal: float | UnsetType = UNSET
    cpu_pressure: float | UnsetType = UNSET
    memory_pressure: float | UnsetType = UNSET
    io_pressure: float | UnsetType = UNSET
    memory_total_bytes: float | UnsetType = UNSET
    memory_available_bytes: float | UnsetType = UNSET
    numa_misses_per_s: float | UnsetType = UNSET
    nvme_busy: float | UnsetType = UNSET
    nvme_read_bytes_per_s: float | UnsetType = UNSET
    nvme_written_bytes_per_s: float | UnsetType = UNSET
    net_rx_bytes_per_s: float | UnsetType = UNSET
    net_tx_bytes_per_s: float | UnsetType = UNSET
    bmc_power_w: float | UnsetType = UNSET


class NodeAnswer(msgspec.Struct, kw_only=True):
    """One node in full. `urgent`: hard signals newer than the scores.

    `withheld`: why schedulers, windows or reservations withhold the node from other work.
    """

    node: str
    as_of_ms: int
    state: StateName
    placed: bool
    withheld: str | None = None
    rack: str | None = None
    gpu_model: str = ""
    risk: Sequence[NodeRisk]
    reasons: Sequence[NodeReason]
    action: Action
    jobs: Sequence[str]
    gpus: Sequence[GpuAnswer]
    host: HostAnswer | None = None
    model: str
    urgent: Sequence[HardSignal] | UnsetType = UNSET
