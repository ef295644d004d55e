"""The results of one tick as board sections.

`make_topology_sections` and `make_score_sections` list the sections that readers may rely on.
"""

from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from fleetcast.features.run_past import LEVELS
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.topology import DOMAIN_LEVELS, Level, Topology
from fleetcast.models.risk.rules import ACTIONS
from fleetcast.models.risk.scores import RISK_HORIZONS_S
from fleetcast.models.run_times.remaining import condition_on_survival
from fleetcast.service import listening
from fleetcast.service.answers.fleet import FleetAnswer, FleetGpu, FleetNode, GpuCounts
from fleetcast.service.answers.jobs import (
    JobRow,
    KnownAttempts,
    QueuedJob,
    QueuedRequest,
    RunningJobRow,
)
from fleetcast.service.answers.risk import NodeAnswer, NodeReason
from fleetcast.service.board.board import Section, encode_names
from fleetcast.service.board.gpu_use import Occupant
from fleetcast.service.pipeline import documents
from fleetcast.service.pipeline.documents import make_host_answers
from fleetcast.service.pipeline.gpu_states import compute_gpu_states
from fleetcast.service.pipeline.running_rows import make_ended_row, make_running_row
from fleetcast.service.pipeline.tick import Tick

encode = msgspec.json.Encoder().encode
AnyJobRow = TypeVar("AnyJobRow", JobRow, RunningJobRow)


def find_highest_gpu_temperature(tick: Tick) -> NDArray[np.float32]:
    """Return the temperature of each node's hottest GPU: (n,) float32, NaN if unknown."""
    hottest: NDArray[np.float64] = np.fmax.reduce(tick.read_gpu_feature("gpu_temp_c"), axis=1, initial=np.nan)
    return hottest.astype(np.float32)


