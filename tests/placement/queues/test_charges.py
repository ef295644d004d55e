"""Charges in closed form, and credits that are conserved."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.placement.queues.charges import Charge, HeldGpus, PastUse, compute_leaf_use, decay_use
from fleetcast.placement.queues.credits import Bank
from fleetcast.placement.queues.showback import sum_charges
from fleetcast.placement.queues.tree import Credits, Prices

HOUR_MS = 3_600_000


def charge(leaf: str = "a", gpus: float = 8, held_ms: int = 0, ended_ms: int | None = None, **fields: object) -> Charge:
    known = {"held": (HeldGpus("train", "H100", gpus),), "expected_s": None, "queued_ms": None, **fields}
    return Charge(1, "r", "j", 1, leaf, "ada", "training", held_ms=held_ms, ended_ms=ended_ms, **known)  # type: ignore[arg-type]


def test_use_in_closed_form_is_the_integral() -> None:
    half_life_s, steps = 3600.0, 20_000
    dt = 7200 / steps
    summed = 0.0
    for _ in range(steps):
        summed = summed * math.exp2(-dt / half_life_s) + 8 * dt
    assert math.isclose(decay_use(0.0, 8.0, 7200.0, half_life_s), summed, rel_tol=1e-3)


@given(st.lists(st.integers(1, 10 * HOUR_MS), min_size=1, max_size=6), st.integers(1, 5 * HOUR_MS))
def test_use_is_the_same_however_often_it_is_asked_for(ends: list[int], later: int) -> None:
    """At once or step by step; and of an open charge what it is of the closed one."""
    past, often = PastUse(HOUR_MS / 1000), PastUse(HOUR_MS / 1000)
    for end_ms in sorted(ends):
        past.add(charge(ended_ms=end_ms))
        often.add(charge(ended_ms=end_ms))
        often.compute_use_at(end_ms + 1)
    now_ms = max(ends) + later
    assert often.compute_use_at(now_ms) == past.compute_use_at(now_ms)
    one, empty = PastUse(3600.0), PastUse(3600.0)
    one.add(charge(ended_ms=ends[0]))
    assert math.isclose(
        compute_leaf_use([charge()], empty, ends[0])["a"].decayed_gpu_s, one.compute_use_at(ends[0])["a"]
    )


def test_the_entry_penalty_is_the_median_and_goes_with_the_job() -> None:
    running = charge(expected_s=7200.0)
    past = PastUse(168 * 3600.0)
    assert compute_leaf_use([running], past, 0)["a"].decayed_gpu_s == 8 * 7200
    near = compute_leaf_use([running], past, HOUR_MS)["a"].decayed_gpu_s
    assert 8 * 7200 * 0.99 < near <= 8 * 7200
    past.add(charge(expected_s=7200.0, ended_ms=1000))
    assert compute_leaf_use([], past, 1000)["a"].decayed_gpu_s < 8.1


def test_a_clock_set_back_takes_nothing() -> None:
    past = PastUse(3600.0)
    past.add(charge(ended_ms=HOUR_MS))
    assert past.compute_use_at(0) == past.compute_use_at(HOUR_MS)
    bank = Bank(HOUR_MS, earned=5.0)
    assert bank.advance_to(0, 0.0, 9.0, Credits(1.0, 100.0), 3600.0) is bank


steps = st.lists(st.tuples(st.integers(0, 10_000_000), st.floats(0, 100)), max_size=30)


@given(steps, st.floats(0.01, 1), st.floats(0, 1e6), st.floats(0, 50))
def test_credits_are_conserved_and_bounded(drawn: list[tuple[int, float]], rate: float, cap: float, own: float) -> None:
    bank, now_ms = Bank(0), 0
    for after_ms, held in drawn:
        now_ms += after_ms
        later = bank.advance_to(now_ms, held, own, Credits(rate, cap), 3600.0)
        assert later.earned >= bank.earned
        assert later.spent >= bank.spent
        assert later.expired >= bank.expired
        bank = later
        assert math.isclose(bank.earned - bank.spent - bank.expired, bank.banked, abs_tol=1e-6 * max(1, bank.earned))
        assert bank.banked <= cap * (1 + 1e-9) + 1e-6 * max(1, bank.earned)


@given(st.floats(1, 1e5), st.floats(1, 1e5), st.floats(0, 30))
def test_credits_of_two_steps_are_those_of_one(first_s: float, then_s: float, held: float) -> None:
    credits, bank = Credits(0.5, 1e7), Bank(0, earned=4e5)
    middle = round(1000 * first_s)
    end = middle + round(1000 * then_s)
    at_once = bank.advance_to(end, held, 10.0, credits, 3600.0)
    twice = bank.advance_to(middle, held, 10.0, credits, 3600.0).advance_to(end, held, 10.0, credits, 3600.0)
    assert math.isclose(at_once.banked, twice.banked, rel_tol=1e-6, abs_tol=1e-3)
    assert math.isclose(at_once.spent, twice.spent, rel_tol=1e-6, abs_tol=1e-3)


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 64)), max_size=20))
def test_the_sum_of_charges_is_the_integral_of_what_was_held(drawn: list[tuple[int, int, int]]) -> None:
    charges = [
        charge(
            leaf="ab"[n % 2],
            gpus=float(gpus),
            held_ms=1000 * begin,
            started_ms=1000 * begin,
            ended_ms=1000 * (begin + run),
        )
        for n, (begin, run, gpus) in enumerate(drawn)
    ]
    held = np.zeros(2001)
    for begin, run, gpus in drawn:
        held[begin : begin + run] += gpus
    for by in ("queue", "user", "class", "pool"):
        rows = sum_charges(charges, by, 200_000, 900_000, Prices())  # type: ignore[arg-type]
        assert math.isclose(sum(row.granted for row in rows.values()), held[200:900].sum())


def test_a_charge_is_split_into_promised_granted_waited_and_lost() -> None:
    row = charge(queued_ms=0, held_ms=10_000, started_ms=15_000, ended_ms=35_000, used_gpu_s=120.0, lost_gpu_s=40.0)
    (found,) = sum_charges([row], "queue", 0, 99_000, Prices({"H100": 36.0})).values()
    assert (found.waited, found.promised, found.granted) == (80.0, 40.0, 160.0)
    assert (found.used, found.lost, found.money) == (120.0, 40.0, 1.6)
    (half,) = sum_charges([row], "queue", 0, 25_000, Prices()).values()
    assert (half.granted, half.lost) == (80.0, 0.0)
