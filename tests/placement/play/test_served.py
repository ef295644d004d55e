"""Shares in play: standing demand, lenders, and users who try to gain by how they send their work."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from fleetcast.fleet.requests import PlacementRequest, RankPlacement
from fleetcast.placement.machines.vacate import remove_jobs
from fleetcast.placement.plan.timeline import Hold, add_placements
from fleetcast.placement.play.replay import Floats, Replay, Trace
from fleetcast.placement.play.served import ServedPlan, make_empty_view
from fleetcast.placement.queues.queues_file import read_queues

Row = tuple[float, float, int, str, str]  # submit_s, run_s, GPUs, queue, user
GPUS = 8


def play(rows: Sequence[Row], queues: str, limits: Sequence[float] | None = None) -> Floats:
    submit_s, run_s, gpus, queue, user = zip(*rows, strict=True)
    trace = Trace([], submit_s, run_s, gpus, [None] * len(rows))

    def ask(job: int) -> PlacementRequest:
        each, limit_s = gpus[job], limits[job] if limits else run_s[job]
        return PlacementRequest(
            request_id=f"j{job:05}", queue=queue[job], user=user[job], gpus_per_node=each, limit_s=limit_s
        )

    return Replay(trace, ServedPlan(make_empty_view([GPUS]), ask, read_queues(queues))).play()


def served(rows: Sequence[Row], start_s: Floats, until_s: float, column: int, name: str) -> float:
    """GPU-seconds of a queue (column 3) or user (4) by then."""
    mine = [(start, row) for start, row in zip(start_s.tolist(), rows, strict=True) if row[column] == name]
    return sum(row[2] * max(0.0, min(row[1], until_s - start)) for start, row in mine)


def standing(shares: dict[str, float], until_s: float, rng: random.Random) -> list[Row]:
    """More work than the fleet can do in jobs of one GPU, sent little by little, in proportion to these shares."""
    rows: list[Row] = []
    for begin_s in range(0, int(until_s), 300):
        for queue, share in shares.items():
            left = 1.5 * share * GPUS * 300 * (2 if begin_s == 0 else 1)
            while left > 0:
                run_s = float(rng.randint(30, 120))
                left -= run_s
                rows.append((float(begin_s), run_s, 1, queue, "ada"))
    return rows


def test_standing_demand_is_served_by_weight_within_two_points_over_a_half_life() -> None:
    queues = "[policy]\nhalf_life_h = 0.5\n[queue.a]\nweight = 40\n[queue.b]\nweight = 40\n[queue.c]\nweight = 20"
    until_s = 1800.0
    rows = standing({"a": 0.4, "b": 0.4, "c": 0.4}, until_s, random.Random(1))
    start_s = play(rows, queues)
    got = {name: served(rows, start_s, until_s, 3, name) / (GPUS * until_s) for name in "abc"}
    assert got == pytest.approx({"a": 0.4, "b": 0.4, "c": 0.2}, abs=0.02)


def test_a_lender_has_its_own_back_when_what_ran_on_it_has_ended() -> None:
    queues = "[queue.a]\nguaranteed = {gpu = 6}\n[queue.b]"
    borrowed: list[Row] = [(float(at), float(150 + at), 1, "b", "ada") for at in range(40)]
    own: list[Row] = [(200.0, 500.0, 1, "a", "ada")] * 6
    rows = sorted([*borrowed, *own], key=lambda row: row[0])
    start_s = play(rows, queues)
    ran = [start + row[1] for start, row in zip(start_s.tolist(), rows, strict=True) if start <= 200.0]
    mine = [start for start, row in zip(start_s.tolist(), rows, strict=True) if row[3] == "a"]
    assert max(mine) <= max(ran)
    assert sum(start < 200.0 for start in start_s.tolist()) >= GPUS  # all of it was lent before


QUEUES = "[policy]\nhalf_life_h = 1\n[queue.team]\nper_user = true"


def work(user: str, run_s: float, gpus: int, total: float, every_s: float = 0.0) -> list[Row]:
    """`total` GPU-seconds in jobs of this size."""
    return [(every_s * at, run_s, gpus, "team", user) for at in range(int(total / (run_s * gpus)))]


def gain(rows: list[Row], limits: dict[float, float] | None = None) -> float:
    """What the user eve gets of the fleet's first half hour beside an honest one, over what she gets if honest, too."""
    honest = work("ada", 200.0, 2, 24_000.0)
    got = []
    for hers in (work("eve", 200.0, 2, 24_000.0), rows):
        both = sorted([*honest, *hers], key=lambda row: row[0])
        asked = [limits.get(row[1], row[1]) if limits and row[4] == "eve" else row[1] for row in both]
        got.append(served(both, play(both, QUEUES, asked), 1800.0, 4, "eve"))
    return got[1] / got[0]


@pytest.mark.parametrize(
    ("rows", "limits"),
    [
        (work("eve", 24.0, 1, 24_000.0), None),  # a thousand tiny jobs
        (work("eve", 200.0, 2, 24_000.0, every_s=15.0), None),  # cancelled while they waited, and sent again later
        (work("eve", 100.0, 2, 24_000.0), None),  # stopped half way, and the rest sent again
        (work("eve", 200.0, 2, 24_000.0), {200.0: 2000.0}),  # limits that are never reached
        (work("eve", 50.0, 2, 24_000.0), {50.0: 50.0}),  # limits too short: killed there, and sent again
    ],
    ids=["tiny", "sent again", "in two halves", "limits too long", "killed at the limit"],
)
def test_a_user_gains_nothing_by_how_the_work_is_sent(rows: list[Row], limits: dict[float, float] | None) -> None:
    assert gain(rows, limits) <= 1.05


def test_gpus_that_are_given_back_are_free_and_shared_ones_when_all_have_gone() -> None:
    view = make_empty_view([2, 1])
    parts = [RankPlacement(0, "n0001", (0,), 300)], [RankPlacement(0, "n0001", (0,), 500)]
    view = add_placements(
        view, [Hold("x", parts[0]), Hold("y", parts[1]), Hold("z", [RankPlacement(0, "n0002", (0,))])]
    )
    assert view.milli.tolist() == [[200, 1000], [0, 0]]
    left = remove_jobs(view, {"x", "z"})
    assert (left.milli.tolist(), left.jobs) == ([[500, 1000], [1000, 0]], ("y",))
    assert left.holders.tolist() == [[0, -1], [-1, -1]]
    empty = remove_jobs(left, {"y"})
    assert (empty.milli.tolist(), empty.jobs, len(empty.parts.gpu)) == ([[1000, 1000], [1000, 0]], (), 0)
    assert np.array_equal(remove_jobs(empty, {"y"}).milli, empty.milli)