def make_topology_sections(topology: Topology, as_of_ms: int) -> list[Section]:
    """Return the sections that change only with a new generation of the topology."""
    models = sorted({node.gpu_model for node in topology.nodes if node.gpu_model})
    pools = sorted({node.pool for node in topology.nodes})
    codes = {name: code for code, name in enumerate(models)}
    pool_codes = {name: code for code, name in enumerate(pools)}
    arrays: dict[str, NDArray[Any] | bytes] = {
        "names.node": encode_names(topology.names),
        "names.gpu_model": encode_names(models),
        "names.pool": encode_names(pools),
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
    arrays["names.power"] = encode_names(powers)
    arrays["node.domain.power"] = np.array(
        [power_codes.get(node.power_domain, -1) for node in topology.nodes], np.int32
    )
    for level in DOMAIN_LEVELS:
        arrays[f"names.{level}"] = encode_names(topology.domain_names[level])
        arrays[f"node.domain.{level}"] = topology.domain[level]
    return [Section(name, data, as_of_ms) for name, data in arrays.items()]


def make_score_sections(tick: Tick) -> list[Section]:
    """Return the sections of risk, occupancy and jobs, and the prebuilt answers of one tick."""
    risk, topology, events = tick.fleet.risk, tick.topology, tick.events
    free_cpus, free_memory = _compute_free_host_resources(tick)
    running_names = tick.memory.get_or_make(
        "running names", (events.placements,), lambda: _list_attempt_names(events.running)
    )
    data: dict[str, NDArray[Any] | bytes] = {
        "node.state": tick.node_state,
        "node.hearing": tick.hearing,
        "node.kept": tick.withheld_nodes.use,
        "kept": encode(tick.withheld_nodes.words),
        "node.flagged": tick.flagged,
        "node.action": _index_actions(tick),
        "node.risk": risk.values,
        "node.gpu_temp_c": find_highest_gpu_temperature(tick),
        "risk.reason": encode(_find_first_reasons(tick)),
        "gpu.usable": tick.usable,
        "gpu.job": tick.occupancy.holder,
        "gpu.parts": tick.occupancy.parts,
        "gpu.unknown_use": tick.unknown_use,
        "names.job": encode_names(tick.occupancy.jobs),
        "gpu.use": tick.gpu_use,
        "gpu.promise": tick.promise,
        "promises": encode([request.request.request_id for request in tick.open.requests]),
        "names.live": encode_names(
            [*running_names, *_list_attempt_names(events.queued), *_list_attempt_names(events.blocked)]
        ),
        "names.ended": encode_names(_list_attempt_names(events.ended)),
        "node.free_cpus": free_cpus,
        "node.free_host_memory_gib": free_memory,
        listening.SECTION: encode(tick.listening),
        "occupancy": encode(_make_known_attempts(tick)),
        "durations": encode(events.durations),
        "jobs.running": encode(_encode_running_rows(tick)),
        "jobs.running.left_s": _compute_remaining_s(tick),
        "jobs.ended": encode([make_ended_row(attempt, tick.node_gpus) for attempt in events.ended]),
        "jobs.queued": encode(
            [make_queued_job(attempt) for attempt in events.queued if attempt.submission is not None]
        ),
        **make_pieces_sections("answers.node", encode_node_answers(tick)),
        **make_pieces_sections("answers.risk", documents.encode_ranking_rows(risk, topology, tick.states)),
        "doc.stragglers": encode(tick.fleet.stragglers),
        "doc.jobs": encode(make_job_rows(tick)),
        "doc.job": encode(encode_job_details(tick)),
    }
    return [Section(name, part, tick.now_ms, risk.model) for name, part in data.items()]


def make_pieces_sections(name: str, parts: Sequence[bytes]) -> dict[str, NDArray[Any] | bytes]:
    """Return two sections: the joined JSON pieces as `name`, and their offsets as `name.offsets`.

    The offsets are (n + 1,) int64. With them, a reader can read one piece without the others.
    """
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    return {name: b"".join(parts), f"{name}.offsets": offsets}


def encode_node_answers(tick: Tick) -> list[bytes]:
    """Encode the body of `GET /v1/nodes/{node}` for each node."""
    parts = []
    occupancy, topology, score = tick.occupancy, tick.topology, tick.fleet.risk
    gpus = documents.make_gpu_answers(
        tick.frames.gpu, tick.gpu_rows, topology.gpus, occupancy.holder, occupancy.jobs, tick.gpu_use
    )
    for row, at in np.argwhere(tick.gpu_use == Occupant.PROMISE).tolist():
        gpus[row][at].request = tick.open.requests[tick.promise[row, at]].request.request_id
    risk = documents.encode_risk_rows(score)
    racks, placed = documents.list_node_domains(topology, Level.RACK), topology.placed.tolist()
    hosts = make_host_answers(tick.frames.node, len(topology))
    for row, node in enumerate(topology.nodes):
        parts.append(
            encode(
                NodeAnswer(
                    node=node.name,
                    as_of_ms=tick.now_ms,
                    state=tick.states[row],
                    placed=placed[row],
                    withheld=tick.withheld_nodes.words.get(node.name),
                    rack=racks[row],
                    gpu_model=node.gpu_model,
                    risk=risk[row],
                    reasons=cast(Sequence[NodeReason], score.reasons.get(row, ())),
                    action=score.actions.get(row, documents.NO_ACTION),
                    jobs=occupancy.node_jobs.get(row, ()),
                    gpus=gpus[row],
                    host=hosts[row],
                    model=score.model,
                )
            )
        )
    return parts


def _compute_free_host_resources(tick: Tick) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    cpus = np.array([node.cpus or np.nan for node in tick.topology.nodes]) - tick.occupancy.used_cpus
    memory = np.array([node.host_memory_gib or np.nan for node in tick.topology.nodes])
    return cpus.astype(np.float32), (memory - tick.occupancy.used_host_memory_gib).astype(np.float32)


def _index_actions(tick: Tick) -> NDArray[np.int8]:
    """Return the index of each node's action in ACTIONS: (n,) int8."""
    codes = np.zeros(len(tick.topology), np.int8)
    for row, action in tick.fleet.risk.actions.items():
        codes[row] = ACTIONS.index(action.code)
    return codes


def _find_first_reasons(tick: Tick) -> dict[str, str]:
    reasons = tick.fleet.risk.reasons
    return {tick.topology.nodes[row].name: of_node[0].sentence for row, of_node in reasons.items() if of_node}


def _make_known_attempts(tick: Tick) -> KnownAttempts:
    return KnownAttempts(
        position=tick.events.position,
        running=tick.events.placements.keys,
        ended=[(attempt.job, attempt.attempt, attempt.ended_ms) for attempt in tick.events.ended],
    )


def _list_attempt_names(attempts: Sequence[JobAttempt]) -> list[str]:
    """Return a name "ATTEMPT JOB" for each attempt. The api recognises attempts by these names."""
    return [f"{row.attempt} {row.job}" for row in attempts]


def _encode_running_rows(tick: Tick) -> list[msgspec.Raw]:
    """Encode the row of each running attempt.

    A row is encoded again only if the attempt or the GPUs that it holds have changed.
    """
    held = tick.memory.get_or_make("held of attempts", (tick.held_by_node,), lambda: _index_held_gpus(tick))
    differ: dict[tuple[str, int], object] = {key: object() for key in tick.sizes.keys() | tick.displaced}

    def render_row(attempt: JobAttempt) -> msgspec.Raw:
        key = attempt.job, attempt.attempt
        row = structs.replace(make_running_row(attempt, held[key]), displaced=key in tick.displaced)
        return msgspec.Raw(encode(_set_gpu_counts(tick, [row])[0]))

    rows: list[msgspec.Raw] = tick.memory.get_row_cache("running").get_rows(
        tick.events.running, render_row, beside={**held, **differ} if differ else held
    )
    return rows


def _index_held_gpus(tick: Tick) -> dict[tuple[str, int], dict[str, int]]:
    """Return attempt → the GPUs that it holds by node, the same object as before if they are the same."""
    held = dict(zip(tick.events.placements.keys, tick.held_by_node, strict=True))
    return tick.memory.share_equal_values("held of attempts", held)


def make_queued_job(attempt: JobAttempt) -> QueuedJob:
    """Convert a waiting job into a placement request, with the time since which it is eligible."""
    asks = {**structs.asdict(documents.read_asked_resources(attempt)), "request_id": attempt.job}
    request = QueuedRequest(
        **asks,
        attempt=attempt.attempt,
        queue=attempt.queue,
        class_=attempt.class_,
        user=attempt.submission.user if attempt.submission else "",
    )
    return QueuedJob(attempt.eligible_ms, request)


def _compute_remaining_s(tick: Tick) -> NDArray[np.float32]:
    """Return the remaining seconds of each running attempt: (running, LEVELS) float32, NaN without a forecast."""
    running, run_times = tick.events.running, tick.run_times
    found = np.full((len(running), len(LEVELS)), np.nan, np.float32)
    issued = [run_times.get((row.job, row.attempt)) for row in running] if run_times else []
    known = [(at, row, row.left_s) for at, row in enumerate(issued) if row is not None and row.left_s is not None]
    if known:
        since_s = [max(0.0, (tick.now_ms - row.left_ms) / 1000) for _, row, _ in known]
        age_s = [max(0.0, (tick.now_ms - (running[at].started_ms or tick.now_ms)) / 1000) for at, *_ in known]
        left_s = np.stack([row for *_, row in known]).astype(np.float64)
        found[[at for at, *_ in known]] = condition_on_survival(left_s, np.array(since_s), np.array(age_s))
    return found


def make_job_rows(tick: Tick) -> list[JobRow]:
    """Make the rows of running, promised, queued, blocked and recently ended attempts, in that order."""
    lately = tick.events.ended[-100:]
    slow = {job for job, score in tick.fleet.stragglers.items() if score.get("slow")}
    attempts = (*tick.events.running, *tick.open.promised, *tick.open.waiting, *tick.blocked, *lately)

    def make_row(attempt: JobAttempt) -> JobRow:
        return _set_gpu_counts(tick, [documents.make_job_row(attempt, tick.now_ms, {}, slow=False)])[0]

    rows: list[JobRow] = tick.memory.get_row_cache("jobs").get_rows(attempts, make_row, beside=tick.sizes)
    for row in rows:
        row.slow = row.job in slow
    places, now_ms = tick.events.placements, tick.now_ms
    issued = map(tick.run_times.get, places.keys) if tick.run_times else repeat(None)
    age_s = np.maximum(0.0, (now_ms - tick.running_columns.started_ms) / 1000)
    by_past_jobs = documents.estimate_all_by_past_jobs(places.gpus, age_s, tick.events.durations)
    for row, run_time, left_s in zip(rows, issued, by_past_jobs, strict=False):  # running attempts are the first rows
        row.remaining_s = (run_time and run_time.compute_remaining_time(now_ms)) or left_s
    return rows


def _set_gpu_counts(tick: Tick, rows: list[AnyJobRow]) -> list[AnyJobRow]:
    """Replace the number of GPUs in each row for which the occupancy and the events differ.

    The number of the occupancy wins. Returns the rows.
    """
    for row in rows:
        row.gpus = tick.sizes.get((row.job, row.attempt), row.gpus)
    return rows


def encode_job_details(tick: Tick) -> dict[str, msgspec.Raw]:
    """Return job → the encoded fields that `/v1/jobs/{id}` adds to the row of its latest attempt.

    They are the placement, the phase, and the last events.
    """
    events = tick.events
    rows = (*events.ended[-100:], *tick.open.requested, *events.blocked, *events.queued, *events.running)
    known = sorted(rows, key=attrgetter("attempt"))

    def render_detail(attempt: JobAttempt) -> msgspec.Raw:
        issued = tick.run_times.get((attempt.job, attempt.attempt))
        return msgspec.Raw(encode(documents.make_job_detail(attempt, issued)))

    details = tick.memory.get_row_cache("details").get_rows(known, render_detail, beside=tick.run_times)
    return {attempt.job: detail for attempt, detail in zip(known, details, strict=True)}


def make_fleet_document(tick: Tick) -> FleetAnswer:
    """Make the document of the console's start page: the header's numbers, and a row for each node."""
    worst = np.nan_to_num(tick.fleet.risk.values[:, 0, :], nan=-1.0).max(axis=0)
    domains = {
        level: documents.list_node_domains(tick.topology, level)
        for level in (Level.RACK, Level.RAIL_GROUP, Level.BLOCK)
    }
    jobs = tick.occupancy.jobs
    nodes = []
    for row, (holders, answers) in enumerate(zip(tick.occupancy.holder.tolist(), tick.usable.tolist(), strict=True)):
        reasons = tick.fleet.risk.reasons.get(row, ())
        count = int(tick.topology.gpus[row])
        nodes.append(
            FleetNode(
                node=tick.topology.nodes[row].name,
                rack=domains[Level.RACK][row],
                rail_group=domains[Level.RAIL_GROUP][row],
                block=domains[Level.BLOCK][row],
                state=tick.states[row],
                flagged=bool(tick.flagged[row]),
                placed=bool(tick.topology.placed[row]),
                p=documents.round_probability(float(worst[row])) if worst[row] >= 0 else None,
                reason=reasons[0].sentence if reasons else None,
                gpus=[
                    FleetGpu(jobs[holder] if holder >= 0 else None, answer)
                    for holder, answer in zip(holders[:count], answers[:count], strict=True)
                ],
                jobs=tick.occupancy.node_jobs.get(row, ()),
            )
        )
    for kind, name in documents.HELD_BY.items():
        for row, at in np.argwhere(tick.gpu_use == kind).tolist():
            nodes[row].gpus[at].held_by = name
    for row, at in np.argwhere(tick.gpu_use == Occupant.PROMISE).tolist():
        nodes[row].gpus[at].request = tick.open.requests[tick.promise[row, at]].request.request_id
    return FleetAnswer(
        as_of_ms=tick.now_ms,
        fleet_time_ms=tick.now_ms,
        horizon_s=RISK_HORIZONS_S[0],
        gpus=GpuCounts(
            total=int(tick.gpu_exists.sum()),
            unknown_use=int((tick.gpu_use == Occupant.UNKNOWN).sum()),
            **{state: int(mask.sum()) for state, mask in compute_gpu_states(tick).items()},
        ),
        queued_gpus=tick.queued_gpus,
        queued_jobs=sum(attempt.tasks for attempt in tick.open.waiting),
        at_risk=int(tick.flagged.sum()),
        nodes=nodes,
        name=tick.meta.fleet,
        speed=tick.meta.speed,
        samples_per_s=tick.ingestion.samples_per_s,
        newest_sample_ms=tick.ingestion.newest_sample_ms,
        no_telemetry=documents.describe_missing_telemetry(tick.ingestion),
        warming=tick.meta.warming,
        stale_after_s=tick.meta.stale_after_s,
    )
