"""`fleetcast evaluate risk --year`: how much a site's own risk fit improves predictions.

The command evaluates the fit on a simulated year. It also reports whether the gate allows the fit to serve.
"""

from collections.abc import Callable, Mapping

from fleetcast.training.fits.site_risk import count_events
from fleetcast.training.fits.train_site import make_verdict
from fleetcast.training.judges.site_risk import judge_windows, make_risk_results
from fleetcast.training.reports.results import Results
from fleetcast.training.sets.simulated_year import draw_plan, simulate_year
from fleetcast.training.sites.site_days import SiteDays

Say = Callable[[str], None]

WINDOWS = 4
YOUNG = 10  # failures of a site that must not serve yet
DATASET = "simulated year"


def evaluate_year(nodes: int, seed: int, say: Say) -> Results:
    """Evaluate a simulated year of a fleet in rolling windows.

    The gate's verdict is reported for the whole year, and for the time just after the first failures.
    """
    say(f"a year of {nodes:,} nodes, seed {seed}")
    days = simulate_year(draw_plan(nodes, seed=seed))
    counts = count_events(days, days.end_ms)
    say(f"{len(days):,} node-days, events: {_format_counts(counts)}; judging {WINDOWS} windows")
    judged = judge_windows(days, WINDOWS)
    results = make_risk_results(judged, DATASET, seed)
    gate = make_verdict(counts, judged, results, None)
    say(f"gate, whole year: {'serves' if gate.won else 'does not serve'}: {gate.sentence}")
    young = count_events(days, find_first_failures_ms(days))
    refused = make_verdict(young, None, Results("risk"), None)
    say(f"gate, {YOUNG} failures: {'serves' if refused.won else 'does not serve'}: {refused.sentence}")
    return results


def find_first_failures_ms(days: SiteDays) -> int:
    """Return the time by which the first YOUNG failures of the site had begun, in Unix ms."""
    times = sorted(days.begun["fail"].time_ms.tolist())
    return int(times[min(YOUNG, len(times)) - 1])


def _format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {count:,}" for kind, count in counts.items())
