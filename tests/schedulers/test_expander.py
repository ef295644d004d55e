"""The cluster-autoscaler's expander: options in, some of them out."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.errors import RequestError
from fleetcast.schedulers.adapter import NotKnown
from fleetcast.schedulers.expander import LABEL, ExpanderAdapter, GroupOption, choose_best_options, compute_pool_risks
from fleetcast.schedulers.weather import Weather
from tests.fuzz.bounds import examples
from tests.schedulers.small_fleet import NOW_MS, outlook, weather

POOLS = {"calm": 0.01, "shaky": 0.2, "bad": 0.6}
DAY_ADDS = 0.2  # what small_fleet's outlook adds to the risk of an hour


def option(id: str, count: int = 1, pool: str = "") -> GroupOption:
    return GroupOption(id, count, {LABEL: pool} if pool else {})


def ids(*options: GroupOption, pools: dict[str, float] | None = None) -> list[str]:
    return choose_best_options(options, POOLS if pools is None else pools)


def test_the_group_whose_nodes_are_least_likely_to_fail_is_left() -> None:
    assert ids(option("bad"), option("shaky")) == ["shaky"]
    assert ids(option("bad"), option("shaky"), option("calm")) == ["calm"]


def test_a_label_of_the_template_names_the_pool() -> None:
    assert ids(option("asg-7", pool="bad"), option("asg-8", pool="calm")) == ["asg-8"]


def test_more_nodes_of_a_better_pool_may_cost_more_than_one_of_a_worse() -> None:
    assert ids(option("shaky", 4), option("bad", 1)) == ["bad"]
    assert ids(option("shaky", 2), option("bad", 1)) == ["shaky"]


def test_a_quiet_pool_is_never_left_out() -> None:
    assert ids(option("calm", 40), option("quieter"), pools={"calm": 0.04, "quieter": 0.0001}) == ["calm", "quieter"]


def test_a_group_of_which_nothing_is_known_stays() -> None:
    assert ids(option("stranger"), option("bad"), option("shaky")) == ["stranger", "shaky"]
    assert ids(option("a"), option("b")) == ["a", "b"]


def test_the_risk_of_a_pool_is_the_mean_of_its_nodes_within_a_day() -> None:
    risk = {"n1": 0.1, "n2": 0.3, "n3": np.nan, "n4": np.nan, "n5": 0.9}
    nodes = outlook(risk, pool=np.array([0, 0, 0, 1, -1]), pools=("a", "b"))
    assert compute_pool_risks(nodes) == {"a": pytest.approx(0.2 + DAY_ADDS)}


def ask(given_weather: Weather, *groups: str) -> list[str]:
    body = json.dumps({"options": [{"id": group} for group in groups]}).encode()
    found: list[str] = json.loads(ExpanderAdapter().verbs["best_options"].answer(given_weather, body))["ids"]
    return found


def test_an_answer_comes_from_the_weather() -> None:
    fleet = weather({"n1": 0.5, "n2": 0.1}, pool=np.array([0, 1]), pools=("a", "b"))
    assert ask(fleet, "a", "b") == ["b"]


def test_without_scores_nothing_is_known_and_the_stale_answer_is_all() -> None:
    body = json.dumps({"options": [{"id": "a"}, {"id": "b"}]}).encode()
    verb = ExpanderAdapter().verbs["best_options"]
    with pytest.raises(NotKnown):
        verb.answer(Weather(1, NOW_MS, NOW_MS), body)
    assert json.loads(verb.stale(body) or b"") == {"ids": ["a", "b"]}


@pytest.mark.parametrize("body", [b"[]", b'{"options": [{"id": 3}]}', b"{}"])
def test_a_question_of_another_shape_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        ExpanderAdapter().verbs["best_options"].stale(body)


@examples(500)
@given(
    st.lists(st.tuples(st.sampled_from([*POOLS, "x", "y"]), st.integers(-3, 5_000)), min_size=1, max_size=8),
    st.dictionaries(st.sampled_from([*POOLS, "x"]), st.floats(0, 1)),
)
def test_some_option_is_always_left_and_none_is_invented(asked: list[tuple[str, int]], pools: dict[str, float]) -> None:
    options = [option(name, count) for name, count in asked]
    left = choose_best_options(options, pools)
    assert left
    assert set(left) <= {name for name, _ in asked}
