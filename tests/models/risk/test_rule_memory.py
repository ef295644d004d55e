"""The memory of rules works on what is seen alone, and shows what work on every rule of every entity shows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.samples import EntityKind
from fleetcast.models.risk.detectors import Detection
from fleetcast.models.risk.memory import EARLY_EVERY_S, HOLD_S, LONGEST_GAP, NEW_SAMPLE_MS, RuleMemory
from tests.fuzz.bounds import examples

KIND, ENTITIES, T0 = EntityKind.NODE, 3, 1_700_000_000_000


class EveryPair:
    """The plain form: each array holds a row for each rule and a column for each entity, and all change each tick."""

    def __init__(self, rules):
        self.rules, shape = rules, (len(rules), ENTITIES)
        self.streak, self.firm = np.zeros(shape, int), np.zeros(shape, bool)
        self.against_s, self.untold_s = np.zeros(shape), np.zeros(shape)
        self.value, self.usual, self.strength = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.since_ms, self.seen_ms = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.sample_ms, self.tick_ms = np.zeros(ENTITIES, np.int64), 0

    def apply(self, found, age_s, now_ms, interval_s, answers):
        of = {name: np.array([getattr(seen, name) for seen in found]) for name in Detection.__dataclass_fields__}
        on, telling = of["on"], of["telling"]
        sample_ms = np.where(np.isfinite(age_s), now_ms - np.nan_to_num(age_s) * 1000, 0).astype(np.int64)
        fresh, gap_s = sample_ms > self.sample_ms + NEW_SAMPLE_MS, (sample_ms - self.sample_ms) / 1000
        self.sample_ms = np.where(fresh, sample_ms, self.sample_ms)
        elapsed_s = min(max(now_ms - self.tick_ms, 0) / 1000, 10 * interval_s) if self.tick_ms else 0.0
        self.tick_ms = now_ms
        if answers is None:
            told_s = read_s = np.where(fresh, np.minimum(gap_s, LONGEST_GAP * interval_s), 0.0)
        else:
            told_s, read_s = np.full(ENTITIES, elapsed_s), np.where(answers, elapsed_s, 0.0)
        began = on & (self.streak == 0) & ~self.firm
        self.streak = np.where(fresh, np.where(on, self.streak + 1, np.where(telling, 0, self.streak)), self.streak)
        self.against_s = np.where(on, 0.0, self.against_s + np.where(telling, told_s, 0.0))
        self.untold_s = np.where(on | telling, 0.0, self.untold_s + read_s)
        often = np.array([max(1.0, EARLY_EVERY_S / interval_s) if rule.early else 1.0 for rule in self.rules])[:, None]
        clears_s = np.array([rule.clears_s for rule in self.rules])[:, None]
        hold_s = np.array([np.inf if rule.hard else HOLD_S for rule in self.rules])[:, None]
        gone = ~on & ((self.against_s >= clears_s) | (self.untold_s >= hold_s))
        need = often * np.array([rule.firm_after for rule in self.rules])[:, None]
        self.firm = (self.firm & ~gone) | (on & (self.streak >= need))
        self.streak = np.where(gone, 0, self.streak)
        for name in ("value", "usual", "strength"):
            setattr(self, name, np.where(on, of[name], getattr(self, name)))
        self.since_ms = np.where(on & (of["since_ms"] > 0), of["since_ms"], np.where(began, now_ms, self.since_ms))
        self.seen_ms = np.where(on, now_ms, self.seen_ms)
        shown = self.firm | (on & (self.streak >= often * np.array([rule.shown_after for rule in self.rules])[:, None]))
        ages = np.array([rule.unit == "s" and rule.hard for rule in self.rules])[:, None]
        lately = ages & (self.since_ms > 0) & (self.seen_ms < now_ms)
        value = np.where(lately, (now_ms - self.since_ms) / 1000, self.value)
        rule, entity = np.nonzero(shown)
        columns = (self.firm, value, self.usual, self.strength, self.since_ms, self.seen_ms)
        return [rule.tolist(), entity.tolist(), *(column[rule, entity].tolist() for column in columns)]


TICKS = st.lists(
    st.fixed_dictionaries(
        {
            "after_s": st.sampled_from([1.0, 15.0, 15.0, 40.0, 700.0]),
            "on": st.lists(st.tuples(st.integers(0, 99), st.integers(0, ENTITIES - 1)), max_size=6),
            "untold": st.lists(st.tuples(st.integers(0, 99), st.integers(0, ENTITIES - 1)), max_size=6),
            "dates": st.booleans(),
            "age_s": st.lists(st.sampled_from([0.0, 1.0, 20.0, np.nan]), min_size=ENTITIES, max_size=ENTITIES),
            "answers": st.lists(st.booleans(), min_size=ENTITIES, max_size=ENTITIES),
        }
    ),
    min_size=1,
    max_size=25,
)


def detections(rules, tick, now_ms):
    on, telling = np.zeros((len(rules), ENTITIES), bool), np.ones((len(rules), ENTITIES), bool)
    for rule, entity in tick["on"]:
        on[rule % 4, entity] = True  # few rules, so that one is often seen again
    for rule, entity in tick["untold"]:
        telling[rule % 4, entity] = False
    since = np.full(ENTITIES, now_ms - 5_000 if tick["dates"] else 0, np.int64)
    number = np.arange(ENTITIES) + now_ms % 1000
    return [
        Detection.make_detection(seen, number + row, number / 2, (number % 7) / 7, since, tells)
        for row, (seen, tells) in enumerate(zip(on, telling, strict=True))
    ]


@given(TICKS, st.booleans(), st.sampled_from([5.0, 15.0]))
@examples(300)
def test_work_on_what_is_seen_shows_what_work_on_every_pair_shows(ticks, is_node, interval_s):
    memory = RuleMemory(KIND)
    plain, now_ms = EveryPair(memory.rules), T0
    for tick in ticks:
        now_ms += round(tick["after_s"] * 1000)
        found = detections(memory.rules, tick, now_ms)
        given_ = (found, np.array(tick["age_s"]), now_ms, interval_s, np.array(tick["answers"]) if is_node else None)
        raised = memory.apply_detections(*given_)
        rows = (raised.rule, raised.entity, raised.firm, raised.value, raised.usual, raised.strength)
        assert [row.tolist() for row in (*rows, raised.since_ms, raised.seen_ms)] == plain.apply(*given_)


def test_a_memory_that_was_saved_and_loaded_goes_on_as_it_was():
    memory, age_s = RuleMemory(KIND), np.zeros(ENTITIES)
    tick = {"on": [(0, 1), (2, 0)], "untold": [], "dates": False}
    for round_ in range(4):
        now_ms = T0 + 15_000 * round_
        memory.apply_detections(detections(memory.rules, tick, now_ms), age_s, now_ms, 15.0)
    again = RuleMemory(KIND)
    again.load(*memory.dump())
    quiet = detections(memory.rules, {"on": [], "untold": [], "dates": False}, now_ms + 1_000)
    one, other = (each.apply_detections(quiet, age_s + 1, now_ms + 1_000, 15.0) for each in (memory, again))
    assert one.firm.any()
    assert (one.rule.tolist(), one.entity.tolist()) == (other.rule.tolist(), other.entity.tolist())
    assert (one.value.tolist(), one.since_ms.tolist()) == (other.value.tolist(), other.since_ms.tolist())
