"""The tree of queues: the guarantees, limits and weights of all queues.

The tree is parsed from `queues.toml` (`fleetcast.placement.queues.queues_file`) and never changes.

A queue's name is its path, such as `research/nlp`. The root, "", is the fleet. Requests wait in leaves.
If a queue is `per_user`, its users are leaves below it, made on demand. Amounts are GPUs by resource: a
GPU model, or `gpu` for GPUs of any model.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from fleetcast.fleet.errors import RequestError
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.fleet.spelling import find_nearest_names
from fleetcast.fleet.topology import Level

ANY = "gpu"  # GPUs of any model
ROOT = ""
DEFAULT_QUEUE = "default"
Amounts = Mapping[str, float]  # resource → GPUs
LeafOrder = Literal["fifo", "shortest", "attained"]
Preemptible = Literal["borrowed", "all", "none"]
ReclaimMode = Literal["off", "advise", "act"]
MovesMode = Literal["off", "advise"]
NAMED = 3
MOST_LEAVES = 65_536  # that are kept in mind


@dataclass(frozen=True, slots=True)
class ReclaimPolicy:
    """The rules by which running jobs may be stopped for a request that waits.

    mode: "off" stops nothing. "advise" plans and records what would be stopped, and stops nothing. "act" lets
    executors stop it. act_in: the queues whose jobs, or those of queues below, may be stopped. If empty, all may.
    patience_s:
    a request waits this long for jobs that should end by themselves. grace_s: seconds for a last checkpoint.
    min_run_s: seconds that a job runs at least. stops_a_day: how often one job may be stopped within 24 hours.
    gpu_h_per_h: GPU-hours of lost work that stops may cost within an hour, inf for no bound. dwell_s: seconds from a
    change of a gang's size until it may grow.
    """

    mode: ReclaimMode = "off"
    patience_s: float = 300.0
    grace_s: float = 120.0
    min_run_s: float = 600.0
    stops_a_day: int = 2
    gpu_h_per_h: float = float("inf")
    act_in: tuple[str, ...] = ()
    dwell_s: float = 600.0

    def may_act_in(self, leaf: str) -> bool:
        """Return whether jobs of a leaf may be stopped, and not only be named in advice."""
        return not self.act_in or any(is_at_or_below(leaf, queue) for queue in self.act_in)


@dataclass(frozen=True, slots=True)
class TreePolicy:
    """The policy of all queues.

    `unknown_queue`: the queue for requests that name an unknown queue. If it is "", such requests are refused.
    claims: the number of waiting requests for which a pass reserves GPUs.
    """

    half_life_s: float = 168 * 3600.0
    order: LeafOrder = "shortest"
    max_wait_s: float = 24 * 3600.0
    claims: int = 1
    unknown_queue: str = ""
    overcommit: bool = False
    reclaim: ReclaimPolicy = ReclaimPolicy()


@dataclass(frozen=True, slots=True)
class SparesPolicy:
    """The nodes that each domain of a level holds ready for gangs that lose nodes.

    count: the number of nodes. If it is None, failures within `repair_s` exceed the number with probability
    `epsilon` at most.
    """

    level: Level
    epsilon: float = 0.05
    count: int | None = None
    repair_s: float = 86_400.0


@dataclass(frozen=True, slots=True)
class QueueClass:
    """A priority class. `preempts`: the classes and queues whose jobs may be stopped for its requests."""

    priority: int = 0
    preempts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Credits:
    """The settings of a queue's credits.

    `rate`: share of the unused guarantee that is banked. `cap_gpu_s`: the most that the bank can hold.
    """

    rate: float
    cap_gpu_s: float


@dataclass(frozen=True, slots=True)
class QueueNode:
    """One queue of the tree.

    guaranteed: GPUs that the queue's own requests get first. A parent's guarantee is at least the sum of its
    children's. limit, borrow: a resource that is missing here is unlimited. lend: if a resource is
    missing here, all of it is lent while it is idle. preemptible: the running jobs that may be stopped if their
    owners do not say. "borrowed" means the jobs beyond the queue's guarantee.
    """

    name: str
    parent: int = -1
    children: tuple[int, ...] = ()
    weight: float = 1.0
    guaranteed: Amounts = field(default_factory=dict)
    limit: Amounts = field(default_factory=dict)
    lend: Amounts = field(default_factory=dict)
    borrow: Amounts = field(default_factory=dict)
    class_name: str = ""
    priority: int = 0
    order: LeafOrder = "shortest"
    max_wait_s: float = 24 * 3600.0
    max_waiting: int | None = None
    per_user: bool = False
    credits: Credits | None = None
    preemptible: Preemptible = "borrowed"

    def find_limit(self, resource: str) -> float:
        """Return the most GPUs of a resource that the queue may ever hold, inf if unlimited.

        This is the smaller of two numbers: its limit, and its guarantee plus the amount that it may borrow.
        """
        borrowed = self.borrow.get(resource)
        highest = float("inf") if borrowed is None else self.guaranteed.get(resource, 0.0) + borrowed
        return min(self.limit.get(resource, float("inf")), highest)

    def find_unlent_guarantee(self, resource: str) -> float:
        """Return the guaranteed GPUs of a resource that the queue never lends, even while they are idle."""
        guaranteed = self.guaranteed.get(resource, 0.0)
        return max(0.0, guaranteed - self.lend.get(resource, guaranteed))


@dataclass(frozen=True, slots=True)
class Window:
    """Nodes that only one queue may use from `from_ms` until `to_ms`. If `queue` is None, no queue may."""

    name: str
    queue: str | None
    nodes: tuple[str, ...]  # by name, or
    domains: tuple[tuple[Level, str], ...]  # all in these
    from_ms: int
    to_ms: int


def describe_window(window: Window) -> str:
    """Return the kind and the name of a window: `reservation 'mlperf'`, `maintenance 'firmware'`."""
    return f"{'maintenance' if window.queue is None else 'reservation'} {window.name!r}"


@dataclass(frozen=True, slots=True)
class Prices:
    """The price of a GPU-hour by model. `gpu` is the price for all other models."""

    gpu_h: Amounts = field(default_factory=dict)
    currency: str = ""

    def find_price(self, model: str) -> float | None:
        return self.gpu_h.get(model, self.gpu_h.get(ANY))


@dataclass(frozen=True)
class QueueTree:
    """The tree of all queues: the root first, and parents before children.

    digest: the hash of the text that the tree was read from. moves: "advise" names moves of running jobs that let a
    waiting gang in. No job is moved.
    """

    nodes: tuple[QueueNode, ...]
    policy: TreePolicy = TreePolicy()
    classes: Mapping[str, QueueClass] = field(default_factory=dict)
    windows: tuple[Window, ...] = ()
    prices: Prices = Prices()
    digest: str = ""
    spares: SparesPolicy | None = None
    moves: MovesMode = "off"

    @cached_property
    def row(self) -> dict[str, int]:
        return {node.name: row for row, node in enumerate(self.nodes)}

    @cached_property
    def resources(self) -> tuple[str, ...]:
        """`gpu`, and the models that any queue names."""
        named = {name for node in self.nodes for kind in list_amounts(node) for name in kind}
        return (ANY, *sorted(named - {ANY}))

    def find_node(self, name: str) -> QueueNode:
        return self.nodes[self.row[name]]

    def list_path(self, name: str) -> list[QueueNode]:
        """Return a queue and the queues above it, with the root last.

        The path of a user's leaf begins with the user's queue.
        """
        row = self.row.get(name)
        if row is None:
            row = self.row[name.rpartition("/")[0]]
        found = []
        while row >= 0:
            found.append(self.nodes[row])
            row = self.nodes[row].parent
        return found

    def list_leaves(self) -> Iterator[QueueNode]:
        return (node for node in self.nodes if not node.children and node.name != ROOT)

    def compute_priority(self, request: PlacementRequest) -> int:
        """Return the request's own priority plus the priority of its class, if the file has that class."""
        named = self.classes.get(request.class_)
        return request.priority + (named.priority if named else 0)

    def find_waiting_queue(self, request: PlacementRequest) -> QueueNode:
        """Return the queue that a request waits in.

        If there is no such queue, raises RequestError that names the wrong field.
        """
        name = self._find_named_path(request)
        node = self._find_queue(name)
        if node is None:
            raise RequestError(self._explain_unknown_queue(name), "tenant" if name != request.queue else "queue")
        if node.children:
            below = format_some_names([self.nodes[child].name for child in node.children])
            raise RequestError(f"queue {node.name!r} has queues below it: name one of them, such as {below}", "queue")
        if request.tenant and not is_at_or_below(node.name, request.tenant):
            raise RequestError(f"queue {node.name!r} is not below tenant {request.tenant!r}", "tenant")
        return node

    @staticmethod
    def _find_named_path(request: PlacementRequest) -> str:
        """Return the path of the queue that a request names, below its tenant."""
        name = request.queue
        if request.tenant and not is_at_or_below(name, request.tenant):
            return f"{request.tenant}/{name}" if name != DEFAULT_QUEUE else request.tenant
        return name

    def _find_queue(self, name: str) -> QueueNode | None:
        """Return the queue with this path. If there is none, return the queue for unknown ones.

        Returns None if the file names no queue for unknown ones.
        """
        row = self.row.get(name) if name != ROOT else None
        if row is None and self.policy.unknown_queue:
            row = self.row[self.policy.unknown_queue]
        return None if row is None else self.nodes[row]

    def find_unknown_path(self, request: PlacementRequest) -> str:
        """Return the queue path that a request names, if the tree has no such queue.

        The request is then charged to another queue. Returns "" if the queue exists.
        """
        name = self._find_named_path(request)
        return "" if name in self.row and name != ROOT else name

    @cached_property
    def _leaf_cache(self) -> dict[tuple[str, str, str], str]:
        """A cache of the leaves of earlier requests."""
        return {}

    def find_request_leaf(self, request: PlacementRequest) -> str:
        """Return the leaf that a request waits in: its queue, or its user's leaf below that queue.

        Raises RequestError in the same cases as `find_waiting_queue`. Also raises it if the queue is per user and
        the request names no user.
        """
        key = request.queue, request.tenant, request.user
        leaf = self._leaf_cache.get(key)
        if leaf is None:
            if len(self._leaf_cache) >= MOST_LEAVES:
                self._leaf_cache.clear()
            leaf = self._leaf_cache[key] = self._find_leaf(request)
        return leaf

    def _find_leaf(self, request: PlacementRequest) -> str:
        node = self.find_waiting_queue(request)
        if not node.per_user:
            return node.name
        if not request.user:
            raise RequestError(f"queue {node.name!r} shares among its users: name the user", "user")
        return make_user_leaf(node.name, request.user)

    def find_known_leaf(self, request: PlacementRequest) -> str:
        """Return the leaf that a request waits in, or "" if the request belongs to no leaf.

        A job of another scheduler, for example, may have no queue.
        """
        if self._leaf_cache.get((request.queue, request.tenant, request.user)) is None:
            node = self._find_queue(self._find_named_path(request))
            if node is None or node.children:
                return ""
        try:
            return self.find_request_leaf(request)
        except RequestError:
            return ""

    def split_leaf(self, leaf: str) -> tuple[str, str]:
        """Return the queue and the user of the requests that a leaf holds. The user is "" if the queue is the leaf."""
        if leaf in self.row:
            return leaf, ""
        queue, _, user = leaf.rpartition("/")
        return queue, user

    def _explain_unknown_queue(self, name: str) -> str:
        names = [node.name for node in self.list_leaves()]
        near = find_nearest_names(name, names, NAMED, 0.5) or [one for one in names if one.rpartition("/")[2] == name]
        if near:
            return f"no queue {name!r}; the nearest are {format_some_names(near)}"
        return f"no queue {name!r}; there are {format_some_names(names)}"


