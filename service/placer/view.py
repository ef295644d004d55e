"""The placer's view of the fleet: a board, plus promised GPUs whose jobs have not been seen running."""

import logging
import math
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.errors import RequestError
from fleetcast.fleet.nodes import NodeState
from fleetcast.fleet.requests import PlacementRequest, check_request
from fleetcast.fleet.topology import DOMAIN_LEVELS, Level, NodeSpec, Topology
from fleetcast.models.risk.rules import ACTIONS
from fleetcast.models.risk.scores import RISK_HORIZONS_S, RISK_KINDS
from fleetcast.placement.ledger.ledger import Intent, IntentState, QueueEntry
from fleetcast.placement.machines.running_jobs import RunningJobs, make_running_jobs
from fleetcast.placement.machines.slots import HeldParts, convert_to_milli, subtract_held_parts
from fleetcast.placement.machines.view import Advice, ClusterView, Inventory, RiskByTime
from fleetcast.placement.plan.queue import WaitingEntry
from fleetcast.placement.plan.timeline import Hold, RunTimeQuantiles, add_placements
from fleetcast.service.board.board import Board
from fleetcast.service.board.free import find_unattributed_gpus, find_windowed_nodes, read_hearing
from fleetcast.service.board.urgent import AWAY, find_struck_nodes, forbids_placement
from fleetcast.service.config import PlacerConfig
from fleetcast.service.pipeline.occupancy import read_gpu_parts
from fleetcast.service.placer.running_jobs import read_finished_attempts, read_running_table

RISK_HORIZON_S = 3600
logger = logging.getLogger(__name__)
ADVICE_OF = {"none": Advice.NONE, "watch": Advice.NONE, "avoid": Advice.AVOID}  # others: to be drained
ADVICE = np.array([ADVICE_OF.get(code, Advice.DRAIN) for code in ACTIONS], np.int8)  # by index into ACTIONS


@dataclass(frozen=True, slots=True)
class ObservedFleet:
    """The decoded contents of a board: the fleet according to job events.

    jobs: the running jobs of the board, without promises, in the order of the view's first jobs. running: these
    jobs and the promises, for estimates of when they end. seen: running attempts. finished: attempts that ended
    with all work done. astray: running attempts whose events name no node, or a node outside the fleet. The
    occupancy lacks astray attempts.
    """

    view: ClusterView
    jobs: RunningJobs
    running: RunningJobs
    run_times: RunTimeQuantiles
    seen: frozenset[tuple[str, int]]
    ended: frozenset[tuple[str, int]]
    finished: frozenset[tuple[str, int]]
    astray: frozenset[tuple[str, int]] = frozenset()
    unknown: str = ""  # why nobody knows what runs; empty where it is known

    def find_holder(self, job: str) -> int:
        """Return the index of a job in the view, or -1 if the view lacks it. If two attempts run, the later one counts.

        A promise counts only if no attempt runs.
        """
        row = self.jobs.row.get(job)
        if row is not None:
            return row
        return self.view.jobs.index(job) if job in self.view.jobs else -1


