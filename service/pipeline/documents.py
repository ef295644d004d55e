"""The conversion of scores into the JSON rows that the API serves.

Numbers are rounded. All functions are pure.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.features.frame import FeatureFrame
from fleetcast.fleet.events import ASKED_FIELDS
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.nodes import NodeState
from fleetcast.fleet.tellers import REQUEST_LABEL
from fleetcast.fleet.topology import Level, Topology
from fleetcast.ingest.pages.unread import describe_unread_samples
from fleetcast.models.risk.node_signals import NODE_SILENT_S
from fleetcast.models.risk.scores import RISK_HORIZONS_S, RISK_KINDS, Action, RiskScores
from fleetcast.service.answers.estimates import RunQuantiles
from fleetcast.service.answers.fleet import Ingestion
from fleetcast.service.answers.jobs import Asks, JobDetail, JobRow, JobState, PlacedRank, RemainingTime
from fleetcast.service.answers.risk import GpuAnswer, HeldBy, HostAnswer, NodeRisk, RankedNode, RiskKind, StateName
from fleetcast.service.board.gpu_use import Occupant
from fleetcast.service.pipeline.run_times.record import IssuedRunTime

NO_ACTION = Action("none", "Nothing to do.")
UNFLAGGED = frozenset({"none", "watch"})
_FIELDS_OF_ASKS = tuple(name for name in Asks.__struct_fields__ if name in ASKED_FIELDS)
STATES: tuple[StateName, ...] = get_args(StateName)  # stale: stopped answering; unknown: never heard


def describe_missing_telemetry(ingestion: Ingestion) -> str | None:
    """Explain why there is no telemetry. Returns None if there is some.

    There are two reasons. Either no exporter can be read, or no sample ever arrived and some records have
    names that are not read.
    """
    up, down = (ingestion.targets.get(state, 0) for state in ("up", "down"))
    if down and not up:
        failing = [row for source in ingestion.sources for row in source.get("targets_failing", ())]
        why = f" {failing[0]['target']}: {failing[0]['reason']}." if failing else ""
        return f"No telemetry: none of {down:,} exporters is read.{why}"
    counts = [source.get("records", {}) for source in ingestion.sources]
    if ingestion.newest_sample_ms is None and any(row.get("unread") for row in counts):
        names = [name for row in counts for name in row.get("unread_names", ())]
        return f"No telemetry: {describe_unread_samples(names)}."
    return None


def round_number(value: float, digits: int = 3) -> float | None:
    """Round a value to `digits` decimal places for JSON. Returns None if it is unknown."""
    return None if value is None or not math.isfinite(value) else round(float(value), digits)


def round_probability(value: float) -> float | None:
    """Round a probability to three significant digits, so that a base rate of 0.0002 does not become zero.

    Returns None if it is unknown.
    """
    return None if not math.isfinite(value) else float(f"{value:.3g}")


def find_flagged_nodes(risk: RiskScores, n: int) -> NDArray[np.bool_]:
    """Return for each node whether its recommended action is more than watching it: (n,) bool."""
    mask = np.zeros(n, bool)
    rows = [row for row, action in risk.actions.items() if action.code not in UNFLAGGED]
    mask[rows] = True
    return mask


def find_answering_nodes(node: FeatureFrame, gpu: FeatureFrame, rows: NDArray[np.int32], n: int) -> NDArray[np.float64]:
    """Return for each node whether its exporters answer: (n,) float64.

    1 means that they do, 0 that they do not, NaN that none ever did. rows: (n, g) rows of `gpu`.
    """
    up = np.full(n, np.nan)
    if len(node.values):
        up[: len(node.values)] = node.column("scrape_up")[:n]
    if not len(gpu.values):
        return up
    age_s = np.nan_to_num(gpu.column("age_s"), nan=np.inf)
    known = (rows >= 0) & (rows < len(age_s))
    youngest_s = np.where(known, age_s[np.where(known, rows, 0)], np.inf).min(axis=1, initial=np.inf)[:n]
    sends = np.isnan(up) & np.isfinite(youngest_s)  # by itself, so nobody asks it
    return np.where(sends, youngest_s <= NODE_SILENT_S, up)


def compute_state_codes(
    node_state: NDArray[np.int8], flags: NDArray[np.bool_], up: NDArray[np.float64]
) -> NDArray[np.int8]:
    """Return the index of each node's state in STATES: (n,) int8.

    node_state: (n,) NodeState. flags: (n,) flagged nodes. up: (n,) the result of `find_answering_nodes`.
    """
    found = {
        "drained": node_state == NodeState.DRAINED,
        "lost": node_state == NodeState.LOST,
        "withheld": node_state >= NodeState.MAINTENANCE,
        "degraded": flags,
        "unknown": np.isnan(up),
        "stale": up <= 0,
    }
    return np.select([*found.values()], [STATES.index(name) for name in found], STATES.index("ok")).astype(np.int8)


def make_risk_rows(values: NDArray[np.float64]) -> list[NodeRisk]:
    """Return the risk rows of one node. values: (kind, horizon) fault probabilities."""
    return [
        NodeRisk(cast(RiskKind, kind), horizon_s, round_probability(values[k, h]))
        for k, kind in enumerate(RISK_KINDS)
        for h, horizon_s in enumerate(RISK_HORIZONS_S)
    ]


def encode_risk_rows(risk: RiskScores) -> list[Sequence[NodeRisk]]:
    """Encode the risk rows of every node, as `make_risk_rows` makes them.

    Most nodes have the same rows, so each distinct set of rows is encoded once.
    """
    made: dict[bytes, Sequence[NodeRisk]] = {}
    answer = []
    for values in np.ascontiguousarray(risk.values.transpose(2, 0, 1)):
        key = values.tobytes()
        if key not in made:
            made[key] = cast(Sequence[NodeRisk], msgspec.Raw(msgspec.json.encode(make_risk_rows(values))))
        answer.append(made[key])
    return answer


DIGITS = {"gpu_util": 2, "sm_active": 2, "tensor_active": 2}  # of the readings; the others have none
READINGS = GpuAnswer.__struct_fields__[2:-2]
HELD_BY: dict[Occupant, HeldBy] = {
    Occupant.UNKNOWN: "unknown",
    Occupant.PROMISE: "promise",
    Occupant.WINDOW: "window",
    Occupant.RESERVATION: "reservation",
}


def make_gpu_answers(
    gpu: FeatureFrame,
    rows: NDArray[np.int32],
    gpus: NDArray[np.integer],
    holder: NDArray[np.int32],
    jobs: Sequence[str],
    use: NDArray[np.int8],
) -> list[list[GpuAnswer]]:
    """Return the list of GPUs of each node, in the form that the API shows.

    rows: (n, g) rows of `gpu`, -1 if telemetry never reported the GPU. gpus: (n,) number of GPUs.
    holder: (n, g) index into `jobs`. use: (n, g) Occupant.
    """
    node, index = np.nonzero(np.arange(rows.shape[1])[None, :] < gpus[:, None])
    entity = rows[node, index]
    has_row = (entity >= 0) & (entity < len(gpu.values))
    named = [jobs[number] if number >= 0 else None for number in holder[node, index].tolist()]
    answers = list(map(GpuAnswer, index.tolist(), named))
    if has_row.any():
        at, gpu_rows = np.flatnonzero(has_row).tolist(), entity[has_row]
        columns = [
            np.round(gpu.column(name)[gpu_rows].astype(np.float64), DIGITS.get(name, 0)).tolist() for name in READINGS
        ]
        for place, answer in zip(
            at, map(GpuAnswer, index[has_row].tolist(), map(named.__getitem__, at), *columns), strict=True
        ):
            answers[place] = answer
    of_each = use[node, index]
    for kind, name in HELD_BY.items():
        for place in np.flatnonzero(of_each == kind).tolist():
            answers[place].held_by = name
    ends = np.cumsum(gpus).tolist()
    return [answers[end - count : end] for end, count in zip(ends, gpus.tolist(), strict=True)]


# What an answer calls it -> feature.
HOST = {
    "cpu_idle": "cpu_idle_share",
    "cpu_steal": "cpu_steal_share",
    "cpu_pressure": "cpu_pressure_share",
    "memory_pressure": "memory_pressure_share",
    "io_pressure": "io_pressure_share",
    "memory_total_bytes": "memory_total_bytes",
    "memory_available_bytes": "memory_available_bytes",
    "numa_misses_per_s": "numa_misses_per_s",
    "nvme_busy": "nvme_busy_share",
    "nvme_read_bytes_per_s": "nvme_read_bytes_per_s",
    "nvme_written_bytes_per_s": "nvme_written_bytes_per_s",
    "net_rx_bytes_per_s": "net_rx_bytes_per_s",
    "net_tx_bytes_per_s": "net_tx_bytes_per_s",
    "bmc_power_w": "bmc_power_w",
}
SHARES = [list(HOST).index(name) for name in HOST if name.endswith(("idle", "steal", "pressure", "busy"))]
MOST_SHARE = 1.05  # a little above 1 by the clocks; further above only when a CPU or a drive came or went


def make_host_answers(node: FeatureFrame | None, n: int) -> list[HostAnswer | None]:
    """Return the host readings of each of n nodes. None means that nothing is known about a host.

    Values have four significant digits.
    """
    answers: list[HostAnswer | None] = [None] * n
    if node is None:
        return answers
    columns = np.stack([node.column(feature)[:n] for feature in HOST.values()], axis=1).astype(np.float64)
    known = np.isfinite(columns)
    known[:, SHARES] &= columns[:, SHARES] <= MOST_SHARE
    for row in np.flatnonzero(known.any(axis=1)).tolist():
        readings = zip(HOST, columns[row].tolist(), known[row].tolist(), strict=True)
        answers[row] = HostAnswer(**{name: float(f"{value:.4g}") for name, value, there in readings if there})
    return answers


def encode_ranking_rows(risk: RiskScores, topology: Topology, states: Sequence[StateName]) -> list[bytes]:
    """Encode the row of each node in `/v1/risk/nodes`, without its probabilities.

    The API adds the probabilities when it ranks the nodes.
    """
    racks = list_node_domains(topology, Level.RACK)
    rows = []
    for row, node in enumerate(topology.nodes):
        reasons = risk.reasons.get(row, ())
        ranked = RankedNode(
            node=node.name,
            rack=racks[row],
            state=states[row],
            placed=bool(topology.placed[row]),
            reason=reasons[0].sentence if reasons else None,
            action=risk.actions.get(row, NO_ACTION),
            parts=risk.parts.get(row, ()),
        )
        rows.append(msgspec.json.encode(ranked))
    return rows


def list_node_domains(topology: Topology, level: Level) -> list[str | None]:
    """Return the name of each node's domain at a level. None means that no source placed the node."""
    names = topology.domain_names[level]
    return [names[index] if index >= 0 else None for index in topology.domain[level].tolist()]


