"""The laws of every adapter in the registry, whatever its language."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetcast_checks import check_adapter
from schedulers.adapter import Adapter, NotKnown
from schedulers.external_metrics import METRIC
from schedulers.weather import Weather
from service.doors import ANSWERERS, WRITERS, make_answerers, make_door
from tests.schedulers.small_demand import small_demand
from tests.schedulers.small_fleet import weather

RISKS = {"low": 0.01, "elevated": 0.1, "high": 0.4, "above the limit": 0.9, "unknown": np.nan}
FEWER = {"low": 0.4, "high": 0.01, "new": 0.9}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "band_file": [{"path": "bands"}],
    "nodes": [
        {},
        {"taint": "PreferNoSchedule"},
        {"taint": "NoSchedule", "server": "https://127.0.0.1:6443"},
        {"slinky": True},
    ],
}
WRITER_CASES = [(use, options) for use, every in OPTIONS.items() for options in every]


def names_of(answer: Any, verb: str) -> set[str]:
    """The nodes that an answer of kube-scheduler's extender is about."""
    if verb == "filter":
        return {*answer["NodeNames"], *answer["FailedNodes"], *answer["FailedAndUnresolvableNodes"]}
    return {row["Host"] for row in answer} if verb == "prioritize" else set(answer["NodeNameToMetaVictims"])


def kube_question(names: list[str]) -> bytes:
    victims = {name: {"Pods": [{"UID": "u"}], "NumPDBViolations": 0} for name in names}
    return json.dumps({"Pod": {}, "NodeNames": names, "NodeNameToMetaVictims": victims}).encode()


def metric_question(names: list[str]) -> bytes:
    """It is about a series, not about nodes."""
    return json.dumps({"metric": METRIC, "selector": "quantile=0.5,horizon_s=600"}).encode()


Question = Callable[[list[str]], bytes]
QUESTIONS: dict[str, tuple[Question, Callable[[Any, str], set[str]]]] = {
    "external_metrics": (metric_question, lambda answer, verb: set()),
    "kube": (kube_question, names_of),
}
VERB_CASES = [(name, verb) for name, adapter in make_answerers().items() for verb in adapter.verbs]


def test_every_adapter_of_the_registry_is_held_to_the_laws() -> None:
    assert set(OPTIONS) == set(WRITERS)
    assert set(QUESTIONS) == set(ANSWERERS)


@pytest.mark.parametrize(("use", "options"), WRITER_CASES)
def test_a_writer_keeps_the_laws(use: str, options: dict[str, Any]) -> None:
    adapter = make_door(use, options).adapter
    assert not adapter.verbs
    check_adapter(adapter, [weather(RISKS), weather(FEWER, 2), weather(None, 3), weather(RISKS, 4), weather({}, 5)])


@pytest.mark.parametrize(("use", "options"), WRITER_CASES)
@settings(deadline=None, max_examples=50)
@given(st.lists(st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 1) | st.just(np.nan)), max_size=4))
def test_a_writer_keeps_the_laws_whatever_the_fleet(
    use: str, options: dict[str, Any], fleets: list[dict[str, float]]
) -> None:
    weathers = [weather(risk, number) for number, risk in enumerate(fleets)]
    check_adapter(make_door(use, options).adapter, [weather(RISKS), *weathers])


@pytest.mark.parametrize(("use", "options"), WRITER_CASES)
def test_a_writer_that_knows_nothing_of_the_nodes_takes_back_what_restricts(use: str, options: dict[str, Any]) -> None:
    adapter = make_door(use, options).adapter
    seen: dict[str, dict[str, str]] = {name: {} for name in RISKS}
    for write in adapter.wishes(weather(RISKS), seen):
        seen[write.key][write.field] = str(write.value)
    for write in list(adapter.wishes(weather(None), seen)):
        seen[write.key][write.field] = str(write.value)
    assert {value.partition(" ")[0] for values in seen.values() for value in values.values()} <= {"None", "Unknown"}


@pytest.mark.parametrize(("name", "verb"), VERB_CASES)
@settings(deadline=None, max_examples=50)
@given(names=st.lists(st.sampled_from([*RISKS, "stranger"]), unique=True))
def test_an_answer_is_about_what_was_asked_and_the_same_twice(name: str, verb: str, names: list[str]) -> None:
    adapter, blind = make_answerers()[name], make_answerers()[name]
    ask, names_in = QUESTIONS[name]
    asked = ask(names)
    told = [answer(adapter, verb, weather(RISKS), asked) for _ in range(2)]
    assert told[0] == told[1] == answer(blind, verb, weather(RISKS, 9), asked)
    assert names_in(json.loads(told[0]), verb) <= set(names)
    stale = adapter.verbs[verb].stale(asked)
    assert stale is None or names_in(json.loads(stale), verb) == set(names)


def answer(adapter: Adapter, verb: str, given: Weather, body: bytes) -> bytes:
    """Whoever knows the nodes here knows of their demand, too."""
    return adapter.verbs[verb].answer(dataclasses.replace(given, demand=small_demand() if given.nodes else None), body)


@pytest.mark.parametrize(("name", "verb"), VERB_CASES)
def test_an_answerer_without_scores_says_that_it_does_not_know_and_wishes_nothing(name: str, verb: str) -> None:
    adapter = make_answerers()[name]
    with pytest.raises(NotKnown):
        answer(adapter, verb, weather(None), QUESTIONS[name][0](["low"]))
    assert not list(adapter.wishes(weather(RISKS), {}))
    assert not adapter.fields
