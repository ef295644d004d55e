"""Job and node events: the public contract of `POST /v1/events`, as a tagged union.

A job event's identity is (job, attempt, sequence), a node event's (node, source, sequence). Times are Unix ms. The
decoder refuses unknown keys, so a typo never loses a field.
"""

from typing import Literal

import msgspec

from fleetcast.fleet.requests import Gang, PlacementRequest, RankPlacement

JobClass = Literal["training", "fine_tuning", "inference", "batch", "interactive"]
PhaseName = Literal["init", "loading", "warmup", "steady", "evaluation", "checkpoint", "cooldown"]
FailureCategory = Literal[
    "user", "out_of_memory", "hardware", "network", "timeout", "node_lost", "cancelled", "unknown"
]


class _JobEvent(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    tag_field="type",
):
    job: str
    attempt: int = 1
    sequence: int
    time_ms: int


class Submitted(_JobEvent, frozen=True, kw_only=True, tag="submitted"):
    """The submission of an attempt, and what it requests. The event with the highest sequence counts.

    `queues`: all queues in which it may start, if several. It waits in each of them, and `queue` is the
    first. Once it runs, a later event names its queue. `tasks`: how many similar attempts wait under
    this name. The tasks of a big array, for instance, may have no names of their own yet. `preemptible`:
    as in a placement request, None if the owner has not said.
    """

    cluster: str = ""
    tenant: str = ""
    queue: str = ""
    queues: tuple[str, ...] = ()
    user: str = ""
    group: str = ""
    name: str = ""
    tasks: int = 1
    class_: JobClass = msgspec.field(default="training", name="class")
    gang: Gang | int = 1
    gpus_per_node: int = 1
    gpu_model: str = ""
    gpu_models: tuple[str, ...] = ()
    gpu_share: int | None = None
    pool: str = ""
    priority: int = 0
    preemptible: bool | None = None
    limit_s: float | None = None
    deadline_ms: int | None = None
    tolerated_wait_s: float | None = None
    cpus: int | None = None
    host_memory_gib: float | None = None
    checkpoint_cost_s: float | None = None
    labels: dict[str, str] = {}


ASKED_FIELDS = tuple(
    name
    for name in Submitted.__struct_fields__
    if name in PlacementRequest.__struct_fields__ and name not in _JobEvent.__struct_fields__
)
"""Fields of what a job asks for: a submission and a placement request have them under the same names and types."""


class Queued(_JobEvent, frozen=True, kw_only=True, tag="queued"):
    """The wait of an attempt, and its reason. The event with the highest sequence counts.

    `blocked`: the attempt may not start even if GPUs are free. For instance, it is held, suspended,
    gated, waits for another job or requests something that no node has. `reason` says which. Until a
    later `queued` event says `blocked: false`, the attempt is no demand, does not compete with others and
    has no start time. It counts as waiting from the time of that event.
    """

    reason: str = ""
    blocked: bool = False


class Started(_JobEvent, frozen=True, kw_only=True, tag="started"):
    """The start of an attempt. `ranks` names its GPUs. `nodes` is used only if ranks are unknown."""

    ranks: tuple[RankPlacement, ...] = ()
    nodes: tuple[str, ...] = ()


class Phase(_JobEvent, frozen=True, kw_only=True, tag="phase"):
    """The beginning of a phase of a job or rank.

    node, gpus: where the rank runs, if no other source reports it.
    """

    name: PhaseName
    rank: int | None = None
    node: str = ""
    gpus: tuple[int, ...] = ()


class StepParts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The seconds of a step by activity."""

    compute: float = 0.0
    communication: float = 0.0
    data: float = 0.0
    other: float = 0.0


class Step(_JobEvent, frozen=True, kw_only=True, tag="step"):
    """A finished step of a job or rank. node, gpus: as in a phase."""

    step: int
    duration_s: float
    rank: int | None = None
    stage: int | None = None
    parts: StepParts | None = None
    tokens: int | None = None
    sequence_length: float | None = None
    node: str = ""
    gpus: tuple[int, ...] = ()


class Checkpoint(_JobEvent, frozen=True, kw_only=True, tag="checkpoint"):
    edge: Literal["begin", "end"]
    bytes: int | None = None
    target: str = ""


class Resized(_JobEvent, frozen=True, kw_only=True, tag="resized"):
    ranks: tuple[RankPlacement, ...] = ()
    nodes: tuple[str, ...] = ()


class Preempted(_JobEvent, frozen=True, kw_only=True, tag="preempted"):
    by: str = ""
    reason: str = ""


class Failed(_JobEvent, frozen=True, kw_only=True, tag="failed"):
    category: FailureCategory
    node: str = ""
    message: str = ""


class Finished(_JobEvent, frozen=True, kw_only=True, tag="finished"):
    pass


class NodeLost(_JobEvent, frozen=True, kw_only=True, tag="node_lost"):
    node: str
    reason: str = ""


JobEvent = Submitted | Queued | Started | Phase | Step | Checkpoint | Resized | Preempted | Failed | Finished | NodeLost


class NodeEvent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A report about a node by an administrator, a health checker or a kernel log reader.

    For "health" and "xid" events, `severity` fatal asks for a drain and warning for caution. Severity
    ok withdraws the reports of the same `check` and `device`. By default the severity of an XID is that
    of its code, and health is a warning. `device`: a PCI address, board UUID, port or switch. `advice`:
    what the reporter recommends. `probability`: the probability of a predicted failure.

    "withhold" and "release" only say that a scheduler reserves a healthy node for other purposes: it is
    no candidate, and has no fault. `check` is the reason: maintenance, reserved, planned, reboot,
    powered_down, not_responding, to_be_deleted or a word of the reporter's own. A release ends its own
    check. Without a check it ends all checks of its source.
    """

    node: str
    source: str
    sequence: int
    time_ms: int
    type: Literal["drain", "undrain", "lost", "returned", "xid", "health", "withhold", "release"]
    gpu: int | None = None
    code: int | str | None = None
    message: str = ""
    check: str = ""
    severity: Literal["ok", "warning", "fatal"] | None = None
    device: str = ""
    advice: str = ""
    probability: float | None = None

    @property
    def condition(self) -> str:
        """The subject of the event. A later event of the same source with the same subject replaces it."""
        where = self.device or ("" if self.gpu is None else str(self.gpu))
        return f"{self.source}|{self.type}|{self.check}|{self.code}|{where}"

    def withdraws(self, other: "NodeEvent") -> bool:
        """Return whether this event withdraws what `other` reported.

        If it names no device or code, it withdraws the reports for all of them.
        """
        if self.severity != "ok" or (self.source, self.check) != (other.source, other.check):
            return False
        same_code = self.code is None or self.code == other.code
        same_device = not self.device or self.device == other.device
        same_gpu = self.gpu is None or self.gpu == other.gpu or bool(self.device)
        return same_code and same_device and same_gpu and self.time_ms >= other.time_ms


type_names = tuple(event.__struct_config__.tag for event in JobEvent.__args__)