def make_job_row(
    attempt: JobAttempt, now_ms: int, durations: Mapping[str, Any], slow: bool, issued: IssuedRunTime | None = None
) -> JobRow:
    """Make one row of `/v1/jobs`.

    If the job has no forecast, its remaining time comes from past jobs of its size.
    """
    left = estimate_remaining_time(attempt, now_ms, durations, issued) if attempt.state == "running" else None
    submission = attempt.submission
    return JobRow(
        job=attempt.job,
        attempt=attempt.attempt,
        state=cast(JobState, attempt.state),
        class_=attempt.class_,
        user=submission.user if submission else "",
        queue=attempt.queue,
        queues=attempt.queues if len(attempt.queues) > 1 else (),
        tasks=attempt.tasks,
        gpus=attempt.gpus,
        nodes=attempt.hosts,
        submitted_ms=attempt.submitted_ms,
        started_ms=attempt.started_ms,
        ended_ms=attempt.ended_ms,
        remaining_s=left,
        slow=slow,
        source="board" if attempt.source == "events" else attempt.source,
    )


def estimate_remaining_time(
    attempt: JobAttempt, now_ms: int, durations: Mapping[str, Any], issued: IssuedRunTime | None
) -> RemainingTime | None:
    """Return the remaining time of a running attempt, from its forecast or else from past jobs of its size.

    Returns None if neither is known.
    """
    return (issued and issued.compute_remaining_time(now_ms)) or estimate_by_past_jobs(attempt, now_ms, durations)


