"""Conversion of the `[queue.*]` tables of `queues.toml` into nodes of the tree.

It finds parents, fills in inherited values, and checks that amounts agree.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec

from fleetcast.fleet.decode_faults import Path
from fleetcast.fleet.entities import MAX_NAME_LENGTH
from fleetcast.fleet.errors import RequestError
from fleetcast.fleet.requests import MAX_COUNT
from fleetcast.placement.queues.tree import (
    ROOT,
    Amounts,
    Credits,
    LeafOrder,
    Preemptible,
    QueueClass,
    QueueNode,
    TreePolicy,
)

DEEPEST = 8
LEAST_WEIGHT = 1e-6
MOST_WEIGHT = 1e9
LEAST_GPUS = 1e-6  # a request takes no smaller part than a thousandth
MOST_GPUS = 1e9

Refuse = Callable[[Path, str], RequestError]


class CreditsTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of a queue's credits in the file.

    rate: the share of the unused guarantee that is earned. cap_gpu_h: the most that is saved, in
    GPU-hours.
    """

    rate: float
    cap_gpu_h: float


class QueueTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table `[queue.NAME]` of the file.

    The key `class` names the queue's class. Without this key, a class with the queue's own name applies. If
    there is none, the parent's class applies.
    """

    parent: str = ""
    weight: float = 1.0
    guaranteed: dict[str, float] = {}
    limit: dict[str, float] = {}
    lend: dict[str, float] = {}
    borrow: dict[str, float] = {}
    class_: str = msgspec.field(default="", name="class")
    order: LeafOrder | None = None
    max_wait_h: float | None = None
    max_waiting: int | None = None
    per_user: bool = False
    credits: CreditsTable | None = None
    preemptible: Preemptible | None = None


AMOUNTS = ("guaranteed", "limit", "lend", "borrow")


class NumberCheck:
    """A check that the numbers of one table are within bounds.

    Within them, computations give finite results.
    """

    def __init__(self, table: Path, refuse: Refuse) -> None:
        self._table = table
        self._refuse = refuse

    def __call__(
        self, key: str, value: float | None, least: float, most: float, unit: str = "", part: str = ""
    ) -> None:
        """Raise RequestError if a value is present and outside least..most.

        part: a key of an inline table.
        """
        if value is not None and not least <= value <= most:
            sign = "above 0: " if least > 0 else ""
            why = f"{part} is {value}, must be {sign}{least:,g}..{most:,g} {unit}".strip()
            raise self._refuse((*self._table, key), why)


def check_text(text: str, path: Path, refuse: Refuse) -> None:
    """Raise RequestError for a name that is empty, too long or cannot be printed."""
    if not text or len(text) > MAX_NAME_LENGTH or not text.isprintable():
        raise refuse(path, f"{text[:60]!r} is no name: 1 to {MAX_NAME_LENGTH} characters, all printable")


def make_queue_nodes(
    tables: Mapping[str, QueueTable], policy: TreePolicy, classes: Mapping[str, QueueClass], refuse: Refuse
) -> tuple[QueueNode, ...]:
    """Convert the tables into the nodes of the queue tree: the root first, and parents before children.

    Raises RequestError if a table is wrong, or if tables contradict each other.
    """
    for name, table in tables.items():
        _check_table(name, table, classes, refuse)
    paths = _find_paths(tables, refuse)
    rows = {ROOT: 0}
    children: dict[int, list[int]] = {}
    nodes = [QueueNode(ROOT, max_wait_s=policy.max_wait_s, order=policy.order)]
    for key, path in sorted(paths.items(), key=lambda item: (item[1].count("/"), item[1])):
        parent = rows[path.rpartition("/")[0]]
        node = _convert_table(path, parent, nodes[parent], tables[key], policy, classes)
        if nodes[parent].per_user:
            raise refuse(("queue", key), f"{nodes[parent].name!r} is per_user, so no queue can be below it")
        rows[path] = len(nodes)
        children.setdefault(parent, []).append(len(nodes))
        nodes.append(node)
    for row, below in children.items():
        nodes[row] = replace(nodes[row], children=tuple(below))
    return _add_parent_guarantees(nodes, {path: key for key, path in paths.items()}, refuse)


def _check_table(name: str, table: QueueTable, classes: Mapping[str, QueueClass], refuse: Refuse) -> None:
    """Raise RequestError if a table is wrong independently of the other tables."""
    here = ("queue", name)
    if any(not part or len(part) > MAX_NAME_LENGTH or not part.isprintable() for part in name.split("/")):
        raise refuse(here, f"{name[:60]!r} is no name: parts joined by /, none empty, all printable")
    if name.count("/") >= DEEPEST:
        raise refuse(here, f"is {name.count('/') + 1} levels deep, at most {DEEPEST}")
    check = NumberCheck(here, refuse)
    check("weight", table.weight, LEAST_WEIGHT, MOST_WEIGHT, "(limit = {gpu = 0} closes a queue)")
    for kind in AMOUNTS:
        for resource, amount in getattr(table, kind).items():
            check_text(resource, (*here, kind), refuse)
            if amount and not LEAST_GPUS <= amount <= MOST_GPUS:
                bounds = f"must be 0 GPUs, or {LEAST_GPUS:g}..{MOST_GPUS:,g}"
                raise refuse((*here, kind), f"{resource} is {amount}, {bounds}")
    for resource, amount in table.guaranteed.items():
        if amount > table.limit.get(resource, math.inf):
            raise refuse((*here, "guaranteed"), f"{amount:g} of {resource}, above its limit, {table.limit[resource]:g}")
    if table.class_ and table.class_ not in classes:
        raise refuse((*here, "class"), f"there is no [class.{table.class_}]; there are {', '.join(classes) or 'none'}")
    check("max_wait_h", table.max_wait_h, 0.001, 1e6, "hours")
    check("max_waiting", table.max_waiting, 0, MAX_COUNT)
    if table.credits:
        check("credits", table.credits.rate, 1e-6, 1, part="rate")
        check("credits", table.credits.cap_gpu_h, 0, 1e12, "GPU-hours", "cap_gpu_h")


def _find_paths(tables: Mapping[str, QueueTable], refuse: Refuse) -> dict[str, str]:
    """Return table → the queue's path.

    Raises RequestError for cycles, missing parents and queues that occur twice.
    """
    found: dict[str, str] = {}
    known: set[str] = set()
    for name in tables:
        chain, at = [name], name
        while tables[at].parent:
            above = tables[at].parent
            if "/" in at:
                raise refuse(("queue", at, "parent"), f"has two parents, {above!r} and the one in its name: drop one")
            if above not in tables:
                raise refuse(("queue", at, "parent"), f"{above!r} is no queue: write [queue.{above}]")
            if above in chain:
                raise refuse(("queue", at, "parent"), f"is a cycle: {' → '.join([*chain, above])}")
            if len(chain) > DEEPEST:
                raise refuse(("queue", name), f"is more than {len(chain)} levels deep, at most {DEEPEST}")
            chain.append(above)
            at = above
        path = "/".join(reversed(chain))
        if path in known:
            raise refuse(("queue", name), f"{path!r} is there twice")
        known.add(path)
        if path.count("/") >= DEEPEST:
            raise refuse(("queue", name), f"is {path.count('/') + 1} levels deep, at most {DEEPEST}")
        found[name] = path
    for name, path in found.items():
        above = path.rpartition("/")[0]
        if above and above not in known:
            raise refuse(("queue", name), f"has no parent: write [queue.{_quote_path(above)}] as well")
    return found


def _quote_path(name: str) -> str:
    return f'"{name}"' if "/" in name else name


def _convert_table(
    path: str, parent: int, above: QueueNode, table: QueueTable, policy: TreePolicy, classes: Mapping[str, QueueClass]
) -> QueueNode:
    own = path.rpartition("/")[2]
    class_name = table.class_ or (own if own in classes else above.class_name)
    credit = table.credits
    return QueueNode(
        name=path,
        parent=parent,
        weight=table.weight,
        guaranteed=table.guaranteed,
        limit=table.limit,
        lend=table.lend,
        borrow=table.borrow,
        class_name=class_name,
        priority=classes[class_name].priority if class_name else 0,
        order=table.order or above.order,
        max_wait_s=table.max_wait_h * 3600 if table.max_wait_h is not None else above.max_wait_s,
        max_waiting=table.max_waiting,
        per_user=table.per_user,
        credits=Credits(credit.rate, credit.cap_gpu_h * 3600) if credit else None,
        preemptible=table.preemptible or above.preemptible,
    )


def _add_parent_guarantees(nodes: list[QueueNode], keys: Mapping[str, str], refuse: Refuse) -> tuple[QueueNode, ...]:
    """Return the nodes with the guarantees of parent queues filled in.

    A parent without a guarantee gets the sum of its children's. Raises RequestError if a guarantee is
    smaller than that sum.
    """
    for row in range(len(nodes) - 1, 0, -1):
        node = nodes[row]
        below = _sum_child_guarantees(nodes, node)
        here = ("queue", keys[node.name])
        for resource, promised in below.items():
            own, most = node.guaranteed.get(resource), node.limit.get(resource, math.inf)
            if own is not None and promised > own:
                why = f"queues below it are guaranteed {promised:g} of {resource}, it has {own:g}"
                raise refuse((*here, "guaranteed"), f"{why}: guarantee it more, or them less")
            if promised > most:
                why = f"queues below it are guaranteed {promised:g} of {resource}, above its limit, {most:g}"
                raise refuse((*here, "limit"), why)
        whole = {**below, **node.guaranteed}
        for resource, amount in node.lend.items():
            if amount > whole.get(resource, 0.0):
                why = f"lends {amount:g} of {resource}, of {whole.get(resource, 0.0):g} guaranteed"
                raise refuse((*here, "lend"), f"{why}: a queue lends at most what it has")
        if node.credits and not whole:
            raise refuse((*here, "credits"), "are earned on an unused guarantee, and it has none: set guaranteed")
        nodes[row] = replace(node, guaranteed=whole)
    return tuple(nodes)


def _sum_child_guarantees(nodes: list[QueueNode], node: QueueNode) -> dict[str, float]:
    children: list[Amounts] = [nodes[child].guaranteed for child in node.children]
    resources = {name for amounts in children for name in amounts}
    return {name: math.fsum(amounts.get(name, 0.0) for amounts in children) for name in sorted(resources)}
