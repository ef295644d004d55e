"""Asks: what requests are to a pass over the queue. Thousands of jobs have hundreds; each is worked out once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.requests import Gang, PlacementRequest
from placement.tree import ANY

MOST_KEPT = 32_768

Ints = NDArray[np.int64]


class MachineShape:
    """Requests of one shape fit, or do not, alike. Shapes that are equal are one object."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, slots=True, eq=False)
class QueueAsk:
    """What requests have in common that differ in name, arrival and times only. Equal ones are one object.

    gpus, wished: of the gang that is wished for, and the thousandths of GPUs that it takes; milli, model: what the
    smallest gang takes, in thousandths too, and of which model, `gpu` where it need not be a certain one. in_line: the
    same for all that differ in their place among queues only; None: this is it.
    """

    shape: MachineShape
    gpus: int
    wished: int
    milli: int
    model: str
    in_line: "QueueAsk | None" = None


@lru_cache(MOST_KEPT)
def ask_of(request: PlacementRequest) -> QueueAsk:
    """Its ask."""
    gang, each = request.members, request.gpus_per_node
    models = (request.gpu_model,) if request.gpu_model else request.gpu_models
    gpus, least = gang.desired * each, gang.min * each * request.milli
    model = models[0] if len(models) == 1 else ANY
    in_line = _in_line(gang, shape_of(request), gpus, gpus * request.milli, least, model)
    return _in_queue(in_line, request.priority, request.queue, request.tenant, request.user, request.class_)


@lru_cache(MOST_KEPT)
def _in_line(_: Gang, shape: MachineShape, gpus: int, wished: int, milli: int, model: str) -> QueueAsk:
    return QueueAsk(shape, gpus, wished, milli, model)


@lru_cache(MOST_KEPT)
def _in_queue(ask: QueueAsk, *_: object) -> QueueAsk:
    return replace(ask, in_line=ask)


@lru_cache(MOST_KEPT)
def shape_of(request: PlacementRequest) -> MachineShape:
    """What a request is to the machines."""
    return _shape(
        *(request.members.min, request.gpus_per_node, request.spread, request.topology.required, request.cluster),
        *(request.gpu_share, request.gpu_models, request.pool),
        *(request.gpu_model, request.gpu_memory_gib, request.cpus, request.host_memory_gib),
        *(request.max_risk, request.avoid_nodes),
    )


@lru_cache(MOST_KEPT)
def _shape(*_: object) -> MachineShape:
    return MachineShape()


class Waiters:
    """What waits, as columns: k entries, and the first of each ask."""

    def __init__(self, entries: Sequence[Any]) -> None:
        self.entries = entries
        self._requests = [entry.request for entry in entries]
        asks = list(map(ask_of, self._requests))
        numbers = dict(zip(dict.fromkeys(asks), range(len(asks)), strict=False))
        found = list(map(numbers.__getitem__, asks))
        self.ask: Ints = np.array(found, np.int64)  # (k,) indices into `asks`
        self.asks = tuple(numbers)
        self.queued_ms: Ints = np.array([entry.queued_ms for entry in entries], np.int64)
        first = np.zeros(len(numbers), np.int64)
        first[self.ask[::-1]] = np.arange(len(found))[::-1]
        self.first = [self._requests[at] for at in first.tolist()]

    def times(self, name: str, otherwise: float) -> NDArray[np.float64]:
        """(k,) a time that a request may name."""
        values = list(map(attrgetter(name), self._requests))
        if values.count(None) == len(values):
            return np.full(len(values), otherwise)
        return np.array([otherwise if value is None else value for value in values], np.float64)

    def ranks(self, *columns: NDArray[Any]) -> Ints:
        """(k,) places by columns of k, the first of which counts most, then by arrival, then by the request's id."""
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