def make_job_detail(attempt: JobAttempt, issued: IssuedRunTime | None = None) -> JobDetail:
    """Return the fields that `/v1/jobs/{id}` adds to a job's row.

    They are the placement, the phase, the forecast at submission, and the last events.
    """
    run_s = issued.quantiles if issued else None
    return JobDetail(
        placement=attempt.ranks or [PlacedRank(node) for node in attempt.nodes],
        phase=attempt.phase or None,
        phase_since_ms=attempt.phase_since_ms,
        queued_reason=attempt.queued_reason or None,
        failure=attempt.failure,
        run_s=RunQuantiles(**run_s) if run_s else None,
        model=issued.model if issued and run_s else None,
        events=attempt.events[-10:],
        asks=read_asked_resources(attempt) if attempt.state in ("queued", "blocked", "running") else msgspec.UNSET,
    )


def read_asked_resources(attempt: JobAttempt) -> Asks:
    """Return the resources that the job's submission requests. Returns empty Asks without a submission."""
    spec = attempt.submission
    if spec is None:
        return Asks()
    asked = {name: getattr(spec, name) for name in _FIELDS_OF_ASKS}
    asked["gpu_share"] = spec.gpu_share if spec.gpus_per_node == 1 else None  # a request is for a part of one GPU alone
    asked["cpus"], asked["limit_s"] = spec.cpus or None, spec.limit_s or None
    is_request = attempt.source == "queue"
    return Asks(request_id=spec.labels.get(REQUEST_LABEL, msgspec.UNSET) if is_request else msgspec.UNSET, **asked)


