"""The columns of a page's series. They assign each number of the next page to its series."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.metrics import METRICS
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.gpu_labels import JobLabel, ObservedJobLabels
from fleetcast.ingest.pages.parts import Folding
from fleetcast.ingest.series import Conversion, Fold, Series


@dataclass(frozen=True, slots=True)
class DeviceCounts:
    """The numbers of a node's GPUs and ports on a page."""

    gpus: int = 0
    ports: int = 0


@dataclass(frozen=True, slots=True)
class PageColumns:
    """The columns of n series in page order, without values.

    kinds: for each kind (kind, rows of its series, metric, entity). folds: for each kind how its rows
    add up to samples, or None if each row is a sample. fold: (n,) uint8, the Fold of each row, as
    bytes. node, device: (n,) int32. reported: node row → numbers of its devices. labels, divided, part:
    one element for each series, empty if no series has a value. sight: the job labels of the page.
    """

    conversion: Conversion
    kinds: tuple[tuple[EntityKind, slice | NDArray[np.intp], NDArray[np.int16], NDArray[np.int32]], ...]
    folds: tuple[Folding | None, ...]
    fold: bytes
    node: NDArray[np.int32]
    device: NDArray[np.int32]
    reported: dict[int, DeviceCounts]  # node row -> devices
    labels: tuple[JobLabel | None, ...]  # of each series; empty where none has any
    divided: tuple[bool, ...]
    part: NDArray[np.int64]  # of each series; empty where none has any
    sight: ObservedJobLabels

    @classmethod
    def from_series(cls, series: Sequence[Series], shared: Sequence[Series] = ()) -> "PageColumns":
        """Build the columns of series in page order.

        shared: series that the page repeats with other labels.
        """
        kind_of, metrics, entities, node, device, scale, form, ceiling, fold, label, divided, part = _make_columns(
            series
        )
        is_labelled = any(one is not None for one in label)
        metric, entity = np.array(metrics, np.int16), np.array(entities, np.int32)
        present = list(dict.fromkeys(kind_of))
        kinds, folds = [], []
        for kind in present:
            rows = [row for row, one in enumerate(kind_of) if one is kind]
            folds.append(Folding.from_series([series[row] for row in rows]) if any(fold) else None)
            at = slice(None) if len(present) == 1 else np.array(rows, np.intp)
            kinds.append((kind, at, metric[at], entity[at]))
        devices = dict.fromkeys(zip(node, kind_of, device, strict=True))
        return cls(
            Conversion.from_fields(scale, form, ceiling),
            tuple(kinds),
            tuple(folds),
            bytes(fold),
            np.array(node, np.int32),
            np.array(device, np.int32),
            _count_devices(devices),
            label if is_labelled else (),
            divided if is_labelled else (),
            np.array(part if any(part) else (), np.int64),
            _collect_labels(devices, (*series, *shared) if is_labelled or shared else ()),
        )

    def make_series(self) -> list[Series]:
        """Convert the columns back to series, in page order."""
        folds = map(Fold, self.fold)
        labels = self.labels or (None,) * len(self.node)
        divided = self.divided or (False,) * len(self.node)
        part = self.part.tolist() or [0] * len(self.node)
        columns = *self.conversion.list_fields(), folds, labels, divided, part
        rows = list(zip(self.node.tolist(), self.device.tolist(), *columns, strict=True))
        found: dict[int, Series] = {}
        for kind, at, metric, entity in self.kinds:
            numbers = np.arange(len(rows))[at].tolist()
            for row, one, where in zip(numbers, metric.tolist(), entity.tolist(), strict=True):
                found[row] = Series(kind, one, where, *rows[row])
        return [found[row] for row in range(len(rows))]

    def describe_row(self, row: int) -> str:
        """Return a readable name of the series in a row. Raises IndexError if there is no such row."""
        for kind, rows, metric, entity in self.kinds:
            at = np.flatnonzero(np.arange(len(self.node))[rows] == row)
            if len(at):
                return f"{METRICS[kind][metric[at[0]]].name} of {kind} {entity[at[0]]}"
        raise IndexError(row)


def _make_columns(series: Sequence[Series]) -> list[tuple[Any, ...]]:
    """Return, for each field of `Series` in order, the values of all series."""
    rows = list(map(msgspec.structs.astuple, series))
    return list(zip(*rows, strict=True)) if rows else [()] * len(Series.__struct_fields__)


def _count_devices(devices: Iterable[tuple[int, EntityKind, int]]) -> dict[int, DeviceCounts]:
    """Count the GPUs and ports of each node. devices: (node, kind of series, device)."""
    found: dict[int, tuple[set[int], set[int]]] = {}
    for node, kind, device in devices:
        gpus, ports = found.setdefault(node, (set(), set()))
        if device >= 0:
            (ports if kind is EntityKind.PORT else gpus).add(device)
    return {node: DeviceCounts(len(gpus), len(ports)) for node, (gpus, ports) in found.items()}


def _collect_labels(devices: Iterable[tuple[int, EntityKind, int]], series: Sequence[Series]) -> ObservedJobLabels:
    """Return the job labels of the GPUs on a page. The caller sets the time of each page.

    devices: (node, kind of series, device). series: the series of the page, including repeated ones, or none if no
    series has a label.
    """
    gpus = dict.fromkeys(device for _, kind, device in devices if kind is EntityKind.GPU)
    jobs: dict[int, dict[JobLabel, None]] = {}
    divided: dict[int, None] = {}
    for one in series:
        if one.divided:
            divided[one.device] = None
        elif one.label is not None:
            jobs.setdefault(one.device, {})[one.label] = None
    return ObservedJobLabels(0, tuple(gpus), {gpu: tuple(found) for gpu, found in jobs.items()}, tuple(divided))
