"""Reading and checking `queues.toml`.

A file with any error is refused as a whole. The RequestError names the line, the field and the fix.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal, TypeVar

import msgspec

from fleetcast.fleet.decode_faults import Path, find_first_fault, format_path, suggest_key
from fleetcast.fleet.errors import RequestError
from fleetcast.fleet.node_names import explain_node_name_fault, is_node_name
from fleetcast.fleet.requests import MAX_COUNT
from fleetcast.fleet.toml_lines import find_key_lines, find_nearest_line
from fleetcast.fleet.toml_text import read_toml
from fleetcast.fleet.topology import Level, NodeSpec
from fleetcast.placement.queues.queue_table import NumberCheck, QueueTable, check_text, make_queue_nodes
from fleetcast.placement.queues.tree import (
    ANY,
    ROOT,
    LeafOrder,
    MovesMode,
    Prices,
    QueueClass,
    QueueTree,
    ReclaimMode,
    ReclaimPolicy,
    SparesPolicy,
    TreePolicy,
    Window,
    is_at_or_below,
)

MOST_BYTES = 4_194_304
MOST_QUEUES = 10_000
MOST_WINDOWS = 1_000
MOST_CLASSES = 1_000
MOST_CLAIMS = 32  # each adds 16 to 40 ms of CPU to a pass over 10,000 nodes and 10,000 jobs
MOST_AMOUNTS = 100_000  # queues times GPU models: each pass compares that many
LATEST_MS = 253_402_214_400_000  # 9999-12-31: later times cannot be written as dates in every zone
MOST_MONEY = 1e9  # of a GPU-hour
LATER = {
    "power": "power caps",
    "carbon": "carbon windows",
    "share": "training together with inference",
}
HERE = ("policy", "class", "queue", "reservation", "maintenance", "prices", "spares", "moves")
REFUSE = "refuse"
_AnyTable = TypeVar("_AnyTable", bound=msgspec.Struct)


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class PolicyTable(_Table, frozen=True):
    """The table `[policy]` of the file."""

    half_life_h: float = 168.0
    order: LeafOrder = "shortest"
    max_wait_h: float = 24.0
    claims: int = 1
    reclaim: ReclaimMode = "off"
    act_in: tuple[str, ...] | None = None
    preempt_after_s: float = 300.0
    grace_s: float = 120.0
    min_run_s: float = 600.0
    stops_a_day: int = 2
    dwell_s: float = 600.0
    preempt_gpu_h_per_h: float | None = None
    unknown_queue: str = REFUSE
    overcommit: bool = False


class ClassTable(_Table, frozen=True):
    """A table `[class.NAME]` of the file."""

    priority: int = 0
    preempts: tuple[str, ...] = ()


class SparesTable(_Table, frozen=True, kw_only=True):
    """The table `[spares]` of the file: `epsilon` or `count` nodes in each domain of `level`."""

    level: Literal["nvlink_domain", "rack", "rail_group", "block", "cluster"]
    epsilon: float | None = None
    count: int | None = None
    repair_h: float = 24.0


class MovesTable(_Table, frozen=True, kw_only=True):
    """The table `[moves]` of the file."""

    mode: MovesMode = "off"


class ReservationTable(_Table, frozen=True, kw_only=True):
    """A table `[[reservation]]`, or `[[maintenance]]` if it has no queue.

    nodes: names, or {level = "domain"}.
    """

    name: str = ""
    queue: str = ""
    nodes: tuple[str, ...] | dict[Literal["nvlink_domain", "rack", "rail_group", "block"], str]
    from_: datetime = msgspec.field(name="from")
    to: datetime


class FaultBuilder:
    """A builder of errors about a place in the file."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __call__(self, path: Path, why: str) -> RequestError:
        """Return an error whose message names the line and the field at this path.

        why: the rest of the message.
        """
        field = format_path(path)
        return RequestError(f"line {find_nearest_line(find_key_lines(self._text), path)}: {field}: {why}", field)