def estimate_all_by_past_jobs(
    gpus: Sequence[int], age_s: NDArray[np.float64], durations: Mapping[str, Any]
) -> list[RemainingTime | None]:
    """Return the result of `estimate_by_past_jobs` for each running attempt.

    gpus: the number of GPUs of each attempt. age_s: (attempt,) the seconds for which it has run.
    """
    by_gpus, of_all = durations.get("by_gpus") or {}, durations.get("all") or {}
    sizes = {size: by_gpus.get(str(size)) or of_all for size in set(gpus)}
    if not any(known.get("n") for known in sizes.values()):
        return [None] * len(gpus)
    usual_s = {size: (known["p50"], known["p90"]) if known.get("n") else (np.nan,) * 2 for size, known in sizes.items()}
    run_s = np.array([usual_s[size] for size in gpus], np.float64)
    left_s = np.round(np.where(run_s > age_s[:, None], run_s - age_s[:, None], age_s[:, None]))
    rows: list[RemainingTime | None] = list(map(RemainingTime, *left_s.T.tolist()))
    for at in np.flatnonzero(np.isnan(run_s[:, 0])).tolist():
        rows[at] = None
    return rows


def estimate_by_past_jobs(attempt: JobAttempt, now_ms: int, durations: Mapping[str, Any]) -> RemainingTime | None:
    """Return p50 and p90 of the remaining seconds, from the run times of finished jobs of this size.

    If the job has run longer than a quantile, this quantile is as much time again as it has run. Returns None
    if no such job has finished, or if this job has not started.
    """
    by_gpus = durations.get("by_gpus")
    known = (by_gpus.get(str(attempt.gpus)) if by_gpus else None) or durations.get("all")
    if not known or attempt.started_ms is None or not known.get("n"):
        return None
    elapsed_s = max(0.0, (now_ms - attempt.started_ms) / 1000)
    left_s = (known[name] - elapsed_s if known[name] > elapsed_s else elapsed_s for name in ("p50", "p90"))
    return RemainingTime(*(round(value, 0) for value in left_s))
