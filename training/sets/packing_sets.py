"""Data sets for packing pods: the nodes of a cluster with their GPUs, and lists of arriving pods.

    SET_node_list_*.parquet   sn, cpu_milli, memory_mib, gpu, model
    SET_pod_list_NAME.*       cpu_milli, memory_mib, num_gpu, gpu_milli (of each GPU), gpu_spec (models "A|B"; may lack)

This is the layout of openb. The files are in `placement/SET` of a data folder. Nodes without GPUs
are left out.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fleetcast.fleet.errors import RecordError
from fleetcast.placement.machines.shapes import MemberShape
from fleetcast.placement.machines.slots import WHOLE, Milli, convert_to_milli
from fleetcast.training.sets.data_folders import read_table

SETS = "placement"
NODE_COLUMNS = ("sn", "cpu_milli", "memory_mib", "gpu", "model")
POD_COLUMNS = ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
MOST_GPUS = 1024  # of one node


@dataclass(frozen=True, slots=True)
class Machines:
    """The n nodes of a cluster, sorted by name.

    milli: (n, g) thousandths of each GPU. cpus, memory_mib: (n,). model: (n,) index into `models`.
    """

    milli: Milli
    cpus: NDArray[np.float64]
    memory_mib: NDArray[np.float64]
    model: NDArray[np.int64]
    models: tuple[str, ...]

    @property
    def gpus(self) -> int:
        return int(self.milli.sum(dtype=np.int64)) // WHOLE


@dataclass(frozen=True, slots=True)
class PodKind:
    """The resources that each pod of one kind requests."""

    shape: MemberShape
    memory_mib: float


@dataclass(frozen=True, slots=True)
class PodList:
    """A list of arriving pods.

    kinds: the kinds of pods. kind: (pods,) the index of each pod's kind.
    """

    name: str
    kinds: tuple[PodKind, ...]
    kind: NDArray[np.int64]

    def compute_milli_gpus(self) -> NDArray[np.int64]:
        """Return (pods,) the milli-GPUs of each pod."""
        each = np.array([kind.shape.gpus * kind.shape.milli for kind in self.kinds], np.int64)
        return each[self.kind]


@dataclass(frozen=True, slots=True)
class PackingSet:
    """A list of arriving pods to evaluate, with the machines that they are packed onto.

    before: the other pod lists of the train folder. Their demand is known when the evaluation begins.
    """

    dataset: str
    machines: Machines
    pods: PodList
    before: tuple[PodList, ...]


def read_packing_sets(train: Path, test: Path, skipped: list[str]) -> list[PackingSet]:
    """Read every pod list of the test folder. If a list is left out, the reason is added to `skipped`.

    The nodes come from the test folder, or else from the train folder.
    """
    found = []
    folders = sorted({path.parent for path in test.glob(f"{SETS}/*/*_pod_list_*")})
    if not folders:
        skipped.append(f"{SETS}: no pod list in {test}")
    for folder in folders:
        try:
            machines = _find_machines([folder, train / SETS / folder.name])
        except RecordError as error:
            skipped.append(f"{folder.name}: {error}")
            continue
        known = _read_pod_lists(train / SETS / folder.name, skipped)
        for pods in _read_pod_lists(folder, skipped):
            before = tuple(one for one in known if one.name != pods.name)
            found.append(PackingSet(f"{folder.name}/{pods.name}", machines, pods, before))
    return found


def _find_machines(folders: list[Path]) -> Machines:
    for folder in folders:
        for path in sorted(folder.glob("*_node_list_*")):
            return read_machines(read_table(path))
    raise RecordError("no node list", f"no *_node_list_* in {' or '.join(map(str, folders))}")


def _read_pod_lists(folder: Path, skipped: list[str]) -> list[PodList]:
    found = []
    for path in sorted(folder.glob("*_pod_list_*")):
        name = path.name.partition("_pod_list_")[2].partition(".")[0]
        try:
            found.append(read_pods(name, read_table(path)))
        except RecordError as error:
            skipped.append(f"{folder.name}/{name}: {error}")
    return found


def read_machines(table: pd.DataFrame) -> Machines:
    """Return the nodes with GPUs, in the order of their names."""
    numbers = _read_numbers(table, NODE_COLUMNS, ("cpu_milli", "memory_mib", "gpu"))
    table = table.assign(**numbers)
    table = table[table["gpu"] > 0].sort_values("sn", kind="stable")
    if not len(table) or table["gpu"].max() > MOST_GPUS:
        raise RecordError("bad node list", f"no node has 1 to {MOST_GPUS} GPUs" if not len(table) else "gpu too large")
    models, model = np.unique(table["model"].astype(str).to_numpy(str), return_inverse=True)
    gpus = table["gpu"].to_numpy(np.int64)
    return Machines(
        milli=convert_to_milli(np.arange(gpus.max())[None, :] < gpus[:, None]),
        cpus=table["cpu_milli"].to_numpy(np.float64) / 1000,
        memory_mib=table["memory_mib"].to_numpy(np.float64),
        model=model.astype(np.int64),
        models=tuple(models.tolist()),
    )


def read_pods(name: str, table: pd.DataFrame) -> PodList:
    """Make a pod list from a table.

    Raises RecordError for missing columns, bad numbers, and pods that request parts of several GPUs.
    """
    numbers = _read_numbers(table, POD_COLUMNS, POD_COLUMNS)
    whole = numbers["gpu_milli"] == WHOLE
    if ((numbers["num_gpu"] > 1) & ~whole).any() or (numbers["gpu_milli"] > WHOLE).any():
        raise RecordError("bad gpu_milli", f"it is of one GPU, at most {WHOLE}, and {WHOLE} where num_gpu is above 1")
    spec = table["gpu_spec"] if "gpu_spec" in table else pd.Series(None, table.index, dtype=object)
    wanted = spec.astype(object).where(spec.notna(), "").to_numpy(object)
    rows = zip(*(numbers[column].tolist() for column in POD_COLUMNS), wanted.tolist(), strict=True)
    codes: dict[tuple[float, float, float, float, str], int] = {}
    kind = [codes.setdefault((*row[:4], str(row[4])), len(codes)) for row in rows]
    return PodList(name, tuple(_make_kind(*code) for code in codes), np.array(kind, np.int64))


def _make_kind(cpu_milli: float, memory_mib: float, num_gpu: float, gpu_milli: float, spec: str) -> PodKind:
    models = tuple(part.casefold() for part in spec.split("|") if part)
    return PodKind(MemberShape(int(num_gpu), int(gpu_milli) if num_gpu else 0, cpu_milli / 1000, models), memory_mib)


def _read_numbers(
    table: pd.DataFrame, needed: tuple[str, ...], numeric: tuple[str, ...]
) -> dict[str, NDArray[np.float64]]:
    missing = [column for column in needed if column not in table.columns]
    if missing:
        raise RecordError("missing column", f"no column {', '.join(missing)}")
    found = {column: pd.to_numeric(table[column], errors="coerce").to_numpy(np.float64) for column in numeric}
    for column, values in found.items():
        if not (np.isfinite(values) & (values >= 0)).all():
            raise RecordError("bad number", f"{column} must be a number of at least 0 in every row")
    return found
