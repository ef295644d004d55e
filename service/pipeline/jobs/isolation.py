"""Checks of the isolation that a scheduler relies on, by telemetry and job events.

    gpu.isolation    (n, g, OBSERVED) float32, NaN unknown      node.network  (n,) bytes/s in and out, NaN unknown
    doc.isolation    mig {gpu: {instance: GiB}}   holders {gpu: [job]}   somewhere {node: [job]}, on GPUs unnamed

If a field cannot be observed, its `ok` is null and `reason` names the metric that would show it. The
whole answer is then null, too, unless another field is false. For a limit, only the use is observed. True
means that the use is below the limit, not that the limit is enforced.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.entities import MAX_NAME_LENGTH
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.service.answers.isolation import IsolationCheck
from fleetcast.service.board.board import Section
from fleetcast.service.pipeline.publish import encode
from fleetcast.service.pipeline.tick import Tick

OBSERVED = (
    "pcie_link_gen",
    "pcie_link_width",
    "pcie_tx_bytes_per_s",
    "pcie_rx_bytes_per_s",
    "fb_used_bytes",
    "sm_active",
    "power_w",
)
READINGS, NETWORK, DOCUMENT = "gpu.isolation", "node.network", "doc.isolation"
GIB = 2.0**30
LEAST_OF_NOMINAL, MOST_OF_NOMINAL = 0.8, 1.02  # of a profile's memory: some is kept back, GB may mean GiB
LONGEST_PROFILE, LONGEST_CPUS, MOST_JOBS = 64, 1_000, 1_000
_PROFILE = re.compile(r"(?:MIG )?\d+(?:c\.\d+)?g\.(\d+)gb.*")
SLACK = 1.01
JobName = Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)]
Small = Annotated[int, msgspec.Meta(ge=0, le=1_000)]
Limit = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
TELLS = {
    "mig": "any metric of the GPU",
    "mig_profile": "DCGM_FI_DEV_FB_TOTAL of GPU instances (label GPU_I_ID)",
    "jobs": "`started` events that name the GPUs of each rank",
    "cpu_pinning": "cpuset.cpus.effective of the job's cgroup, which none of the exporters that are read gives",
    "pcie_link_gen": "DCGM_FI_DEV_PCIE_LINK_GEN",
    "pcie_link_width": "DCGM_FI_DEV_PCIE_LINK_WIDTH",
    "pcie_max_bytes_per_s": "DCGM_FI_PROF_PCIE_TX_BYTES and DCGM_FI_PROF_PCIE_RX_BYTES",
    "network_max_bytes_per_s": "node_network_receive_bytes_total and node_network_transmit_bytes_total",
    "gpu_memory_max_gib": "DCGM_FI_DEV_FB_USED",
    "sm_active_max": "DCGM_FI_PROF_SM_ACTIVE",
    "power_max_w": "DCGM_FI_DEV_POWER_USAGE",
}
LIMITS = tuple(field for field in TELLS if "_max" in field)
BELOW = "its use lies below now; whether anything would hold it there is not seen"
MEMORY_ONLY = "by the memory of its instances: telemetry does not report their slices"


class IsolationExpectation(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The isolation of one GPU that a scheduler relies on. A field that is None is not checked.

    mig_profile: for example `1g.10gb`. jobs: the only jobs that may hold the GPU. cpu_pinning: a list of
    CPUs.
    """

    mig: bool | None = None
    mig_profile: Annotated[str, msgspec.Meta(max_length=LONGEST_PROFILE)] | None = None
    jobs: Annotated[list[JobName], msgspec.Meta(max_length=MOST_JOBS)] | None = None
    cpu_pinning: Annotated[str, msgspec.Meta(max_length=LONGEST_CPUS)] | None = None
    pcie_link_gen: Small | None = None
    pcie_link_width: Small | None = None
    pcie_max_bytes_per_s: Limit | None = None
    network_max_bytes_per_s: Limit | None = None
    gpu_memory_max_gib: Limit | None = None
    sm_active_max: Limit | None = None
    power_max_w: Limit | None = None


