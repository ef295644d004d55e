"""A whole training: a back-test, a fit on all data, a new version with its card, and the gate.

    inputs ─ windows ─ back-test ─ Verdict ┐
      └──── fit on all of it ─ model ─────┴─ Card ─ Registry.add_version ─ promote, if it won

A version is complete or absent, so training may be killed at any moment and run again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fleetcast.fleet.errors import ConfigError, FleetcastError
from fleetcast.models.forecast import Forecaster
from fleetcast.models.versions.card import Card, FitSpan, compute_calibration, make_card_metrics, read_package_versions
from fleetcast.models.versions.registry import Registry
from fleetcast.training.fits.backtest import backtest, make_demand_windows, make_duration_windows, make_verdict
from fleetcast.training.reports.card_page import render_card
from fleetcast.training.reports.contests import select_pooled_rows
from fleetcast.training.reports.results import Results
from fleetcast.training.sets.demand_sets import DemandSet
from fleetcast.training.sets.job_sets import HistoryJobs
from fleetcast.training.sites.histories import TrainingInputs

Say = Callable[[str], None]

DEPENDENCIES = ("fleetcast", "lightgbm", "numpy", "scikit-learn")


class Model(Protocol):
    """A fitted model that can be saved in a folder."""

    def save(self, folder: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """The settings of a training.

    windows: the number of back-test windows. address: the address of a Dask scheduler. own: further
    forecasters, which count as baselines.
    """

    kind: str
    made_by: str
    seed: int = 0
    windows: int = 1
    address: str | None = None
    processes: int = 1
    own: tuple[Forecaster, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """The model version that a training added, and the results of its back-test.

    objection: the reason why the version does not serve, "" if it serves.
    """

    version: str
    card: Card
    results: Results
    objection: str


@dataclass(frozen=True, slots=True)
class FitResult:
    """A model, and the facts about its fit that its card lists."""

    model: Model
    fitted_until_ms: int
    data: tuple[FitSpan, ...]
    features: tuple[str, ...]
    settings: dict[str, Any]


def train(
    inputs: TrainingInputs,
    plan: TrainingPlan,
    registry: Registry,
    now_ms: int,
    *,
    promote: bool = True,
    say: Say = print,
) -> TrainingOutcome:
    """Train a model, and add it to the registry as a version.

    promote: whether the version shall serve if the gate allows it. Raises FleetcastError if the data
    are insufficient or unclear. The registry stays unchanged if the process is killed before the end.
    """
    if plan.kind == "demand":
        sets = inputs.read_panels()
        windows = make_demand_windows(sets, plan.windows, plan.seed, own=plan.own)
    else:
        tables = inputs.read_jobs()
        if len(tables) > 1:
            names = ", ".join(name for name, _ in tables)
            raise ConfigError(
                f"{len(tables)} job histories, each with users and a clock of its own ({names}): name one by --set"
            )
        windows = make_duration_windows(tables, plan.windows, plan.seed)
    say(f"1 of 2: judging on windows that are not fitted on: 0 of {len(windows)} done")
    results = backtest(plan.kind, windows, address=plan.address, processes=plan.processes, say=say)
    say("2 of 2: fitting on all of it")
    fit = fit_demand(sets, plan.seed, say) if plan.kind == "demand" else fit_duration(tables, plan.seed)
    card = _make_card(fit, plan, results, now_ms)
    version = registry.add_version(plan.kind, fit.model.save, card, render_card)
    objection = "it was not asked for (--no-promote)"
    if promote:
        try:
            registry.promote(plan.kind, version)
            objection = ""
        except FleetcastError as error:
            objection = str(error)
    return TrainingOutcome(version, registry.read_version_card(plan.kind, version), results, objection)


def _make_card(fit: FitResult, plan: TrainingPlan, results: Results, now_ms: int) -> Card:
    metrics = make_card_metrics(select_pooled_rows(results.rows))
    return Card(
        kind=plan.kind,
        created_ms=now_ms,
        made_by=plan.made_by,
        seed=plan.seed,
        fitted_until_ms=fit.fitted_until_ms,
        data=fit.data,
        features=fit.features,
        settings=fit.settings,
        metrics=metrics,
        calibration=compute_calibration(metrics),
        gate=make_verdict(plan.kind, results),
        dependencies=read_package_versions(*DEPENDENCIES),
    )


def fit_demand(sets: Sequence[DemandSet], seed: int, say: Say = lambda line: None) -> FitResult:
    """Fit the demand trees of every target on all bins."""
    import msgspec

    from fleetcast.models.demand.features import FEATURES
    from fleetcast.models.demand.trees import DemandTrees

    panels = [row.panel for row in sets]
    model = DemandTrees(seed).fit(panels, [panel.bins for panel in panels], say)
    data = tuple(
        FitSpan(f"{row.dataset} {panel.target}", panel.first_ms, panel.end_ms(panel.bins - 1), panel.values.size)
        for row, panel in zip(sets, panels, strict=True)
    )
    return FitResult(model, model.fitted_until_ms, data, FEATURES, msgspec.to_builtins(model.settings))


def fit_duration(tables: Sequence[tuple[str, HistoryJobs]], seed: int) -> FitResult:
    """Fit the model of run times and remaining times on everything known at the last submission or end.

    Raises FleetcastError if too few jobs have ended.
    """
    from fleetcast.features.past_runs import FEATURES
    from fleetcast.models.run_times.boosted_quantiles import LEAF_ROWS, PARAMETERS, TREES
    from fleetcast.models.run_times.duration import HELD_OUT, ROWS_FITTED, DurationModel
    from fleetcast.training.judges.duration import _draw_watched_jobs
    from fleetcast.training.sets.duration_rows import LANDMARKS_S, replay_history

    ((name, table),) = tables
    until_s = float(np.nanmax(np.concatenate((table.submit_s, table.end_s))))
    watched = _draw_watched_jobs(np.ones(len(table), np.bool_), seed)
    rows = replay_history(table, watched=watched, landmarks_s=LANDMARKS_S)
    model = DurationModel(seed).fit(rows.join_run_times(table), until_s)
    if model.fitted_until_ms is None:
        raise FleetcastError(f"{name}: {len(table):,} jobs, too few of them ended to fit on")
    span = FitSpan(name, round(float(table.submit_s.min()) * 1000), round(until_s * 1000), len(table))
    parameters = {name: value for name, value in PARAMETERS.items() if name != "verbose"}
    settings = {**parameters, "trees": TREES, "leaf_rows": LEAF_ROWS, "rows": ROWS_FITTED, "held_out": HELD_OUT}
    return FitResult(model, model.fitted_until_ms, (span,), FEATURES, settings)
