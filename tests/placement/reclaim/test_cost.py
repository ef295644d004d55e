import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.placement.reclaim.cost import (
    RESTART_S,
    StopCosts,
    StoppableJobs,
    compute_stop_costs,
)
from tests.fuzz.bounds import examples

NOW_MS = 10_000_000.0
UNKNOWN = float("nan")


def one(
    gpus: float = 8,
    age_s: float = 7200,
    kept_s: float = UNKNOWN,
    checkpoint_s: float = UNKNOWN,
    failures_s: float = UNKNOWN,
    restart_s: float = UNKNOWN,
    on_demand: bool = False,
) -> StopCosts:
    """The cost of one job: its age, and the age of its last checkpoint, in seconds."""
    numbers = (gpus, NOW_MS - age_s * 1000, NOW_MS - kept_s * 1000, checkpoint_s, failures_s, restart_s)
    return compute_stop_costs(StoppableJobs(*(np.array([x]) for x in numbers), np.array([on_demand])), NOW_MS)


def test_work_is_lost_since_the_last_checkpoint_and_a_restart_is_added() -> None:
    cost = one(gpus=8, kept_s=600, restart_s=120)
    assert (cost.lost[0], cost.restart[0], cost.total[0]) == (4800, 960, 5760)


def test_an_unknown_restart_costs_300_seconds() -> None:
    cost = one(gpus=2, kept_s=0)
    assert (cost.lost[0], cost.restart[0]) == (0, 2 * RESTART_S)


def test_without_a_checkpoint_all_work_is_lost() -> None:
    cost = one(gpus=1, age_s=7200)
    assert cost.lost[0] == 7200


def test_without_a_checkpoint_at_most_one_usual_interval_is_lost() -> None:
    cost = one(gpus=1, age_s=7200, checkpoint_s=50, failures_s=10_000)
    assert cost.lost[0] == 1000
    young = one(gpus=1, age_s=100, checkpoint_s=50, failures_s=10_000)
    assert young.lost[0] == 100


def test_a_known_checkpoint_counts_even_if_it_is_older_than_the_usual_interval() -> None:
    assert one(gpus=1, kept_s=5000, checkpoint_s=50, failures_s=10_000).lost[0] == 5000


def test_a_checkpoint_on_demand_counts_where_it_is_cheaper() -> None:
    asked = one(gpus=4, kept_s=900, checkpoint_s=60, on_demand=True)
    assert asked.lost[0] == 240
    fresh = one(gpus=4, kept_s=10, checkpoint_s=60, on_demand=True)
    assert fresh.lost[0] == 40
    assert one(gpus=4, kept_s=900, on_demand=True).lost[0] == 3600


def test_clocks_that_disagree_make_no_term_negative() -> None:
    cost = one(gpus=4, age_s=-50, kept_s=-100)
    assert cost.lost[0] == 0


@examples(300)
@given(
    st.floats(0, 1e4),
    *(st.floats(-1e6, 1e6) | st.just(UNKNOWN) for _ in range(2)),
    *(st.floats(0, 1e6) | st.just(UNKNOWN) for _ in range(3)),
    st.booleans(),
)
def test_no_term_is_negative_or_unknown(
    gpus: float, age_s: float, kept_s: float, checkpoint_s: float, failures_s: float, restart_s: float,
    on_demand: bool,
) -> None:  # fmt: skip
    age_s = 0.0 if np.isnan(age_s) else age_s
    cost = one(gpus, age_s, kept_s, checkpoint_s, failures_s, restart_s, on_demand)
    for term in (cost.lost, cost.restart):
        assert term[0] >= 0
    assert cost.lost[0] <= gpus * max(age_s, 0) + 1e-6, "a job loses no more than it has worked"
