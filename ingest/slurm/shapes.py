"""The structs of Slurm's JSON with the fields that are used, in the forms of both 22.05 and 24.11."""

import msgspec


class Amount(msgspec.Struct, frozen=True):
    """A number in the newer form of Slurm's JSON. If it is not set, or infinite, it counts as None."""

    set: bool = True
    infinite: bool = False
    number: float | None = None


Number = float | str | Amount | None
Words = str | list[str] | None


class SlurmSignal(msgspec.Struct, frozen=True):
    id: Number = None
    signal_id: Number = None


class Exit(msgspec.Struct, frozen=True):
    return_code: Number = None
    signal: SlurmSignal | None = None


class SlurmQueuedJob(msgspec.Struct, kw_only=True):
    """A job as slurmctld reports it."""

    job_id: int
    job_state: Words = None
    array_job_id: Number = None
    array_task_id: Number = None
    array_task_string: str | None = None
    het_job_id: Number = None
    het_job_offset: Number = None
    restart_cnt: Number = None
    submit_time: Number = None
    start_time: Number = None
    end_time: Number = None
    resize_time: Number = None
    nodes: str | None = None
    node_count: Number = None
    gres_detail: list[str] | None = None
    tres_req_str: str | None = None
    tres_alloc_str: str | None = None
    tres_per_node: str | None = None
    tres_per_job: str | None = None
    tres_per_task: str | None = None
    tasks: Number = None
    user_name: str | None = None
    group_name: str | None = None
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    name: str | None = None
    cluster: str | None = None
    priority: Number = None
    time_limit: Number = None
    cpus: Number = None
    state_reason: str | None = None
    state_description: str | None = None
    comment: str | None = None
    admin_comment: str | None = None
    system_comment: str | None = None
    exit_code: int | Exit | None = None
    failed_node: str | None = None


class Tres(msgspec.Struct, frozen=True):
    type: str = ""
    name: str | None = None
    count: int | None = None


class TresLists(msgspec.Struct, frozen=True):
    allocated: list[Tres] = []
    requested: list[Tres] = []


class Times(msgspec.Struct, frozen=True):
    submission: Number = None
    start: Number = None
    end: Number = None
    limit: Number = None


class SlurmState(msgspec.Struct, frozen=True):
    current: Words = None
    reason: str | None = None


class Pair(msgspec.Struct, frozen=True):
    job_id: Number = None
    task_id: Number = None
    task: str | None = None
    job_offset: Number = None


class Comments(msgspec.Struct, frozen=True):
    administrator: str | None = None
    job: str | None = None
    system: str | None = None


class Required(msgspec.Struct, frozen=True):
    cpus: Number = msgspec.field(default=None, name="CPUs")


class AccountedJob(msgspec.Struct, kw_only=True):
    """A job as slurmdbd reports it."""

    job_id: int
    state: SlurmState = SlurmState()
    array: Pair = Pair()
    het: Pair = Pair()
    restart_cnt: Number = None
    time: Times = Times()
    nodes: str | None = None
    allocation_nodes: Number = None
    tres: TresLists = TresLists()
    user: str | None = None
    group: str | None = None
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    name: str | None = None
    cluster: str | None = None
    priority: Number = None
    required: Required = Required()
    comment: Comments | str | None = None
    exit_code: int | Exit | None = None
    failed_node: str | None = None


class NodeInfo(msgspec.Struct, kw_only=True):
    name: str
    state: Words = None
    state_flags: list[str] | None = None
    reason: str | None = None
    reason_changed_at: Number = None
    gres: str | None = None
    reservation: str | None = None
    hostname: str | None = None
    address: str | None = None
    cpus: Number = None
    real_memory: Number = None


class NodeNames(msgspec.Struct, frozen=True):
    nodes: list[str] = []
    hostnames: list[str] = []
    addresses: list[str] = []


class SlurmReason(msgspec.Struct, frozen=True):
    description: str | None = None
    time: Number = None


class GroupState(msgspec.Struct, frozen=True):
    state: Words = None


class GroupGres(msgspec.Struct, frozen=True):
    total: str | None = None


class NodeGroup(msgspec.Struct, kw_only=True):
    """Nodes of one partition in one state, as sinfo of 23.02 and later lists them."""

    nodes: NodeNames
    node: GroupState = GroupState()
    gres: GroupGres = GroupGres()
    reason: SlurmReason | str | None = None


class Error(msgspec.Struct, frozen=True):
    description: str | None = None
    error: str | None = None


class SlurmAnswer(msgspec.Struct):
    errors: list[Error] | None = None
    jobs: list[msgspec.Raw] | None = None
    nodes: list[msgspec.Raw] | None = None
    sinfo: list[msgspec.Raw] | None = None