def make_user_leaf(queue: str, user: str) -> str:
    """Return the path of a user's leaf below a queue.

    A slash in the user's name does not make another level.

    >>> make_user_leaf("research/nlp", "ada")
    'research/nlp/ada'
    """
    return f"{queue}/{user.replace('/', '|')}"


def list_unused_settings(tree: QueueTree) -> list[str]:
    """Return a sentence for each setting of the file that has no effect yet."""
    notes = []
    if any(node.order == "attained" for node in tree.nodes):
        notes.append("order attained is fifo: no running job is stopped yet")
    if tree.policy.reclaim.mode == "off":
        idle = {
            "preemptible": any(node.preemptible != "borrowed" for node in tree.nodes),
            "preempt_gpu_h_per_h": tree.policy.reclaim.gpu_h_per_h < float("inf"),
            "preempts": any(found.preempts for found in tree.classes.values()),
        }
        notes += [f'{key} has no effect: reclaim is "off" in [policy]' for key, is_set in idle.items() if is_set]
    if tree.policy.reclaim.mode != "act" and tree.policy.reclaim.act_in:
        notes.append('act_in has no effect: reclaim is not "act" in [policy]')
    return notes


def list_amounts(node: QueueNode) -> tuple[Amounts, ...]:
    return node.guaranteed, node.limit, node.lend, node.borrow


def format_some_names(names: Sequence[str]) -> str:
    """Format up to three quoted names, and the number of the others.

    >>> format_some_names(["a", "b", "c", "d"])
    "'a', 'b', 'c' and 1 more"
    """
    return join_some([repr(name) for name in names])


def join_some(texts: Sequence[str]) -> str:
    """Join up to three texts, and the number of the others.

    >>> join_some(["a", "b"]), join_some(["a to 1 member"] * 1003)
    ('a, b', 'a to 1 member, a to 1 member, a to 1 member and 1,000 more')
    """
    shown = ", ".join(texts[:NAMED])
    return shown if len(texts) <= NAMED else f"{shown} and {len(texts) - NAMED:,} more"


def is_at_or_below(name: str, above: str) -> bool:
    """Return whether a queue is `above` or lies below it."""
    return name == above or name.startswith(f"{above}/")
