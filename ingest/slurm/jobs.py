"""The common form of a Slurm job, and its conversion into events. Attempt = restarts + 1.

squeue, sacct, slurmrestd and the plugins all give a `SlurmJob`. Equal facts have the same identity
(`fleetcast.ingest.lifecycle`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from fleetcast.fleet.errors import ConfigError, RecordError
from fleetcast.fleet.events import Failed, Finished, JobClass, JobEvent, Preempted, Queued, Resized, Started, Submitted
from fleetcast.fleet.node_names import is_node_name
from fleetcast.fleet.requests import WHOLE_GPU, RankPlacement
from fleetcast.ingest.inbox.job_events import MAX_GANG, MAX_QUEUES, decode_event
from fleetcast.ingest.lifecycle import ENDED, EXPLAINED, QUEUED, RESIZED, STARTED, SUBMITTED
from fleetcast.ingest.node_names import expand_nodes
from fleetcast.ingest.preemptible import find_in_comment, make_unread_label, parse_preemptible
from fleetcast.ingest.slurm.failures import ENDED as ENDED_STATES
from fleetcast.ingest.slurm.failures import UNEXPLAINED, classify_end
from fleetcast.ingest.slurm.fields import WaitingTasks, clean_name, parse_model_name
from fleetcast.ingest.slurm.gres import MAX_GPUS, MPS_OF_A_GPU, HeldShards, find_mig_profile, strip_mig_profile
from fleetcast.ingest.slurm.reasons import is_blocked

HOLDS = frozenset(
    {"RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING"}
)
WAITS = frozenset(
    {"PENDING", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "EXPEDITING", "POWER_UP_NODE"}
)
NO_NODES = ("", "(null)", "None assigned", "None", "N/A")
MESSAGE_LENGTH = 1000
REST = "_rest"  # ends the name of the tasks of an array that have no name of their own yet
MAX_LISTS, MAX_LIST_LENGTH = 8192, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """The known facts of one attempt of a Slurm job. Unknown counts are 0, and unknown times are None.

    states: the base state, then flags. gpus: the number on all nodes. milli: the size of `of_gpus` of them in
    thousandths of a GPU, less for MIG instances. indices: the numbers of its GPUs, a row for each node. shares:
    the number of parts of the kind `unit` (shard or mps) on all nodes. parts: its shards of each GPU, a row for
    each node. attempt: None if restarts are unknown. tasks: 0 for an array whose tasks have all started.
    """

    id: str
    states: tuple[str, ...]
    attempt: int | None = None
    submit_ms: int | None = None
    start_ms: int | None = None
    end_ms: int | None = None
    resize_ms: int | None = None
    nodes: tuple[str, ...] = ()
    node_count: int = 0
    tasks: int = 1
    is_cut: bool = False  # Slurm left tasks of its array out
    gpus: int = 0
    gpus_per_node: int = 0
    gpu_kind: str = ""
    milli: int = 0
    of_gpus: int = 0
    indices: tuple[tuple[int, ...], ...] = ()
    shares: int = 0
    shares_per_node: int = 0
    unit: str = ""
    parts: tuple[tuple[HeldShards, ...], ...] = ()
    user: str = ""
    group: str = ""
    account: str = ""
    partition: str = ""
    qos: str = ""
    name: str = ""
    cluster: str = ""
    priority: int | None = None
    limit_s: float | None = None
    cpus: int | None = None
    memory_gib: float | None = None
    reason: str = ""
    comment: str = ""
    status: tuple[int, int] = (0, 0)
    failed_node: str = ""

    @property
    def has_gpus(self) -> bool:
        """Return whether the job holds or requests GPUs or parts of them."""
        return bool(self.gpus or self.gpus_per_node or any(self.indices) or self.shares or self.shares_per_node)

    @property
    def end_state(self) -> str:
        """The state in which the job ended, or "" while it holds nodes or waits."""
        first = self.states[0] if self.states and "COMPLETING" not in self.states else ""
        return first if first in ENDED_STATES else ""

    @property
    def has_known_state(self) -> bool:
        """True if one of the job's states is known."""
        return any(state in HOLDS or state in WAITS or state in ENDED_STATES for state in self.states)

    @property
    def holds_nodes(self) -> bool:
        """Return whether the job holds nodes now.

        A job in an unknown state holds the nodes that the queue lists for it.
        """
        if not self.has_known_state:
            return bool(self.nodes)
        return not self.end_state and any(state in HOLDS for state in self.states)


