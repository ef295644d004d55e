import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.schedulers.bands import LEVELS, BandRule, Bands, compute_next_levels, limit_high_share

RULE = BandRule(elevated=0.1, high=0.5, leave_ratio=0.7)


def levels_of(bands: Bands, *scores: float, pool: list[int] | None = None) -> list[str]:
    rows = {name: row for row, name in enumerate("abcdefghij"[: len(scores)])}
    pools = None if pool is None else np.array(pool)
    return [LEVELS[level] for level in bands.update(rows, np.array(scores), pools)]


def test_a_band_is_left_only_well_below_where_it_was_entered() -> None:
    bands = Bands(RULE)
    went = [levels_of(bands, score)[0] for score in (0.51, 0.40, 0.34, 0.08, 0.06)]
    assert went == ["high", "high", "elevated", "elevated", "low"]


def test_an_unknown_score_changes_nothing() -> None:
    bands = Bands(RULE)
    assert levels_of(bands, 0.6, np.nan) == ["high", "low"]
    assert levels_of(bands, np.nan, 0.2) == ["high", "elevated"]


def test_bands_follow_the_names_when_the_nodes_change() -> None:
    bands = Bands()
    bands.update({"a": 0, "b": 1}, np.array([0.4, 0.0]))
    assert bands.update({"new": 0, "b": 1, "a": 2}, np.array([0.25, 0.25, 0.25])).tolist() == [1, 1, 2]
    assert bands.bands_above_low == {"new": "elevated", "b": "elevated", "a": "high"}


def test_a_restart_goes_on_where_the_process_before_it_was() -> None:
    bands = Bands(RULE, {"a": "high", "gone": "elevated", "b": "nonsense"})
    assert levels_of(bands, 0.4, 0.4) == ["high", "elevated"]


def test_at_most_a_share_of_a_pool_is_high_and_the_riskiest_are() -> None:
    bands = Bands(BandRule(elevated=0.1, high=0.5, max_share=0.5))
    assert levels_of(bands, 0.6, 0.9, 0.7, 0.0) == ["elevated", "high", "high", "low"]
    assert bands.capped == 1
    assert levels_of(bands, 0.99, 0.9, 0.7, 0.0)[:3] == ["elevated", "high", "high"], "no two change places"
    assert levels_of(bands, 0.99, 0.9, 0.2, 0.0)[:3] == ["high", "high", "elevated"]
    assert bands.capped == 0


def test_each_pool_has_its_share_and_one_node_may_always_be_high() -> None:
    bands = Bands(BandRule(elevated=0.1, high=0.5, max_share=0.1))
    assert levels_of(bands, 0.6, 0.9, 0.7, pool=[0, 0, 1]) == ["elevated", "high", "high"]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.floats(0, 1)), min_size=1, max_size=30),
    st.floats(0, 1),
    st.integers(1, 3),
)
def test_the_share_only_takes_high_ones_down(rows: list[tuple[int, int, float]], share: float, pools: int) -> None:
    levels, held, scores = (np.array(column) for column in zip(*rows, strict=True))
    pool = np.arange(len(rows)) % pools
    allowed = limit_high_share(levels, held, scores, pool, share)
    assert set(levels[allowed != levels]) <= {2}
    assert set(allowed[allowed != levels]) <= {1}
    for number in range(pools):
        assert np.count_nonzero(allowed[pool == number] == 2) <= max(1, int(share * np.count_nonzero(pool == number)))


@pytest.mark.parametrize("level", [0, 1, 2])
def test_noise_at_the_edge_of_a_band_changes_it_once_at_most(level: int) -> None:
    held = np.array([level], np.int8)
    went = []
    for step in range(20):
        held = compute_next_levels(held, np.array([RULE.high + (0.01 if step % 2 else -0.01)]), RULE)
        went.append(int(held[0]))
    assert sum(a != b for a, b in itertools.pairwise(went)) <= 1
