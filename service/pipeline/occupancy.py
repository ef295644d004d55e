"""The occupancy of GPUs as arrays. It is observed from job events, never assumed from decisions.

If the events and the snapshots are lost, the occupancy comes from the last board. If the board is also
missing, nothing may be placed.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.events import Submitted
from fleetcast.fleet.held_gpus import count_held_milli, count_unnamed_gpus, find_rank_share, find_submitted_share
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.placements import RunningPlaces
from fleetcast.fleet.requests import MAX_COUNT, WHOLE_GPU, RankPlacement
from fleetcast.fleet.topology import Topology
from fleetcast.service.answers.jobs import RunningJobRow
from fleetcast.service.board.board import Board

NOTHING_GIVEN: Mapping[tuple[str, int], Sequence[RankPlacement]] = {}
UNKNOWN = (
    "what runs is not known: the snapshots, a part of the inbox and the board are lost, so GPUs that look free may be "
    "in use; stop, put the state folder back from a backup and start, or accept it with `fleetcast state accept` once "
    "nothing runs that no source reports again"
)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """The attempts that hold the GPUs of a fleet.

    holder: (n, g) int32 index into `jobs` of the attempt that holds a GPU, -1 if free.
    parts: (k, 4) int32 job, node, GPU, thousandths, for GPUs that jobs hold only in part. The first
    such job is the holder of the GPU.
    sizes: index into `jobs` → GPUs held, for attempts that hold another number of GPUs than their events
    state. This happens if the events name no GPUs, GPUs that the node lacks, one GPU for several members, or
    GPUs that a later attempt names. Every count of such an attempt's GPUs uses this number.
    guessed_on: rows of the nodes on which telemetry decided which GPUs an attempt holds.
    displaced: indices into `jobs` of the attempts that hold fewer GPUs than they state, because other
    attempts hold their GPUs.
    """

    holder: NDArray[np.int32]
    jobs: tuple[str, ...]
    node_jobs: dict[int, list[str]]
    used_cpus: NDArray[np.float64]  # (n,)
    used_host_memory_gib: NDArray[np.float64]  # (n,)
    parts: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 4), np.int32))
    sizes: Mapping[int, int] = field(default_factory=dict)
    guessed_on: Sequence[int] = ()
    displaced: frozenset[int] = frozenset()


def compute_occupancy(
    running: Sequence[JobAttempt],
    topology: Topology,
    index: dict[str, int],
    at_work: NDArray[np.bool_] | None = None,
    given: Mapping[tuple[str, int], Sequence[RankPlacement]] = NOTHING_GIVEN,
) -> Occupancy:
    """Assign the GPUs of the topology to the running attempts. `index`: node name → row.

    Some attempts name nodes but no GPUs, or GPUs that the node lacks, because launchers number GPUs in their
    own way. They get GPUs that no attempt names, first those that telemetry shows `at_work`, (n, g) bool.
    `_count_unnamed_gpus` decides how many. A part of a GPU shares the fullest GPU that has room for it.

    `given`: the GPUs that our placer gave to attempts that name wrong GPUs or none. These attempts hold the
    given GPUs.
    """
    stated = _collect_stated_gpus(running, topology, index, given)
    folded = _Holders(running, topology, stated)
    for number, row, milli, gpus in stated.unnamed:
        works = np.zeros(folded.holder.shape[1], bool) if at_work is None else at_work[row]
        if milli < WHOLE_GPU:
            folded.guess_shared_gpus(number, row, milli, gpus, works)
        else:
            folded.guess_whole_gpus(number, row, gpus, works)
    return Occupancy(
        folded.holder,
        tuple(attempt.job for attempt in running),
        *_sum_host_use(running, topology, index),
        np.array(folded.parts, np.int32).reshape(-1, 4),
        _find_size_changes(running, folded.holder, {number for number, *_ in folded.parts}, topology),
        sorted({row for _, row, _, _ in stated.unnamed}),
        frozenset(folded.displaced),
    )


@dataclass(frozen=True, slots=True)
class _StatedGpus:
    """The GPUs that events and promises state. A number is the index of an attempt.

    named: (row, GPU, number) of whole GPUs. The last attempt that names a GPU holds it.
    parts: (number, row, GPU, thousandths).
    unnamed: (number, row, thousandths, GPUs), GPUs without indices. Their indices are guessed after all named
    GPUs are assigned. If GPUs is 0, their number is guessed, too.
    """

    named: list[tuple[int, int, int]] = field(default_factory=list)
    parts: list[tuple[int, int, int, int]] = field(default_factory=list)
    unnamed: list[tuple[int, int, int, int]] = field(default_factory=list)


def _collect_stated_gpus(
    running: Sequence[JobAttempt],
    topology: Topology,
    index: Mapping[str, int],
    given: Mapping[tuple[str, int], Sequence[RankPlacement]],
) -> _StatedGpus:
    found, counts = _StatedGpus(), topology.gpus.tolist()
    for number, attempt in enumerate(running):
        places = [(rank.node, rank.gpus, rank.gpu_share) for rank in _choose_ranks(attempt, given)]
        for node, gpus, share in places or [(node, (), msgspec.UNSET) for node in attempt.nodes]:
            row = index.get(node, -1)
            if row < 0:
                continue
            milli = share or find_submitted_share(attempt)
            known = [gpu for gpu in gpus if 0 <= gpu < counts[row]]
            if len(known) < len(gpus) or not gpus:
                found.unnamed.append((number, row, milli, len(gpus) - len(known)))
            if milli < WHOLE_GPU:
                found.parts.extend((number, row, gpu, milli) for gpu in known)
            else:
                found.named.extend((row, gpu, number) for gpu in known)
    return found


def _sum_host_use(
    running: Sequence[JobAttempt], topology: Topology, index: Mapping[str, int]
) -> tuple[dict[int, list[str]], NDArray[np.float64], NDArray[np.float64]]:
    """Return row → jobs on this node, and the CPUs and the GiB of host memory that they use: (n,) each."""
    jobs: dict[int, list[str]] = {}
    cpus, memory_gib = np.zeros(len(topology)), np.zeros(len(topology))
    for attempt in running:
        for node in attempt.hosts:
            if (row := index.get(node, -1)) >= 0:
                jobs.setdefault(row, []).append(attempt.job)
                if attempt.submission:
                    cpus[row] += attempt.submission.cpus or 0
                    memory_gib[row] += attempt.submission.host_memory_gib or 0
    return jobs, cpus, memory_gib


class _Holders:
    """The holders of GPUs while they are assigned. Stated GPUs come first, then guesses for the others."""

    def __init__(self, running: Sequence[JobAttempt], topology: Topology, stated: _StatedGpus) -> None:
        self.running, self.names, self.counts = running, topology.names, topology.gpus.tolist()
        self.holder = np.full((len(topology), max(1, int(topology.gpus.max(initial=1)))), -1, np.int32)
        if stated.named:
            rows, columns, numbers = zip(*stated.named, strict=True)
            self.holder[list(rows), list(columns)] = numbers
        self.displaced = {number for row, gpu, number in stated.named if self.holder[row, gpu] != number}
        self.displaced |= {number for number, row, gpu, _ in stated.parts if self.holder[row, gpu] >= 0}
        self.parts: list[tuple[int, int, int, int]] = []
        self.used: dict[int, dict[int, int]] = {}  # row -> GPU -> thousandths of it that jobs hold
        for part in [part for part in stated.parts if self.holder[part[1], part[2]] < 0]:
            self._record_part(*part)

    def guess_shared_gpus(self, number: int, row: int, milli: int, gpus: int, works: NDArray[np.bool_]) -> None:
        """Assign parts of a node's GPUs to an attempt. The GPUs must have room for these parts.

        milli: the part in thousandths of a GPU. works: (g,) bool, each GPU is busy.
        """
        for _ in range(gpus or count_unnamed_gpus(self.running[number], self.names[row])):
            gpu = _find_gpu_with_room(self.holder[row], self.used.get(row, {}), milli, self.counts[row], works)
            if gpu >= 0:
                self._record_part(number, row, gpu, milli)
            else:
                self.displaced.add(number)

    def guess_whole_gpus(self, number: int, row: int, gpus: int, works: NDArray[np.bool_]) -> None:
        """Assign free GPUs of a node to an attempt. works: (g,) bool, each GPU is busy."""
        free = _sort_free_gpus(self.holder[row], self.counts[row], works)
        wanted = gpus or _count_unnamed_gpus(self.running[number], works[free])
        self.holder[row, free[:wanted]] = number
        if len(free) < min(wanted, self.counts[row]):
            self.displaced.add(number)

    def _record_part(self, number: int, row: int, gpu: int, milli: int) -> None:
        """Record a part of a GPU. The first attempt that shares a GPU becomes its holder."""
        self.parts.append((number, row, gpu, milli))
        of_node = self.used.setdefault(row, {})
        of_node[gpu] = of_node.get(gpu, 0) + milli
        if self.holder[row, gpu] < 0:
            self.holder[row, gpu] = number


class OccupancyCache:
    """A cache of the last occupancy. It stays valid until one of its inputs changes."""

    def __init__(self) -> None:
        self._found: Occupancy | None = None
        self._of: tuple[RunningPlaces, Topology, Mapping[tuple[str, int], Sequence[RankPlacement]]] | None = None
        self._works = np.zeros((0, 0), bool)  # (k, g) of the nodes in `guessed_on`

    def find_freed_gpus(self, running: Container[str]) -> NDArray[np.bool_] | None:
        """Return the GPUs that were held at the last tick by jobs that no longer run: (n, g) bool.

        Returns None if all these jobs still run.
        """
        jobs = self._found.jobs if self._found is not None else ()
        over = [number for number, job in enumerate(jobs) if job not in running]
        return np.isin(self._found.holder, over) if self._found is not None and over else None

    def get_occupancy(
        self,
        running: Sequence[JobAttempt],
        placements: RunningPlaces,
        topology: Topology,
        index: dict[str, int],
        at_work: NDArray[np.bool_],
        given: Mapping[tuple[str, int], Sequence[RankPlacement]],
    ) -> Occupancy:
        """Return the result of `compute_occupancy`, from the cache if no argument has changed.

        placements: the placements of `running`.
        """
        found, of = self._found, self._of
        if (
            found is None
            or of is None
            or of[0] is not placements
            or of[1] is not topology
            or of[2] != given
            or not np.array_equal(at_work[list(found.guessed_on)], self._works)
        ):
            found = self._found = compute_occupancy(running, topology, index, at_work, given)
            self._of, self._works = (placements, topology, given), at_work[list(found.guessed_on)]
        return found


def count_milli_by_node(seen: Occupancy, running: Sequence[JobAttempt], topology: Topology) -> list[dict[str, int]]:
    """Return, for each running attempt, node → thousandths of GPUs that it holds there.

    For nodes with a known number of GPUs, they come from the occupancy, so that jobs add up to the GPUs in
    use. For other nodes, they come from the attempt's events.
    """
    counts = dict(zip(topology.names, topology.gpus.tolist(), strict=True))
    found: list[dict[str, int]] = []
    for attempt in running:
        stated = count_held_milli(attempt, counts)
        found.append({node: 0 if counts.get(node) else milli for node, milli in stated.items()})
    whole = seen.holder.copy()
    whole[seen.parts[:, 1], seen.parts[:, 2]] = -1
    rows, columns = np.nonzero(whole >= 0)
    held = zip(whole[rows, columns].tolist(), rows.tolist(), repeat(WHOLE_GPU))
    parts = ((number, row, milli) for number, row, _, milli in seen.parts.tolist())
    for number, row, milli in chain(held, parts):
        node = topology.names[row]
        found[number][node] = found[number].get(node, 0) + milli
    return found


def _choose_ranks(
    attempt: JobAttempt, given: Mapping[tuple[str, int], Sequence[RankPlacement]]
) -> Sequence[RankPlacement]:
    """Return the ranks that our placer gave an attempt, if it runs on exactly their nodes.

    Otherwise, return the ranks that its events name.
    """
    ranks = given.get((attempt.job, attempt.attempt), ())
    return ranks if ranks and {rank.node for rank in ranks} == set(attempt.hosts) else attempt.ranks


def names_wrong_gpus(attempt: JobAttempt, node_gpus: Mapping[str, int]) -> bool:
    """Return whether an attempt's events name no GPUs, or name GPUs that a node of the fleet lacks."""
    return not attempt.ranks or any(
        not rank.gpus or max(rank.gpus) >= node_gpus.get(rank.node, MAX_COUNT) for rank in attempt.ranks
    )