@dataclass(frozen=True, slots=True)
class Site:
    """The facts that convert a site's names and numbers into ours.

    classes: partition or QOS → class. preemptible: partitions, QOS and accounts whose jobs may be stopped.
    shares_of_gpu: unit → number of parts of one GPU, read from the site's nodes. numbered_gpus: node → number
    of GPUs that job records can refer to by number. It is 0 if their numbers count MIG instances.
    """

    prefix: str = ""
    cluster: str = ""
    classes: dict[str, JobClass] = field(default_factory=dict)
    preemptible: frozenset[str] = frozenset()
    cpu_jobs: bool = False
    shares_of_gpu: Mapping[str, int] = field(default_factory=dict)
    numbered_gpus: Mapping[str, int] = field(default_factory=dict)


SITE = Site()


def make_job_events(job: SlurmJob, site: Site) -> list[JobEvent]:
    """Return all events that a record implies, in order.

    Raises RecordError `no_job_id`, `no_state` or `no_time`.
    """
    if not job.id:
        raise RecordError("no_job_id", repr(job.name[:80]))
    if not job.states:
        raise RecordError("no_state", f"job {job.id}")
    return list(_make_events(job, site))


def encode_checked_event(event: JobEvent, now_ms: int) -> bytes:
    """Return an event as JSON. Raises RecordError if the event API would refuse it.

    For example, the API refuses a time ahead of the clock.
    """
    raw = msgspec.json.encode(event)
    decode_event(raw, now_ms)
    return raw


