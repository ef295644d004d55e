"""PlacementRequest and Decision: the public contract of placement.

All times are in ms, durations in s, ratios 0..1.
"""

from collections.abc import Collection
from typing import Literal

import msgspec

from fleetcast.fleet.entities import MAX_NAME_LENGTH
from fleetcast.fleet.errors import RequestError
from fleetcast.fleet.node_names import explain_node_name_fault, is_node_name
from fleetcast.fleet.topology import Level

WHOLE_GPU = 1000  # thousandths
_LEVELS: dict[str | None, Level | None] = {None: None, "": None} | {level.value: level for level in Level}

LevelName = Literal["node", "nvlink_domain", "rack", "rail_group", "block", "cluster"]
Outcome = Literal["placed", "refused", "queued"]


class Gang(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The number of members that start together: at least `min`, at best `desired`, in steps of `step`."""

    min: int
    desired: int
    step: int = 1


class TopologyConstraint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A constraint on a placement's topology.

    `required` is a hard constraint. `preferred` is widened level by level if it cannot be met.
    """

    required: LevelName | None = None
    preferred: LevelName | None = None


class RankPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """The place of one gang member: a node, and the indices of its GPUs on the node.

    gpu_share: thousandths of its one GPU. Absent if the member has whole GPUs.
    """

    rank: int
    node: str
    gpus: tuple[int, ...] = ()
    gpu_share: int | msgspec.UnsetType = msgspec.UNSET

    @property
    def milli(self) -> int:
        """The part that the member holds of each of its GPUs, in thousandths."""
        return self.gpu_share or WHOLE_GPU


class PlacementRequest(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, cache_hash=True
):
    """A request for GPUs. `gang` counts members, and each gets `gpus_per_node` GPUs on one node.

    Two members may share a node unless `spread` is set. gpu_share: the thousandths of its one GPU that a
    member gets. With 0 GPUs, a member gets only CPUs or host memory. gpu_models: the acceptable models,
    each in the form of `gpu_model`. preemptible: whether its owner allows that the running job is stopped.
    None means that the owner has not said, and then the queue decides.
    """

    request_id: str
    job: str = ""
    attempt: int = 1
    cluster: str = ""
    tenant: str = ""
    queue: str = "default"
    user: str = ""
    class_: Literal["training", "fine_tuning", "inference", "batch", "interactive"] = msgspec.field(
        default="training", name="class"
    )
    priority: int = 0
    preemptible: bool | None = None
    gang: Gang | int = 1
    gpus_per_node: int = 1
    gpu_model: str = ""
    gpu_memory_gib: float | None = None
    gpu_models: tuple[str, ...] = ()
    pool: str = ""
    gpu_share: int | None = None
    mig_profile: str | None = None
    cpus: int | None = None
    host_memory_gib: float | None = None
    nvme_gib: float | None = None
    host_offload: bool = False
    topology: TopologyConstraint = TopologyConstraint()
    spread: bool = False
    limit_s: float | None = None
    deadline_ms: int | None = None
    tolerated_wait_s: float | None = None
    max_risk: float | None = None
    power_w: float | None = None
    checkpoint_cost_s: float | None = None
    avoid_nodes: tuple[str, ...] = ()
    dry_run: bool = False

    @property
    def job_name(self) -> str:
        return self.job or self.request_id

    @property
    def members(self) -> Gang:
        """The gang with all its fields. A gang given as a number n means exactly n members."""
        return self.gang if isinstance(self.gang, Gang) else Gang(self.gang, self.gang)

    @property
    def milli(self) -> int:
        """The part that a member gets of each of its GPUs, in thousandths."""
        return self.gpu_share or WHOLE_GPU

    @property
    def models(self) -> tuple[str, ...]:
        """The names of acceptable GPU models, in lower case. Empty means any model."""
        return tuple(name.casefold() for name in (self.gpu_models or (self.gpu_model,)) if name)

    @property
    def required(self) -> Level | None:
        return _LEVELS[self.topology.required]

    @property
    def preferred(self) -> Level | None:
        return _LEVELS[self.topology.preferred]


class RunnerUp(msgspec.Struct, frozen=True):
    """A possible placement that was not chosen, with its score."""

    nodes: tuple[str, ...]
    score: float
    parts: dict[str, float]


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a PlacementRequest. Always, `nodes == candidates + sum(rejected.values())`.

    `candidates` can host at least one member. `rejected` counts the other nodes by their first reason.
    If there was no room for a whole gang, `sentence` says so. `ignored`: facts of the request that
    changed nothing (`list_ignored_facts`).
    """

    request_id: str
    decision_id: str
    outcome: Outcome
    sentence: str
    ranks: tuple[RankPlacement, ...] = ()
    score: float = 0.0
    parts: dict[str, float] = {}
    nodes: int = 0
    candidates: int = 0
    rejected: dict[str, int] = {}
    runners_up: tuple[RunnerUp, ...] = ()
    topology_level: str = ""
    generation: int = 0
    board_as_of_ms: int = 0
    models: dict[str, str] = {}
    expires_ms: int = 0
    ignored: tuple[str, ...] = ()


MAX_MEMBERS = 1_000_000
MAX_GPUS_PER_NODE = 1024
MAX_AVOIDED = 100_000
MAX_MODELS = 100
MAX_COUNT = 2**53  # what every JSON reader and the ledger can hold exactly
LEAST_AMOUNT = 1e-6  # of seconds and GiB: a microsecond, a kilobyte; less is a mistake, and quotients must stay finite
MAX_AMOUNT = 1e12  # of seconds, GiB, CPUs: more is a mistake, and sums must stay finite
NOT_HONOURED_YET = (
    "mig_profile",
    "nvme_gib",
    "power_w",
    "deadline_ms",
    "tolerated_wait_s",
)
HONOURED_BY_QUEUES = ("class", "deadline_ms", "queue", "tenant", "tolerated_wait_s")  # where a file of queues serves
HONOURED_BY_RECLAIM = ("checkpoint_cost_s", "preemptible")  # where running jobs may be stopped
FACTS_WITHOUT_EFFECT = ("checkpoint_cost_s", "class", "preemptible", "queue", "tenant")
_NAMES = tuple(field.name for field in msgspec.structs.fields(PlacementRequest) if field.type is str)
_FIELDS = {field.encode_name: field for field in msgspec.structs.fields(PlacementRequest)}
_DEFAULTS = tuple((key, _FIELDS[key].name, _FIELDS[key].default) for key in FACTS_WITHOUT_EFFECT)


def check_request(request: PlacementRequest, with_queues: bool = True) -> None:
    """Check a request beyond its types. Raises RequestError with the field if it is invalid.

    Demands that are NOT_HONOURED_YET are refused as well.
    """
    for name in NOT_HONOURED_YET:
        if getattr(request, name) is not None and name not in HONOURED_BY_QUEUES:
            raise RequestError(f"{name} is not honoured yet; leave it out", name)
        if getattr(request, name) is not None and not with_queues:
            raise RequestError(f"{name} is honoured by queues, and [placer] names no file of them; leave it out", name)
    _check_times(request)
    if not request.request_id:
        raise RequestError(f"request_id must have 1 to {MAX_NAME_LENGTH} characters", "request_id")
    for name in _NAMES:
        _check_text(name, getattr(request, name))
    if not 0 <= request.attempt <= MAX_COUNT:
        raise RequestError(f"attempt is {_format_value(request.attempt)}, it must lie in 0..{MAX_COUNT}", "attempt")
    if abs(request.priority) > MAX_COUNT:
        raise RequestError(f"priority is {_format_value(request.priority)}, at most {MAX_COUNT} either way", "priority")
    _check_gang(request)
    _check_gpus(request)
    if len(request.avoid_nodes) > MAX_AVOIDED:
        raise RequestError(f"avoid_nodes holds {len(request.avoid_nodes)}, at most {MAX_AVOIDED}", "avoid_nodes")
    if request.max_risk is not None and not 0 <= request.max_risk <= 1:
        raise RequestError(f"max_risk is {request.max_risk}, it must lie in 0..1", "max_risk")
    for name in ("gpu_memory_gib", "cpus", "host_memory_gib", "limit_s"):
        value = getattr(request, name)
        if value is not None and not LEAST_AMOUNT <= value <= MAX_AMOUNT:
            limits = f"greater than 0, at least {LEAST_AMOUNT:.0e} and at most {MAX_AMOUNT:.0e}"
            raise RequestError(f"{name} is {_format_value(value)}, it must be {limits}", name)
    if request.checkpoint_cost_s is not None and not 0 <= request.checkpoint_cost_s <= MAX_AMOUNT:
        cost = _format_value(request.checkpoint_cost_s)
        raise RequestError(f"checkpoint_cost_s is {cost}, it must lie in 0..{MAX_AMOUNT:.0e}", "checkpoint_cost_s")


def _check_times(request: PlacementRequest) -> None:
    deadline_ms, wait_s = request.deadline_ms, request.tolerated_wait_s
    if deadline_ms is not None and not 0 < deadline_ms <= MAX_COUNT:
        raise RequestError(f"deadline_ms is {_format_value(deadline_ms)}, it must lie in 1..{MAX_COUNT}", "deadline_ms")
    if wait_s is not None and not 0 <= wait_s <= MAX_AMOUNT:
        raise RequestError(f"tolerated_wait_s is {wait_s}, it must lie in 0..{MAX_AMOUNT:.0e}", "tolerated_wait_s")


def check_avoided_nodes(request: PlacementRequest) -> None:
    """Check the node names in `avoid_nodes` of a client's request. Raises RequestError if one is invalid."""
    bad = next((name for name in request.avoid_nodes if not is_node_name(name)), None)
    if bad is not None:
        raise RequestError(f"avoid_nodes: {explain_node_name_fault(bad)}", "avoid_nodes")


def list_ignored_facts(request: PlacementRequest, used: Collection[str] = ()) -> tuple[str, ...]:
    """Return the JSON keys of stated facts that no decision uses yet, sorted.

    `used`: keys that the answer did use. A default value does not count as stated, even if it is written
    out. This is because the ledger treats both requests as the same.
    """
    stated = [key for key, name, default in _DEFAULTS if getattr(request, name) != default]
    return tuple([key for key in stated if key not in used]) if stated else ()


def _check_text(name: str, text: str) -> None:
    """Check the length and characters of a name. Raises RequestError.

    Names become lines and labels elsewhere. Job events refuse unprintable names, so a job with such a name
    could never be observed.
    """
    if len(text) > MAX_NAME_LENGTH:
        raise RequestError(f"{name} must have at most {MAX_NAME_LENGTH} characters, it has {len(text)}", name)
    if not text.isprintable():
        raise RequestError(f"{name} is {_format_value(text)}: it has characters that cannot be printed", name)


def _format_value(value: object) -> str:
    """Format a value for a message, and cut it if it is long.

    Python refuses to format numbers of thousands of digits.
    """
    huge = isinstance(value, int) and value.bit_length() > 1000
    text = "a number of hundreds of digits" if huge else repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _check_gang(request: PlacementRequest) -> None:
    gang = request.members
    if gang.min < 1:
        field = "gang.min" if isinstance(request.gang, Gang) else "gang"
        raise RequestError(f"{field} is {_format_value(gang.min)}, a gang has at least one member", field)
    if gang.desired < gang.min:
        sizes = f"{_format_value(gang.desired)}, less than gang.min, {_format_value(gang.min)}"
        raise RequestError(f"gang.desired is {sizes}", "gang.desired")
    if gang.desired > MAX_MEMBERS:
        raise RequestError(f"the gang has {_format_value(gang.desired)} members, at most {MAX_MEMBERS}", "gang")
    if not 1 <= gang.step <= MAX_MEMBERS:
        raise RequestError(f"gang.step is {_format_value(gang.step)}, it must lie in 1..{MAX_MEMBERS}", "gang.step")


def _check_gpus(request: PlacementRequest) -> None:
    """Check the number of GPUs, the part of a GPU, and the models of a request. Raises RequestError."""
    each, share = request.gpus_per_node, request.gpu_share
    if not 0 <= each <= MAX_GPUS_PER_NODE:
        raise RequestError(
            f"gpus_per_node is {_format_value(each)}, it must lie in 0..{MAX_GPUS_PER_NODE}", "gpus_per_node"
        )
    if share is not None and not 1 <= share <= WHOLE_GPU:
        meant = f"it counts thousandths of one GPU and must lie in 1..{WHOLE_GPU}"
        raise RequestError(f"gpu_share is {_format_value(share)}, {meant}", "gpu_share")
    if share is not None and each != 1:
        raise RequestError(f"gpu_share is a part of one GPU, gpus_per_node is {each}: leave one out", "gpu_share")
    if request.gpu_model and request.gpu_models:
        raise RequestError("gpu_model and gpu_models are both given: name all models in gpu_models", "gpu_models")
    if len(request.gpu_models) > MAX_MODELS:
        raise RequestError(f"gpu_models holds {len(request.gpu_models)}, at most {MAX_MODELS}", "gpu_models")
    for name in request.gpu_models:
        _check_text("gpu_models", name)
        if not name:
            raise RequestError("gpu_models holds an empty name: leave it out", "gpu_models")
    if each:
        return
    if request.cpus is None and request.host_memory_gib is None:
        raise RequestError("gpus_per_node is 0: say what else it needs, cpus or host_memory_gib", "gpus_per_node")
    for name in ("gpu_model", "gpu_models", "gpu_memory_gib"):
        if getattr(request, name):
            raise RequestError(f"gpus_per_node is 0, so leave out {name}", name)
