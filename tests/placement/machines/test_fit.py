"""The search for a gang's place skips levels that cannot win, and finds what filling all of them finds."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.requests import PlacementRequest, TopologyConstraint
from fleetcast.placement.engine import decide
from fleetcast.placement.machines.domains import sum_room_by_domain
from fleetcast.placement.machines.filters import screen
from fleetcast.placement.machines.fit import Fit, GangSearch, find_best_fits, list_allowed_levels
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.scorers import NodeScores
from fleetcast.placement.machines.view import ClusterView, ViewMemo
from tests.fuzz.bounds import examples
from tests.placement.conftest import build

UNLIKE, ALIKE = (0, 2, 8, 8), (0, 4, 5, 7)  # free GPUs of nodes; the fit of alike ones does not depend on other nodes
free = st.sampled_from([UNLIKE, ALIKE]).flatmap(
    lambda counts: st.lists(st.lists(st.sampled_from(counts), min_size=1, max_size=6), min_size=1, max_size=6)
)
scorer_names = st.sampled_from([None, "mine", "risk", "slow", "fit", "packing"])


def options_with(scorer: str | None, rng: np.random.Generator, nodes: int) -> Options:
    """Return options with one scorer of that name, whose scores are random."""
    score = rng.random(nodes)
    return Options(max_risk=1.0, scorers=((scorer, lambda request, view, options: score),) if scorer else ())


@examples(375)
@given(
    free,
    st.integers(2, 12),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([None, "rail_group"]),
    scorer_names,
    st.integers(0, 99),
)
def test_no_level_that_could_win_is_skipped(
    racks: Any, gang: int, each: int, required: Any, scorer: str | None, seed: int
) -> None:
    view = build({f"r{at}": counts for at, counts in enumerate(racks)})
    rng = np.random.default_rng(seed)
    view = build(
        {f"r{at}": counts for at, counts in enumerate(racks)},
        p_fail=rng.random(len(view)) ** 4,
        p_slow=rng.random(len(view)) / 100,
    )
    options = options_with(scorer, rng, len(view))
    request = PlacementRequest(
        request_id="a", gang=gang, gpus_per_node=each, topology=TopologyConstraint(required), max_risk=1.0
    )
    scores = NodeScores(request, view, options, screen(request, view, options))
    found = find_best_fits(request, view.topology, scores, gang)
    search = GangSearch(request, view.topology, scores, gang)
    every = []
    for level in list_allowed_levels(request):
        offer = sum_room_by_domain(level, view.topology, scores.rows, scores.room)
        if offer.most_members >= gang:
            fits = search.find_level_fits(offer)
            assert not scores.has_score_bounds or all(
                fit.score <= search.bounds.bound_level_score(offer) for fit in fits
            )
            every += fits
    every.sort(key=lambda fit: -fit.score)
    best = {fit.rows[np.argsort(fit.rows)].tobytes(): fit for fit in reversed(every)}  # the first of equals stays
    expected = sorted(best.values(), key=lambda fit: next(at for at, one in enumerate(every) if one is fit))[:3]
    assert [(fit.level, fit.rows.tolist(), fit.takes.tolist(), fit.score) for fit in found] == [
        (fit.level, fit.rows.tolist(), fit.takes.tolist(), fit.score) for fit in expected
    ]


@examples(250)
@given(free, st.integers(2, 12), st.sampled_from([1, 2, 8]), scorer_names, st.integers(0, 99))
def test_domains_whose_bound_is_low_need_not_be_filled(
    racks: Any, gang: int, each: int, scorer: str | None, seed: int
) -> None:
    view = build({f"r{at}": counts * 2 for at, counts in enumerate(racks * 2)})
    rng = np.random.default_rng(seed)
    view = replace(view, p_fail=rng.random(len(view)) ** 4, p_slow=rng.random(len(view)) / 10)
    options = options_with(scorer, rng, len(view))
    request = PlacementRequest(request_id="a", gang=gang, gpus_per_node=each, max_risk=1.0)
    scores = NodeScores(request, view, options, screen(request, view, options))
    search = GangSearch(request, view.topology, scores, gang)
    with patch("fleetcast.placement.machines.fit.FEW", 0), patch("fleetcast.placement.machines.fit.AT_ONCE", 1):
        for level in list_allowed_levels(request)[1:]:
            offer = sum_room_by_domain(level, view.topology, scores.rows, scores.room)
            feasible = offer.members >= gang
            if not feasible.any():
                continue
            every = search._fill_wanted_domains(np.ones(np.count_nonzero(feasible), bool), offer, feasible)
            some = search.find_level_fits(offer)
            if scores.is_gang_score_independent:
                bounds = search.bounds.bound_domain_scores(offer, feasible)
                for alone, bound in zip(np.eye(np.count_nonzero(feasible), dtype=bool), bounds, strict=True):
                    (fit,) = search._fill_wanted_domains(alone, offer, feasible)
                    assert fit.score <= bound
            assert [_plain(fit) for fit in some] == [_plain(fit) for fit in every]
            among = search.find_level_fits(offer, above=every[-1].score)
            assert [_plain(fit) for fit in among] == [_plain(fit) for fit in every]


def test_a_scorer_that_replaces_the_risk_can_prefer_a_risky_rack() -> None:
    view = build({f"r{at}": [8, 8] for at in range(40)})
    p_fail = np.full(len(view), 0.001)
    p_fail[-2:] = 0.9

    def likes_risk(request: PlacementRequest, view: ClusterView, options: Options) -> Any:
        return np.where(view.p_fail > 0.5, 1.0, 0.5)

    request = PlacementRequest(request_id="a", gang=2, gpus_per_node=8, topology=TopologyConstraint("rack"))
    options = Options(max_risk=1.0, scorers=(("risk", likes_risk),))
    decision = decide(request, replace(view, p_fail=p_fail), options)
    assert [rank.node for rank in decision.ranks] == ["n079", "n080"]


def _plain(fit: Fit) -> tuple[Any, ...]:
    return fit.level, fit.rows.tolist(), fit.takes.tolist(), fit.score, fit.points


sizes = st.tuples(st.integers(1, 6), st.sampled_from([1, 2, 8]), st.sampled_from([None, 900.0]))


@examples(100)
@given(free, st.lists(sizes, min_size=2, max_size=6), st.integers(0, 99))
def test_a_view_decides_alike_whatever_it_remembers(racks: Any, drawn: Any, seed: int) -> None:
    """A view keeps the chances of its nodes and the range of their domains between requests, and after new risks."""
    rng = np.random.default_rng(seed)
    used = build({f"r{at}": counts for at, counts in enumerate(racks)})
    for number, (gang, each, limit_s) in enumerate(drawn):
        if number % 2 == 0:
            used = replace(used, p_fail=rng.random(len(used)) ** 4, p_slow=rng.random(len(used)) / 100)
        request = PlacementRequest(request_id="a", gang=gang, gpus_per_node=each, limit_s=limit_s)
        assert decide(request, used) == decide(request, replace(used, memo=ViewMemo()))


@examples(400)
@given(st.lists(st.lists(st.sampled_from([0, 4, 8, 8]), min_size=4, max_size=9), min_size=1, max_size=6), st.data())
def test_gangs_that_fill_alike_nodes_get_the_answer_of_any_gang(racks: Any, data: st.DataObject) -> None:
    view = build({f"r{at}": counts for at, counts in enumerate(racks)})
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    view = replace(view, p_fail=rng.random(len(view)) ** 4, p_slow=rng.random(len(view)) / 100)
    gang, each = data.draw(st.integers(2, 6)), data.draw(st.sampled_from([8, 8, 8, 4]))
    request = PlacementRequest(request_id="a", gang=gang, gpus_per_node=each, max_risk=1.0)
    with patch.object(NodeScores, "are_gangs_even", lambda scores, size: False):
        filled_in_turn = decide(request, view)
    assert decide(request, view) == filled_in_turn
