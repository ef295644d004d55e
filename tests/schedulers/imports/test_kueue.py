"""Kueue's objects as queues.toml."""

import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.schedulers.imports.kueue import draft_kueue
from tests.schedulers.imports.importing import imported, named, nodes

FLAVORS = """
kind: ResourceFlavor
apiVersion: kueue.x-k8s.io/v1beta2
metadata: {name: big}
spec: {nodeLabels: {nvidia.com/gpu.product: h100}}
---
kind: ResourceFlavor
apiVersion: kueue.x-k8s.io/v1beta2
metadata: {name: small}
spec: {nodeLabels: {nvidia.com/gpu.product: a100, pool: x}}
---
"""
COHORT = """
apiVersion: kueue.x-k8s.io/v1beta2
kind: Cohort
metadata: {name: org}
spec:
  resourceGroups:
  - coveredResources: [nvidia.com/gpu]
    flavors: [{name: big, resources: [{name: nvidia.com/gpu, nominalQuota: 4}]}]
---
"""


def cluster_queue(name: str, spec: str, flavor: str = "big", quota: str = "nominalQuota: 8", version: str = "2") -> str:
    return f"""
apiVersion: kueue.x-k8s.io/v1beta{version}
kind: ClusterQueue
metadata: {{name: {name}, labels: {{any: thing}}}}
spec:
  namespaceSelector: {{}}
  {spec}
  resourceGroups:
  - coveredResources: [cpu, nvidia.com/gpu]
    flavors: [{{name: {flavor}, resources: [{{name: cpu, nominalQuota: 1}}, {{name: nvidia.com/gpu, {quota}}}]}}]
---
"""


def test_quotas_are_guarantees_and_a_root_has_what_its_tree_has() -> None:
    text = FLAVORS + COHORT
    text += cluster_queue("a", "cohortName: org", quota="nominalQuota: 8, borrowingLimit: 4, lendingLimit: 6")
    text += cluster_queue("b", "cohort: org", flavor="small", version="1") + cluster_queue("alone", "stopPolicy: None")
    tree, notes = imported(draft_kueue, text)
    found = nodes(tree)
    assert found["org"].guaranteed == {"H100": 12, "A100": 8}
    assert found["org"].limit == {"H100": 12, "A100": 8, "gpu": 20}
    assert (found["org/a"].guaranteed, found["org/a"].lend, found["org/a"].borrow) == (
        {"H100": 8},
        {"H100": 6},
        {"H100": 4},
    )
    assert found["org/a"].find_limit("H100") == 12
    assert found["org/a"].find_limit("A100") == 0  # a flavor that it does not name
    assert found["alone"].limit == {"H100": 8, "A100": 0, "gpu": 8}
    assert named(notes, "quotas of other") == ["org/a (cpu 1 of big)", "org/b (cpu 1 of small)", "alone (cpu 1 of big)"]
    assert named(notes, "ResourceFlavor nodeLabels.pool") == ["small (x)"]


def test_weights_are_quantities_and_0_is_the_last() -> None:
    text = FLAVORS + "".join(
        cluster_queue(name, f"cohortName: org\n  fairSharing: {{weight: {weight}}}")
        for name, weight in (("a", "500m"), ("b", "40"), ("c", "0"))
    )
    found = nodes(imported(draft_kueue, text)[0])
    assert [found[f"org/{name}"].weight for name in "abc"] == [0.5, 40, 1e-6]


def test_cohorts_nest_and_need_not_be_there() -> None:
    text = COHORT.replace("spec:", "spec:\n  parentName: company")
    found = nodes(imported(draft_kueue, FLAVORS + text + cluster_queue("org", "cohortName: org"))[0])
    assert set(found) == {"company", "company/org", "company/org/org"}
    assert found["company"].limit == {"H100": 12, "A100": 0, "gpu": 12}


