"""One tick's results as board sections; `topology_sections` and `score_sections` list what a reader may rely on."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from features.extract import Frames
from features.frame import FeatureFrame
from features.run_past import LEVELS
from features.serving import ServedInstance
from fleet.entities import Entities
from fleet.jobs import JobAttempt
from fleet.nodes import NodeRecord
from fleet.topology import DOMAIN_LEVELS, Level, Topology
from models.score import Fleet
from models.scores import RISK_HORIZONS_S, RiskScores
from service import documents
from service.board import Section
from service.host_answers import host_answers
from service.occupancy import Occupancy, observe
from service.run_book import Attempt, ToldRun
from service.state import Told

IN_SERVICE, DRAINED, LOST = 0, 1, 2
ENDED_KEPT_MS = 3_600_000
SILENT_INTERVALS = 3.0

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Given:
    """All that a tick is made of, as of one moment: a thread may work on it, since nothing in it changes.

    (`entities` may grow, which is no change to the rows that `frames` have.)
    """

    now_ms: int
    topology: Topology
    entities: Entities
    frames: Frames
    gpu_rows: NDArray[np.int32]
    told: Told
    interval_s: float
    served: Sequence[ServedInstance] = ()
    mig: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)  # GPU -> MIG instance -> GiB
    told_runs: Mapping[Attempt, ToldRun] = field(default_factory=dict)
    inbox: Mapping[str, int] = field(default_factory=dict)  # segment -> offset of what is folded into what is told


@dataclass(frozen=True, slots=True)
class Tick:
    """Everything that one tick knows, handed from the pipeline to the functions below."""

    now_ms: int
    topology: Topology
    node_state: NDArray[np.int8]
    gpu_rows: NDArray[np.int32]
    gpu: FeatureFrame | None
    node: FeatureFrame | None
    risk: RiskScores
    stragglers: Mapping[str, Any]
    occupancy: Occupancy
    running: Sequence[JobAttempt]
    queued: Sequence[JobAttempt]
    ended: Sequence[JobAttempt]
    durations: Mapping[str, Any]
    position: int
    interval_s: float
    told_runs: Mapping[Attempt, ToldRun] = field(default_factory=dict)


def tick_of(given: Given, fleet: Fleet) -> Tick:
    """What was given and what the models make of it."""
    told, topology = given.told, given.topology
    rows = {name: row for row, name in enumerate(topology.names)}
    return Tick(
        now_ms=given.now_ms,
        topology=topology,
        node_state=in_service(rows, told.nodes),
        gpu_rows=given.gpu_rows,
        gpu=given.frames.gpu,
        node=given.frames.node,
        risk=fleet.risk,
        stragglers=fleet.stragglers,
        occupancy=observe(told.running, topology, rows),
        running=told.running,
        queued=told.queued,
        ended=told.ended,
        durations=told.durations,
        position=told.position,
        interval_s=given.interval_s,
        told_runs=given.told_runs,
    )


def in_service(rows: Mapping[str, int], nodes: Mapping[str, NodeRecord]) -> NDArray[np.int8]:
    """(n,) 0 in service, 1 drained, 2 lost: what node events say. `rows`: name -> row of all nodes."""
    state = np.zeros(len(rows), np.int8)
    for name, record in nodes.items():
        if name in rows:
            state[rows[name]] = LOST if record.lost else DRAINED if record.drained else IN_SERVICE
    return state


def usable_gpus(tick: Tick) -> NDArray[np.bool_]:
    """(n, g) the GPU exists and has not vanished from its exporter's page."""
    width = tick.gpu_rows.shape[1]
    usable = np.arange(width)[None, :] < tick.topology.gpus[:, None]
    if tick.gpu is not None and len(tick.gpu.values):
        silent = np.nan_to_num(tick.gpu.column("silent_s")) > SILENT_INTERVALS * tick.interval_s
        rows = tick.gpu_rows
        known = (rows >= 0) & (rows < len(silent))
        usable &= ~(known & silent[np.where(known, rows, 0)])
    return usable


