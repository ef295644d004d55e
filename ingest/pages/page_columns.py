"""The columns of a page's series, which place each number of the next page."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleet.metrics import METRICS
from fleet.samples import EntityKind
from ingest.gpu_labels import JobLabel, LabelSight
from ingest.pages.parts import Folding
from ingest.series import Conversion, Fold, Series


@dataclass(frozen=True, slots=True)
class Reported:
    """The numbers of a node's devices on a page."""

    gpus: int = 0
    ports: int = 0


@dataclass(frozen=True, slots=True)
class PageColumns:
    """The columns of n series in page order, without values.

    kinds: (kind, its rows, metric, entity). folds: one for each kind, None if each of its rows is a sample.
    fold: how each row counts.
    """

    conversion: Conversion
    kinds: tuple[tuple[EntityKind, slice | NDArray[np.intp], NDArray[np.int16], NDArray[np.int32]], ...]
    folds: tuple[Folding | None, ...]
    fold: bytes
    node: NDArray[np.int32]
    device: NDArray[np.int32]
    reported: dict[int, Reported]  # node row -> devices
    labels: tuple[JobLabel | None, ...]  # of each series; empty where none has any
    divided: tuple[bool, ...]
    part: NDArray[np.int64]  # of each series; empty where none has any
    sight: LabelSight

    @classmethod
    def of(cls, series: Sequence[Series], shared: Sequence[Series] = ()) -> "PageColumns":
        """Build the columns of some series. shared: series that the page repeats under other labels."""
        labelled = any(one.label is not None for one in series)
        metric = np.array([one.metric for one in series], np.int16)
        entity = np.array([one.entity for one in series], np.int32)
        present = list(dict.fromkeys(one.kind for one in series))
        kinds, folds = [], []
        for kind in present:
            rows = np.array([row for row, one in enumerate(series) if one.kind is kind], np.intp)
            folds.append(Folding.of([one for one in series if one.kind is kind]))
            kinds.append((kind, slice(None) if len(present) == 1 else rows, metric[rows], entity[rows]))
        return cls(
            Conversion.of(series),
            tuple(kinds),
            tuple(folds),
            bytes(one.fold for one in series),
            np.array([one.node for one in series], np.int32),
            np.array([one.device for one in series], np.int32),
            _count_devices(series),
            tuple(one.label for one in series) if labelled else (),
            tuple(one.divided for one in series) if labelled else (),
            np.array([one.part for one in series] if any(one.part for one in series) else (), np.int64),
            _sight(series, shared),
        )

    def series(self) -> list[Series]:
        """Return the series of the columns."""
        folds = map(Fold, self.fold)
        labels = self.labels or (None,) * len(self.node)
        divided = self.divided or (False,) * len(self.node)
        part = self.part.tolist() or [0] * len(self.node)
        columns = *self.conversion.columns(), folds, labels, divided, part
        rows = list(zip(self.node.tolist(), self.device.tolist(), *columns, strict=True))
        found: dict[int, Series] = {}
        for kind, at, metric, entity in self.kinds:
            numbers = np.arange(len(rows))[at].tolist()
            for row, one, where in zip(numbers, metric.tolist(), entity.tolist(), strict=True):
                found[row] = Series(kind, one, where, *rows[row])
        return [found[row] for row in range(len(rows))]

    def name(self, row: int) -> str:
        """Return a readable name of a sample. Raises IndexError if there is no such row."""
        for kind, rows, metric, entity in self.kinds:
            at = np.flatnonzero(np.arange(len(self.node))[rows] == row)
            if len(at):
                return f"{METRICS[kind][metric[at[0]]].name} of {kind} {entity[at[0]]}"
        raise IndexError(row)


def _count_devices(series: Sequence[Series]) -> dict[int, Reported]:
    devices: dict[int, tuple[set[int], set[int]]] = {}
    for one in series:
        gpus, ports = devices.setdefault(one.node, (set(), set()))
        if one.device >= 0:
            (ports if one.kind is EntityKind.PORT else gpus).add(one.device)
    return {node: Reported(len(gpus), len(ports)) for node, (gpus, ports) in devices.items()}


def _sight(series: Sequence[Series], shared: Sequence[Series]) -> LabelSight:
    """Return the labels of the GPUs on a page. The caller sets the time of each page."""
    gpus = dict.fromkeys(one.device for one in series if one.kind is EntityKind.GPU)
    jobs: dict[int, dict[JobLabel, None]] = {}
    divided: dict[int, None] = {}
    for one in (*series, *shared):
        if one.divided:
            divided[one.device] = None
        elif one.label is not None:
            jobs.setdefault(one.device, {})[one.label] = None
    return LabelSight(0, tuple(gpus), {gpu: tuple(found) for gpu, found in jobs.items()}, tuple(divided))