def _find_size_changes(
    running: Sequence[JobAttempt], holder: NDArray[np.int32], sharing: set[int], topology: Topology
) -> dict[int, int]:
    """Return number → GPUs held, for attempts that hold another number of GPUs than their events state.

    sharing: numbers of attempts that hold parts of GPUs. These attempts are left out, and so are attempts on
    nodes whose number of GPUs is unknown. For both, the number in the events counts.
    """
    counts = np.bincount(holder[holder >= 0], minlength=len(running)).tolist()
    known = {node.name for node in topology.nodes if node.gpus}
    return {
        number: counts[number]
        for number, row in enumerate(running)
        if counts[number] != row.gpus
        and number not in sharing
        and row.hosts
        and known.issuperset(row.hosts)
        and all(find_rank_share(row, rank) == WHOLE_GPU for rank in row.ranks)
    }


def _find_gpu_with_room(
    holder: NDArray[np.int32], used: Mapping[int, int], milli: int, gpus: int, works: NDArray[np.bool_]
) -> int:
    """Return the fullest shared GPU of a node that has room for a part. Without one, return a free GPU, or -1."""
    with_room = [gpu for gpu, total in used.items() if total + milli <= WHOLE_GPU]
    if with_room:
        return max(with_room, key=lambda gpu: (used[gpu], -gpu))
    free = np.flatnonzero(holder[:gpus] < 0)
    return int(free[np.argmin(~works[free])]) if len(free) else -1


