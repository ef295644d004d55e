"""Jobs that stop in a sampled future: the payer starts first, and the next attempts of the jobs wait."""

import numpy as np

from fleetcast.placement.ahead.sampled_future import Arrival, Future, PayerStop, StoppedJob
from fleetcast.placement.machines.gang_room import Fleet, GangAsk, Slot
from fleetcast.placement.machines.slots import WHOLE

NODES, GPUS = 2, 8 * WHOLE
SLOT = Slot(GPUS, np.ones(NODES, np.int64))
ASK = GangAsk(0, 1, 3600.0)
NO_RELEASE = np.zeros(0, np.int64), np.zeros(0, np.int64)
STOP = -100
PAYER, BEHIND = 1, 3


def hold(node: int) -> tuple[np.ndarray, np.ndarray]:
    return np.array([node]), np.array([GPUS])


def play(first_end_s: float, second_end_s: float, head_run_s: float = 500.0) -> dict[int, float]:
    """Play two jobs, each on its node. After ten seconds the second one stops for the second of four waiting jobs.

    Its next attempt goes before the last of them.
    """
    runs_s = (head_run_s, 50.0, 500.0, 500.0)
    waiting = [Arrival(0.0, (float(number), 0.0), ASK, run_s, number) for number, run_s in enumerate(runs_s)]
    following = Arrival(10.0, (2.5, 10.0), ASK, 2000.0)
    stop = PayerStop(waiting[PAYER], [StoppedJob(-2, *hold(1), following)])
    ends = [(first_end_s, -1, *hold(0)), (second_end_s, -2, *hold(1)), (10.0, STOP, *NO_RELEASE)]
    fleet = Fleet(np.zeros(NODES, np.int64), np.zeros(NODES), [SLOT])
    return Future(fleet, ends, iter(()), is_settled=True, stops={STOP: stop}).play(waiting)


def test_the_payer_starts_first_and_the_next_attempt_waits_in_its_place() -> None:
    """The next attempt starts at 560 and at 1,000 s. Without it, the last job would start then."""
    assert play(100.0, 1000.0) == {0: 60.0, PAYER: 10.0, 2: 100.0, BEHIND: 600.0}
    assert play(1000.0, 5000.0) == {0: 60.0, PAYER: 10.0, 2: 560.0, BEHIND: 1060.0}


def test_a_job_that_ended_before_does_not_come_back_and_the_payer_still_goes_first() -> None:
    assert play(100.0, 5.0) == {0: 5.0, PAYER: 100.0, 2: 150.0, BEHIND: 505.0}


def test_no_job_stops_for_a_payer_that_has_started() -> None:
    """The second job runs until its own end at 1,000 s."""
    assert play(2.0, 1000.0, head_run_s=3.0) == {0: 2.0, PAYER: 5.0, 2: 55.0, BEHIND: 555.0}