def read_queues(text: str) -> QueueTree:
    """Parse the queue tree from the text of a `queues.toml`.

    Raises RequestError if the text is wrong. Its message names the line, the field and the fix.
    """
    if len(text) > MOST_BYTES:
        size = f"{len(text):,} bytes, at most {MOST_BYTES:,}"
        raise RequestError(f"the file has {size} are read: a tree of {MOST_QUEUES:,} queues fits into that", "queue")
    try:
        document = read_toml(text)
    except ValueError as error:
        raise RequestError(f"no valid TOML: {error}", None) from None
    refuse = FaultBuilder(text)
    for name in document:
        if name in LATER:
            raise refuse((name,), f"{LATER[name]} are not honoured yet; leave the table out")
        if name not in HERE:
            raise refuse((name,), f"no such table{suggest_key(name, HERE)}")
    return _make_tree(document, refuse, hashlib.sha256(text.encode()).hexdigest())


def _make_tree(document: Mapping[str, Any], refuse: FaultBuilder, digest: str) -> QueueTree:
    policy = _make_policy(_convert_table(document.get("policy", {}), PolicyTable, ("policy",), refuse), refuse)
    class_tables = _get_tables(document, "class", refuse)
    if len(class_tables) > MOST_CLASSES:
        raise refuse(("class",), f"there are {len(class_tables):,} classes, at most {MOST_CLASSES:,}")
    classes = {
        name: _make_class(name, _convert_table(table, ClassTable, ("class", name), refuse), refuse)
        for name, table in class_tables.items()
    }
    tables = _get_tables(document, "queue", refuse)
    if not tables:
        raise refuse(("queue",), "there is none: write at least one [queue.NAME]")
    if len(tables) > MOST_QUEUES:
        raise refuse(("queue",), f"there are {len(tables):,} queues, at most {MOST_QUEUES:,}")
    queues = {name: _convert_table(table, QueueTable, ("queue", name), refuse) for name, table in tables.items()}
    nodes = make_queue_nodes(queues, policy, classes, refuse)
    tree = QueueTree(nodes, policy, classes, (), _parse_prices(document.get("prices", {}), refuse), digest)
    if len(nodes) * len(tree.resources) > MOST_AMOUNTS:
        counts = f"{len(nodes) - 1:,} queues times {len(tree.resources) - 1:,} GPU models"
        raise refuse(("queue",), f"{counts}, at most {MOST_AMOUNTS:,} amounts: name fewer models, or fewer queues")
    _check_names(tree, refuse)
    windows = _parse_windows(document, "reservation", tree, refuse) + _parse_windows(
        document, "maintenance", tree, refuse
    )
    moves = _convert_table(document.get("moves", {}), MovesTable, ("moves",), refuse).mode
    return QueueTree(nodes, policy, classes, windows, tree.prices, digest, _parse_spares(document, refuse), moves)


def count_installed_gpus(nodes: Iterable[NodeSpec]) -> dict[str, float]:
    """Return resource → number of GPUs that a fleet has, including those that are out of service now."""
    found: dict[str, float] = {ANY: 0.0}
    for node in nodes:
        found[ANY] += node.gpus
        if node.gpu_model:
            found[node.gpu_model] = found.get(node.gpu_model, 0.0) + node.gpus
    return found


def check_capacity(tree: QueueTree, capacity: Mapping[str, float], text: str = "") -> None:
    """Raise RequestError if the queues are guaranteed more GPUs than the fleet has.

    capacity: resource → GPUs of the fleet.
    """
    if tree.policy.overcommit:
        return
    root = tree.nodes[0]
    for resource in tree.resources:
        promised = math.fsum(tree.nodes[child].guaranteed.get(resource, 0.0) for child in root.children)
        if promised > capacity.get(resource, 0.0):
            what = "GPUs" if resource == ANY else f"GPUs of model {resource}"
            first = next(node for row in root.children if resource in (node := tree.nodes[row]).guaranteed)
            raise FaultBuilder(text)(
                ("queue", first.name, "guaranteed"),
                f"the queues are guaranteed {promised:g} {what}, the fleet has {capacity.get(resource, 0.0):g}: "
                "guarantee less, or set overcommit = true in [policy]",
            )


def _convert_table(value: Any, kind: type[_AnyTable], path: Path, refuse: FaultBuilder) -> _AnyTable:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        fault = find_first_fault(error, kind, value, toml=True)
        raise refuse((*path, *fault.path), fault.why) from None


