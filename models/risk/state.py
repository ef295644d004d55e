"""RiskState: the state of node risk and stragglers between ticks.

Each part is defined in the module that works with it.

    written by score_own_nodes    rules, clocks, slots, alike, links, scrapes: about the entities of one pipeline
    written by score_fleet        faults, rate, record, outcomes, streaks, paces, repairs, witnesses, days, shadow,
                                  gangs: about the fleet, in the one process that scores it

In addition, the service sets `faults.prior` at the start. `faults.set_fit` sets the site's own fit, and
`shift_times` shifts the times when the clock is set.
"""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from fleetcast.fleet.stateful import Dump, Stateful
from fleetcast.models.risk.alike import ComparableDevices
from fleetcast.models.risk.day_levels import DayLevels
from fleetcast.models.risk.fault_log import FaultLog
from fleetcast.models.risk.fault_rate import FaultRate
from fleetcast.models.risk.gpu_signals import UsualClocks
from fleetcast.models.risk.heat import SlotTemperatures
from fleetcast.models.risk.job_outcomes import JobOutcomes
from fleetcast.models.risk.memory import RuleMemory
from fleetcast.models.risk.node_signals import ScrapeTimes
from fleetcast.models.risk.port_signals import PortLinks
from fleetcast.models.risk.record import RiskRecord
from fleetcast.models.risk.repairs import RepairLog
from fleetcast.models.risk.rules import OF_KIND
from fleetcast.models.risk.witnesses import Witnesses
from fleetcast.models.stragglers.gang import GangMemberCache
from fleetcast.models.stragglers.gang_signals import GangStreaks
from fleetcast.models.stragglers.paces import Paces

NEWEST = frozenset({"witnesses", "rate"})  # owners that a snapshot of the version before lacks


UNSAVED = frozenset({"interval_s", "rules", "alike", "gangs"})  # `rules` by kind; the others are made anew


class RiskState(Stateful):
    """The state of node risk and stragglers, in parts. `interval_s`: seconds between scrapes of an entity."""

    def __init__(self, interval_s: float = 15.0) -> None:
        self.interval_s = interval_s
        self.rules = {kind: RuleMemory(kind) for kind in OF_KIND}
        self.clocks = UsualClocks()
        self.slots = SlotTemperatures()
        self.alike = ComparableDevices()  # made of entities at each start, so no snapshot keeps it
        self.gangs = GangMemberCache()  # made of placements, so no snapshot keeps it
        self.links = PortLinks()
        self.scrapes = ScrapeTimes()
        self.faults = FaultLog()
        self.rate = FaultRate()
        self.record = RiskRecord()
        self.outcomes = JobOutcomes()
        self.streaks = GangStreaks(interval_s)
        self.paces = Paces()
        self.repairs = RepairLog()
        self.witnesses = Witnesses()
        self.days = DayLevels()
        self.shadow = RiskRecord()

    def _list_stateful_parts(self) -> dict[str, Stateful]:
        named = {name: part for name, part in vars(self).items() if name not in UNSAVED}
        return {**{f"rules.{kind}": rules for kind, rules in self.rules.items()}, **named}

    def dump(self) -> Dump:
        """Return a copy of the state for a snapshot, by part. The names of arrays begin with the part's name."""
        parts = {name: part.dump() for name, part in self._list_stateful_parts().items()}
        arrays = {f"{name}/{array}": values for name, (_, own) in parts.items() for array, values in own.items()}
        return {name: about for name, (about, _) in parts.items()}, arrays

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Fill an empty state with the result of `dump`.

        Raises KeyError that names a missing part or array.
        """
        own: dict[str, dict[str, NDArray[Any]]] = {name: {} for name in self._list_stateful_parts()}
        for name, values in arrays.items():
            owner, _, array = name.partition("/")
            own[owner][array] = values
        for name, part in self._list_stateful_parts().items():
            if name in about or name not in NEWEST:
                part.load(about[name], own[name])

    def shift_times(self, by_ms: int) -> None:
        """Shift the times of all observations by `by_ms`, because our clock was set. Events keep their own times."""
        for part in self._list_stateful_parts().values():
            part.shift_times(by_ms)
