"""The decoded form of the samples of every telemetry source."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class EntityKind(StrEnum):
    GPU = "gpu"
    GPU_INSTANCE = "gpu_instance"
    PORT = "port"
    LINK = "link"
    SWITCH = "switch"
    NODE = "node"
    RANK = "rank"
    POOL = "pool"
    SERVED_MODEL = "served_model"


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Samples of one entity kind, as immutable columns of equal length n."""

    kind: EntityKind
    metric: NDArray[np.int16]  # row in `METRICS[kind]`
    entity: NDArray[np.int32]  # row in `Entities[kind]`
    time_ms: NDArray[np.int64]  # event time, Unix ms
    value: NDArray[np.float64]  # in the metric's unit; counters are raw, the store makes them rates

    def __post_init__(self) -> None:
        n = len(self.metric)
        if not (len(self.entity) == len(self.time_ms) == len(self.value) == n):
            sizes = (n, len(self.entity), len(self.time_ms), len(self.value))
            raise ValueError(f"columns of a SampleBatch differ in length: {sizes}")

    def __len__(self) -> int:
        return len(self.metric)

    def select_samples(self, chosen: NDArray[np.bool_]) -> "SampleBatch":
        """Return the samples for which `chosen` is true, in order. chosen: (n,) bool."""
        return SampleBatch(
            self.kind, self.metric[chosen], self.entity[chosen], self.time_ms[chosen], self.value[chosen]
        )

    @classmethod
    def from_rows(cls, kind: EntityKind, rows: Sequence[tuple[int, int, int, float]]) -> "SampleBatch":
        """Make a batch of (metric, entity, time_ms, value) tuples, for tests and rare paths."""
        metric, entity, time_ms, value = zip(*rows, strict=True) if rows else ((), (), (), ())
        return cls(
            kind,
            np.array(metric, np.int16),
            np.array(entity, np.int32),
            np.array(time_ms, np.int64),
            np.array(value, np.float64),
        )

    @classmethod
    def concat(cls, batches: Sequence["SampleBatch"]) -> "SampleBatch":
        """Concatenate batches of the same kind, in order.

        Raises ValueError if the kinds differ or there is no batch.
        """
        kinds = {batch.kind for batch in batches}
        if len(kinds) != 1:
            raise ValueError(f"cannot concatenate batches of kinds {sorted(kinds)}")
        return cls(
            kinds.pop(),
            np.concatenate([batch.metric for batch in batches]),
            np.concatenate([batch.entity for batch in batches]),
            np.concatenate([batch.time_ms for batch in batches]),
            np.concatenate([batch.value for batch in batches]),
        )

    @classmethod
    def merge_by_kind(cls, batches: Iterable["SampleBatch"]) -> list["SampleBatch"]:
        """Merge the samples into one batch for each kind, in order. A store can then write few large batches."""
        found: dict[str, list[SampleBatch]] = {}
        for batch in batches:
            found.setdefault(batch.kind, []).append(batch)
        return [same[0] if len(same) == 1 else cls.concat(same) for same in found.values()]
