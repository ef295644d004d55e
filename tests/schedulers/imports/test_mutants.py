"""Objects with anything anywhere: a tree that the placer takes, or a refusal that names the file."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.errors import ConfigError
from fleetcast.schedulers.imports.kai import draft_kai
from fleetcast.schedulers.imports.kueue import draft_kueue
from fleetcast.schedulers.imports.volcano import draft_volcano
from tests.schedulers.imports.importing import Make, imported

GPU = "nvidia.com/gpu"
QUOTA = [
    {
        "flavors": [
            {"name": "f", "resources": [{"name": GPU, "nominalQuota": 8, "borrowingLimit": 1, "lendingLimit": 1}]}
        ]
    }
]
SHARED = {"resourceGroups": QUOTA, "fairSharing": {"weight": "2"}}
SCOPE = {"admissionScope": {"admissionMode": "UsageBasedAdmissionFairSharing"}, "stopPolicy": "Hold"}


def thing(kind: str, name: str, spec: Any, version: str = "kueue.x-k8s.io/v1beta2") -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": "n"}, "spec": spec}


KUEUE = [
    thing("ResourceFlavor", "f", {"nodeLabels": {"nvidia.com/gpu.product": "h100"}}),
    thing("Cohort", "c", {"parentName": "d", **SHARED}),
    thing("ClusterQueue", "q", {"cohortName": "c", **SHARED, **SCOPE}),
    thing("LocalQueue", "l", {"clusterQueue": "q", "fairSharing": {"weight": 2}}),
    {**thing("WorkloadPriorityClass", "q", None), "value": 5},
    {
        **thing("Configuration", "", None, "config.kueue.x-k8s.io/v1beta2"),
        "admissionFairSharing": {"usageHalfLifeTime": "1h"},
    },
]
RESOURCES = {
    "resources": {"gpu": {"quota": 4, "limit": 8, "overQuotaWeight": 2, "lendingLimit": 1}, "cpu": {"quota": 1}}
}
KAI = [
    thing("Queue", "a", {"priority": 3, **RESOURCES}, "scheduling.run.ai/v2"),
    thing("Queue", "b", {"parentQueue": "a", **RESOURCES}, "scheduling.run.ai/v2"),
]
AMOUNTS = {"guarantee": {"resource": {GPU: 2}}, "deserved": {GPU: 4}, "capability": {GPU: 8}, "reclaimable": False}
VOLCANO = [
    thing("Queue", "root", {"weight": 1}, "scheduling.volcano.sh/v1beta1"),
    thing("Queue", "a", {"parent": "root", "weight": 2, "priority": 4, **AMOUNTS}, "scheduling.volcano.sh/v1beta1"),
    thing("Queue", "b", {"parent": "a", "weight": 2, **AMOUNTS}, "scheduling.volcano.sh/v1beta1"),
]
numbers = (
    st.floats() | st.integers() | st.sampled_from([0, -1, 1e308, "8", "500m", "1e300E", "9Ei", ".nan", "-0", "1e9"])
)
anything = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5) | st.sampled_from(["a", "b", "c", "q", "a/b", "root"]),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["name", GPU, "gpu", "x"]), inner, max_size=2)
    ),
    max_leaves=3,
)


def places_of(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value below."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, one in list(pairs) for found in [(value, key), *places_of(one)]]


@pytest.mark.parametrize(("make", "things"), [(draft_kueue, KUEUE), (draft_kai, KAI), (draft_volcano, VOLCANO)])
@given(changes=st.lists(st.tuples(st.integers(0, 10**6), anything), min_size=1, max_size=3))
def test_a_changed_object_is_taken_or_refused(make: Make, things: list[Any], changes: list[tuple[int, Any]]) -> None:
    changed = copy.deepcopy(things)
    for number, value in changes:
        container, key = (found := places_of(changed))[number % len(found)]
        container[key] = value
    imports_or_refuses(make, changed)


def test_a_name_that_cannot_be_printed_is_refused_wherever_it_stands() -> None:
    """The name of a class and of a GPU model, too, which no queue has."""
    for make, things in ((draft_kueue, KUEUE), (draft_kai, KAI), (draft_volcano, VOLCANO)):
        for number in range(len(places_of(things))):
            changed = copy.deepcopy(things)
            container, key = places_of(changed)[number]
            container[key] = "\x1f"
            imports_or_refuses(make, changed)


def imports_or_refuses(make: Make, changed: list[Any]) -> None:
    refused, queues = "", 0
    try:
        queues = len(imported(make, json.dumps({"kind": "List", "items": changed}))[0].nodes) - 1
    except ConfigError as error:
        refused = str(error)
    assert queues > 0 or refused.startswith("file0")
