"""`fleetcast evaluate risk --year`: what a site's own risk fit is worth on a simulated year.

It also reports whether the gate lets it serve.
"""

from collections.abc import Callable, Mapping

from fleetcast.training.fits.site_risk import events_of
from fleetcast.training.fits.train_site import verdict
from fleetcast.training.judges.site_risk import judge_windows, make_risk_results
from fleetcast.training.reports.results import Results
from fleetcast.training.sets.simulated_year import plan_of, simulated_year
from fleetcast.training.sites.site_days import SiteDays

Say = Callable[[str], None]

WINDOWS = 4
YOUNG = 10  # failures of a site that must not serve yet
DATASET = "simulated year"


def evaluate_year(nodes: int, seed: int, say: Say) -> Results:
    """Evaluate a year of a fleet in rolling windows.

    Also ask the gate at the year's end and after the first failures.
    """
    say(f"a year of {nodes:,} nodes, seed {seed}")
    days = simulated_year(plan_of(nodes, seed=seed))
    counts = events_of(days, days.end_ms)
    say(f"{len(days):,} node-days, events: {_words(counts)}; judging {WINDOWS} windows")
    judged = judge_windows(days, WINDOWS)
    results = make_risk_results(judged, DATASET, seed)
    gate = verdict(counts, judged, results, None)
    say(f"gate, whole year: {'serves' if gate.won else 'does not serve'}: {gate.sentence}")
    young = events_of(days, find_youth_end(days))
    refused = verdict(young, None, Results("risk"), None)
    say(f"gate, {YOUNG} failures: {'serves' if refused.won else 'does not serve'}: {refused.sentence}")
    return results


def find_youth_end(days: SiteDays) -> int:
    """Return the time in ms by which the first YOUNG failures had begun."""
    times = sorted(days.begun["fail"].time_ms.tolist())
    return int(times[min(YOUNG, len(times)) - 1])


def _words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {count:,}" for kind, count in counts.items())
