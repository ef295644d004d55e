"""The list STATEFUL: the parts of a pipeline's state besides samples, jobs and nodes.

A snapshot has a file `NAME.arrays` for each part.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from fleetcast.features.arrays_file import TornFileError, read_arrays, write_arrays
from fleetcast.features.co_runs import CoRuns
from fleetcast.features.job_peaks import JobPeaks
from fleetcast.features.store_files import StoreError
from fleetcast.fleet.stateful import Dump, Stateful
from fleetcast.models.demand.forecaster import DemandForecaster
from fleetcast.models.demand.sparse import SparseForecaster
from fleetcast.models.versions.registry import Registry
from fleetcast.service.config import Config
from fleetcast.service.pipeline import old_names
from fleetcast.service.pipeline.demand.served_trees import ServedTrees, ShadowTrees
from fleetcast.service.pipeline.gpu_times import GpuTimes
from fleetcast.service.pipeline.jobs.verdicts import Verdicts
from fleetcast.service.pipeline.learnt_times import LearntJobTimes
from fleetcast.service.pipeline.node_past import NodePasts
from fleetcast.service.pipeline.run_times.record import RunTimeRecord
from fleetcast.service.pipeline.state import FleetState
from fleetcast.service.pipeline.unknown_use import UnknownUse
from fleetcast.service.plugins import make_forecaster

logger = logging.getLogger(__name__)

UNREADABLE = (OSError, ValueError, KeyError, IndexError, TypeError, StoreError, TornFileError, msgspec.MsgspecError)
NEW_PARTS = frozenset({"learnt_times"})  # that snapshots of the version before lack
ABOUT = "about"  # the array that holds what is no array, packed
S = TypeVar("S", bound=Stateful)


@dataclass(frozen=True, slots=True)
class PartKind:
    """A kind of stateful part: its name, and how to make an empty one.

    starts_empty: if the file of this part is damaged, the part starts empty. For any other part, a damaged
    file makes the whole snapshot unusable.
    """

    name: str  # of its file
    make: Callable[[Config, FleetState], Stateful]
    starts_empty: bool = False


STATEFUL: tuple[PartKind, ...] = (
    PartKind("demand", lambda config, state: state.demand),
    PartKind("runs", lambda config, state: state.runs),
    PartKind("forecaster", lambda config, state: make_demand_forecaster(config)),
    PartKind("memory", lambda config, state: state.memory),
    PartKind("peaks", lambda config, state: JobPeaks()),
    PartKind("run_times", lambda config, state: RunTimeRecord()),
    PartKind("co_runs", lambda config, state: CoRuns(), starts_empty=True),
    PartKind("pasts", lambda config, state: NodePasts(), starts_empty=True),
    PartKind("verdicts", lambda config, state: Verdicts(), starts_empty=True),
    PartKind("gpu_times", lambda config, state: GpuTimes(), starts_empty=True),
    PartKind("labelled", lambda config, state: state.labelled, starts_empty=True),
    PartKind("label_jobs", lambda config, state: state.label_jobs, starts_empty=True),
    PartKind("unknown_use", lambda config, state: UnknownUse(), starts_empty=True),
    PartKind("learnt_times", lambda config, state: LearntJobTimes(), starts_empty=True),
)


class Parts:
    """The stateful parts of one pipeline. `parts[CoRuns]` returns the part of this class."""

    def __init__(self, kinds: Sequence[PartKind], config: Config, state: FleetState) -> None:
        self._kinds = {kind.name: kind for kind in kinds}
        self._made = {kind.name: kind.make(config, state) for kind in kinds}
        self._made_of = config, state

    def __getitem__(self, kind: type[S]) -> S:
        return next(part for part in self if isinstance(part, kind))

    def __iter__(self) -> Iterator[Stateful]:
        return iter(self._made.values())

    def dump(self, early: Mapping[type[Any], Dump]) -> dict[str, Dump]:
        """Return part name → its dump.

        early: dumps that were made before. Their parts must not have changed since.
        """
        return {name: early.get(type(part)) or part.dump() for name, part in self._made.items()}

    def load(self, folder: Path, is_old: bool = False) -> None:
        """Load files of `write_parts` into new parts. Raises one of UNREADABLE.

        is_old: the files have the names in `old_names`.
        """
        for name, part in self._made.items():
            try:
                part.load(*(_read_old_dump(folder, name) if is_old else _read_dump(folder / f"{name}.arrays")))
            except UNREADABLE as error:
                if not self._kinds[name].starts_empty:
                    raise
                is_new = isinstance(error, FileNotFoundError) and name in NEW_PARTS
                log = logger.info if is_new else logger.warning
                log("%s of snapshot %s cannot be used (%s) and starts empty", name, folder.name, error)
                self._made[name] = self._kinds[name].make(*self._made_of)

    def shift_times(self, by_ms: int) -> None:
        """Shift the times in all parts after the clock was set."""
        for part in self:
            part.shift_times(by_ms)


def write_parts(folder: Path, dumps: Mapping[str, Dump]) -> None:
    """Write one file for each part. Raises OSError."""
    for name, (about, arrays) in dumps.items():
        packed = np.frombuffer(msgspec.msgpack.encode(about, enc_hook=_convert_numpy_number), np.uint8)
        write_arrays(folder / f"{name}.arrays", {}, {**arrays, ABOUT: packed})


def _read_dump(path: Path) -> Dump:
    arrays = read_arrays(path)[1]
    return msgspec.msgpack.decode(arrays.pop(ABOUT).tobytes(), strict=False), arrays


def _read_old_dump(folder: Path, name: str) -> Dump:
    return old_names.rename_fields(name, _read_dump(folder / f"{old_names.FILES.get(name, name)}.arrays"))


def _convert_numpy_number(value: Any) -> Any:
    """Convert a NumPy number into a Python number. Raises TypeError for other values."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a snapshot cannot hold {type(value).__name__}")


def make_demand_forecaster(config: Config) -> DemandForecaster:
    registry = Registry(config.models_folder)
    plugins = [make_forecaster(path) for path in config.pipeline.forecasters]
    sparse = SparseForecaster()
    return DemandForecaster([ServedTrees(registry), sparse, *plugins], [sparse], [ShadowTrees(registry)])
