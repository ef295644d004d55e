"""Shapes: the part of a request that decides which nodes can host it.

Thousands of jobs have tens of shapes.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.machines.slots import WHOLE

COMMON = 0.99  # the rarest shapes, one request in a hundred, are left out of a demand
MOST_SHAPES = 128


@dataclass(frozen=True, slots=True)
class MemberShape:
    """The slots, CPUs and GPU models that one member of a request needs.

    It needs `gpus` slots, each with `milli` thousandths free. models: GPU model names in lower case, or parts
    of them. Empty if any model will do.
    """

    gpus: int
    milli: int = WHOLE
    cpus: float = 0.0
    models: tuple[str, ...] = ()

    def is_hosted_by(self, model: str) -> bool:
        """Return whether the shape may run on a GPU of this model."""
        return not self.models or any(wanted in model.casefold() for wanted in self.models)


@dataclass(frozen=True, slots=True)
class ShapeDemand:
    """The demand for m shapes as columns. Each shape is weighted by its share of the requests.

    levels: (u,) the different thousandths of a slot that shapes need, ascending.
    """

    gpus: NDArray[np.int64]  # (m,)
    cpus: NDArray[np.float64]  # (m,)
    hosts: NDArray[np.bool_]  # (models + 1, m) nodes of the model can host it; the last row is of an unknown model
    weight: NDArray[np.float64]  # (m,) sum 1, what needs no GPU included
    levels: NDArray[np.int64]
    level_of: NDArray[np.int64]  # (m,) index into `levels`
    cpus_per_gpu: float  # what one GPU of this demand wants of them; 0: nothing is known of CPUs


def make_shape_demand(
    members: Mapping[MemberShape, float], models: Iterable[str], common: float = COMMON
) -> ShapeDemand | None:
    """Return the demand for the commonest shapes, on GPUs of `models`.

    members: shape → number of members. Returns None if no shape needs a GPU.
    """
    total = sum(members.values())
    wanted = sum(shape.gpus * shape.milli * count for shape, count in members.items()) / WHOLE
    cpus = sum(shape.cpus * count for shape, count in members.items() if shape.gpus)
    most, seen = [], 0.0
    for shape, count in sorted(members.items(), key=lambda item: (-item[1], repr(item[0])))[:MOST_SHAPES]:
        if seen >= common * total:
            break
        most.append((shape, count))
        seen += count
    using = [(shape, count / seen) for shape, count in most if shape.gpus]
    if not using:
        return None
    levels, level_of = np.unique([shape.milli for shape, _ in using], return_inverse=True)
    names = [*models, ""]
    return ShapeDemand(
        gpus=np.array([shape.gpus for shape, _ in using], np.int64),
        cpus=np.array([shape.cpus for shape, _ in using], np.float64),
        hosts=np.array([[shape.is_hosted_by(name) for shape, _ in using] for name in names], bool),
        weight=np.array([share for _, share in using], np.float64),
        levels=levels.astype(np.int64),
        level_of=level_of,
        cpus_per_gpu=cpus / wanted,
    )


def make_member_shape(request: PlacementRequest) -> MemberShape:
    """Return the shape of one member of a request."""
    milli = request.milli if request.gpus_per_node else 0
    return MemberShape(request.gpus_per_node, milli, float(request.cpus or 0), tuple(sorted(request.models)))


class RecentShapes:
    """The shapes of the newest requests, each counted once for each member."""

    def __init__(self, most: int) -> None:
        self._newest: deque[tuple[MemberShape, int]] = deque()
        self._most = most
        self._members: Counter[MemberShape] = Counter()
        self.version = 0

    def add(self, shape: MemberShape, members: int = 1) -> None:
        """Add a request. Beyond `most` requests, the oldest is dropped."""
        self._newest.append((shape, members))
        self._members[shape] += members
        if len(self._newest) > self._most:
            oldest, gone = self._newest.popleft()
            self._members[oldest] -= gone
        self.version += 1

    def __len__(self) -> int:
        return len(self._newest)

    def count_members(self) -> Counter[MemberShape]:
        """Return shape → number of members in the newest requests."""
        return +self._members