def hottest_gpu(tick: Tick) -> NDArray[np.float32]:
    """(n,) temperature of each node's hottest GPU, NaN where none tells."""
    hottest = np.full(len(tick.topology), np.nan, np.float32)
    if tick.gpu is not None and len(tick.gpu.values):
        temperature = tick.gpu.column("gpu_temp_c")
        rows = tick.gpu_rows
        known = (rows >= 0) & (rows < len(temperature))
        each = np.where(known, temperature[np.where(known, rows, 0)], np.nan)
        hottest = np.fmax.reduce(each, axis=1).astype(np.float32) if each.shape[1] else hottest
    return hottest


def topology_sections(topology: Topology, as_of_ms: int) -> list[Section]:
    """What changes only with a new topology generation."""
    models = sorted({node.gpu_model for node in topology.nodes if node.gpu_model})
    pools = sorted({node.pool for node in topology.nodes})
    codes = {name: code for code, name in enumerate(models)}
    pool_codes = {name: code for code, name in enumerate(pools)}
    arrays: dict[str, NDArray[Any] | bytes] = {
        "names.node": "\n".join(topology.names).encode(),
        "names.gpu_model": "\n".join(models).encode(),
        "names.pool": "\n".join(pools).encode(),
        "node.placed": topology.placed,
        "node.gpus": topology.gpus,
        "node.gpu_model": np.array([codes.get(node.gpu_model, -1) for node in topology.nodes], np.int16),
        "node.gpu_memory_gib": np.array([node.gpu_memory_gib or np.nan for node in topology.nodes], np.float32),
        "node.cpus": np.array([node.cpus for node in topology.nodes], np.int32),
        "node.host_memory_gib": np.array([node.host_memory_gib or np.nan for node in topology.nodes], np.float32),
        "node.pool": np.array([pool_codes[node.pool] for node in topology.nodes], np.int16),
    }
    powers = sorted({node.power_domain for node in topology.nodes if node.power_domain})
    power_codes = {name: code for code, name in enumerate(powers)}
    arrays["names.power"] = "\n".join(powers).encode()
    arrays["node.domain.power"] = np.array(
        [power_codes.get(node.power_domain, -1) for node in topology.nodes], np.int32
    )
    for level in DOMAIN_LEVELS:
        arrays[f"names.{level}"] = "\n".join(topology.domain_names[level]).encode()
        arrays[f"node.domain.{level}"] = topology.domain[level]
    return [Section(name, data, as_of_ms) for name, data in arrays.items()]


def score_sections(tick: Tick) -> list[Section]:
    """Risk, occupancy, jobs and the prebuilt answers of one tick."""
    n = len(tick.topology)
    flags = documents.flagged(tick.risk, n)
    states = documents.node_states(tick.node_state, flags, documents.answering(tick.node, tick.gpu, tick.gpu_rows, n))
    usable = usable_gpus(tick)
    free_cpus, free_memory = _free_host(tick)
    data: dict[str, NDArray[Any] | bytes] = {
        "node.state": tick.node_state,
        "node.flagged": flags,
        "node.risk": tick.risk.values,
        "node.gpu_temp_c": hottest_gpu(tick),
        "risk.reason": encode(_first_reasons(tick)),
        "gpu.usable": usable,
        "gpu.job": tick.occupancy.holder,
        "names.job": "\n".join(tick.occupancy.jobs).encode(),
        "names.live": "\n".join(_known_attempts(tick)).encode(),
        "node.free_cpus": free_cpus,
        "node.free_host_memory_gib": free_memory,
        "occupancy": encode(_occupancy(tick)),
        "durations": encode(tick.durations),
        "jobs.running": encode([_running_row(attempt) for attempt in tick.running]),
        "jobs.running.left_s": _left_s(tick),
        "jobs.queued": encode([queued_row(attempt) for attempt in tick.queued if attempt.submission is not None]),
        **pieces("answers.node", node_answers(tick, states)),
        **pieces("answers.risk", documents.ranking_rows(tick.risk, tick.topology, states)),
        "doc.stragglers": encode(tick.stragglers),
        "doc.jobs": encode(job_rows(tick)),
        "doc.job": encode(job_details(tick)),
    }
    return [Section(name, part, tick.now_ms, tick.risk.model) for name, part in data.items()]


