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

from fleet.errors import RequestError
from schedulers.name_index import NameIndex
from schedulers.pieces import Pieces
from schedulers.ratings import NEUTRAL, Outlook, Ratings

GPU_RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")
LIMIT = "fleetcast/limit-s"  # annotation: how long the pod will run, in whole seconds
PREFIX = "fleetcast: "
NULL = msgspec.Raw(b"null")
HOST_SCORE_AT = len(b'{"Score":')

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
    """ExtenderArgs with whole nodes as the bytes that they are, since they go back as they came, and so the names."""

    pod: Pod | None = None
    nodes: _RawNodeList | None = None
    node_names: msgspec.Raw = NULL

    @property
    def names_json(self) -> bytes:
        return bytes(memoryview(self.node_names))

    @property
    def is_whole(self) -> bool:
        return self.nodes is not None and self.names_json == b"null"

    def names(self) -> list[str] | None:
        """As strings, whether they came so or in whole nodes; None where neither came."""
        try:
            names = _read_names.decode(self.node_names)
        except msgspec.ValidationError as error:
            raise RequestError(f"NodeNames: {error}", "NodeNames") from None
        return [_name(node) for node in self.nodes.items or ()] if names is None and self.nodes else names


class _Named(msgspec.Struct):
    name: str


class _Node(msgspec.Struct):
    metadata: _Named


_encode = msgspec.json.Encoder().encode
_read_args = msgspec.json.Decoder(_RawArgs)
_read_preemption = msgspec.json.Decoder(PreemptionArgs)
_read_node = msgspec.json.Decoder(_Node)
_read_names = msgspec.json.Decoder(list[str] | None)


class KubeExtender:
    """Bodies in, bodies out. Pieces of answers are made once a board, then only looked up and put together.

    Raises RequestError for a body of another shape; msgspec.DecodeError, UnicodeDecodeError or RecursionError for
    one that is no JSON.
    """

    def __init__(self) -> None:
        self.ratings = Ratings()
        self._index = NameIndex(())
        self._names = self._hosts = Pieces(())
        self._scored: dict[int, Pieces] = {}

    def see(self, outlook: Outlook) -> None:
        """Answer from this from now on."""
        if outlook.rows is not self.ratings.outlook.rows:
            names = [_encode(name) for name in outlook.rows]
            self._index = NameIndex(tuple(outlook.rows))
            self._names = Pieces(names)
            self._hosts = Pieces([b'{"Score":  ,"Host":%b}' % name for name in names])
        self.ratings.see(outlook)
        self._scored = {}

    def filter(self, body: bytes) -> bytes:
        """FilterResult. Nodes that we know to be unusable fail in a way that preempting others cannot cure."""
        args = _decode(_read_args, body)
        refusals = self.ratings.unusable(args.pod.limit_s if args.pod else None)
        if args.is_whole:
            return _filter_whole(args.nodes, refusals.why)
        rows = self._index.rows(args.names_json)
        if rows is None:
            return _filter_names(args.names(), refusals.why)
        refused = np.take(refusals.mask, rows)
        if not refused.any():
            return _filter_result(args.names_json, {})
        names = self.ratings.names
        failed = {names[row]: PREFIX + refusals.why[names[row]] for row in rows[refused].tolist()}
        return _filter_result(self._names.join(rows[~refused]), failed)

    def prioritize(self, body: bytes) -> bytes:
        """A list of HostPriority, one for every node asked about, in that order."""
        args = _decode(_read_args, body)
        gpus = self.ratings.alike(args.pod.gpus if args.pod else 0)
        rows = self._index.rows(args.names_json)
        if rows is None:
            known, scores = self.ratings.outlook.rows, self.ratings.scores(gpus)
            names = args.names() or ()
            return _encode(
                [HostPriority(name, int(scores[known[name]]) if name in known else NEUTRAL) for name in names]
            )
        if gpus not in self._scored:
            self._scored[gpus] = self._hosts.with_numbers(self.ratings.scores(gpus), HOST_SCORE_AT)
        return self._scored[gpus].join(rows)

    def preempt(self, body: bytes) -> bytes:
        """PreemptionResult: the same nodes with the same victims, less the nodes that are of no use without them."""
        args = _decode(_read_preemption, body)
        unusable = self.ratings.unusable(args.pod.limit_s if args.pod else None).why
        asked = args.node_name_to_meta_victims
        if asked is None:
            whole = args.node_name_to_victims or {}
            asked = {name: victims.by_id() for name, victims in whole.items()}
        return _encode(PreemptionResult({name: row for name, row in asked.items() if name not in unusable}))


def _filter_names(names: list[str] | None, why: Mapping[str, str]) -> bytes:
    failed = {name: PREFIX + why[name] for name in names or () if name in why}
    passing = names if names is None else [name for name in names if name not in failed]
    return _filter_result(_encode(passing), failed)


def _filter_whole(nodes: _RawNodeList | None, why: Mapping[str, str]) -> bytes:
    named = [(_name(node), node) for node in (nodes and nodes.items) or ()]
    failed = {name: PREFIX + why[name] for name, _ in named if name in why}
    passing = {"metadata": {}, "items": [node for name, node in named if name not in failed]}
    return _filter_result(b"null", failed, _encode(passing))


def _filter_result(names: bytes, failed: Mapping[str, str], nodes: bytes = b"null") -> bytes:
    """FilterResult as JSON; names and nodes are JSON already."""
    return (b'{"Nodes":%b,"NodeNames":%b,"FailedNodes":{},"FailedAndUnresolvableNodes":%b,"Error":""}') % (
        nodes,
        names,
        _encode(failed),
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
        if pod is None or all(part in (None, NULL) for part in nodes):
            return decoder.decode(_respelt(body, decoder.type))
    except msgspec.ValidationError as error:
        raise RequestError(str(error)) from None
    return args


def _respelt(body: bytes, wanted: Any) -> bytes:
    spelling = {name.casefold(): name for name in wanted.__struct_encode_fields__}
    given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return _encode({spelling.get(key.casefold(), key): value for key, value in given.items()})
