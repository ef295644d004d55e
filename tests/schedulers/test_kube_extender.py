"""The words of kube-scheduler: requests as its Go structs marshal them, replies as it reads them."""

import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.errors import RequestError
from fleetcast.schedulers.kube_extender import KubeExtender
from fleetcast.schedulers.kube_types import KubePod
from fleetcast.schedulers.ratings import NEUTRAL
from tests.schedulers.small_fleet import outlook

NODES = {"low": 0.01, "high": 0.4, "drained": 0.0, "risky": 0.9, "unknown risk": np.nan}
STATE = np.array([0, 0, 1, 0, 0], np.int8)
REFUSED = {"drained": "fleetcast: drained", "risky": "fleetcast: risk 90 % within 1 h"}


@pytest.fixture(scope="module")
def extender() -> KubeExtender:
    made = KubeExtender()
    made.use_outlook(outlook(NODES, state=STATE))
    return made


def pod(gpus: int = 8, **spec: Any) -> dict[str, Any]:
    """A v1.Pod as the scheduler sends it, less what nobody reads."""
    quantities = {"cpu": "1", "memory": "1Gi", "nvidia.com/gpu": str(gpus)}
    return {
        "metadata": {"name": "train-0", "namespace": "default", "uid": "6f1c", "labels": {"app": "train"}},
        "spec": {
            "containers": [{"name": "c", "image": "i", "resources": {"limits": quantities, "requests": quantities}}],
            "schedulerName": "default-scheduler",
            **spec,
        },
        "status": {"phase": "Pending", "qosClass": "Guaranteed"},
    }


def asked(names: list[str], gpus: int = 8) -> bytes:
    """extenderv1.ExtenderArgs with nodeCacheCapable: true."""
    return json.dumps({"Pod": pod(gpus), "Nodes": None, "NodeNames": names}).encode()


def node(name: str) -> dict[str, Any]:
    status = {"allocatable": {"nvidia.com/gpu": "8"}, "conditions": [{"type": "Ready", "status": "True"}]}
    return {"metadata": {"name": name, "labels": {"rack": "r1"}}, "spec": {"podCIDR": "10.0.0.0/24"}, "status": status}


def asked_whole(names: list[str]) -> bytes:
    """extenderv1.ExtenderArgs with nodeCacheCapable: false."""
    nodes = {"metadata": {}, "items": [node(name) for name in names]}
    return json.dumps({"Pod": pod(), "Nodes": nodes, "NodeNames": None}).encode()


def scores(extender: KubeExtender, names: list[str], gpus: int = 8) -> list[int]:
    rows = json.loads(extender.prioritize(asked(names, gpus)))
    assert [row["Host"] for row in rows] == names
    assert all(set(row) == {"Host", "Score"} for row in rows)
    return [row["Score"] for row in rows]


def test_unusable_nodes_fail_for_good_and_all_others_pass(extender: KubeExtender) -> None:
    assert json.loads(extender.filter(asked([*NODES, "nobody knows me"]))) == {
        "Nodes": None,
        "NodeNames": ["low", "high", "unknown risk", "nobody knows me"],
        "FailedNodes": {},
        "FailedAndUnresolvableNodes": REFUSED,
        "Error": "",
    }


def test_whole_nodes_go_back_as_they_came(extender: KubeExtender) -> None:
    result = json.loads(extender.filter(asked_whole(["drained", "low", "stranger"])))
    assert result["Nodes"] == {"metadata": {}, "items": [node("low"), node("stranger")]}
    assert result["NodeNames"] is None
    assert result["FailedAndUnresolvableNodes"] == {"drained": "fleetcast: drained"}


def test_every_node_asked_about_has_a_score(extender: KubeExtender) -> None:
    assert scores(extender, ["stranger", *NODES]) == [NEUTRAL, 10, 1, 0, 0, NEUTRAL]
    whole = json.loads(extender.prioritize(asked_whole(["low", "stranger"])))
    assert whole == [{"Host": "low", "Score": 10}, {"Host": "stranger", "Score": NEUTRAL}]


def test_scores_follow_the_pod(extender: KubeExtender) -> None:
    assert scores(extender, ["low"], gpus=8) == [10]
    assert scores(extender, ["low"], gpus=1) == [6]
    assert scores(extender, ["low"], gpus=10**9) == [6]