class IsolationReport(msgspec.Struct):
    """The document of the board section `doc.isolation`."""

    mig: dict[str, dict[str, float | None]]
    holders: dict[str, list[str]]
    somewhere: dict[str, list[str]] = {}


class ObservedGpu(msgspec.Struct):
    """The observations of one GPU. Readings are NaN if unknown.

    somewhere: jobs on the GPU's node for which no event names the GPUs.
    """

    readings: dict[str, float]
    network: float
    mig: dict[str, float | None]
    holders: list[str]
    somewhere: list[str] = []

    @property
    def is_reported(self) -> bool:
        """Return whether telemetry or a job reported this GPU. If not, it may be in use without our knowledge."""
        return bool(self.holders) or self.has_telemetry

    @property
    def has_telemetry(self) -> bool:
        """True if telemetry reported this GPU. Jobs do not say whether a GPU is divided."""
        return bool(self.mig) or any(map(math.isfinite, self.readings.values()))


def make_isolation_sections(tick: Tick) -> list[Section]:
    """Return the board sections with the readings, the jobs and the MIG instances of every GPU."""
    running = tick.events.running
    network = np.full(len(tick.topology), np.nan, np.float32)
    if len(tick.frames.node.values):
        both = tick.frames.node.column("net_rx_bytes_per_s") + tick.frames.node.column("net_tx_bytes_per_s")
        network[: len(both)] = both[: len(network)]
    holders, somewhere = tick.memory.get_or_make(
        "isolation",
        (tick.events.placements,),
        lambda: (msgspec.Raw(encode(group_jobs_by_gpu(running))), msgspec.Raw(encode(_find_unnamed_gpu_jobs(running)))),
    )
    data: dict[str, NDArray[Any] | bytes] = {
        READINGS: stack_gpu_readings(tick),
        NETWORK: network,
        DOCUMENT: encode({"mig": tick.mig, "holders": holders, "somewhere": somewhere}),
    }
    return [Section(name, part, tick.now_ms) for name, part in data.items()]


def stack_gpu_readings(tick: Tick) -> NDArray[np.float32]:
    """Return the readings of every GPU at a tick: (n, g, OBSERVED) float32, NaN if unknown."""
    return np.stack([tick.read_gpu_feature(name) for name in OBSERVED], axis=-1).astype(np.float32)


def group_jobs_by_gpu(running: Sequence[JobAttempt]) -> dict[str, list[str]]:
    """Return GPU → the jobs that hold it, for jobs whose events name their GPUs."""
    found: dict[str, list[str]] = {}
    for attempt in running:
        for rank in attempt.ranks:
            for gpu in rank.gpus:
                jobs = found.setdefault(f"{rank.node}/{gpu}", [])
                if attempt.job not in jobs:
                    jobs.append(attempt.job)
    return found


def _find_unnamed_gpu_jobs(running: Sequence[JobAttempt]) -> dict[str, list[str]]:
    """Return node → the jobs that run there on GPUs that no event names."""
    found: dict[str, list[str]] = {}
    for attempt in running:
        named = {rank.node for rank in attempt.ranks if rank.gpus}
        for node in attempt.hosts:
            if node not in named:
                found.setdefault(node, []).append(attempt.job)
    return found


def check_isolation(expected: IsolationExpectation, sight: ObservedGpu, as_of_ms: int) -> list[IsolationCheck]:
    """Check each field that the scheduler expects. Returns one row for each field, in the order of the fields."""
    found = []
    for field, wanted in msgspec.structs.asdict(expected).items():
        if wanted is not None:
            observed, ok = _check_field(field, wanted, sight)
            found.append(IsolationCheck(field, wanted, observed, ok, as_of_ms, _explain_result(field, ok, sight)))
    return found


