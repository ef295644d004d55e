"""An evaluation on step times of real runs that were rendered as telemetry.

The evaluation covers the detected periods, and forecasts of some cycles ahead.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fleetcast.features.period import SAMPLES_A_PERIOD, find_period
from fleetcast.models.jobs.renewal import LEVELS
from fleetcast.models.jobs.template import LEVEL_S, lock_phase, predict_ahead
from fleetcast.training.reports.results import Results
from fleetcast.training.sets.fingerprint_sets import CHANNELS, convert_to_numbers, make_mean_row, read_files

Array = NDArray[np.float64]

RENDERED = "telemetry/rendered"
WITHIN = 0.02
EXPECTED = ("power_w", "ib_tx_bytes_s")
CYCLES_AHEAD, ORIGINS, MOST_PAST = (1.5, 5.3, 20), 8, 600


class _Truth(msgspec.Struct):
    interval_s: Annotated[float, msgspec.Meta(gt=0)]
    period_s: Annotated[float, msgspec.Meta(gt=0)]
    series: str = ""


@dataclass(frozen=True, slots=True)
class RenderedRun:
    """The telemetry rendered from the step times of a real run, and its true period.

    channels: (channel, sample) means over GPUs. in_half: whether the run is in the half of the runs that was not
    used to choose thresholds.
    """

    truth: _Truth
    names: tuple[str, ...]
    channels: Array
    in_half: bool

    @property
    def is_aliased(self) -> bool:
        return self.truth.period_s < SAMPLES_A_PERIOD * self.truth.interval_s


def _read_rendered_run(path: Path) -> RenderedRun:
    """Read a rendered run from the path of its truth file. Raises one of UNREADABLE."""
    truth = msgspec.json.decode(path.read_bytes(), type=_Truth)
    table = pd.read_parquet(path.parent / "telemetry.parquet")
    names = tuple(name for name in CHANNELS if name in table)
    values = convert_to_numbers(table, ["time_s", *names])
    means = values[np.isfinite(values["time_s"])].groupby("time_s").mean().to_numpy(np.float64).T
    if not names or means.shape[1] < 2:
        raise ValueError(f"no samples of {', '.join(CHANNELS)}")
    series = truth.series or path.parent.name.rpartition("-")[0]  # the same at all intervals
    return RenderedRun(truth, names, means, hashlib.sha256(series.encode()).digest()[0] % 2 == 1)


def judge_rendered_runs(results: Results, folder: Path, seed: int) -> None:
    runs = list(read_files(results, RENDERED, sorted(folder.glob("*/truth.json")), _read_rendered_run))
    _judge_periods(results, runs, seed)
    _judge_forecasts(results, [run for run in runs if not run.is_aliased], seed)


def _judge_periods(results: Results, runs: Sequence[RenderedRun], seed: int) -> None:
    """Add the share of runs whose period is found within 2 %. For an aliased run, "unknown" is the right answer.

    The series "other_half" has the runs that were not used to choose thresholds.
    """
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    unknown: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in runs:
        interval_s, period_s = run.truth.interval_s, run.truth.period_s
        said = {
            "ours": find_period(run.channels, interval_s).period_s,
            "largest_line": _find_strongest_period(run.channels, interval_s),
        }
        for method, answered_s in said.items():
            near = (
                answered_s is None
                if run.is_aliased
                else answered_s is not None and abs(answered_s / period_s - 1) <= WITHIN
            )
            for series in ("all", "other_half") if run.in_half else ("all",):
                (unknown if run.is_aliased else found)[series, method].append(float(near))
    for metric, values_by_key in (("period_within_2pct", found), ("aliased_unknown", unknown)):
        for (series, method), values in values_by_key.items():
            results.rows.append(make_mean_row(RENDERED, "period", method, metric, values, seed, series))


def _find_strongest_period(channels: Array, interval_s: float) -> float:
    """Return the period in seconds of the strongest frequency of the first channel, as the baseline."""
    first = np.nan_to_num(channels[0] - np.nanmean(channels[0]))
    power = np.abs(np.fft.rfft(first)) ** 2
    return float(len(first) * interval_s / (1 + int(np.argmax(power[1:]))))


def _judge_forecasts(results: Results, runs: Sequence[RenderedRun], seed: int) -> None:
    """Add the pinball loss and the coverage of forecasts of power and traffic some cycles ahead.

    The loss is relative to the mean level. Origins lie in the last half of a run.
    """
    losses: dict[tuple[str, str], list[float]] = defaultdict(list)
    inside: dict[tuple[str, str], list[float]] = defaultdict(list)
    for run in runs:
        of_run: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
        for series, method, scored in _score_forecasts(run):
            of_run[series, method].append(scored)
        for key, scores in of_run.items():
            losses[key].append(float(np.mean([loss for loss, _ in scores])))
            inside[key].append(float(np.mean([hit for _, hit in scores])))
    for metric, values_by_key in (("expected_pinball", losses), ("coverage_80", inside)):
        for (series, method), values in values_by_key.items():
            if metric == "expected_pinball" or method != "last_value":
                results.rows.append(make_mean_row(RENDERED, "expected", method, metric, values, seed, series))


def _score_forecasts(run: RenderedRun) -> Iterator[tuple[str, str, tuple[float, float]]]:
    """Yield (how far ahead, method, (loss, hit)) for each forecast.

    The hit is 1 if the value lies between p10 and p90, else 0.
    """
    many = run.channels.shape[1]
    past = min(many // 2, MOST_PAST)
    for origin in np.linspace(past, many - 1, ORIGINS + 1).astype(int)[:-1].tolist():
        window = run.channels[:, origin - past : origin]
        stated = find_period(window, run.truth.interval_s).period_s
        for name in EXPECTED:
            if name not in run.names:
                continue
            values = window[run.names.index(name)]
            for cycles in CYCLES_AHEAD:
                samples = round(cycles * run.truth.period_s / run.truth.interval_s)
                if origin - 1 + samples >= many or not np.isfinite(values).all():
                    continue
                actual = float(run.channels[run.names.index(name), origin - 1 + samples])
                for method, quantiles in _forecast_by_methods(values, stated, samples, run.truth.interval_s).items():
                    yield f"{cycles}_cycles", method, _score_quantiles(actual, quantiles, float(np.abs(values).mean()))


def _forecast_by_methods(
    values: Array, period_s: float | None, samples: int, interval_s: float
) -> dict[str, list[float]]:
    """Return method → the p10, p50 and p90 that it forecasts for the value `samples` ahead."""
    level = np.quantile(values[-max(1, round(LEVEL_S / interval_s)) :], LEVELS).tolist()
    lock = lock_phase(values, period_s / interval_s) if period_s is not None else None
    ours = level if lock is None else predict_ahead(values, lock, samples, interval_s, LEVELS)
    return {"ours": ours, "level": level, "last_value": [float(values[-1])] * 3}


def _score_quantiles(actual: float, quantiles: Sequence[float], scale: float) -> tuple[float, float]:
    """Return the pinball loss of p50 and p90 divided by `scale`, and whether p10 to p90 holds the value.

    The second number is 1 if it does, else 0.
    """
    loss = sum(
        max(level * (actual - stated), (level - 1) * (actual - stated))
        for level, stated in zip(LEVELS[1:], quantiles[1:], strict=True)
    )
    return loss / max(scale, 1e-9), float(quantiles[0] <= actual <= quantiles[2])
