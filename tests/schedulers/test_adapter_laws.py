"""The laws of every adapter in the registry, whatever its language."""

import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st

from fleetcast.checks import check_adapter, make_wavering_hour
from fleetcast.schedulers import buffers, kueue
from fleetcast.schedulers.adapter import Adapter, NotKnown, Seen
from fleetcast.schedulers.external_metrics import METRIC
from fleetcast.schedulers.slurm import DRAIN
from fleetcast.schedulers.slurm_durations import MINUTES
from fleetcast.schedulers.weather import Weather
from fleetcast.service.doors import ANSWERERS, WRITERS, make_answerers, make_door
from tests.fuzz.bounds import examples
from tests.schedulers.small_demand import small_demand
from tests.schedulers.small_fleet import JOBS, STARTS, domains, weather

RISKS = {"low": 0.01, "elevated": 0.1, "high": 0.4, "above the limit": 0.9, "unknown": np.nan}
FEWER = {"low": 0.4, "high": 0.01, "new": 0.9}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "band_file": [{"path": "bands"}],
    "buffers": [{}, {"namespace": "serve", "server": "https://127.0.0.1:6443"}],
    "kueue": [{}, {"gate": True}, {"gate": True, "max_risk": 0.01, "hold_s": 60}],
    "nodes": [
        {},
        {"taint": "PreferNoSchedule"},
        {"taint": "NoSchedule", "server": "https://127.0.0.1:6443"},
        {"slinky": True},
    ],
    "slurm": [{}, {"extra": True, "comments": True}, {"features": False, "url": "http://127.0.0.1:1"}],
    "slurm_durations": [{"folder": "durations"}],
    "topology": [{}, {"labels": {"rack": "example.com/rack"}}],
}
HOLDS: dict[str, Seen] = {  # beside the nodes
    "buffers": {
        "serve/ahead": {buffers.POOL: "serve", buffers.GPUS: "8"},
        "serve/bounded": {
            **{buffers.POOL: "serve", buffers.GPUS: "1", buffers.LEAST: "2", buffers.MOST: "9"},
            "fleetcast.io/quantile": "0.5",
        },
        "serve/elsewhere": {buffers.POOL: "train", buffers.GPUS: "8"},
        "serve/held": {buffers.POOL: "serve", buffers.GPUS: "8", "theirs: spec.replicas": "3"},
        "serve/mistaken": {buffers.POOL: "serve", buffers.GPUS: "eight"},
    },
    "kueue": {
        "fleetcast": {kueue.CHECK: "fleetcast.io/forecast"},
        "team/reserved": {kueue.HOLD: kueue.PENDING, kueue.JOB: "team/one", kueue.GPUS: "8", kueue.HELD: "0"},
        "team/held before": {kueue.HOLD: kueue.PENDING, kueue.JOB: "team/one", kueue.GPUS: "16", kueue.HELD: "3"},
        "team/being held": {
            **{kueue.HOLD: f"{kueue.RETRY} 60", kueue.JOB: "team/one"},
            **{kueue.GPUS: "8", kueue.HELD: "0"},
        },
        "team/waiting": {
            **{kueue.WAITS: "for quota", kueue.NOTE: "forecast: expected start 2025-10-09T10:05Z"},
            **{kueue.JOB: "team/two", kueue.HELD: "1"},
        },
    },
    "slurm": {
        "job 7": {"pending": "yes"},
        "job 9": {"pending": "yes", "theirs: comment": "mine"},
    },
}
KEEPS = {"kueue": frozenset({kueue.ACTIVE})}  # after a withdrawal: without it queues would stop
STAYS: dict[str, set[str]] = {  # where nothing is known: facts, a human's to lift, or with an age of its own
    "slurm": {DRAIN},
    "slurm_durations": {MINUTES},
    "topology": {"label fleetcast.io/rack", "label fleetcast.io/block", "label example.com/rack"},
    "kueue": {kueue.ACTIVE},
}
WRITER_CASES = [(use, options) for use, every in OPTIONS.items() for options in every]


Names = set[str] | None  # of nodes; None: the answer is about none


def full(risk: dict[str, float], sequence: int = 1) -> Weather:
    """With jobs that run or wait for their start; each node is in a rack of its own name, two racks make a block."""
    blocks = [f"block {number // 2}" for number in range(len(risk))]
    placed = weather(risk, sequence, domains=domains(rack=[*risk], block=blocks))
    return dataclasses.replace(placed, jobs=JOBS, starts=STARTS)


def law(use: str) -> dict[str, Any]:
    return {"holds": HOLDS.get(use), "keeps": KEEPS.get(use, frozenset())}


def names_of(answer: Any, verb: str) -> Names:
    """The nodes that an answer of kube-scheduler's extender is about."""
    if verb == "filter":
        return {*answer["NodeNames"], *answer["FailedNodes"], *answer["FailedAndUnresolvableNodes"]}
    return {row["Host"] for row in answer} if verb == "prioritize" else set(answer["NodeNameToMetaVictims"])


def kube_question(names: list[str]) -> bytes:
    victims = {name: {"Pods": [{"UID": "u"}], "NumPDBViolations": 0} for name in names}
    return json.dumps({"Pod": {}, "NodeNames": names, "NodeNameToMetaVictims": victims}).encode()


def keda_question(names: list[str]) -> bytes:
    """Of one series: names of nodes mean nothing to it."""
    metadata = {"target": "wanted", "targetPerReplica": "8", "horizonSeconds": "300"}
    return json.dumps({"metadata": metadata, "metricName": ",".join(names)}).encode()