def _get_tables(document: Mapping[str, Any], name: str, refuse: FaultBuilder) -> dict[str, Any]:
    value = document.get(name, {})
    if not isinstance(value, dict):
        raise refuse((name,), f"is a {type(value).__name__}; write [{name}.NAME]")
    return value


def _make_policy(table: PolicyTable, refuse: FaultBuilder) -> TreePolicy:
    check = NumberCheck(("policy",), refuse)
    check("half_life_h", table.half_life_h, 0.001, 1e6, "hours")
    check("max_wait_h", table.max_wait_h, 0.001, 1e6, "hours")
    check("claims", table.claims, 1, MOST_CLAIMS, "requests with reserved GPUs")
    check("preempt_after_s", table.preempt_after_s, 0, 1e6, "seconds")
    check("grace_s", table.grace_s, 0, 1e5, "seconds")
    check("min_run_s", table.min_run_s, 0, 1e6, "seconds")
    check("dwell_s", table.dwell_s, 0, 1e6, "seconds")
    check("stops_a_day", table.stops_a_day, 0, 1000, "stops of one job")
    check("preempt_gpu_h_per_h", table.preempt_gpu_h_per_h, 0, 1e9, "GPU-hours an hour")
    if table.act_in == ():
        raise refuse(("policy", "act_in"), "names no queue: leave it out to act in all, or set reclaim to advise")
    unknown = "" if table.unknown_queue == REFUSE else table.unknown_queue
    half_life_s, max_wait_s = table.half_life_h * 3600, table.max_wait_h * 3600
    most_gpu_h = math.inf if table.preempt_gpu_h_per_h is None else table.preempt_gpu_h_per_h
    times_s = table.preempt_after_s, table.grace_s, table.min_run_s
    reclaim = ReclaimPolicy(table.reclaim, *times_s, table.stops_a_day, most_gpu_h, table.act_in or (), table.dwell_s)
    return TreePolicy(half_life_s, table.order, max_wait_s, table.claims, unknown, table.overcommit, reclaim)


def _parse_spares(document: Mapping[str, Any], refuse: FaultBuilder) -> SparesPolicy | None:
    if "spares" not in document:
        return None
    table = _convert_table(document["spares"], SparesTable, ("spares",), refuse)
    if (table.epsilon is None) == (table.count is None):
        raise refuse(("spares",), "write either epsilon or count")
    check = NumberCheck(("spares",), refuse)
    check("epsilon", table.epsilon, 1e-9, 1)
    check("count", table.count, 0, MAX_COUNT, "nodes of each domain")
    check("repair_h", table.repair_h, 0.001, 1e5, "hours")
    return SparesPolicy(Level(table.level), table.epsilon or 1.0, table.count, table.repair_h * 3600)


def _make_class(name: str, table: ClassTable, refuse: FaultBuilder) -> QueueClass:
    check_text(name, ("class", name), refuse)
    NumberCheck(("class", name), refuse)("priority", table.priority, -MAX_COUNT, MAX_COUNT)
    return QueueClass(table.priority, table.preempts)


def _check_names(tree: QueueTree, refuse: FaultBuilder) -> None:
    """Raise RequestError if a table refers to a queue or class that does not exist."""
    unknown, leaves = tree.policy.unknown_queue, {node.name: None for node in tree.list_leaves()}
    if unknown and unknown not in leaves:
        why = f"{unknown!r} is no queue without queues below it{suggest_key(unknown, [*leaves])}"
        raise refuse(("policy", "unknown_queue"), why)
    for name in tree.policy.reclaim.act_in:
        queues = [queue for queue in tree.row if queue != ROOT]
        if name not in queues:
            raise refuse(("policy", "act_in"), f"{name!r} is no queue{suggest_key(name, queues)}")
    for name, found in tree.classes.items():
        for other in found.preempts:
            if other not in tree.classes and other not in tree.row:
                near = suggest_key(other, [*tree.classes, *leaves])
                raise refuse(("class", name, "preempts"), f"{other!r} is no class and no queue{near}")
    if cycle := find_preemption_cycle(tree):
        raise refuse(
            ("class", cycle[0], "preempts"), f"is a cycle: {' → '.join(cycle)}; two jobs could stop each other"
        )


