"""kube-scheduler's HTTP extender (k8s.io/kube-scheduler/extender/v1): filter, prioritize, preempt.

Go's structs carry no JSON tags, so keys are PascalCase; Go reads them in any case, and so do we. With
`nodeCacheCapable: true` nodes come as names, else whole; what came is what goes back.

Every answer fails open: a node that we do not know passes and gets the neutral score, and an extender that has seen
nothing, or nothing fresh, changes nothing. It never names a node that it was not asked about, and invents no victim.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.errors import RequestError
from schedulers.ratings import NEUTRAL, Outlook, Ratings

GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
LIMIT = "fleetcast/limit-s"  # annotation: how long the pod will run, in whole seconds
PREFIX = "fleetcast: "

Quantities = dict[str, str | int | float]
Args = TypeVar("Args", bound=msgspec.Struct)


class Resources(msgspec.Struct):
    limits: Quantities | None = None
    requests: Quantities | None = None


class Container(msgspec.Struct):
    resources: Resources | None = None


class PodMeta(msgspec.Struct):
    uid: str = ""
    annotations: dict[str, str] | None = None


class PodSpec(msgspec.Struct, rename="camel"):
    containers: list[Container] | None = None
    init_containers: list[Container] | None = None
    active_deadline_seconds: int | None = None


class Pod(msgspec.Struct):
    """What we read of a v1.Pod."""

    metadata: PodMeta | None = None
    spec: PodSpec | None = None

    @property
    def gpus(self) -> int:
        """Whole GPUs that it takes: all containers together, or the greediest of those that run before them."""
        if self.spec is None:
            return 0
        together = sum(map(_gpus, self.spec.containers or ()))
        return max([together, *map(_gpus, self.spec.init_containers or ())])

    @property
    def limit_s(self) -> float | None:
        """How long it may run: its annotation or else its deadline; None where neither says."""
        said = ((self.metadata and self.metadata.annotations) or {}).get(LIMIT, "")
        if said.isdecimal():
            return float(said[:12])
        return self.spec.active_deadline_seconds if self.spec else None


class NodeList(msgspec.Struct):
    items: list[dict[str, Any]] | None = None


class ExtenderArgs(msgspec.Struct, rename="pascal"):
    """The question of filter and prioritize: a pod, and nodes by name or whole."""

    pod: Pod | None = None
    nodes: NodeList | None = None
    node_names: list[str] | None = None


class FilterResult(msgspec.Struct, rename="pascal"):
    """Nodes that pass, in the form that they came in, and why each other one does not."""

    nodes: NodeList | None
    node_names: list[str] | None
    failed_nodes: dict[str, str]
    failed_and_unresolvable_nodes: dict[str, str]
    error: str = ""


class HostPriority(msgspec.Struct, rename="pascal"):
    host: str
    score: int


class MetaPod(msgspec.Struct):
    uid: str = msgspec.field(name="UID")


class MetaVictims(msgspec.Struct, rename="pascal"):
    pods: list[MetaPod] | None = None
    num_pdb_violations: int = msgspec.field(name="NumPDBViolations", default=0)


class Victims(msgspec.Struct, rename="pascal"):
    pods: list[Pod] | None = None
    num_pdb_violations: int = msgspec.field(name="NumPDBViolations", default=0)

    def by_id(self) -> MetaVictims:
        ids = [MetaPod(pod.metadata.uid) for pod in self.pods or () if pod.metadata]
        return MetaVictims(ids, self.num_pdb_violations)


class PreemptionArgs(msgspec.Struct, rename="pascal"):
    """The question of preempt: on which nodes room could be made for a pod, and at whose cost."""

    pod: Pod | None = None
    node_name_to_victims: dict[str, Victims] | None = None
    node_name_to_meta_victims: dict[str, MetaVictims] | None = None


class PreemptionResult(msgspec.Struct, rename="pascal"):
    node_name_to_meta_victims: dict[str, MetaVictims]


class _RawNodeList(msgspec.Struct):
    items: list[msgspec.Raw] | None = None


class _RawArgs(msgspec.Struct, rename="pascal"):
    """ExtenderArgs with nodes as the bytes that they are, since they go back as they came."""

    pod: Pod | None = None
    nodes: _RawNodeList | None = None
    node_names: list[str] | None = None


class _Named(msgspec.Struct):
    name: str


class _Node(msgspec.Struct):
    metadata: _Named


_encode = msgspec.json.Encoder().encode
_read_args = msgspec.json.Decoder(_RawArgs)
_read_preemption = msgspec.json.Decoder(PreemptionArgs)
_read_node = msgspec.json.Decoder(_Node)


class KubeExtender:
    """Bodies in, bodies out. What a board says is made into pieces of answers once, then only put together.

    Raises RequestError for a body of another shape; msgspec.DecodeError, UnicodeDecodeError or RecursionError for
    one that is no JSON.
    """

    def __init__(self) -> None:
        self.ratings = Ratings()
        self._tables: dict[int, _Pieces] = {}

    def see(self, outlook: Outlook) -> None:
        """Answer from this from now on."""
        if outlook.rows is not self.ratings.outlook.rows:
            self._tables.clear()
        self.ratings.see(outlook)

    def filter(self, body: bytes) -> bytes:
        """FilterResult. Nodes that we know to be unusable fail in a way that preempting others cannot cure."""
        args = _decode(_read_args, body)
        unusable = self.ratings.unusable(args.pod.limit_s if args.pod else None)
        if args.nodes is not None and args.node_names is None:
            return _filter_whole(args.nodes, unusable)
        names = args.node_names
        failed: dict[str, str] = {}
        if names and not unusable.keys().isdisjoint(names):
            failed = {name: PREFIX + unusable[name] for name in names if name in unusable}
            names = [name for name in names if name not in failed]
        return _encode(FilterResult(None, names, {}, failed))

    def prioritize(self, body: bytes) -> bytes:
        """A list of HostPriority, one for every node asked about, in that order."""
        args = _decode(_read_args, body)
        names = args.node_names
        if names is None:
            names = [_name(node) for node in (args.nodes and args.nodes.items) or ()]
        pieces = self._pieces(args.pod.gpus if args.pod else 0)
        return b"[" + b",".join(map(pieces.__getitem__, names)) + b"]"

    def preempt(self, body: bytes) -> bytes:
        """PreemptionResult: the same nodes with the same victims, less the nodes that are of no use without them."""
        args = _decode(_read_preemption, body)
        unusable = self.ratings.unusable(args.pod.limit_s if args.pod else None)
        asked = args.node_name_to_meta_victims
        if asked is None:
            whole = args.node_name_to_victims or {}
            asked = {name: victims.by_id() for name, victims in whole.items()}
        return _encode(PreemptionResult({name: row for name, row in asked.items() if name not in unusable}))

    def _pieces(self, gpus: int) -> "_Pieces":
        gpus = self.ratings.alike(gpus)
        if gpus not in self._tables:
            self._tables[gpus] = _Pieces()
        table = self._tables[gpus]
        table.write(self.ratings.names, self.ratings.scores(gpus))
        return table


class _Pieces(dict[str, bytes]):
    """Name → its HostPriority as JSON; that of a name which is not in here is neutral, and is not kept."""

    def __init__(self) -> None:
        super().__init__()
        self._scores: NDArray[np.int64] = np.zeros(0, np.int64)

    def __missing__(self, name: str) -> bytes:
        return _piece(name, NEUTRAL)

    def write(self, names: tuple[str, ...], scores: NDArray[np.int64]) -> None:
        """Make those anew whose score has changed; names are the same ones from call to call."""
        if scores is self._scores:
            return
        changed = np.arange(len(scores)) if len(scores) != len(self._scores) else np.flatnonzero(scores != self._scores)
        for row, score in zip(changed.tolist(), scores[changed].tolist(), strict=True):
            self[names[row]] = _piece(names[row], score)
        self._scores = scores


def _piece(name: str, score: int) -> bytes:
    return b'{"Host":%b,"Score":%d}' % (_encode(name), score)


def _filter_whole(nodes: _RawNodeList, unusable: Mapping[str, str]) -> bytes:
    passing, failed = [], {}
    for node in nodes.items or ():
        name = _name(node)
        if name in unusable:
            failed[name] = PREFIX + unusable[name]
        else:
            passing.append(node)
    return _encode(
        {
            "Nodes": {"metadata": {}, "items": passing},
            "NodeNames": None,
            "FailedNodes": {},
            "FailedAndUnresolvableNodes": failed,
            "Error": "",
        }
    )


def _name(node: msgspec.Raw) -> str:
    try:
        return _read_node.decode(node).metadata.name
    except msgspec.ValidationError as error:
        raise RequestError(f"Nodes.items: {error}", "Nodes") from None


def _gpus(container: Container) -> int:
    resources = container.resources
    if resources is None:
        return 0
    asked = (resources.requests or {}, resources.limits or {})
    return sum(max(_count(part.get(name, 0)) for part in asked) for name in GPU_RESOURCES)


def _count(quantity: str | int | float) -> int:
    """Whole units; GPUs come in no others.

    >>> _count("8"), _count(2), _count("500m")
    (8, 2, 0)
    """
    if isinstance(quantity, str):
        return int(quantity[:9]) if quantity.isdecimal() else 0
    return max(0, int(quantity))


def _decode(decoder: msgspec.json.Decoder[Args], body: bytes) -> Args:
    """The struct, whatever the case of its keys. Raises RequestError, or what msgspec does for no JSON."""
    try:
        args = decoder.decode(body)
        pod, *nodes = msgspec.structs.astuple(args)
        if pod is None or all(part is None for part in nodes):
            return decoder.decode(_respelt(body, decoder.type))
    except msgspec.ValidationError as error:
        raise RequestError(str(error)) from None
    return args


def _respelt(body: bytes, wanted: Any) -> bytes:
    spelling = {name.casefold(): name for name in wanted.__struct_encode_fields__}
    given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return _encode({spelling.get(key.casefold(), key): value for key, value in given.items()})