class ViewDecoder:
    """A decoder of boards for the placer. It uses the settings in `placer`.

    It decodes the topology again only if the board has a new one.
    """

    def __init__(self, placer: PlacerConfig | None = None) -> None:
        self._placer = placer or PlacerConfig()
        self._key: tuple[Any, ...] = ()
        self._topology = Topology.build([])
        self._inventory = Inventory.from_topology(self._topology)
        self._is_of_fleet: list[bool] = []

    def decode_board(self, board: Board) -> ObservedFleet:
        """Decode a board. Raises KeyError if it lacks a section, as the very first board may."""
        meta = board.json("meta")
        self._refresh_topology(board, int(meta["generation"]))
        occupancy, rows = board.json("occupancy"), board.json("jobs.running")
        jobs = read_running_table(board)
        return ObservedFleet(
            view=self._make_view(board, meta),
            jobs=jobs,
            running=_fill_unknown_starts(jobs, board.as_of_ms),
            run_times=RunTimeQuantiles.from_durations(board.json("durations")),
            seen=frozenset((job, attempt) for job, attempt in occupancy["running"]),
            ended=frozenset((job, attempt) for job, attempt, _ in occupancy["ended"]),
            finished=read_finished_attempts(board),
            astray=frozenset((row["job"], row["attempt"]) for row in rows if self._has_unknown_node(row)),
            unknown=meta.get("occupancy_unknown", ""),
        )

    def _has_unknown_node(self, row: Mapping[str, Any]) -> bool:
        """Return whether a running job names no node, or a node outside the fleet.

        A node is outside the fleet if it has neither a place in the topology nor GPUs.
        """
        held, index = row.get("held"), self._inventory.row
        if held is None:  # a board of an earlier version
            return False
        at = [index.get(node, -1) for node in held]
        return not at or any(node < 0 or not self._is_of_fleet[node] for node in at)

    def try_decode_board(self, board: Board) -> ObservedFleet | None:
        """Decode a board, or return None if it lacks a section, as the very first board may."""
        try:
            return self.decode_board(board)
        except KeyError as error:
            logger.info("the board is not complete yet (%s), waiting for the next one", error)
            return None

    def _refresh_topology(self, board: Board, generation: int) -> None:
        key = (generation, board.meta("names.node")["as_of_ms"], board.meta("names.node")["nbytes"])
        if key != self._key:
            self._topology = decode_topology(board, generation)
            self._inventory = Inventory.from_topology(self._topology)
            self._is_of_fleet = (self._topology.placed | (self._topology.gpus > 0)).tolist()
            self._key = key

    def _make_view(self, board: Board, meta: dict[str, Any]) -> ClusterView:
        n = len(self._topology)
        usable = _fit_rows(board.array("gpu.usable"), n, False)
        holders = _fit_rows(board.array("gpu.job"), n, -1)
        parts = _decode_parts(board, holders.shape)
        in_use = find_unattributed_gpus(board, self._placer)
        if in_use is not None:
            in_use = _fit_rows(in_use, n, False) & usable & (holders < 0)
            usable &= ~in_use
        by_time = _fit_rows(board.array("node.risk").transpose(2, 0, 1), n, np.nan)  # (n, kind, horizon)
        state = _fit_rows(board.array("node.state"), n, NodeState.DRAINED)
        rows = self._inventory.row
        reason = {rows[name]: text for name, text in board.json("risk.reason").items() if name in rows}
        for name, signals in find_struck_nodes(board).items():
            row = rows.get(name, -1)
            for signal in filter(forbids_placement, signals) if row >= 0 else ():
                if signal.type in AWAY:
                    state[row] = NodeState.DRAINED
                else:
                    by_time[row, RISK_KINDS.index("fail")] = 1.0
                reason[row] = signal.sentence
        fail, slow = (by_time[:, RISK_KINDS.index(kind)].T for kind in ("fail", "slow"))
        heat = board.array("node.gpu_temp_c") if "node.gpu_temp_c" in board else np.zeros(0)
        advice = ADVICE[board.array("node.action")] if "node.action" in board else np.zeros(0, np.int8)
        hour = RISK_HORIZONS_S.index(RISK_HORIZON_S)
        return ClusterView(
            topology=self._topology,
            milli=subtract_held_parts(convert_to_milli(usable & (holders < 0)), usable, parts),
            parts=parts,
            usable=usable,
            state=state,
            p_fail=fail[hour],
            p_slow=slow[hour],
            risk=RiskByTime(RISK_HORIZONS_S, fail, slow, _fit_rows(heat.astype(np.float64), n, np.nan)),
            usual_run_s=RunTimeQuantiles.from_durations(board.json("durations")).find_median_run_s(),
            reason=reason,
            holders=holders,
            jobs=board.names("names.job"),
            free_cpus=_fit_rows(board.array("node.free_cpus"), n, np.nan).astype(np.float64),
            free_host_memory_gib=_fit_rows(board.array("node.free_host_memory_gib"), n, np.nan).astype(np.float64),
            risk_horizon_s=RISK_HORIZON_S,
            as_of_ms=board.as_of_ms,
            generation=self._topology.generation,
            models=tuple((name, str(model)) for name, model in meta["models"].items()),
            unknown_use=in_use,
            hearing=read_hearing(board, n, self._placer),
            withheld=find_windowed_nodes(board, n),
            inventory=self._inventory,
            advice=_fit_rows(advice, n, Advice.NONE),
        )


def _decode_parts(board: Board, shape: tuple[int, ...]) -> HeldParts:
    """Decode the parts of GPUs that jobs hold.

    Nodes and GPUs that the view lacks are left out. shape: (nodes, GPUs of a node).
    """
    job, row, gpu, milli = read_gpu_parts(board).astype(np.int64).T
    known = (row < shape[0]) & (gpu < shape[1])
    return HeldParts(job[known], (row * shape[1] + gpu)[known], milli[known])


def _fill_unknown_starts(jobs: RunningJobs, as_of_ms: int) -> RunningJobs:
    """Return the table in which jobs of unknown start have started at the time of the board."""
    unknown = (jobs.started_ms < 0) & (jobs.gpus > 0)
    filled = replace(jobs, started_ms=np.where(unknown, as_of_ms, jobs.started_ms))
    _ = filled.runs  # computed now, in the thread that decodes
    return filled


def read_waiting_jobs(board: Board, known: Collection[str]) -> list[WaitingEntry]:
    """Return the jobs that wait according to events, except those in `known`.

    Each job has its latest valid attempt. Clients cannot use the request ids of these entries.
    """
    if "jobs.queued" not in board:
        return []
    found: dict[str, WaitingEntry] = {}
    for row in msgspec.json.decode(board.raw("jobs.queued"), type=list[_QueuedRow]):
        try:
            request = msgspec.convert(row.request, PlacementRequest)
            check_request(request)
        except (RequestError, msgspec.ValidationError):
            continue
        name = request.job_name
        if name not in known and (name not in found or found[name].request.attempt < request.attempt):
            mine = msgspec.structs.replace(request, request_id=f"\n{name}", job=name)
            found[name] = WaitingEntry(mine, row.submitted_ms)
    return list(found.values())