def test_flavors_without_a_model_count_gpus_of_any() -> None:
    text = cluster_queue("a", "cohortName: org", flavor="unknown") + cluster_queue("b", "cohortName: org")
    tree, notes = imported(draft_kueue, FLAVORS + text)
    assert nodes(tree)["org/a"].guaranteed == {"gpu": 8}
    assert nodes(tree)["org/b"].guaranteed == {"H100": 8, "gpu": 8}
    assert named(notes, "flavors without") == ["unknown"]


LOCAL = """
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {name: main, namespace: team}
spec: {clusterQueue: a, fairSharing: {weight: 3}}
---
"""
SCOPE = "admissionScope: {admissionMode: UsageBasedAdmissionFairSharing}"
CONFIGURATION = """
apiVersion: config.kueue.x-k8s.io/v1beta2
kind: Configuration
fairSharing: {}
admissionFairSharing: {usageHalfLifeTime: 84h30m}
---
"""


def test_local_queues_are_names_or_share_by_use() -> None:
    tree, notes = imported(draft_kueue, FLAVORS + cluster_queue("a", "cohortName: org") + LOCAL)
    assert set(nodes(tree)) == {"org", "org/a"}
    assert named(notes, "LocalQueues are") == ["team/main is org/a"]
    assert tree.policy.half_life_s == 3600e6
    tree, _ = imported(draft_kueue, FLAVORS + cluster_queue("a", SCOPE) + LOCAL + CONFIGURATION)
    assert nodes(tree)["a/team.main"].weight == 3
    assert tree.policy.half_life_s == 84.5 * 3600


def test_classes_and_what_has_no_counterpart() -> None:
    spec = """cohortName: org
  queueingStrategy: StrictFIFO
  stopPolicy: Hold
  preemption: {reclaimWithinCohort: Any, withinClusterQueue: Never}
  admissionChecksStrategy: {admissionChecks: [{name: check}]}"""
    classes = "---\nkind: WorkloadPriorityClass\napiVersion: kueue.x-k8s.io/v1beta2\nmetadata: {name: prod}\nvalue: 7\n"
    other = "---\nkind: Pod\napiVersion: v1\nmetadata: {name: p}\n"
    tree, notes = imported(draft_kueue, FLAVORS + cluster_queue("a", spec) + classes + other)
    assert tree.classes["prod"].priority == 7
    assert nodes(tree)["org/a"].max_waiting == 0
    assert named(notes, "StrictFIFO") == ["org/a"]
    assert named(notes, "ClusterQueue preemption.reclaimWithinCohort") == ["a (Any)"]
    assert named(notes, "ClusterQueue admissionChecksStrategy") == ["a ({admissionChecks: [{name: check}]})"]
    assert not named(notes, "ClusterQueue preemption.within")
    assert named(notes, "objects of the kind Pod") == ["p"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (FLAVORS, "there is no ClusterQueue"),
        (cluster_queue("a", "cohortName: org").replace("beta2", "beta9"), "v1beta9; read are"),
        (cluster_queue("a", "x: y", quota="nominalQuota: -8"), "line 10: ClusterQueue a: .*nominalQuota is -8"),
        (cluster_queue("a", "x: y", quota="nominalQuota: .nan"), "line 10: .*nominalQuota is '.nan', must be a number"),
        (cluster_queue("a", "fairSharing: {weight: -1}"), "line 7: ClusterQueue a: fairSharing.weight is -1"),
        (cluster_queue("a", "fairSharing: 5"), "fairSharing is 5, must be a mapping"),
        (cluster_queue("a", "x: y") * 2, "ClusterQueue a is there twice, first in file0, line 2"),
        (
            cluster_queue("a", "cohortName: c")
            + "".join(
                COHORT.replace("org", me).replace("spec:", f"spec:\n  parentName: {up}") for me, up in ("cd", "dc")
            ),
            "is a cycle",
        ),
        (cluster_queue("a", "x: y").replace("name: a", "name: 7/8"), ""),
    ],
)
def test_bad_objects_are_refused_with_the_line(text: str, why: str) -> None:
    if not why:
        assert set(nodes(imported(draft_kueue, text)[0])) == {"7|8"}
        return
    with pytest.raises(ConfigError, match=why):
        imported(draft_kueue, text)