def find_preemption_cycle(tree: QueueTree) -> list[str]:
    """Return the classes of a cycle of `preempts`, with the first class again at its end. Returns [] if there is none.

    A class that preempts a queue preempts the classes of that queue and of the queues below it.
    """
    preempted: dict[str, list[str]] = {}
    for name, found in tree.classes.items():
        below = [node.class_name for node in tree.nodes for other in found.preempts if is_at_or_below(node.name, other)]
        preempted[name] = [other for other in (*found.preempts, *below) if other in tree.classes]
    try:
        TopologicalSorter(preempted).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def _parse_prices(value: Any, refuse: FaultBuilder) -> Prices:
    if not isinstance(value, dict):
        raise refuse(("prices",), f"is {value!r}, must be a table of prices of a GPU-hour by model")
    rest = dict(value)
    currency = rest.pop("currency", "")
    if not isinstance(currency, str) or len(currency) > 16 or not currency.isprintable():
        raise refuse(("prices", "currency"), f"is {currency!r}, must be a short text, such as 'EUR'")
    for model, price in rest.items():
        check_text(model, ("prices", model), refuse)
        if isinstance(price, bool) or not isinstance(price, int | float):
            raise refuse(("prices", model), f"is {price!r}, must be money for a GPU-hour, 0 or more")
        NumberCheck(("prices",), refuse)(model, price, 0, MOST_MONEY, "money for a GPU-hour")
    return Prices({model: float(price) for model, price in rest.items()}, currency)


def _parse_windows(document: Mapping[str, Any], kind: str, tree: QueueTree, refuse: FaultBuilder) -> tuple[Window, ...]:
    tables = document.get(kind, [])
    if not isinstance(tables, list):
        raise refuse((kind,), f"is no list of tables; write [[{kind}]]")
    if len(tables) > MOST_WINDOWS:
        raise refuse((kind,), f"there are {len(tables):,}, at most {MOST_WINDOWS:,}")
    found = []
    for at, value in enumerate(tables):
        table = _convert_table(value, ReservationTable, (kind, at), refuse)
        found.append(_convert_window(table, kind, (kind, at), tree, refuse))
    return tuple(found)


def _convert_window(table: ReservationTable, kind: str, path: Path, tree: QueueTree, refuse: FaultBuilder) -> Window:
    if kind == "reservation" and (table.queue not in tree.row or not table.queue):
        raise refuse((*path, "queue"), f"{table.queue!r} is no queue{suggest_key(table.queue, list(tree.row)[1:])}")
    if kind == "maintenance" and table.queue:
        raise refuse((*path, "queue"), "maintenance has no queue: leave the queue out, or write [[reservation]]")
    if not table.nodes:
        raise refuse((*path, "nodes"), 'is empty: name nodes, or a domain such as {rack = "r12"}')
    names = table.nodes.values() if isinstance(table.nodes, dict) else table.nodes
    for text in (table.name, *names):
        check_text(text or "unnamed", path, refuse)
    from_ms, to_ms = _convert_to_ms(table.from_), _convert_to_ms(table.to)
    for key, ms in (("from", from_ms), ("to", to_ms)):
        if not 0 <= ms <= LATEST_MS:
            raise refuse((*path, key), "must lie between 1970 and 9999-12-31")
    if from_ms >= to_ms:
        raise refuse((*path, "to"), f"{table.to.isoformat()} is not after its begin, {table.from_.isoformat()}")
    name = table.name or f"{kind} {path[1] + 1}"  # type: ignore[operator]
    queue = table.queue or None
    if isinstance(table.nodes, dict):
        domains = tuple((Level(level), domain) for level, domain in table.nodes.items())
        return Window(name, queue, (), domains, from_ms, to_ms)
    if (bad := next((node for node in table.nodes if not is_node_name(node)), None)) is not None:
        raise refuse((*path, "nodes"), explain_node_name_fault(bad))
    return Window(name, queue, table.nodes, (), from_ms, to_ms)


def _convert_to_ms(time: datetime) -> int:
    """Return a time in Unix ms. A time without a zone is UTC."""
    known = time if time.tzinfo else time.replace(tzinfo=UTC)
    return round(known.timestamp() * 1000)
