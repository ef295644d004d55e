"""Marks on Kubernetes nodes: a condition, a label and, if configured, a taint and a feature for Slurm.

    condition GpuFailureExpected      True in the band high, else False. The cause of the risk is its reason
    label     fleetcast.io/risk       the band
    taint     fleetcast.io/risk=high  only in the band high, with the configured effect
    annotation features.slinky.slurm.net/spec   if configured: the band as a feature for slurm-operator

A condition is written when its status changes. A new reason alone is not written, because other programs
measure time from the last write.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from fleetcast.fleet.nodes import FAILURE_EXPECTED
from fleetcast.schedulers.adapter import Seen, Verb, Write, withdraw_fields
from fleetcast.schedulers.bands import HIGH, LEVELS
from fleetcast.schedulers.weather import Outlook, Weather

MARK = "fleetcast.io/risk"
SLINKY = "features.slinky.slurm.net/spec"
CONDITION, LABEL, TAINT = f"condition {FAILURE_EXPECTED}", f"label {MARK}", f"taint {MARK}"
FEATURE = f"annotation {SLINKY}"
COSTS = {TAINT: 1000, CONDITION: 900}  # of leaving it there: a taint keeps pods away, repair acts on a condition
THEIRS = "theirs: "  # before a field of ours that another owner holds
EFFECTS = ("", "PreferNoSchedule", "NoSchedule")


class NodeMarks:
    """The adapter `nodes`, which marks Kubernetes nodes with their risk band.

    A key is a node of the cluster. `effect`: the effect of the taint, "" for no taint. `slinky`: whether
    slurm-operator gets the band, too.
    """

    verbs: Mapping[str, Verb] = {}
    fields = frozenset({CONDITION, LABEL, TAINT, FEATURE})

    def __init__(self, effect: str = "", slinky: bool = False) -> None:
        self._effect, self._slinky = effect, slinky

    def wishes(self, weather: Weather | None, seen: Seen) -> Iterator[Write]:
        if weather is None:
            yield from withdraw_fields(seen, self.fields, "withdrawn", COSTS)
            return
        why = "there is no forecast now"
        for name, values in seen.items():
            if weather.nodes is None:
                yield from withdraw_fields({name: values}, (LABEL, TAINT, FEATURE), why, COSTS)
                if CONDITION in values:
                    cost = COSTS[CONDITION] if _parse_status(values[CONDITION]) == "True" else 0
                    yield from _make_wish(name, values, CONDITION, "Unknown NoForecast", why, cost)
            elif name in weather.nodes.rows:
                yield from self._mark_node(name, values, weather.nodes)
            else:
                yield from withdraw_fields({name: values}, self.fields, "no forecast knows this node", COSTS)

    def _mark_node(self, name: str, values: Mapping[str, str], nodes: Outlook) -> Iterator[Write]:
        row = nodes.rows[name]
        p = nodes.risk[0, row]
        if np.isnan(p):
            return
        band = LEVELS[nodes.level[row]]
        why = f"risk {p:.0%} within 1 h" + (f": {nodes.reasons[name]}" if name in nodes.reasons else "")
        is_high = band == HIGH
        condition = (
            f"True {_format_reason(nodes.causes.get(name, 'high_risk'))}" if is_high else "False NoFailureExpected"
        )
        taint = f"{HIGH}:{self._effect}" if is_high and self._effect else None
        feature = f"risk_{band}" if self._slinky else None
        for field, value in ((CONDITION, condition), (LABEL, band), (TAINT, taint), (FEATURE, feature)):
            yield from _make_wish(name, values, field, value, why, int(1000 * p))


def _make_wish(
    name: str, values: Mapping[str, str], field: str, value: str | None, why: str, cost: int
) -> Iterator[Write]:
    """Yield at most one write: none if the field has the value already, or belongs to another system."""
    held = values.get(field)
    is_so = _parse_status(held) == _parse_status(value) if field == CONDITION else held == value
    if not is_so and THEIRS + field not in values:
        yield Write(name, field, value, held, why, cost)


def _parse_status(condition: str | None) -> str | None:
    return None if condition is None else condition.partition(" ")[0]


def _format_reason(cause: str) -> str:
    """Format a cause as the reason of a condition.

    >>> _format_reason("sm_clock_mhz"), _format_reason("high_risk"), _format_reason("79 xid")
    ('SmClockMhz', 'HighRisk', 'Xid')
    """
    words = "".join(letter if letter.isascii() and letter.isalnum() else " " for letter in cause).split()
    return "".join(word.capitalize() for word in words).lstrip("0123456789") or "HighRisk"
