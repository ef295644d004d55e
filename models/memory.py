"""RiskMemory: what the rules remember between ticks, so that one odd sample is no alarm and one good one no pardon.

    seen once ──► shown (a reason, action "watch") ──► seen `firm_after` times in a row ──► firm
    firm ──► cleared after `clears_s` of telling observations against it, or HOLD_S without any telling one

Only a new sample counts as an observation: ticks between two scrapes change nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.events import NodeEvent
from fleet.samples import EntityKind
from models.fault_log import FaultLog
from models.heat import Slots
from models.job_outcomes import JobOutcomes
from models.port_peers import PortPeers
from models.risk_record import RECORD_ARRAYS, RiskRecord
from models.rules import EARLY, OF_KIND, ROW, RULES
from models.signals import Sight, Signal
from models.steps import Pace

HOLD_S = 600.0
NEW_SAMPLE_MS = 500
LEARNED = ("usual_clock", "was_up", "was_speed", "usual_scrape_s", "scrape_known_s")
EVIDENCE = ("streak", "firm", "against_s", "untold_s", "value", "usual", "strength", "since_ms")
EARLY_EVERY_S = 15.0  # between the samples that the rules of early signs count
SCRAPE_EASES_S, SCRAPE_LEARNS_S = (
    14_400.0,
    300.0,
)  # of the usual time that a scrape takes: upwards; at first and downwards
USUAL_DECAY = 0.001  # of the gap, an observation: a changed clock limit is the new usual after some hours


@dataclass(slots=True)
class KindMemory:
    """Of one kind of entity: arrays (rule, entity), rules as in OF_KIND."""

    rules: int
    streak: NDArray[np.int32] = field(init=False)
    firm: NDArray[np.bool_] = field(init=False)
    against_s: NDArray[np.float64] = field(init=False)
    untold_s: NDArray[np.float64] = field(init=False)
    value: NDArray[np.float64] = field(init=False)
    usual: NDArray[np.float64] = field(init=False)
    strength: NDArray[np.float64] = field(init=False)
    since_ms: NDArray[np.int64] = field(init=False)
    sample_ms: NDArray[np.int64] = field(init=False)  # (entity,)
    tick_ms: int = 0

    def __post_init__(self) -> None:
        self.streak = np.zeros((self.rules, 0), np.int32)
        self.firm = np.zeros((self.rules, 0), bool)
        self.against_s = np.zeros((self.rules, 0))
        self.untold_s = np.zeros((self.rules, 0))
        self.value = np.zeros((self.rules, 0))
        self.usual = np.zeros((self.rules, 0))
        self.strength = np.zeros((self.rules, 0))
        self.since_ms = np.zeros((self.rules, 0), np.int64)
        self.sample_ms = np.zeros(0, np.int64)

    def grow(self, entities: int) -> None:
        more = entities - len(self.sample_ms)
        if more <= 0:
            return
        for name in EVIDENCE:
            setattr(self, name, np.pad(getattr(self, name), ((0, 0), (0, more))))
        self.sample_ms = np.pad(self.sample_ms, (0, more))

    def dump(self) -> dict[str, NDArray[Any]]:
        """What a snapshot keeps: the evidence where something was seen; elsewhere it has no effect."""
        rule, entity = np.nonzero((self.streak > 0) | self.firm)
        arrays = {name: getattr(self, name)[rule, entity] for name in EVIDENCE}
        tick_ms = np.array([self.tick_ms], np.int64)
        return {**arrays, "rule": rule, "entity": entity, "sample_ms": self.sample_ms.copy(), "tick_ms": tick_ms}

    def load(self, arrays: Mapping[str, NDArray[Any]], rows: NDArray[np.intp]) -> None:
        """The inverse of `dump`, into an empty one. rows: rule there -> rule here, -1 where there is none any more."""
        self.grow(len(arrays["sample_ms"]))
        self.sample_ms[:] = arrays["sample_ms"]
        self.tick_ms = int(arrays["tick_ms"][0])
        rule, entity = rows[arrays["rule"]], arrays["entity"]
        known = (rule >= 0) & (entity < len(self.sample_ms))
        for name in EVIDENCE:
            getattr(self, name)[rule[known], entity[known]] = arrays[name][known]

    def move(self, by_ms: int) -> None:
        """Move all times; 0 is none."""
        for times in (self.since_ms, self.sample_ms):
            times[times > 0] += by_ms
        self.tick_ms += by_ms if self.tick_ms else 0


class Pardon(msgspec.Struct, frozen=True, array_like=True):
    """Evidence that a repair made void until then. back_ms: when the node was given back; value: what it showed."""

    until_ms: int
    back_ms: int
    value: float


@dataclass(frozen=True, slots=True)
class Raised:
    """What is shown now of one kind: (rule, entity) masks and the evidence of when it was last seen."""

    shown: NDArray[np.bool_]
    firm: NDArray[np.bool_]
    value: NDArray[np.float64]
    usual: NDArray[np.float64]
    strength: NDArray[np.float64]
    since_ms: NDArray[np.int64]


class RiskMemory:
    """State of the rules of one pipeline. `interval_s`: how often its entities are scraped."""

    def __init__(self, interval_s: float = 15.0) -> None:
        self.interval_s = interval_s
        self.kinds = {kind: KindMemory(len(rows)) for kind, rows in OF_KIND.items()}
        self.usual_clock = np.zeros(0)  # (gpu,) MHz under load, NaN unknown
        self.was_up = np.zeros(0, bool)  # (port,) the link was seen active
        self.was_speed = np.zeros(0)  # (port,) best speed seen
        self.usual_scrape_s = np.zeros(0)  # (node,) what a scrape usually takes, NaN unknown
        self.scrape_known_s = np.zeros(0)  # (node,) for how long it has been learned
        self.scrape_ms = 0
        self.slots = Slots()
        self.port_peers: PortPeers | None = None  # made anew when it does not fit, so no snapshot keeps it
        # Of the fleet, kept by whoever runs score_fleet:
        self.faults = FaultLog()
        self.record = RiskRecord()
        self.outcomes = JobOutcomes()
        self.streaks: dict[tuple[str, str], tuple[int, int, Signal]] = {}  # (rule, entity) -> first, last seen
        self.paces: dict[str, tuple[tuple[int | None, ...], Pace]] = {}  # job -> what it was computed from, pace
        self.told_ms: dict[str, int] = {}  # node -> its last return from repair that was honoured, as it was told
        self.back_ms: dict[str, int] = {}  # node -> that return for a day, by the clock of what is seen
        self.looked: dict[str, tuple[int, NodeEvent, NodeEvent]] = {}  # node -> events it had: how many, first, last
        self.pardons: dict[tuple[str, str], Pardon] = {}  # (rule, entity)

    def dump(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """What a snapshot keeps: JSON-able parts, and arrays by name. Rows are those of `Entities`."""
        about = {
            "rules": {kind.value: [RULES[row].name for row in rows] for kind, rows in OF_KIND.items()},
            "slots": self.slots.dump(),
            "scrape_ms": self.scrape_ms,
            "faults": self.faults.dump(),
            "outcomes": self.outcomes.dump(),
            "streaks": [[*key, *times, msgspec.to_builtins(seen)] for key, (*times, seen) in self.streaks.items()],
            "paces": {job: [stamp, msgspec.to_builtins(pace)] for job, (stamp, pace) in self.paces.items()},
            "told_ms": dict(self.told_ms),
            "back_ms": dict(self.back_ms),
            "pardons": [[*key, msgspec.to_builtins(pardon)] for key, pardon in self.pardons.items()],
        }
        arrays = {name: getattr(self, name).copy() for name in LEARNED}
        about["record"], record = self.record.dump()
        arrays |= {f"record/{name}": array for name, array in record.items()}
        for kind, memory in self.kinds.items():
            arrays |= {f"{kind.value}/{name}": array for name, array in memory.dump().items()}
        return about, arrays

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """The inverse of `dump`, into an empty memory; what a rule that is gone has seen is left out."""
        for kind, memory in self.kinds.items():
            here = {RULES[row].name: at for at, row in enumerate(OF_KIND[kind])}
            rows = np.array([here.get(name, -1) for name in about["rules"][kind.value]], np.intp)
            prefix = f"{kind.value}/"
            parts = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
            memory.load(parts, rows)
        for name in LEARNED:
            if name in arrays:  # snapshots of earlier versions have fewer
                setattr(self, name, arrays[name].copy())
        self.scrape_ms = about.get("scrape_ms", 0)
        if "slots" in about:
            self.slots.load(about["slots"])
        if "outcomes" in about:  # not in snapshots of versions that kept none
            self.faults.load(about["faults"])
            self.outcomes.load(about["outcomes"])
            self.record.load(about["record"], {name: arrays[f"record/{name}"] for name in RECORD_ARRAYS})
        else:
            self.faults.take_over(about.get("fault_ms", {}))
        self.streaks = {
            (rule, entity): (first_ms, last_ms, msgspec.convert(seen, Signal))
            for rule, entity, first_ms, last_ms, seen in about["streaks"]
            if rule in ROW
        }
        self.paces = {job: (tuple(stamp), msgspec.convert(pace, Pace)) for job, (stamp, pace) in about["paces"].items()}
        self.told_ms = dict(about.get("told_ms", {}))
        self.back_ms = dict(about.get("back_ms", {}))
        self.pardons = {
            (rule, entity): msgspec.convert(row, Pardon)
            for rule, entity, row in about.get("pardons", [])
            if rule in ROW
        }

    def move(self, by_ms: int) -> None:
        """Move the times of all that was seen, as when the clock by which it was seen stepped; events keep theirs."""
        for memory in self.kinds.values():
            memory.move(by_ms)
        self.slots.move(by_ms)
        self.scrape_ms += by_ms if self.scrape_ms else 0
        self.faults.move(by_ms)
        self.record.move(by_ms)
        self.outcomes.move(by_ms)
        self.streaks = {key: (first + by_ms, last + by_ms, seen) for key, (first, last, seen) in self.streaks.items()}
        self.back_ms = {node: time_ms + by_ms for node, time_ms in self.back_ms.items()}
        self.pardons = {
            key: Pardon(row.until_ms + by_ms, row.back_ms + by_ms if row.back_ms else 0, row.value)
            for key, row in self.pardons.items()
        }

    def learn_clock(
        self, clock: NDArray[np.float64], ceiling: NDArray[np.float64], healthy: NDArray[np.bool_]
    ) -> NDArray[np.float64]:
        """(gpu,) usual clock under load: rises at once, falls slowly, and only on `healthy` observations under load."""
        before = np.pad(self.usual_clock, (0, len(clock) - len(self.usual_clock)), constant_values=np.nan)
        eased = before - USUAL_DECAY * (before - clock)
        after = np.where(healthy & np.isfinite(clock) & (clock < before), eased, np.fmax(before, clock))
        self.usual_clock = np.fmax(after, ceiling)
        return self.usual_clock

    def learn_link(
        self, up: NDArray[np.bool_], speed: NDArray[np.float64]
    ) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """(port,) whether the link was ever seen active, and the best speed it had."""
        more = len(up) - len(self.was_up)
        self.was_up = np.pad(self.was_up, (0, more)) | up
        self.was_speed = np.fmax(np.pad(self.was_speed, (0, more), constant_values=np.nan), speed)
        return self.was_up, self.was_speed

    def learn_scrape(self, took_s: NDArray[np.float64], now_ms: int) -> NDArray[np.float64]:
        """(node,) seconds that its scrapes usually take, NaN until known: falls in minutes, rises in hours."""
        more = len(took_s) - len(self.usual_scrape_s)
        before = np.pad(self.usual_scrape_s, (0, more), constant_values=np.nan)
        known_s = np.pad(self.scrape_known_s, (0, more))
        elapsed_s = min(max(now_ms - self.scrape_ms, 0) / 1000, 10 * self.interval_s) if self.scrape_ms else 0.0
        self.scrape_ms = now_ms
        told = np.isfinite(took_s)
        young = (known_s < SCRAPE_LEARNS_S) | (took_s < before)
        share = np.minimum(1.0, elapsed_s / np.where(young, SCRAPE_LEARNS_S, SCRAPE_EASES_S))
        eased = before + (took_s - before) * share
        self.usual_scrape_s = np.where(told, np.where(np.isfinite(before), eased, took_s), before)
        self.scrape_known_s = known_s + np.where(told, elapsed_s, 0.0)
        return np.where(self.scrape_known_s >= SCRAPE_LEARNS_S, self.usual_scrape_s, np.nan)

    def settle(
        self, kind: EntityKind, sights: list[Sight], age_s: NDArray[np.float64], now_ms: int, forget: NDArray[np.bool_]
    ) -> Raised:
        """Fold this tick's sights of one kind (in the order of OF_KIND) and say what is shown and what is firm.

        age_s: (entity,) since the last sample, NaN when there never was one; `forget`: (entity,) drop all that was
        remembered (a vanished GPU no longer throttles).
        """
        memory = self.kinds[kind]
        memory.grow(len(age_s))
        rules = [RULES[row] for row in OF_KIND[kind]]
        on = np.array([sight.on for sight in sights]).reshape(len(rules), -1)
        telling = np.array([sight.telling for sight in sights]).reshape(len(rules), -1)
        fresh = self._fresh(memory, age_s, now_ms)
        elapsed_s = min(max(now_ms - memory.tick_ms, 0) / 1000, 10 * self.interval_s) if memory.tick_ms else 0.0
        memory.tick_ms = now_ms
        began = on & (memory.streak == 0) & ~memory.firm
        memory.streak = np.where(
            fresh, np.where(on, memory.streak + 1, np.where(telling, 0, memory.streak)), memory.streak
        )
        memory.against_s = np.where(on, 0.0, memory.against_s + np.where(telling, elapsed_s, 0.0))
        memory.untold_s = np.where(on | telling, 0.0, memory.untold_s + elapsed_s)
        often = np.array([self._often(rule.name) for rule in rules])[:, None]
        need = often * np.array([rule.firm_after for rule in rules])[:, None]
        clears_s = np.array([rule.clears_s for rule in rules])[:, None]
        gone = ~on & ((memory.against_s >= clears_s) | (memory.untold_s >= HOLD_S))
        memory.firm = (memory.firm & ~gone) | (on & (memory.streak >= need))
        memory.streak = np.where(gone, 0, memory.streak)
        self._keep(memory, sights, on, began, now_ms)
        if forget.any():
            self._forget(memory, forget, kind)
        shown_after = often * np.array([rule.shown_after for rule in rules])[:, None]
        shown = memory.firm | (on & (memory.streak >= shown_after))
        return Raised(shown, memory.firm & shown, memory.value, memory.usual, memory.strength, memory.since_ms)

    def _often(self, rule: str) -> float:
        """Samples that count as one: early signs ask for minutes, which are more samples where they come oftener."""
        return max(1.0, EARLY_EVERY_S / self.interval_s) if rule in EARLY else 1.0

    def _fresh(self, memory: KindMemory, age_s: NDArray[np.float64], now_ms: int) -> NDArray[np.bool_]:
        sample_ms = np.where(np.isfinite(age_s), now_ms - np.nan_to_num(age_s) * 1000, 0).astype(np.int64)
        fresh = sample_ms > memory.sample_ms + NEW_SAMPLE_MS
        memory.sample_ms = np.where(fresh, sample_ms, memory.sample_ms)
        return fresh

    def _keep(
        self,
        memory: KindMemory,
        sights: list[Sight],
        on: NDArray[np.bool_],
        began: NDArray[np.bool_],
        now_ms: int,
    ) -> None:
        """Remember the evidence of what is on now; a signal that does not know its start begins when first seen."""
        for name in ("value", "usual", "strength"):
            now = np.array([getattr(sight, name) for sight in sights]).reshape(on.shape)
            setattr(memory, name, np.where(on, now, getattr(memory, name)))
        known = np.array([sight.since_ms for sight in sights]).reshape(on.shape)
        memory.since_ms = np.where(on & (known > 0), known, np.where(began, now_ms, memory.since_ms))

    def _forget(self, memory: KindMemory, forget: NDArray[np.bool_], kind: EntityKind) -> None:
        lasting = np.array([RULES[row].hard or RULES[row].name == "gpus_missing" for row in OF_KIND[kind]])
        drop = forget[None, :] & ~lasting[:, None]
        memory.firm &= ~drop
        memory.streak = np.where(drop, 0, memory.streak)
