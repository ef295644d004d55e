"""The search for a gang's place skips levels that cannot win, and finds what filling all of them finds."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleet.requests import PlacementRequest, TopologyConstraint
from placement.filters import screen
from placement.fit import Fit, GangSearch, allowed_levels, best_fits, room_at
from placement.options import Options
from placement.scorers import NodeScores
from tests.fuzz.bounds import examples
from tests.placement.conftest import build

free = st.lists(st.lists(st.sampled_from([0, 2, 8, 8]), min_size=1, max_size=6), min_size=1, max_size=6)


@examples(375)
@given(free, st.integers(2, 12), st.sampled_from([1, 2, 8]), st.sampled_from([None, "rail_group"]), st.integers(0, 99))
def test_no_level_that_could_win_is_skipped(racks: Any, gang: int, each: int, required: Any, seed: int) -> None:
    view = build({f"r{at}": counts for at, counts in enumerate(racks)})
    rng = np.random.default_rng(seed)
    view = build(
        {f"r{at}": counts for at, counts in enumerate(racks)},
        p_fail=rng.random(len(view)) ** 4,
        p_slow=rng.random(len(view)) / 100,
    )
    options = Options(max_risk=1.0)
    request = PlacementRequest(
        request_id="a", gang=gang, gpus_per_node=each, topology=TopologyConstraint(required), max_risk=1.0
    )
    scores = NodeScores(request, view, options, screen(request, view, options))
    found = best_fits(request, view.topology, scores, gang)
    search = GangSearch(request, view.topology, scores, gang)
    every = []
    for level in allowed_levels(request):
        offer = room_at(level, view.topology, scores.rows, scores.room)
        if offer.most >= gang:
            fits = search.fits(offer)
            assert all(fit.score <= search.bound(offer) for fit in fits)
            every += fits
    every.sort(key=lambda fit: -fit.score)
    best = {fit.rows[np.argsort(fit.rows)].tobytes(): fit for fit in reversed(every)}  # the first of equals stays
    expected = sorted(best.values(), key=lambda fit: next(at for at, one in enumerate(every) if one is fit))[:3]
    assert [(fit.level, fit.rows.tolist(), fit.takes.tolist(), fit.score) for fit in found] == [
        (fit.level, fit.rows.tolist(), fit.takes.tolist(), fit.score) for fit in expected
    ]


@examples(250)
@given(free, st.integers(2, 12), st.sampled_from([1, 8]), st.integers(0, 99))
def test_domains_whose_bound_is_low_need_not_be_filled(racks: Any, gang: int, each: int, seed: int) -> None:
    view = build({f"r{at}": counts * 2 for at, counts in enumerate(racks * 2)})
    rng = np.random.default_rng(seed)
    view = replace(view, p_fail=rng.random(len(view)) ** 4, p_slow=rng.random(len(view)) / 10)
    options = Options(max_risk=1.0)
    request = PlacementRequest(request_id="a", gang=gang, gpus_per_node=each, max_risk=1.0)
    scores = NodeScores(request, view, options, screen(request, view, options))
    search = GangSearch(request, view.topology, scores, gang)
    with patch("placement.fit.FEW", 0), patch("placement.fit.AT_ONCE", 1):
        for level in allowed_levels(request)[1:]:
            offer = room_at(level, view.topology, scores.rows, scores.room)
            feasible = offer.members >= gang
            if not feasible.any():
                continue
            every = search._fill_only(np.ones(np.count_nonzero(feasible), bool), offer, feasible)
            some = search.fits(offer)
            if scores.is_alone:
                assert every[0].score <= search.bounds(offer, feasible).max()
            assert [_plain(fit) for fit in some] == [_plain(fit) for fit in every]
            among = search.fits(offer, above=every[-1].score)
            assert [_plain(fit) for fit in among] == [_plain(fit) for fit in every]


def _plain(fit: Fit) -> tuple[Any, ...]:
    return fit.level, fit.rows.tolist(), fit.takes.tolist(), fit.score, fit.points
