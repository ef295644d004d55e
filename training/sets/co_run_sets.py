"""Measured co-runs of two jobs on one GPU, and profiles of each job alone, as in `interference/lucid`.

    colocate_info   model1, dataset1, batchsize1, amp1, speed1 (relative to alone), the same with 2
    single_data     model, dataset, batchsize, amp, gpu_util %, gmem_util %, gmem MiB; label: Lucid's own answer

The loads in colocate_info were measured during the co-run, so they are not read. Only profiles may
provide loads. A configuration is (model, dataset, batch size, amp). Each co-run makes two rows, each
with another job as the victim.
"""

import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fleetcast.fleet.errors import RecordError
from fleetcast.models.jobs.interference import Pairs
from fleetcast.training.sets.data_folders import read_table

Array = NDArray[np.float64]
Config = tuple[str, ...]

PARTS = ("model", "dataset", "batchsize", "amp")
TABLES = ("colocate_info", "single_data")
SETS = "interference"
GPU_MEMORY_MIB = 24_576.0  # of the GPUs that Lucid measured on: only a scale, the same for all
SLOWEST, FASTEST = 0.01, 3.0  # what a measured relative speed may be


@dataclass(frozen=True, slots=True)
class CoRunPairs:
    """Co-runs as n rows, each with the speed of one job (the victim) next to its partner.

    Both rows of a co-run have the same number in `pair`. label: (n,) the sum of Lucid's labels, NaN if there is
    none.
    """

    pairs: Pairs
    speed: Array
    pair: NDArray[np.int64]
    model: NDArray[np.str_]
    partner_model: NDArray[np.str_]
    label: Array

    def __len__(self) -> int:
        return len(self.speed)

    def select_rows(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> "CoRunPairs":
        return CoRunPairs(
            self.pairs.select_rows(rows),
            self.speed[rows],
            self.pair[rows],
            self.model[rows],
            self.partner_model[rows],
            self.label[rows],
        )

    def has_any_model(self, models: set[str]) -> NDArray[np.bool_]:
        """Return (n,) whether the victim or the partner is one of these models."""
        names = list(models)
        return np.asarray(np.isin(self.model, names) | np.isin(self.partner_model, names))


@dataclass(slots=True)
class CoRunSet:
    """The co-runs of one set from both folders. left_out: reason → number of co-runs that were left out.

    in_test: (row,) whether only the test folder has the row.
    """

    dataset: str
    rows: CoRunPairs
    in_test: NDArray[np.bool_]
    new_models: set[str]
    left_out: dict[str, int] = field(default_factory=dict)


def find_family(model: str) -> str:
    """Return the model's name up to its first number, which models of other sizes or versions share.

    >>> find_family("ResNet50"), find_family("EfficientNet"), find_family("3D-UNet")
    ('ResNet', 'EfficientNet', '3D-UNet')
    """
    found = re.match(r"[^\W\d]+", model)
    return found.group() if found else model


def read_co_run_sets(train: Path, test: Path, skipped: list[str]) -> list[CoRunSet]:
    """Read every set of co-runs that is in both folders.

    For each other set, the reason why it was left out is added to `skipped`.
    """
    names = sorted({path.parent.name for folder in (train, test) for path in folder.glob(f"{SETS}/*/colocate_info.*")})
    found = []
    for name in names:
        dataset = f"{SETS}/{name}"
        try:
            tables = [[_read_set_table(folder / dataset, part) for part in TABLES] for folder in (train, test)]
            found.append(_join_folders(dataset, *tables))
        except (RecordError, FileNotFoundError) as error:
            skipped.append(f"{dataset}: {error}")
    if not names:
        skipped.append(f"{SETS}: no colocate_info in {train} or {test}")
    return found


def _read_set_table(folder: Path, name: str) -> pd.DataFrame:
    paths = sorted(folder.glob(f"{name}.*"))
    if not paths:
        raise FileNotFoundError(f"no {name} in {folder}")
    return read_table(paths[0])


def _join_folders(dataset: str, train: list[pd.DataFrame], test: list[pd.DataFrame]) -> CoRunSet:
    """Join the tables of both folders. A co-run that is in both belongs to the train folder.

    The profile of a job may come from either folder.
    """
    left_out: dict[str, int] = {}
    profiles = _read_profiles(train[1]) | _read_profiles(test[1])
    known = _read_co_runs(train[0], profiles, left_out)
    later = {key: speeds for key, speeds in _read_co_runs(test[0], profiles, left_out).items() if key not in known}
    both = {**known, **later}
    if not both:
        raise RecordError("no co-runs", "no row has two speeds and the profiles of both")
    rows = _make_pair_rows(both, profiles)
    in_test = np.repeat(np.arange(len(both)) >= len(known), 2)
    trained = {config[0] for key in known for config in key}
    new = {config[0] for key in later for config in key} - trained
    return CoRunSet(dataset, rows, in_test, new, left_out)


def _require_columns(table: pd.DataFrame, columns: list[str]) -> None:
    missing = [name for name in columns if name not in table.columns]
    if missing:
        raise RecordError("missing column", f"no column {', '.join(missing)}")


def _read_configs(table: pd.DataFrame, suffix: str = "") -> list[Config]:
    columns = [table[part + suffix].astype(str).tolist() for part in PARTS]
    return list(zip(*columns, strict=True))


def _convert_to_numbers(column: "pd.Series[Any]") -> Array:
    return np.asarray(pd.to_numeric(column, errors="coerce"), np.float64)


def _read_profiles(table: pd.DataFrame) -> dict[Config, tuple[float, float, float, float]]:
    """Return configuration → loads of compute, bandwidth and memory (ratios), and Lucid's label.

    The label is NaN if there is none. Rows with unreadable loads are skipped.
    """
    _require_columns(table, [*PARTS, "gpu_util", "gmem_util", "gmem"])
    label = _convert_to_numbers(table["label"]) if "label" in table.columns else np.full(len(table), np.nan)
    loads = zip(
        _convert_to_numbers(table["gpu_util"]) / 100,
        _convert_to_numbers(table["gmem_util"]) / 100,
        _convert_to_numbers(table["gmem"]) / GPU_MEMORY_MIB,
        label,
        strict=True,
    )
    found = zip(_read_configs(table), loads, strict=True)
    return {config: load for config, load in found if 0 <= load[0] <= 1 and 0 <= load[1] <= 1 and load[2] >= 0}


def _read_co_runs(
    table: pd.DataFrame, profiles: dict[Config, Any], left_out: dict[str, int]
) -> dict[tuple[Config, Config], tuple[float, float]]:
    """Return the configurations of both jobs → the speeds of both jobs.

    If a co-run was measured several times, the speeds are means.
    """
    _require_columns(table, [part + suffix for suffix in "12" for part in (*PARTS, "speed")])
    found: dict[tuple[Config, Config], list[tuple[float, float]]] = {}
    speeds = zip(
        _convert_to_numbers(table["speed1"]).tolist(), _convert_to_numbers(table["speed2"]).tolist(), strict=True
    )
    for one, other, pair in zip(_read_configs(table, "1"), _read_configs(table, "2"), speeds, strict=True):
        if not all(SLOWEST <= speed <= FASTEST for speed in pair):
            reason = f"no speed from {SLOWEST:g} to {FASTEST:g}"
        elif one not in profiles or other not in profiles:
            reason = "no profile"
        else:
            found.setdefault((one, other), []).append(pair)
            continue
        left_out[reason] = left_out.get(reason, 0) + 1
    return {
        key: (_average([one for one, _ in rows]), _average([two for _, two in rows])) for key, rows in found.items()
    }


def _average(values: list[float]) -> float:
    return sum(values) / len(values)


def _make_pair_rows(both: dict[tuple[Config, Config], tuple[float, float]], profiles: dict[Config, Any]) -> CoRunPairs:
    rows, speed, models, labels = [], [], [], []
    for (one, other), speeds in both.items():
        for victim, partner, value in ((one, other, speeds[0]), (other, one, speeds[1])):
            rows.append((profiles[victim][:3], profiles[partner][:3], _compute_keys(victim), _compute_keys(partner)))
            speed.append(value)
            models.append((victim[0], partner[0]))
            labels.append(profiles[victim][3] + profiles[partner][3])
    names = np.array(models, np.str_).reshape(len(models), 2)
    pair = np.repeat(np.arange(len(both), dtype=np.int64), 2)
    return CoRunPairs(Pairs.from_rows(rows), np.array(speed), pair, names[:, 0], names[:, 1], np.array(labels))


def _compute_keys(config: Config) -> tuple[int, int]:
    """Return the keys of the configuration and of its model, never 0."""
    return zlib.crc32("|".join(config).encode()) + 1, zlib.crc32(config[0].encode()) + 1