def _sort_free_gpus(row: NDArray[np.int32], gpus: int, works: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Return the indices of the free GPUs of a node, the busy ones first."""
    free = np.flatnonzero(row[:gpus] < 0)
    return free[np.argsort(~works[free], kind="stable")]


def _count_unnamed_gpus(attempt: JobAttempt, works: NDArray[np.bool_]) -> int:
    """Return how many GPUs of a node to assign to an attempt whose events name none.

    works: (GPU,) bool, each GPU that no attempt names is busy.
    """
    if attempt.source == "sdk":  # it says nothing of how many
        return max(1, int(np.count_nonzero(works)))
    return attempt.submission.gpus_per_node if attempt.submission else len(works)


decode_running = msgspec.json.Decoder(list[RunningJobRow]).decode


def read_running_attempts(board: Board) -> list[JobAttempt] | None:
    """Return the attempts that ran when a board was made. Returns None if the board does not list them.

    They have sequence 0, so any event is newer.
    """
    try:
        if not board.json("meta").get("occupancy_known", True):
            return None
        holder, nodes = board.array("gpu.job"), board.names("names.node")
        rows = decode_running(board.raw("jobs.running"))
        parts = read_gpu_parts(board)
    except KeyError:
        return None
    attempts = []
    for number, row in enumerate(rows):
        held: dict[int, list[int]] = {}
        mine = holder == number
        mine[parts[:, 1], parts[:, 2]] = False
        for node, gpu in np.argwhere(mine).tolist():
            held.setdefault(node, []).append(gpu)
        places = [(nodes[node], tuple(gpus), WHOLE_GPU) for node, gpus in held.items()]
        places += [(nodes[node], (gpu,), milli) for job, node, gpu, milli in parts.tolist() if job == number]
        attempts.append(_make_board_attempt(row, places))
    return attempts


def read_gpu_parts(board: Board) -> NDArray[np.int32]:
    """Return the parts of GPUs, as `Occupancy.parts`: (k, 4) int32. Empty on a board of an older version."""
    return board.array("gpu.parts") if "gpu.parts" in board else np.zeros((0, 4), np.int32)


def _make_board_attempt(row: RunningJobRow, places: Sequence[tuple[str, tuple[int, ...], int]]) -> JobAttempt:
    job, number, started_ms = row.job, row.attempt, row.started_ms
    submitted = Submitted(
        job=job, attempt=number, sequence=0, time_ms=started_ms or 0, queue=row.queue, limit_s=row.limit_s
    )
    ranks = tuple(
        RankPlacement(rank, node, gpus, milli if milli < WHOLE_GPU else msgspec.UNSET)
        for rank, (node, gpus, milli) in enumerate(places)
    )
    return JobAttempt(job, number, submission=submitted, started_ms=started_ms, ranks=ranks)