def pieces(name: str, parts: Sequence[bytes]) -> dict[str, NDArray[Any] | bytes]:
    """Pieces of JSON, one after the other, and where each begins: (n + 1,). A reader takes one without the others."""
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return {name: b"".join(parts), f"{name}.offsets": offsets}


def node_answers(tick: Tick, states: Sequence[str]) -> list[bytes]:
    """The body of `GET /v1/nodes/{node}` for each node."""
    parts = []
    occupancy, topology = tick.occupancy, tick.topology
    gpus = documents.gpu_answers(tick.gpu, tick.gpu_rows, topology.gpus, occupancy.holder, occupancy.jobs)
    risk = documents.encoded_risk_rows(tick.risk)
    racks, placed = documents.domain_of(topology, Level.RACK), topology.placed.tolist()
    hosts = host_answers(tick.node, len(topology))
    for row, node in enumerate(topology.nodes):
        parts.append(
            encode(
                {
                    "node": node.name,
                    "as_of_ms": tick.now_ms,
                    "state": states[row],
                    "placed": placed[row],
                    "rack": racks[row],
                    "gpu_model": node.gpu_model,
                    "risk": risk[row],
                    "reasons": tick.risk.reasons.get(row, ()),
                    "action": tick.risk.actions.get(row, documents.NO_ACTION),
                    "jobs": occupancy.node_jobs.get(row, []),
                    "gpus": gpus[row],
                    "host": hosts[row],
                    "model": tick.risk.model,
                }
            )
        )
    return parts


def _free_host(tick: Tick) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    cpus = np.array([node.cpus or np.nan for node in tick.topology.nodes]) - tick.occupancy.used_cpus
    memory = np.array([node.host_memory_gib or np.nan for node in tick.topology.nodes])
    return cpus.astype(np.float32), (memory - tick.occupancy.used_host_memory_gib).astype(np.float32)


def _first_reasons(tick: Tick) -> dict[str, str]:
    return {tick.topology.nodes[row].name: reasons[0].sentence for row, reasons in tick.risk.reasons.items() if reasons}


def _occupancy(tick: Tick) -> dict[str, Any]:
    return {
        "position": tick.position,
        "running": [(attempt.job, attempt.attempt) for attempt in tick.running],
        "ended": [(attempt.job, attempt.attempt, attempt.ended_ms) for attempt in tick.ended],
    }


def _known_attempts(tick: Tick) -> Iterator[str]:
    """ "ATTEMPT JOB" of what runs, waits or ended lately: no new names, whoever tells of them next."""
    return (f"{row.attempt} {row.job}" for row in (*tick.running, *tick.queued, *tick.ended))


def _running_row(attempt: JobAttempt) -> dict[str, Any]:
    return {
        "job": attempt.job,
        "attempt": attempt.attempt,
        "gpus": attempt.gpus,
        "started_ms": attempt.started_ms,
        "queue": attempt.queue,
        "limit_s": attempt.submission.limit_s if attempt.submission else None,
    }


def queued_row(attempt: JobAttempt) -> dict[str, Any]:
    """A job that waits as a placement request, and since when."""
    named = {"request_id": attempt.job, "attempt": attempt.attempt, "queue": attempt.queue, "class": attempt.class_}
    user = attempt.submission.user if attempt.submission else ""
    return {"submitted_ms": attempt.submitted_ms, "request": named | {"user": user} | _asked(attempt)}


def _left_s(tick: Tick) -> NDArray[np.float32]:
    """(running, LEVELS) seconds from now that each running attempt has still to go; NaN where nothing was told."""
    left_s = np.full((len(tick.running), len(LEVELS)), np.nan, np.float32)
    for row, attempt in enumerate(tick.running):
        told = tick.told_runs.get((attempt.job, attempt.attempt))
        if told is not None and told.left_s is not None:
            left_s[row] = told.left_s - (tick.now_ms - told.left_ms) / 1000
    return np.maximum(left_s, 0.0)


