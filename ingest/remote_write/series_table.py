"""The table of the series of all remote-write senders, as columns."""

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.gpu_labels import JobLabel
from fleetcast.ingest.series import Series

KINDS = tuple(EntityKind)
GPU = KINDS.index(EntityKind.GPU)
COLUMNS = np.dtype(
    [
        *(("kind", "i1"), ("form", "i1"), ("fold", "i1"), ("metric", "<i2"), ("entity", "<i4"), ("device", "<i4")),
        *(("scale", "<f8"), ("ceiling", "<f8"), ("label", "<i4"), ("divided", "?"), ("part", "<i8")),
    ]
)


@dataclass(slots=True)
class SeriesTable:
    """Series as rows of columns. New rows are appended.

    labels: the job labels. The column `label` holds the index of a label plus one, or 0 for no label.
    """

    _columns: NDArray[np.void]
    _size: int
    labels: list[JobLabel]
    _numbers: dict[JobLabel, int]

    def __init__(self) -> None:
        self.labels, self._numbers = [], {}
        self._columns = np.zeros(1024, COLUMNS)
        self._size = 0

    @property
    def columns(self) -> NDArray[np.void]:
        """The rows, (rows,) with the fields of `COLUMNS`, as a view."""
        return self._columns[: self._size]

    def add_series(self, one: Series) -> int:
        if self._size == len(self._columns):
            self._columns = np.concatenate([self._columns, np.zeros_like(self._columns)])
        kind = KINDS.index(one.kind)
        label = 0 if one.label is None else self._numbers.setdefault(one.label, len(self._numbers) + 1)
        if label > len(self.labels):
            self.labels.append(cast(JobLabel, one.label))
        identity = kind, one.form, one.fold, one.metric, one.entity, one.device, one.scale, one.ceiling
        self._columns[self._size] = (*identity, label, one.divided, one.part)
        self._size += 1
        return self._size - 1
