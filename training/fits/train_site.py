"""Training of site risk: a back-test on rolling windows, a fit on all of a site's days, and the gate."""

from collections.abc import Callable

from fleetcast.fleet.errors import FleetcastError
from fleetcast.models.risk.hazard import HORIZONS_DAYS
from fleetcast.models.risk.scores import RISK_KINDS
from fleetcast.models.risk.site_risk import SITE_FEATURES, SiteFit
from fleetcast.models.versions.card import Card, FitSpan, GateVerdict, make_card_metrics, read_package_versions
from fleetcast.models.versions.registry import Registry
from fleetcast.training.fits.backtest import WIN
from fleetcast.training.fits.retrain import DEPENDENCIES, TrainingOutcome, TrainingPlan
from fleetcast.training.fits.site_risk import FEWEST_EVENTS, PENALTY, count_events, fit_site
from fleetcast.training.judges.site_risk import (
    BESIDE,
    OURS,
    SERVING,
    SHIPPED,
    JudgedDays,
    compare_geometric_means,
    judge_windows,
    make_risk_results,
)
from fleetcast.training.reports.card_page import render_card
from fleetcast.training.reports.contests import select_pooled_rows
from fleetcast.training.reports.results import Results
from fleetcast.training.sites.site_days import SiteDays

Say = Callable[[str], None]

KIND = "risk"
NAMES = {"fail": "failures", "drain": "drains", "slow": "slowdowns"}
FEWEST_JUDGED = 20  # failures, drains and slowdowns that came in the judged windows


def train_risk(
    days: SiteDays, plan: TrainingPlan, registry: Registry, now_ms: int, *, promote: bool = True, say: Say = print
) -> TrainingOutcome:
    """Train a version and add it to the registry.

    The version serves if it beats the shipped fit and the serving version. If the process is killed, the
    registry stays unchanged.
    """
    counts = count_events(days, days.end_ms)
    say(f"1 of 2: judging on {plan.windows} windows that are not fitted on, each by a fit on what came before")
    served = _load_serving_fit(registry)
    version = registry.find_current_version(KIND)
    since_ms = registry.read_version_card(KIND, version).fitted_until_ms if version and served else 0
    enough = counts["fail"] >= FEWEST_EVENTS
    judged = judge_windows(days, plan.windows, served, since_ms) if enough else None
    results = make_risk_results(judged, "site", plan.seed) if judged else Results(KIND)
    say("2 of 2: fitting on all of it")
    fit = fit_site(days, days.end_ms, {"source": plan.made_by})
    card = Card(
        kind=KIND,
        created_ms=now_ms,
        made_by=plan.made_by,
        seed=plan.seed,
        fitted_until_ms=days.end_ms,
        data=(FitSpan("archive", int(days.time_ms.min(initial=days.end_ms)), days.end_ms, len(days)),),
        features=SITE_FEATURES,
        settings={"penalty": PENALTY, "fewest_events": FEWEST_EVENTS, "horizons_days": list(HORIZONS_DAYS)},
        metrics=make_card_metrics(select_pooled_rows(results.rows)),
        gate=make_verdict(counts, judged, results, version),
        dependencies=read_package_versions(*DEPENDENCIES),
    )
    added = registry.add_version(KIND, fit.save, card, render_card)
    objection = "it was not asked for (--no-promote)"
    if promote:
        try:
            registry.promote(KIND, added)
            objection = ""
        except FleetcastError as error:
            objection = str(error)
    return TrainingOutcome(added, registry.read_version_card(KIND, added), results, objection)


def _load_serving_fit(registry: Registry) -> SiteFit | None:
    folder = registry.find_serving_folder(KIND)
    return None if folder is None else SiteFit.load(folder)


def make_verdict(
    counts: dict[str, int], judged: JudgedDays | None, results: Results, version: str | None
) -> GateVerdict:
    """Return the gate's verdict on the new fit.

    The fit wins only with enough failures. Its log loss must also be lower than those of the shipped
    fit and of the serving version, if there is one.
    """
    short = "; ".join(f"{count:,} {NAMES[kind]}, {FEWEST_EVENTS} needed" for kind, count in counts.items())
    if judged is None:
        return GateVerdict(False, short, "log_loss", SHIPPED, 0.0, 0.0, 0)
    kinds = [kind for kind in RISK_KINDS if any(kind in fit.kinds for fit in judged.fits)]
    ours, theirs, n = compare_geometric_means(results, kinds, SHIPPED)
    if (came := _count_judged_events(results, OURS)) < FEWEST_JUDGED or not n:
        sentence = f"{came} events in the judged windows, {FEWEST_JUDGED} needed; in all {short}"
        return GateVerdict(False, sentence, "log_loss", SHIPPED, 0.0, 0.0, 0)
    rival = SHIPPED
    if version is not None:
        rival = f"the serving version {version}"
        if (later := _count_judged_events(results, BESIDE)) < FEWEST_JUDGED:
            sentence = f"{later} events since the data of {rival} ended, {FEWEST_JUDGED} needed to compare them"
            return GateVerdict(False, sentence, "log_loss", rival, 0.0, 0.0, 0)
        beside, against, later = compare_geometric_means(results, kinds, SERVING, BESIDE)
        if beside / against >= ours / theirs:
            ours, theirs, n = beside, against, later
        else:
            rival = SHIPPED
    return _judge_ratio(ours, theirs, n, rival, kinds, counts, len(judged.fits))


def _count_judged_events(results: Results, method: str) -> int:
    """Count the events within a day in the judged rows for which this method has a log loss."""
    return sum(row.n for row in results.select(series="all", method=method, metric="log_loss", horizon_s=86_400))


def _judge_ratio(
    ours: float, theirs: float, n: int, rival: str, kinds: list[str], counts: dict[str, int], windows: int
) -> GateVerdict:
    ratio = ours / theirs
    word = "below" if ratio < 1 else "above"
    who = "the shipped fit" if rival == SHIPPED else rival
    had = ", ".join(f"{counts[kind]:,} {NAMES[kind]}" for kind in kinds)
    sentence = (
        f"log loss {abs(1 - ratio):.1%} {word} {who}, geometric mean over kinds and horizons in {windows} windows "
        f"out of sample, of {had}; {1 - WIN:.0%} below is asked for"
    )
    return GateVerdict(ratio <= WIN, sentence, "log_loss", rival, ours, theirs, n)
