"""Check that no stop in short plays breaks a bound. `make test` plays a few of them, `make simulation` 2,000.

`FLEETCAST_SHORT_PLAYS=10000 make simulation` plays 10,000.
"""

import os
from dataclasses import replace
from functools import cache

import pytest

from tests.simulation.short_plays import ShortPlay, find_broken_law, play_short

FEW = 25
BLOCK = 500
MANY = int(os.environ.get("FLEETCAST_SHORT_PLAYS", "2000"))


def play_block(begin: int, end: int) -> int:
    """Play these seeds, and return the number of stops. Fails at the first law that is broken."""
    stops = 0
    for seed in range(begin, end):
        play = play_short(seed)
        assert not (broken := find_broken_law(play)), f"seed {seed}: {broken}"
        stops += len(play.progress.stops)
    return stops


def test_no_stop_of_a_short_play_breaks_a_bound() -> None:
    assert play_block(0, FEW) > FEW / 4


@pytest.mark.simulation
@pytest.mark.timeout(900)
@pytest.mark.parametrize("begin", range(0, MANY, BLOCK))
def test_no_stop_of_many_short_plays_breaks_a_bound(begin: int) -> None:
    assert play_block(begin, begin + BLOCK) > BLOCK / 4


@cache
def find_seed_with_stop() -> int:
    return next(seed for seed in range(FEW) if play_short(seed).progress.stops)


def find_play_with_stop() -> ShortPlay:
    return play_short(find_seed_with_stop())


@pytest.mark.parametrize(
    ("bound", "said"),
    [
        ({"stops_a_day": 0}, "1 times within a day"),
        ({"min_run_s": 1e9}, "before it had run 1e+09 s"),
        ({"gpu_h_per_h": -1.0}, "GPU-hours"),
    ],
)
def test_a_broken_bound_is_found(bound: dict[str, float], said: str) -> None:
    play = find_play_with_stop()
    assert find_broken_law(play) == ""
    assert said in find_broken_law(replace(play, policy=replace(play.policy, **bound)))


def test_a_stop_for_nobody_and_a_quarrel_are_found() -> None:
    play = find_play_with_stop()
    first = play.progress.stops[0]
    play.progress.stops[0] = first._replace(payer=len(play.requests))
    assert "did not start" in find_broken_law(play)
    play.progress.stops[0] = first
    begun = next(one for one in play.progress.attempts if one.job == first.job)
    play.progress.stops.append(first._replace(job=first.payer, payer=first.job, at_s=begun.start_s))
    play.progress.attempts.append(replace(begun, job=first.payer, start_s=begun.start_s, end_s=begun.start_s))
    assert find_broken_law(play)


def test_gpus_that_two_jobs_hold_are_found() -> None:
    play = find_play_with_stop()
    assert "GPUs were held" in find_broken_law(replace(play, gpus=0))