def job_rows(tick: Tick) -> list[dict[str, Any]]:
    """Running, queued and lately ended attempts, in that order."""
    slow = {job for job, score in tick.stragglers.items() if score.get("slow")}
    return [
        documents.job_row(
            attempt,
            tick.now_ms,
            tick.durations,
            attempt.job in slow,
            tick.told_runs.get((attempt.job, attempt.attempt)),
        )
        for attempt in (*tick.running, *tick.queued, *tick.ended[-100:])
    ]


def job_details(tick: Tick) -> dict[str, Any]:
    """What `/v1/jobs/{id}` adds to the row of the latest attempt: placement, phase and the last events."""
    known = sorted((*tick.ended[-100:], *tick.queued, *tick.running), key=lambda attempt: attempt.attempt)
    return {
        attempt.job: {
            **documents.job_detail(attempt, tick.told_runs.get((attempt.job, attempt.attempt))),
            **({"asks": _asked(attempt)} if attempt.state in ("queued", "running") else {}),
        }
        for attempt in known
    }


def _asked(attempt: JobAttempt) -> dict[str, Any]:
    """What a job that waits was submitted with, by the keys of a placement request."""
    told = attempt.submission
    if told is None:
        return {}
    asked = {"gang": told.gang, "gpus_per_node": told.gpus_per_node, "priority": told.priority}
    more = {"gpu_model": told.gpu_model, "cpus": told.cpus, "limit_s": told.limit_s}
    return asked | {name: value for name, value in more.items() if value}


def fleet_document(tick: Tick, usable: NDArray[np.bool_], header: Mapping[str, Any]) -> dict[str, Any]:
    """The console's first picture: numbers of the header strip and a row a node for the map."""
    n = len(tick.topology)
    flags = documents.flagged(tick.risk, n)
    states = documents.node_states(tick.node_state, flags, documents.answering(tick.node, tick.gpu, tick.gpu_rows, n))
    held = tick.occupancy.holder >= 0
    exists = np.arange(held.shape[1])[None, :] < tick.topology.gpus[:, None]
    free = int((usable & ~held & (tick.node_state == IN_SERVICE)[:, None]).sum())
    worst = np.nan_to_num(tick.risk.values[:, 0, :], nan=-1.0).max(axis=0)
    domains = {
        level: documents.domain_of(tick.topology, level) for level in (Level.RACK, Level.RAIL_GROUP, Level.BLOCK)
    }
    jobs = tick.occupancy.jobs
    nodes = []
    for row, (holders, answers) in enumerate(zip(tick.occupancy.holder.tolist(), usable.tolist(), strict=True)):
        reasons = tick.risk.reasons.get(row, ())
        count = int(tick.topology.gpus[row])
        nodes.append(
            {
                "node": tick.topology.nodes[row].name,
                "rack": domains[Level.RACK][row],
                "rail_group": domains[Level.RAIL_GROUP][row],
                "block": domains[Level.BLOCK][row],
                "state": states[row],
                "flagged": bool(flags[row]),
                "placed": bool(tick.topology.placed[row]),
                "p": documents.probability(float(worst[row])) if worst[row] >= 0 else None,
                "reason": reasons[0].sentence if reasons else None,
                "gpus": [
                    {"job": jobs[holder] if holder >= 0 else None, "usable": answer}
                    for holder, answer in zip(holders[:count], answers[:count], strict=True)
                ],
                "jobs": tick.occupancy.node_jobs.get(row, []),
            }
        )
    return {
        "as_of_ms": tick.now_ms,
        "fleet_time_ms": tick.now_ms,
        "horizon_s": RISK_HORIZONS_S[0],
        "gpus": {
            "running": int(held.sum()),
            "free": free,
            "unusable": int((exists & ~usable).sum()),
            "total": int(exists.sum()),
        },
        "queued_gpus": sum(attempt.gpus for attempt in tick.queued),
        "queued_jobs": len(tick.queued),
        "at_risk": int(flags.sum()),
        "nodes": nodes,
        **header,
    }