def test_what_is_seen_anew_counts_at_once() -> None:
    extender = KubeExtender()
    rows = {"a": 0, "b": 1}
    for risk, expected in (([0.0, 0.0], [10, 10]), ([0.9, 0.0], [0, 10]), ([0.9, 0.1], [0, 4])):
        extender.use_outlook(outlook(dict(zip("ab", risk, strict=True)), rows=rows))
        assert scores(extender, ["a", "b", "c"]) == [*expected, NEUTRAL]
    extender.use_outlook(outlook({"c": 0.0}))
    assert scores(extender, ["a", "b", "c"]) == [NEUTRAL, NEUTRAL, 10]


META = {
    name: {"Pods": [{"UID": f"{name}-1"}, {"UID": f"{name}-2"}], "NumPDBViolations": 1}
    for name in ("low", "drained", "stranger")
}


def test_preempting_on_a_node_of_no_use_is_refused_and_no_victim_is_invented(extender: KubeExtender) -> None:
    kept = {name: META[name] for name in ("low", "stranger")}
    answer = extender.preempt(json.dumps({"Pod": pod(), "NodeNameToMetaVictims": META}).encode())
    assert json.loads(answer) == {"NodeNameToMetaVictims": kept}
    whole = {
        name: {"Pods": [{"metadata": {"uid": row["UID"]}} for row in victims["Pods"]], "NumPDBViolations": 1}  # type: ignore[attr-defined]
        for name, victims in META.items()
    }
    asked = {"Pod": pod(), "NodeNameToVictims": whole, "NodeNameToMetaVictims": None}
    assert json.loads(extender.preempt(json.dumps(asked).encode())) == {"NodeNameToMetaVictims": kept}


def test_keys_in_any_case_are_read(extender: KubeExtender) -> None:
    names = list(NODES)
    for spelt in (("pod", "nodenames"), ("pod", "nodeNames"), ("Pod", "nodenames"), ("pod", "NodeNames")):
        body = json.dumps(dict(zip(spelt, (pod(1), names), strict=True))).encode()
        assert extender.filter(body) == extender.filter(asked(names)), spelt
        assert extender.prioritize(body) == extender.prioritize(asked(names, 1)), spelt
    whole = json.dumps({"pod": pod(), "nodes": {"items": [node("low"), node("drained")]}}).encode()
    assert [row["metadata"]["name"] for row in json.loads(extender.filter(whole))["Nodes"]["items"]] == ["low"]
    lower = json.dumps({"pod": pod(), "nodenametometavictims": META}).encode()
    assert set(json.loads(extender.preempt(lower))["NodeNameToMetaVictims"]) == {"low", "stranger"}


def test_who_has_seen_nothing_changes_nothing() -> None:
    blind, names = KubeExtender(), list(NODES)
    answer = json.loads(blind.filter(asked(names)))
    assert (answer["NodeNames"], answer["FailedAndUnresolvableNodes"]) == (names, {})
    assert scores(blind, names) == [NEUTRAL] * len(names)
    assert json.loads(blind.preempt(json.dumps({"NodeNameToMetaVictims": META}).encode())) == {
        "NodeNameToMetaVictims": META
    }


def test_a_question_about_no_node_is_answered_with_none(extender: KubeExtender) -> None:
    for body in (b"{}", b'{"Pod":{},"Nodes":null,"NodeNames":null}', b'{"Pod":null,"NodeNames":[]}'):
        assert not json.loads(extender.filter(body))["NodeNames"]
        assert json.loads(extender.prioritize(body)) == []
    assert json.loads(extender.preempt(b"{}")) == {"NodeNameToMetaVictims": {}}


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b'"text"',
        b'{"Pod":{},"NodeNames":5}',
        b'{"Pod":{},"NodeNames":[1]}',
        b'{"Pod":5,"NodeNames":["a"]}',
        b'{"Pod":{},"Nodes":{"items":[{}]}}',
        b'{"Pod":{},"Nodes":{"items":[5]},"NodeNames":["a"]}',
        b'{"pod":{},"nodenames":{"a":1}}',
    ],
)
def test_another_shape_is_refused_and_named(extender: KubeExtender, body: bytes) -> None:
    for reply in (extender.filter, extender.prioritize):
        with pytest.raises(RequestError, match=r"\w"):
            reply(body)


