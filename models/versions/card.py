"""The card of a model version: its training data, accuracy and baselines, and whether it may serve."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from fleetcast.fleet.decode_faults import explain_json_error
from fleetcast.fleet.errors import ModelError

CARD_FILE, PAGE_FILE = "card.json", "card.html"


class FitSpan(msgspec.Struct, frozen=True):
    """The first and the last moment, and the number, of the rows of one data set that a model was fitted on."""

    dataset: str
    first_ms: int
    last_ms: int
    rows: int


class CardMetric(msgspec.Struct, frozen=True):
    """One metric of an evaluation, with the fields of `fleetcast.training.reports.results.ResultRow`.

    method: "ours" or the baseline's name.
    """

    dataset: str
    target: str
    series: str
    horizon_s: int | None
    method: str
    model: str
    metric: str
    value: float | None
    low: float | None
    high: float | None
    n: int


class Coverage(msgspec.Struct, frozen=True):
    """The share of n outcomes that lay within a band (`observed`), and the share that should lie there (`nominal`).

    horizon_s: None if the target has no horizon.
    """

    target: str
    horizon_s: int | None
    nominal: float
    observed: float
    n: int


class TargetVerdict(msgspec.Struct, frozen=True):
    """The gate's verdict on one target of a model.

    ratio: our loss divided by the best baseline's. Lower is better. why: the reason why the model did
    not win, empty if it won.
    """

    target: str
    won: bool
    ratio: float
    why: str = ""


class GateVerdict(msgspec.Struct, frozen=True):
    """The gate's verdict on a model.

    ours, baseline_value: the metric (less is better) over the same origins. sentence: the verdict in words,
    e.g. "WQL of running at 1 h: 0.0101, persistence has 0.0110 (8.2 % less), 504 origins".

    targets: the verdict on each target, if the model has several. Such a model wins if it wins one
    target, and serves only the targets that it wins.
    """

    won: bool
    sentence: str
    metric: str
    baseline: str
    ours: float
    baseline_value: float
    origins: int
    targets: tuple[TargetVerdict, ...] = ()

    @property
    def withheld_targets(self) -> frozenset[str]:
        """The targets that a promoted version does not serve. A version promoted by force serves all targets."""
        return frozenset(one.target for one in self.targets if not one.won) if self.won else frozenset()


class FileSum(msgspec.Struct, frozen=True):
    """The path, size and SHA-256 of one file of a version. The path is relative to the version's folder."""

    path: str
    size_bytes: int
    sha256: str


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """All facts about a model version. The registry fills `version` and `files`.

    fitted_until_ms: the model was fitted only on what was known by this time, in Unix ms. gate: None if it
    was not evaluated.
    """

    kind: str
    created_ms: int
    made_by: str
    seed: int
    fitted_until_ms: int
    version: str = ""
    data: tuple[FitSpan, ...] = ()
    features: tuple[str, ...] = ()
    settings: dict[str, Any] = {}
    metrics: tuple[CardMetric, ...] = ()
    calibration: tuple[Coverage, ...] = ()
    gate: GateVerdict | None = None
    dependencies: dict[str, str] = {}
    files: tuple[FileSum, ...] = ()

    @property
    def state(self) -> str:
        """The gate's verdict: "won", "lost" or "not judged"."""
        if self.gate is None:
            return "not judged"
        return "won" if self.gate.won else "lost"


def make_card_metrics(rows: Iterable[object]) -> tuple[CardMetric, ...]:
    """Return the rows of an evaluation in the form in which a card stores them."""
    return tuple(msgspec.convert(row, CardMetric, from_attributes=True) for row in rows)


def compute_calibration(metrics: Iterable[CardMetric]) -> tuple[Coverage, ...]:
    """Return the calibration table from our rows `coverage_50`, `coverage_80` …, pooled over data sets.

    >>> row = CardMetric("venus", "running", "all", 3600, "ours", "trees", "coverage_80", 0.79, None, None, 500)
    >>> compute_calibration([row])
    (Coverage(target='running', horizon_s=3600, nominal=0.8, observed=0.79, n=500),)
    """
    sums: dict[tuple[str, int | None, float], tuple[float, int]] = {}
    for row in metrics:
        head, _, level = row.metric.partition("_")
        if head == "coverage" and level.isdigit() and row.method == "ours" and row.series == "all" and row.n:
            key = (row.target, row.horizon_s, int(level) / 100)
            total, n = sums.get(key, (0.0, 0))
            if row.value is not None:
                sums[key] = (total + row.value * row.n, n + row.n)
    return tuple(Coverage(*key, total / n, n) for key, (total, n) in sums.items())


def read_package_versions(*packages: str) -> dict[str, str]:
    """Return package -> version, for the packages that are installed."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_card(card: Card, folder: Path) -> None:
    """Write the card as `card.json` into a folder."""
    (folder / CARD_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(card), indent=1) + b"\n")


def read_card(folder: Path) -> Card:
    """Read the card of a version's folder. Raises ModelError if it is missing or unreadable."""
    path = folder / CARD_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Card)
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is no model card: {explain_json_error(error)}") from None