def metrics_of(answer: Any, verb: str) -> Names:
    """The names that a value is told under; the other verbs name nothing that was asked."""
    return set(answer["metricName"].split(",")) - {"fleetcast-wanted"} if verb == "metrics" else None


def expander_question(names: list[str]) -> bytes:
    return json.dumps({"options": [{"id": name} for name in names]}).encode()


def metric_question(names: list[str]) -> bytes:
    """It is about a series, not about nodes."""
    return json.dumps({"metric": METRIC, "selector": "quantile=0.5,horizon_s=600"}).encode()


def volcano_names(answer: Any, verb: str) -> Names:
    return set(answer["nodeScore"]) if verb == "prioritize" else None


def volcano_question(names: list[str]) -> bytes:
    return json.dumps({"task": {}, "nodes": [{"Name": name} for name in names], "job": {}}).encode()


Question = Callable[[list[str]], bytes]
QUESTIONS: dict[str, tuple[Question, Callable[[Any, str], Names]]] = {
    "expander": (expander_question, lambda answer, verb: set(answer["ids"])),
    "external_metrics": (metric_question, lambda answer, verb: None),
    "keda": (keda_question, metrics_of),
    "kube": (kube_question, names_of),
    "trimaran": (lambda names: "\n".join(names).encode(), lambda answer, verb: set(answer["data"]["NodeMetricsMap"])),
    "volcano": (volcano_question, volcano_names),
}
VERB_CASES = [(name, verb) for name, adapter in make_answerers().items() for verb in adapter.verbs]
NEEDS_NO_WEATHER = {("keda", "metric_spec")}


def test_every_adapter_of_the_registry_is_held_to_the_laws() -> None:
    assert set(OPTIONS) == set(WRITERS)
    assert set(QUESTIONS) == set(ANSWERERS)


@pytest.mark.parametrize(("use", "options"), WRITER_CASES)
def test_a_writer_keeps_the_laws(use: str, options: dict[str, Any]) -> None:
    adapter = make_door(use, options).adapter
    assert not adapter.verbs
    fleets = [full(RISKS), full(FEWER, 2), weather(None, 3), full(RISKS, 4), full({}, 5)]
    check_adapter(adapter, fleets, **law(use))


@examples(125)
@given(st.lists(st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 1) | st.just(np.nan)), max_size=4))
def test_a_writer_keeps_the_laws_whatever_the_fleet(fleets: list[dict[str, float]]) -> None:
    """Check every writer over the same fleets. They share the hour of wavering boards that ends the check."""
    weathers = [full(RISKS), *(full(risk, number) for number, risk in enumerate(fleets))]
    hour = make_wavering_hour(weathers)
    for use, options in WRITER_CASES:
        note(f"{use} {options}")
        check_adapter(make_door(use, options).adapter, weathers, hour=hour, **law(use))


@pytest.mark.parametrize(("use", "options"), WRITER_CASES)
def test_a_writer_without_a_forecast_takes_back_what_restricts_or_costs(use: str, options: dict[str, Any]) -> None:
    adapter = make_door(use, options).adapter
    seen = {key: dict(values) for key, values in {**HOLDS.get(use, {}), **{name: {} for name in RISKS}}.items()}
    for write in adapter.wishes(full(RISKS), copy.deepcopy(seen)):
        seen.setdefault(write.key, {})[write.field] = str(write.value)
    for write in list(adapter.wishes(weather(None), seen)):
        seen.setdefault(write.key, {})[write.field] = str(write.value)
    ours = adapter.fields - STAYS.get(use, set())
    left = {values[field].partition(" ")[0] for values in seen.values() for field in ours & values.keys()}
    assert left <= {"None", "Unknown"}


@pytest.mark.parametrize(("name", "verb"), VERB_CASES)
@examples(125)
@given(names=st.lists(st.sampled_from([*RISKS, "stranger"]), unique=True))
def test_an_answer_is_about_what_was_asked_and_the_same_twice(name: str, verb: str, names: list[str]) -> None:
    adapter, blind = make_answerers()[name], make_answerers()[name]
    ask, names_in = QUESTIONS[name]
    asked = ask(names)
    told = [answer(adapter, verb, weather(RISKS), asked) for _ in range(2)]
    assert told[0] == told[1] == answer(blind, verb, weather(RISKS, 9), asked)
    about = names_in(json.loads(told[0]), verb)
    assert about is None or about <= set(names)
    stale = adapter.verbs[verb].stale(asked)
    if (name, verb) in NEEDS_NO_WEATHER:
        assert stale == told[0]
    else:
        assert stale is None or names_in(json.loads(stale), verb) == (None if about is None else set(names))


def answer(adapter: Adapter, verb: str, given: Weather, body: bytes) -> bytes:
    """Whoever knows the nodes here knows of their demand, too."""
    return adapter.verbs[verb].answer(dataclasses.replace(given, demand=small_demand() if given.nodes else None), body)


@pytest.mark.parametrize(("name", "verb"), sorted({*VERB_CASES} - NEEDS_NO_WEATHER))
def test_an_answerer_without_scores_says_that_it_does_not_know_and_wishes_nothing(name: str, verb: str) -> None:
    adapter = make_answerers()[name]
    with pytest.raises(NotKnown):
        answer(adapter, verb, weather(None), QUESTIONS[name][0](["low"]))
    assert not list(adapter.wishes(weather(RISKS), {}))
    assert not adapter.fields