NO_JSON = (b"", b"{", b'{"Pod":{},"NodeNames":["\xff"]}', b'{"NodeNames":["\\ud800"]}', b'{"x":' + b"[" * 100_000)


@pytest.mark.parametrize("body", NO_JSON, ids=range(len(NO_JSON)))
def test_what_is_no_json_is_no_json(extender: KubeExtender, body: bytes) -> None:
    for reply in (extender.filter, extender.prioritize):
        with pytest.raises((msgspec.DecodeError, UnicodeDecodeError, RecursionError)):
            reply(body)


def container(gpus: str | int, *, key: str = "requests", name: str = "nvidia.com/gpu") -> dict[str, Any]:
    return {"resources": {key: {name: gpus}}}


def test_a_pod_of_mig_instances_is_ranked_as_one_with_gpus() -> None:
    extender = KubeExtender()
    extender.use_outlook(outlook({"idle": 0.0, "full": 0.0}, free=np.array([8, 0])))  # type: ignore[arg-type]

    def ranked(resource: str) -> list[int]:
        pod = {"spec": {"containers": [container("1", name=resource)]}}
        body = json.dumps({"Pod": pod, "Nodes": None, "NodeNames": ["idle", "full"]}).encode()
        return [row["Score"] for row in json.loads(extender.prioritize(body))]

    assert ranked("nvidia.com/mig-2g.20gb") == ranked("nvidia.com/gpu") != ranked("cpu")


@pytest.mark.parametrize(
    ("spec", "gpus"),
    [
        ({"containers": [container("4"), container(2)]}, 6),
        ({"containers": [container("4", key="limits")]}, 4),
        ({"containers": [container("1")], "initContainers": [container("8"), container("2")]}, 8),
        ({"containers": [{}, {"resources": {}}, {"resources": {"limits": None}}]}, 0),
        ({"containers": [container("many"), container("-1"), container(1.5)]}, 1),
        ({"containers": None}, 0),
        ({"containers": [container("1", name="nvidia.com/mig-1g.10gb")]}, 1),
        ({"containers": [container("2", name="nvidia.com/mig-3g.40gb"), container("2", name="amd.com/gpu")]}, 3),
        ({"containers": [container("8", name="nvidia.com/mig-1g.10gb.me", key="limits")]}, 2),
        ({"containers": [container("3", name="nvidia.com/mig-half")]}, 3),  # unknown: as whole ones, never as none
        ({"containers": [container("2", name="nvidia.com/gpu.shared")]}, 2),
        ({"containers": [container("9", name="nvidia.com/gpufs")]}, 0),
        ({"containers": [container("8", name="habana.ai/gaudi"), container("1", name="gpu.intel.com/xe")]}, 9),
        ({"containers": [container("1", name="gpu.intel.com/xe_monitoring")]}, 0),
    ],
)
def test_gpus_of_a_pod(spec: dict[str, Any], gpus: int) -> None:
    assert msgspec.convert({"spec": spec}, KubePod).gpus == gpus


@pytest.mark.parametrize(
    ("annotation", "deadline_s", "limit_s"),
    [(None, None, None), (None, 600, 600), ("86400", None, 86400), ("86400", 600, 86400), ("a day", 600, 600)],
)
def test_how_long_a_pod_will_run(annotation: str | None, deadline_s: int | None, limit_s: int | None) -> None:
    metadata = {"annotations": None if annotation is None else {"fleetcast/limit-s": annotation}}
    made = msgspec.convert({"metadata": metadata, "spec": {"activeDeadlineSeconds": deadline_s}}, KubePod)
    assert made.limit_s == limit_s


@given(st.lists(st.sampled_from(list(NODES)) | st.text(), unique=True), st.integers(0, 20))
def test_replies_are_about_the_nodes_asked_about_and_no_others(names: list[str], gpus: int) -> None:
    extender = KubeExtender()
    extender.use_outlook(outlook(NODES, state=STATE))
    names = [name for name in names if name.isprintable() or name.isascii()]
    answer = json.loads(extender.filter(asked(names, gpus)))
    failed = answer["FailedAndUnresolvableNodes"]
    assert answer["NodeNames"] == [name for name in names if name not in failed]
    assert set(failed) == set(names) & set(REFUSED)
    assert all(0 <= score <= 10 for score in scores(extender, names, gpus))