def _make_events(job: SlurmJob, site: Site) -> Iterator[JobEvent]:
    name, attempt = site.prefix + job.id, job.attempt or 1
    began = job.start_ms is not None and bool(job.nodes) and (job.holds_nodes or bool(job.end_state))
    if job.submit_ms is not None:
        yield _make_submitted_event(job, site)
        if not began and not job.end_state:
            blocked = is_blocked(job.reason, job.states, is_held=job.priority == 0)
            yield Queued(
                job=name,
                attempt=attempt,
                sequence=QUEUED,
                time_ms=job.submit_ms,
                reason=job.reason[:MESSAGE_LENGTH] or ("JobHeldUser" if blocked else ""),
                blocked=blocked,
            )
    if began and job.start_ms is not None:
        ranks, nodes = _make_placements(job, site)
        yield Started(job=name, attempt=attempt, sequence=STARTED, time_ms=job.start_ms, ranks=ranks, nodes=nodes)
        if job.resize_ms is not None and job.resize_ms > job.start_ms:
            since = min((job.resize_ms - job.start_ms) // 1000, ENDED - RESIZED - 1)
            yield Resized(
                job=name, attempt=attempt, sequence=RESIZED + since, time_ms=job.resize_ms, ranks=ranks, nodes=nodes
            )
    if job.end_state:
        yield _make_end_event(job, name)


def _make_submitted_event(job: SlurmJob, site: Site) -> Submitted:
    gang, per_node, share = find_size(job, site)
    profile, model = find_mig_profile(job.gpu_kind), strip_mig_profile(job.gpu_kind)
    partitions = tuple(dict.fromkeys(filter(None, map(clean_name, job.partition.split(",")))))[:MAX_QUEUES]
    places = {*partitions, job.qos, job.account}
    classes = [site.classes[place] for place in (job.qos, *partitions, job.account) if place in site.classes]
    labels = {"qos": clean_name(job.qos)} if clean_name(job.qos) else {}
    labels |= {"mig": profile} if profile else {}
    word = find_in_comment(job.comment)
    labels |= make_unread_label(word)
    said = parse_preemptible(word)
    return Submitted(
        job=site.prefix + job.id,
        attempt=job.attempt or 1,
        sequence=SUBMITTED,
        time_ms=job.submit_ms or 0,
        cluster=clean_name(site.cluster or job.cluster),
        tenant=clean_name(job.account),
        queue=partitions[0] if partitions else "",
        queues=partitions if len(partitions) > 1 else (),
        user=clean_name(job.user),
        group=clean_name(job.group),
        name=clean_name(job.name),
        tasks=job.tasks,
        class_=classes[0] if classes else "training",
        gang=gang,
        gpus_per_node=per_node,
        gpu_model=clean_name(parse_model_name(model)) if model else "",
        gpu_share=share,
        priority=job.priority or 0,
        preemptible=True if said is None and places & site.preemptible else said,
        limit_s=job.limit_s,
        cpus=-(-job.cpus // gang) if job.cpus else None,
        host_memory_gib=round(job.memory_gib / gang, 3) if job.memory_gib else None,
        labels=labels,
    )


class AskedSize(NamedTuple):
    """The number of a job's members, one for each node, and their GPUs.

    gpus_per_node: the number of GPUs of each member. share: the size of each of these GPUs in thousandths, or
    None for whole GPUs.
    """

    gang: int
    gpus_per_node: int
    share: int | None = None


def find_size(job: SlurmJob, site: Site = SITE) -> AskedSize:
    """Return the size that a job holds. If it holds none, return the size that it requests."""
    gang = min(max(1, len(job.nodes) or job.node_count), MAX_GANG)
    total = sum(map(len, job.indices)) or job.gpus
    per_node = min(max(0, -(-total // gang) if total else job.gpus_per_node), MAX_GPUS)
    if not per_node and (job.shares or job.shares_per_node):
        return _find_shared_size(job, gang, site)
    milli = round(job.milli / job.of_gpus) if job.of_gpus else WHOLE_GPU
    return AskedSize(gang, per_node, milli if 0 < milli < WHOLE_GPU else None)


def _find_shared_size(job: SlurmJob, gang: int, site: Site) -> AskedSize:
    """Return the size of a job that holds or requests shards. Shards of an unknown size count as one GPU."""
    shares = -(-job.shares // gang) if job.shares else job.shares_per_node
    size = next((part.size for row in job.parts for part in row), 0) or site.shares_of_gpu.get(job.unit, 0)
    size = size or (MPS_OF_A_GPU if job.unit == "mps" else 0)
    if not size:
        return AskedSize(gang, 1)
    gpus = min(-(-shares // size), MAX_GPUS)
    milli = max(1, round(WHOLE_GPU * shares / size / gpus))
    return AskedSize(gang, gpus, milli if milli < WHOLE_GPU else None)


def _make_placements(job: SlurmJob, site: Site) -> tuple[tuple[RankPlacement, ...], tuple[str, ...]]:
    """Return (ranks with their GPUs, ()) if the job's record numbers its GPUs, otherwise ((), its nodes)."""
    if len(job.parts) == len(job.nodes) and all(job.parts):
        held = [(node, part) for node, row in zip(job.nodes, job.parts, strict=True) for part in row]
        return tuple(
            RankPlacement(at, node, (part.gpu,), _compute_milli(part)) for at, (node, part) in enumerate(held)
        ), ()
    if len(job.indices) != len(job.nodes) or not all(job.indices):
        return (), job.nodes
    pairs = list(zip(job.nodes, job.indices, strict=True))
    if any(max(held) >= site.numbered_gpus.get(node, MAX_GPUS) for node, held in pairs):
        return (), job.nodes  # the numbers count something else there, as MIG instances
    return tuple(RankPlacement(rank, node, held) for rank, (node, held) in enumerate(pairs)), ()


def _compute_milli(part: HeldShards) -> int:
    return max(1, round(WHOLE_GPU * part.held / part.size))


def _make_end_event(job: SlurmJob, name: str) -> JobEvent:
    attempt = job.attempt or 1
    time_ms = job.end_ms if job.end_ms is not None else job.start_ms if job.start_ms is not None else job.submit_ms
    if time_ms is None:
        raise RecordError("no_time", f"job {job.id} is {job.end_state} and has no time")
    if job.end_state == "COMPLETED":
        return Finished(job=name, attempt=attempt, sequence=ENDED, time_ms=time_ms)
    words = [job.end_state, *(part for part in (job.reason, job.comment) if clean_name(part))]
    said = "; ".join(words)[:MESSAGE_LENGTH]
    if job.end_state == "PREEMPTED":
        return Preempted(job=name, attempt=attempt, sequence=ENDED, time_ms=time_ms, reason=said)
    code, signal = job.status
    said += f" (exit {code}, signal {signal})" if code or signal else ""
    why = classify_end(job.end_state, job.reason, job.comment, job.status)
    return Failed(
        job=name,
        attempt=attempt,
        sequence=ENDED if why in UNEXPLAINED else EXPLAINED,
        time_ms=time_ms,
        category=why,
        node=job.failed_node if is_node_name(job.failed_node) else "",
        message=said,
    )


def make_rest_finished_event(name: str, time_ms: int) -> Finished:
    """Return a `finished` event for the record that represented an array's further tasks.

    All of these tasks now have their own names or no longer exist.
    """
    return Finished(job=name, sequence=ENDED, time_ms=time_ms)


def make_unexplained_end(name: str, attempt: int, time_ms: int) -> Failed:
    """Return a `failed` event for an attempt whose end no record states.

    At that time, Slurm knows only a later attempt of the job, or no attempt.
    """
    said = "Slurm holds it no more, and its accounting does not say how it ended"
    return Failed(job=name, attempt=attempt, sequence=ENDED, time_ms=time_ms, category="unknown", message=said)


_lists: dict[str, tuple[str, ...]] = {}  # short ones, by text: polls repeat themselves


def expand_node_list(text: str) -> tuple[str, ...]:
    """Return the node names in a list such as `n[1-4],m7`. Raises RecordError `bad_nodes`."""
    if (known := _lists.get(text)) is not None:
        return known
    if text.strip() in NO_NODES:
        return ()
    try:
        names = tuple(expand_nodes(text.strip()))
    except ConfigError as error:
        raise RecordError("bad_nodes", str(error)[:200]) from None
    if len(names) <= MAX_LIST_LENGTH:
        if len(_lists) >= MAX_LISTS:
            _lists.clear()
        _lists[text] = names
    return names


def format_job_id(number: int | str, array: tuple[int, int | None], het: tuple[int, int]) -> str:
    """Return the id of a job as Slurm prints it. array: (array's job, task). het: (first job, offset).

    >>> format_job_id(12, (5, 7), (0, 0)), format_job_id(12, (0, None), (9, 1)), format_job_id(12, (0, None), (0, 0))
    ('5_7', '9+1', '12')
    """
    if array[0] and array[1] is not None:
        return f"{array[0]}_{array[1]}"
    return f"{het[0]}+{het[1]}" if het[0] else str(number)


def split_array(job: SlurmJob, array: int, waiting: WaitingTasks) -> list[SlurmJob]:
    """Return one record for each waiting task of an array, and one for all further tasks.

    Slurm stores the waiting tasks as one record. If no task can be read, the array itself is returned as one record
    that is marked as cut. If all tasks have started, each has a record of its own. The array's record, which has no
    nodes, then counts no task.
    """
    if not waiting.named:
        tasks = 1 if waiting.is_cut or job.nodes else 0
        return [replace(job, id=str(array), is_cut=waiting.is_cut, tasks=tasks)]
    named = [replace(job, id=f"{array}_{task}") for task in waiting.named]
    if waiting.is_cut:
        named[-1] = replace(named[-1], is_cut=True)
    further = waiting.count - len(named)
    return [*named, replace(job, id=f"{array}{REST}", tasks=further)] if further else named