def _explain_result(field: str, ok: bool | None, sight: ObservedGpu) -> str | None:
    """Explain why a field is unknown, or what limits the evidence for a confirmed field.

    Returns None if there is nothing to explain.
    """
    if ok is None and field == "jobs" and sight.somewhere:
        return f"no event names the GPUs of {', '.join(sight.somewhere[:3])} on this node; {TELLS[field]} would show it"
    if ok is None:
        return f"not seen: {TELLS[field]} would show it"
    if ok and field == "mig_profile":
        return MEMORY_ONLY
    return BELOW if ok and field in LIMITS else None


def combine_checks(rows: Sequence[IsolationCheck]) -> bool | None:
    """Return False if a field is violated. Otherwise, return None if a field cannot be observed, or else True."""
    answers = [row.ok for row in rows]
    return False if False in answers else None if None in answers else True


def _check_field(field: str, wanted: Any, sight: ObservedGpu) -> tuple[Any, bool | None]:
    read = sight.readings
    if not sight.is_reported and field != "network_max_bytes_per_s":  # that is of the node
        return None, None
    match field:
        case "cpu_pinning":
            return None, None
        case "mig" | "mig_profile" if not sight.has_telemetry:
            return None, None
        case "mig":
            return bool(sight.mig), bool(sight.mig) is wanted
        case "mig_profile":
            return _check_profile(wanted, sight.mig)
        case "jobs":
            return _check_jobs(wanted, sight)
        case "pcie_link_gen" | "pcie_link_width":
            return _convert_nan_to_none(read[field]), _make_verdict(read[field], read[field] >= wanted)
        case "pcie_max_bytes_per_s":
            return _check_at_most(read["pcie_tx_bytes_per_s"] + read["pcie_rx_bytes_per_s"], wanted)
        case "network_max_bytes_per_s":
            return _check_at_most(sight.network, wanted)
        case "gpu_memory_max_gib":
            return _check_at_most(read["fb_used_bytes"] / GIB, wanted)
        case "sm_active_max":
            return _check_at_most(read["sm_active"], wanted)
    return _check_at_most(read["power_w"], wanted)


def _check_jobs(wanted: Sequence[str], sight: ObservedGpu) -> tuple[Any, bool | None]:
    """Return the holders of the GPU, and whether they are as expected.

    If a job holds unnamed GPUs of the node, the second value is None, unless the known holders already
    contradict the expectation.
    """
    held, asked, may = set(sight.holders), set(wanted), set(sight.somewhere)
    if not held <= asked or not asked - held <= may:
        return sight.holders, False
    return sight.holders, None if may else True


def parse_profile_gib(profile: str) -> float | None:
    """Return the memory in GiB in the name of a MIG profile, or None if the name states none.

    >>> parse_profile_gib("1g.10gb"), parse_profile_gib("MIG 1c.3g.40gb+me"), parse_profile_gib("half")
    (10.0, 40.0, None)
    """
    found = _PROFILE.fullmatch(profile.strip())
    return float(found.group(1)) if found else None


def _check_profile(wanted: str, mig: Mapping[str, float | None]) -> tuple[Any, bool | None]:
    """Return the sizes of the instances as text, and whether one of them has the memory of the profile.

    Telemetry shows the memory of instances, but not their slices.
    """
    gib = parse_profile_gib(wanted)
    if not mig:
        return "no MIG instance", False
    sizes = sorted(size for size in mig.values() if size is not None)
    if gib is None or not sizes:
        return None, None
    shown = ", ".join(f"{size:g} GiB" for size in sizes)
    return shown, any(LEAST_OF_NOMINAL * gib <= size <= MOST_OF_NOMINAL * gib for size in sizes)


def _check_at_most(value: float, wanted: float) -> tuple[float | None, bool | None]:
    return _convert_nan_to_none(value), _make_verdict(value, value <= wanted * SLACK)


def _make_verdict(value: float, ok: bool) -> bool | None:
    return bool(ok) if math.isfinite(value) else None


def _convert_nan_to_none(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None
