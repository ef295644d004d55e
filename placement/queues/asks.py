"""Keys by which a pass over the queue treats requests alike.

Thousands of jobs have only hundreds of different keys, and a pass tries each key once. A key is the whole
request without the fields that are declared below. A new field of a request is part of every key until
it is declared here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest, TopologyConstraint
from fleetcast.placement.queues.tree import ANY

MAX_REMEMBERED = 32_768

IDS_AND_TIMES = frozenset(
    {*("request_id", "job", "attempt"), *("limit_s", "deadline_ms", "tolerated_wait_s", "checkpoint_cost_s")}
)  # read by no filter, and an operator's own may not
QUEUE_FIELDS = frozenset({"tenant", "queue", "user", "class_", "priority"})  # read by the order of queues alone
UNREAD_BY_FILTERS = IDS_AND_TIMES | QUEUE_FIELDS | {"preemptible", "host_offload", "dry_run"}  # by none of `FILTERS`
_DEFAULTS = {field.name: "" if field.required else field.default for field in msgspec.structs.fields(PlacementRequest)}
_DEFAULTS_OF = {
    names: {name: _DEFAULTS[name] for name in names} for names in (IDS_AND_TIMES, QUEUE_FIELDS, UNREAD_BY_FILTERS)
}

Ints = NDArray[np.int64]


class FitKey:
    """A key that requests share if they fit on the same nodes. Equal keys are one object."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True, eq=False)
class QueueAsk:
    """The part of a request that remains without ids and times. Equal asks are one object.

    gpus: GPUs of the desired gang. wished: thousandths of GPUs that the desired gang takes. milli: thousandths
    that the smallest gang takes. model: the one model that it needs, or `gpu` without such a model. wide, narrow:
    its fit keys without and with plugins. in_line: the ask without the fields that only the order of queues
    reads. None if this ask itself has none of these fields.
    """

    gpus: int
    wished: int
    milli: int
    model: str
    wide: FitKey
    narrow: FitKey
    in_line: "QueueAsk | None" = None


@lru_cache(MAX_REMEMBERED)
def make_queue_ask(request: PlacementRequest) -> QueueAsk:
    """Return the request's ask: the part of it that remains without ids and times."""
    return _make_ask(_reset_fields(request, IDS_AND_TIMES))


@lru_cache(MAX_REMEMBERED)
def _make_ask(request: PlacementRequest) -> QueueAsk:
    in_line = _make_line_ask(_reset_fields(request, QUEUE_FIELDS))
    return replace(in_line, narrow=_intern_fit_key(request), in_line=in_line)


@lru_cache(MAX_REMEMBERED)
def _make_line_ask(request: PlacementRequest) -> QueueAsk:
    gang, each = request.members, request.gpus_per_node
    models = (request.gpu_model,) if request.gpu_model else request.gpu_models
    gpus, model = gang.desired * each, models[0] if len(models) == 1 else ANY
    wide = make_fit_key(request, has_plugins=False)
    return QueueAsk(gpus, gpus * request.milli, gang.min * each * request.milli, model, wide, wide)


@lru_cache(MAX_REMEMBERED)
def make_fit_key(request: PlacementRequest, has_plugins: bool) -> FitKey:
    """Return the key of all requests that the filters treat alike.

    The built-in filters read fewer fields than an operator's own filters may. With `has_plugins`, only ids
    and times are left out.
    """
    if has_plugins:
        return _intern_fit_key(_reset_fields(request, IDS_AND_TIMES))
    smallest = msgspec.structs.replace(
        _reset_fields(request, UNREAD_BY_FILTERS),
        gang=request.members.min,
        topology=TopologyConstraint(request.topology.required),
    )
    return _intern_fit_key(smallest)


@lru_cache(MAX_REMEMBERED)
def _intern_fit_key(_: PlacementRequest) -> FitKey:
    return FitKey()


def _reset_fields(request: PlacementRequest, names: frozenset[str]) -> PlacementRequest:
    """Return the request with some fields reset to their defaults.

    names: one of the sets of field names above.
    """
    return msgspec.structs.replace(request, **_DEFAULTS_OF[names])


class WaitingColumns:
    """The k waiting entries as columns, and their different asks.

    ask: (k,) indices into `asks`. first: the first request of each ask.
    """

    def __init__(self, entries: Sequence[Any]) -> None:
        self.entries = entries
        self._requests = [entry.request for entry in entries]
        asks = list(map(make_queue_ask, self._requests))
        numbers = dict(zip(dict.fromkeys(asks), range(len(asks)), strict=False))
        found = list(map(numbers.__getitem__, asks))
        self.ask: Ints = np.array(found, np.int64)  # (k,) indices into `asks`
        self.asks = tuple(numbers)
        self.queued_ms: Ints = np.array([entry.queued_ms for entry in entries], np.int64)
        first = np.zeros(len(numbers), np.int64)
        first[self.ask[::-1]] = np.arange(len(found))[::-1]
        self.first = [self._requests[at] for at in first.tolist()]

    def list_times(self, name: str, otherwise: float) -> NDArray[np.float64]:
        """Return (k,) the values of an optional time field of the requests, such as `limit_s`.

        A request without the field gets `otherwise`.
        """
        values = list(map(attrgetter(name), self._requests))
        if values.count(None) == len(values):
            return np.full(len(values), otherwise)
        return np.array([otherwise if value is None else value for value in values], np.float64)

    def rank_rows(self, *columns: NDArray[Any]) -> Ints:
        """Return (k,) the place of each entry, sorted by the columns. The first column counts most.

        Ties are broken by arrival, then by the request's id.
        """
        keys = (*columns, self.queued_ms)
        order = np.lexsort(keys[::-1])
        alike = np.ones(max(0, len(order) - 1), bool)
        for key in keys:
            alike &= np.diff(key[order]) == 0
        if alike.any():
            group = np.cumsum(np.append(0, ~alike)).tolist() if len(order) else []
            named = [
                (at, self.entries[row].request.request_id, row) for at, row in zip(group, order.tolist(), strict=True)
            ]
            order = np.array([row for _, _, row in sorted(named)], np.int64)
        ranks = np.empty(len(order), np.int64)
        ranks[order] = np.arange(len(order))
        return ranks
