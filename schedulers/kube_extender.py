"""kube-scheduler's HTTP extender (k8s.io/kube-scheduler/extender/v1): filter, prioritize, preempt.

Keys may have any capitalisation, as in Go. With `nodeCacheCapable: true`, requests and answers name the
nodes. Otherwise they contain whole node objects. A lack of data never blocks scheduling: an unknown node
passes with the neutral score, and without fresh data nothing changes. An answer contains only nodes and
victims of the request.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.decode_faults import explain_decode_error
from fleetcast.fleet.errors import RequestError
from fleetcast.schedulers.adapter import NotKnown, Seen, Verb, Write
from fleetcast.schedulers.kube_types import HostPriority, KubeNode, KubePod, PreemptionArgs, PreemptionResult
from fleetcast.schedulers.name_index import NameIndex
from fleetcast.schedulers.ratings import NEUTRAL, Ratings
from fleetcast.schedulers.weather import Outlook, Weather

PREFIX = "fleetcast: "
NULL = msgspec.Raw(b"null")
HOST_SCORE_AT = len(b'{"Score":')

SPACE, ZERO, OPEN, CLOSE = b" 0[]"
Args = TypeVar("Args", bound=msgspec.Struct)


class Pieces:
    """JSON values as an array of bytes, from which lists are assembled fast: (n, width) uint8.

    Each value is padded with spaces to the length of the longest value, and ends with a comma.

    >>> Pieces([b'"a"', b"[1,2]"]).join_rows(np.array([1, 0]))
    b'[[1,2],"a"  ]'
    """

    def __init__(self, values: Sequence[bytes]) -> None:
        width = max(map(len, values), default=0)
        text = b"".join(value.ljust(width) + b"," for value in values)
        self._bytes = np.frombuffer(text, np.uint8).reshape(len(values), width + 1)

    def replace_numbers(self, numbers: NDArray[np.int64], at: int) -> "Pieces":
        """Return a copy in which a number from 0 to 99 replaces two bytes of each value, from index `at` on.

        numbers: (n,) one for each value.
        """
        made = Pieces(())
        made._bytes = self._bytes.copy()
        tens, units = np.divmod(numbers, 10)
        made._bytes[:, at] = np.where(tens > 0, ZERO + tens, SPACE)
        made._bytes[:, at + 1] = ZERO + units
        return made

    def join_rows(self, rows: NDArray[np.intp]) -> bytes:
        """Return a JSON array of the values of these rows, in that order. Every row must exist."""
        if not len(rows):
            return b"[]"
        text = np.empty(1 + len(rows) * self._bytes.shape[1], np.uint8)
        np.take(self._bytes, rows, axis=0, out=text[1:].reshape(len(rows), -1), mode="clip")  # "raise" would copy
        text[0], text[-1] = OPEN, CLOSE
        return text.tobytes()


class _RawNodeList(msgspec.Struct):
    items: list[msgspec.Raw] | None = None


class _RawArgs(msgspec.Struct, rename="pascal"):
    """ExtenderArgs in which whole nodes and names stay as bytes, because they are returned unchanged."""

    pod: KubePod | None = None
    nodes: _RawNodeList | None = None
    node_names: msgspec.Raw = NULL

    @property
    def names_json(self) -> bytes:
        return bytes(memoryview(self.node_names))

    @property
    def is_whole(self) -> bool:
        return self.nodes is not None and self.names_json == b"null"

    def read_names(self) -> list[str] | None:
        """Return the node names, which came either as strings or in whole nodes. Returns None without nodes."""
        try:
            names = _read_names.decode(self.node_names)
        except msgspec.ValidationError as error:
            raise RequestError(
                f"NodeNames: {explain_decode_error(error, _read_names, self.node_names)}", "NodeNames"
            ) from None
        return [_read_node_name(node) for node in self.nodes.items or ()] if names is None and self.nodes else names


_encode = msgspec.json.Encoder().encode
_read_args = msgspec.json.Decoder(_RawArgs)
_read_preemption = msgspec.json.Decoder(PreemptionArgs)
_read_node = msgspec.json.Decoder(KubeNode)
_read_names = msgspec.json.Decoder(list[str] | None)


class KubeExtender:
    """The extender's verbs. Each converts a request body into an answer body.

    Answers are assembled from parts that are made once for each board. Raises RequestError for a body of
    the wrong form, and msgspec.DecodeError, UnicodeDecodeError or RecursionError for a body that is not JSON.
    """

    def __init__(self) -> None:
        self.ratings = Ratings()
        self._index = NameIndex(())
        self._names = self._hosts = Pieces(())
        self._scored: dict[int, Pieces] = {}

    def use_outlook(self, outlook: Outlook) -> None:
        """Use this outlook for all later answers."""
        if outlook.rows is not self.ratings.outlook.rows:
            names = [_encode(name) for name in outlook.rows]
            self._index = NameIndex(tuple(outlook.rows))
            self._names = Pieces(names)
            self._hosts = Pieces([b'{"Score":  ,"Host":%b}' % name for name in names])
        self.ratings.use_outlook(outlook)
        self._scored = {}

    def filter(self, body: bytes) -> bytes:
        """Return a FilterResult without the nodes that the pod cannot use.

        Refused nodes count as unresolvable, because preempting jobs there would not help.
        """
        args = _decode_args(body)
        refusals = self.ratings.find_unusable_nodes(args.pod.limit_s if args.pod else None)
        if args.is_whole:
            return _filter_node_objects(args.nodes, refusals.why)
        rows = self._index.find_rows(args.names_json)
        if rows is None:
            return _filter_names(args.read_names(), refusals.why)
        refused = np.take(refusals.mask, rows)
        if not refused.any():
            return _encode_filter_result(args.names_json, {})
        names = self.ratings.names
        failed = {names[row]: PREFIX + refusals.why[names[row]] for row in rows[refused].tolist()}
        return _encode_filter_result(self._names.join_rows(rows[~refused]), failed)

    def prioritize(self, body: bytes) -> bytes:
        """Return a list of HostPriority, one for every node of the request, in the same order."""
        args = _decode_args(body)
        gpus = self.ratings.normalise_gpus(args.pod.gpus if args.pod else 0)
        rows = self._index.find_rows(args.names_json)
        if rows is None:
            known, scores = self.ratings.outlook.rows, self.ratings.compute_scores(gpus)
            names = args.read_names() or ()
            return _encode(
                [HostPriority(name, int(scores[known[name]]) if name in known else NEUTRAL) for name in names]
            )
        if gpus not in self._scored:
            self._scored[gpus] = self._hosts.replace_numbers(self.ratings.compute_scores(gpus), HOST_SCORE_AT)
        return self._scored[gpus].join_rows(rows)

    def preempt(self, body: bytes) -> bytes:
        """Return the PreemptionResult: the request's nodes and victims, without nodes that the pod cannot use.

        Preempting jobs on an unusable node would not help. The victims on all other nodes stay the same.
        """
        args = _decode_any_case(_read_preemption, body)
        unusable = self.ratings.find_unusable_nodes(args.pod.limit_s if args.pod else None).why
        asked = args.node_name_to_meta_victims
        if asked is None:
            whole = args.node_name_to_victims or {}
            asked = {name: victims.make_meta_victims() for name, victims in whole.items()}
        return _encode(PreemptionResult({name: row for name, row in asked.items() if name not in unusable}))


REPLIES: Mapping[str, Callable[[KubeExtender, bytes], bytes]] = {
    "filter": KubeExtender.filter,
    "prioritize": KubeExtender.prioritize,
    "preempt": KubeExtender.preempt,
}


class KubeAdapter:
    """The adapter `kube`, which filters and rates nodes for kube-scheduler.

    It has one extender for the newest weather, and one without data for stale answers.
    """

    fields: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self._extender, blind = KubeExtender(), KubeExtender()
        self._weather: Weather | None = None
        self.verbs = {
            name: Verb(partial(self._answer, reply), partial(reply, blind)) for name, reply in REPLIES.items()
        }

    def wishes(self, weather: Weather | None, seen: Seen) -> Iterable[Write]:
        return ()

    def _answer(self, reply: Callable[[KubeExtender, bytes], bytes], weather: Weather, body: bytes) -> bytes:
        if weather.nodes is None:
            raise NotKnown("the board has no scores yet")
        if weather is not self._weather:
            self._extender.use_outlook(weather.nodes)
            self._weather = weather
        return reply(self._extender, body)


def _decode_args(body: bytes) -> _RawArgs:
    args = _decode_any_case(_read_args, body)
    if args.nodes is not None and not args.is_whole:
        for node in args.nodes.items or ():  # names came, too, and are enough; these are only checked
            _read_node_name(node)
    return args


def _filter_names(names: list[str] | None, why: Mapping[str, str]) -> bytes:
    failed = {name: PREFIX + why[name] for name in names or () if name in why}
    passing = names if names is None else [name for name in names if name not in failed]
    return _encode_filter_result(_encode(passing), failed)


def _filter_node_objects(nodes: _RawNodeList | None, why: Mapping[str, str]) -> bytes:
    named = [(_read_node_name(node), node) for node in (nodes and nodes.items) or ()]
    failed = {name: PREFIX + why[name] for name, _ in named if name in why}
    passing = {"metadata": {}, "items": [node for name, node in named if name not in failed]}
    return _encode_filter_result(b"null", failed, _encode(passing))


def _encode_filter_result(names: bytes, failed: Mapping[str, str], nodes: bytes = b"null") -> bytes:
    """Return a FilterResult as JSON. names, nodes: values that are already encoded as JSON."""
    return (b'{"Nodes":%b,"NodeNames":%b,"FailedNodes":{},"FailedAndUnresolvableNodes":%b,"Error":""}') % (
        nodes,
        names,
        _encode(failed),
    )


def _read_node_name(node: msgspec.Raw) -> str:
    try:
        return _read_node.decode(node).metadata.name
    except msgspec.ValidationError as error:
        raise RequestError(f"Nodes.items: {explain_decode_error(error, _read_node, node)}", "Nodes") from None


def _decode_any_case(decoder: msgspec.json.Decoder[Args], body: bytes) -> Args:
    """Decode the body, whatever the case of its keys.

    Raises RequestError, or msgspec's error if the body is not JSON.
    """
    try:
        args = decoder.decode(body)
        pod, *nodes = msgspec.structs.astuple(args)
        if pod is None or all(part in (None, NULL) for part in nodes):
            return decoder.decode(_rename_keys(body, decoder.type))
    except msgspec.ValidationError as error:
        raise RequestError(explain_decode_error(error, decoder, body)) from None
    return args


def _rename_keys(body: bytes, wanted: Any) -> bytes:
    spelling = {name.casefold(): name for name in wanted.__struct_encode_fields__}
    given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return _encode({spelling.get(key.casefold(), key): value for key, value in given.items()})