def merge_waiting_jobs(board: Board | None, own: Sequence[QueueEntry], promised: Sequence[str]) -> list[WaitingEntry]:
    """Return all waiting entries, each once: our own queue, then waiting jobs of other schedulers.

    promised: jobs with promised GPUs. They do not wait.
    """
    found = [WaitingEntry(entry.request, entry.queued_ms) for entry in own]
    known = {*promised, *(entry.request.job_name for entry in found)}
    return found if board is None else [*found, *read_waiting_jobs(board, known)]


class _QueuedRow(msgspec.Struct):
    """A row of the board section `jobs.queued`."""

    submitted_ms: int
    request: dict[str, Any]


def _fit_rows(array: NDArray[Any], n: int, fill: Any) -> NDArray[Any]:
    """Return a copy of `array` with exactly n rows. Missing rows get the value `fill`.

    A section may be one topology generation older than the rest.
    """
    if len(array) >= n:
        return array[:n].copy()
    missing = np.full((n - len(array), *array.shape[1:]), fill, array.dtype)
    return np.concatenate([array, missing])


def decode_topology(board: Board, generation: int) -> Topology:
    """Decode the topology from the sections of a board."""
    names: dict[Level, tuple[str, ...]] = {level: board.names(f"names.{level}") for level in DOMAIN_LEVELS}
    domain: dict[Level, NDArray[np.int32]] = {
        level: board.array(f"node.domain.{level}").copy() for level in DOMAIN_LEVELS
    }
    models, pools = board.names("names.gpu_model"), board.names("names.pool")
    columns = [
        np.nan_to_num(board.array(f"node.{name}"), nan=0).tolist()
        for name in ("gpus", "gpu_model", "gpu_memory_gib", "cpus", "host_memory_gib", "pool")
    ]
    powers = (*(board.names("names.power") if "names.power" in board else ()), "")  # the last is of -1
    power = board.array("node.domain.power").tolist() if len(powers) > 1 else [-1] * len(columns[0])
    lists: dict[Level, list[int]] = {level: domain[level].tolist() for level in DOMAIN_LEVELS}
    specs = [
        NodeSpec(
            name=name,
            gpus=gpus,
            gpu_model=models[model] if model >= 0 else "",
            gpu_memory_gib=memory,
            cpus=cpus,
            host_memory_gib=host,
            pool=pools[pool] if 0 <= pool < len(pools) else "default",
            domains=_list_domains(row, lists, names),
            power_domain=powers[power[row]],
        )
        for row, (name, gpus, model, memory, cpus, host, pool) in enumerate(
            zip(board.names("names.node"), *columns, strict=True)
        )
    ]
    return Topology(
        nodes=tuple(specs),
        placed=board.array("node.placed").copy(),
        gpus=board.array("node.gpus").copy(),
        domain=domain,
        domain_names=names,
        generation=generation,
    )


def _list_domains(row: int, lists: dict[Level, list[int]], names: dict[Level, tuple[str, ...]]) -> dict[Level, str]:
    return {level: names[level][index] for level in DOMAIN_LEVELS if (index := lists[level][row]) >= 0}


def add_intents(observed: ObservedFleet, intents: Sequence[Intent]) -> ObservedFleet:
    """Return the observed fleet with the promised GPUs added.

    intents: the promises whose jobs have not been seen running.
    """
    if not intents:
        return observed
    holds = [Hold(intent.job, intent.ranks, intent.cpus, intent.host_memory_gib) for intent in intents]
    promised = make_running_jobs(
        (intent.job for intent in intents),
        attempt=[intent.attempt for intent in intents],
        gpus=[intent.gpus for intent in intents],
        started_ms=[intent.created_ms for intent in intents],
        limit_s=[math.nan if intent.limit_s is None else intent.limit_s for intent in intents],
    )
    running = observed.running.append_rows(promised)
    return replace(observed, view=add_placements(observed.view, holds), running=running)


def find_finished_intents(
    intents: Sequence[Intent], observed: ObservedFleet, expired: Container[str]
) -> list[tuple[str, IntentState]]:
    """Return the request ids of intents that no longer hold GPUs, each with its new state.

    An intent ends when its attempt was seen running, has ended, or has not started in time (`expired`). If
    the attempt is astray, the intent holds the GPUs until the attempt ends. The attempt may run on these
    GPUs under an unknown node name.
    """
    rows = []
    for intent in intents:
        key = (intent.job, intent.attempt)
        if key in observed.ended:
            rows.append((intent.request_id, IntentState.ENDED))
        elif key in observed.astray:
            continue
        elif key in observed.seen:
            rows.append((intent.request_id, IntentState.SEEN))
        elif intent.request_id in expired:
            rows.append((intent.request_id, IntentState.EXPIRED))
    return rows
