"""Queues of the KAI Scheduler and of Volcano as queues.toml."""

import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.schedulers.imports.kai import draft_kai
from fleetcast.schedulers.imports.volcano import draft_volcano
from tests.schedulers.imports.importing import imported, named, nodes


def kai(name: str, spec: str, gpu: str = "quota: 8, overQuotaWeight: 2, limit: -1") -> str:
    return f"""
apiVersion: scheduling.run.ai/v2
kind: Queue
metadata: {{name: {name}}}
spec:
  {spec}
  resources:
    cpu: {{quota: -1, limit: -1, overQuotaWeight: 1}}
    gpu: {{{gpu}}}
---
"""


def test_kai_quotas_weights_and_limits() -> None:
    text = kai("org", "displayName: Org", "quota: 6, overQuotaWeight: 1, limit: 20, lendingLimit: 2")
    text += kai("a", "parentQueue: org", "quota: 4, overQuotaWeight: 3, limit: -1") + kai("b", "parentQueue: org")
    text += kai("c", "reclaimMinRuntime: 5m", "quota: 4, overQuotaWeight: 0") + kai("d", "x: y", "quota: -1, limit: -1")
    tree, notes = imported(draft_kai, text)
    found = nodes(tree)
    assert (found["org"].guaranteed, found["org"].limit, found["org"].lend) == ({"gpu": 12}, {"gpu": 20}, {"gpu": 2})
    assert named(notes, "a guarantee below that of its queues") == ["org"]
    assert (found["org/a"].weight, found["org/a"].limit) == (3, {})
    assert found["c"].find_limit("gpu") == 4  # no limit is no more than the quota
    assert named(notes, "overQuotaWeight 0") == ["c"]
    assert named(notes, "a quota of -1") == ["d"]
    assert named(notes, "Queue reclaimMinRuntime") == ["c (5m)"]
    assert named(notes, "Queue displayName") == ["org (Org)"]
    assert tree.classes == {}


def test_kai_priorities_are_classes_where_they_differ() -> None:
    tree, _ = imported(draft_kai, kai("a", "priority: 200") + kai("b", "x: y"))
    assert {name: node.priority for name, node in nodes(tree).items()} == {"a": 200, "b": 100}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (kai("a", "parentQueue: none"), "line 2: Queue a is below 'none', which is in none of the files"),
        (kai("a", "parentQueue: b") + kai("b", "parentQueue: a"), "is a cycle"),
        (kai("a", "x: y", "quota: -2"), "line 9: Queue a: resources.gpu.quota is -2"),
        (kai("a", "priority: 1.5"), "priority 1.5"),
        (kai("a", "x: y") * 2, "Queue a is there twice"),
        (kai("a", "x: y").replace("run.ai", "other"), "there is no Queue of scheduling.run.ai/"),
    ],
)
def test_bad_kai_queues_are_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        imported(draft_kai, text)


def volcano(name: str, spec: str, state: str = "Open") -> str:
    return f"""
apiVersion: scheduling.volcano.sh/v1beta1
kind: Queue
metadata: {{name: {name}}}
spec: {{{spec}}}
status: {{state: {state}, allocated: {{cpu: 1}}}}
---
"""


def test_volcano_guarantee_is_kept_and_deserved_is_lent() -> None:
    text = volcano("root", "weight: 1, capability: {cpu: 5}") + volcano("org", "parent: root, weight: 4")
    text += volcano(
        "a", 'parent: org, guarantee: {resource: {nvidia.com/gpu: "2"}}, deserved: {nvidia.com/gpu: 8, cpu: 1}'
    )
    text += volcano("b", "reclaimable: false, capability: {nvidia.com/gpu: 4}, type: x") + volcano(
        "c", "weight: 2", "Closed"
    )
    tree, notes = imported(draft_volcano, text)
    found = nodes(tree)
    assert set(found) == {"org", "org/a", "b", "c"}
    assert (found["org/a"].guaranteed, found["org/a"].find_unlent_guarantee("gpu")) == ({"gpu": 8}, 2)
    assert (found["org"].weight, found["b"].limit, found["c"].max_waiting) == (4, {"gpu": 4}, 0)
    assert named(notes, "reclaimable false") == ["b"]
    assert named(notes, "Queue capability") == ["root ({cpu: 5})"]
    assert named(notes, "Queue deserved.cpu") == ["a (1)"]
    assert named(notes, "Queue type") == ["b (x)"]
