"""The fields of Kubernetes' pods and nodes that we read, and the bodies of the extender.

Pods and nodes have keys in camelCase, and the bodies have keys in PascalCase. The extender's Go structs have
no JSON tags.
"""

from math import ceil

import msgspec

from fleetcast.fleet.gpu_resources import is_gpu_resource
from fleetcast.fleet.mig import SLICES, parse_mig_profile

MIG_RESOURCE = "nvidia.com/mig-"  # and a profile
LIMIT = "fleetcast/limit-s"  # annotation: how long the pod will run, in whole seconds

Quantities = dict[str, str | int | float]


class KubeResources(msgspec.Struct):
    limits: Quantities | None = None
    requests: Quantities | None = None


class KubeContainer(msgspec.Struct):
    resources: KubeResources | None = None


class PodMeta(msgspec.Struct):
    uid: str = ""
    annotations: dict[str, str] | None = None


class KubePodSpec(msgspec.Struct, rename="camel"):
    containers: list[KubeContainer] | None = None
    init_containers: list[KubeContainer] | None = None
    active_deadline_seconds: int | None = None


class KubePod(msgspec.Struct):
    """The fields of a v1.Pod that we read."""

    metadata: PodMeta | None = None
    spec: KubePodSpec | None = None

    @property
    def gpus(self) -> int:
        """The GPUs that the pod needs, rounded up to whole ones.

        MIG instances count as the GPU slices that they fill. This is the sum over its containers, or the
        largest of its init containers if that is more.
        """
        if self.spec is None:
            return 0
        together = sum(map(_count_slices, self.spec.containers or ()))
        return ceil(max([together, *map(_count_slices, self.spec.init_containers or ())]) / SLICES)

    @property
    def limit_s(self) -> float | None:
        """The longest run time of the pod, in seconds: its annotation, or else its deadline.

        None if it has neither.
        """
        said = ((self.metadata and self.metadata.annotations) or {}).get(LIMIT, "")
        if said.isdecimal():
            return float(said[:12])
        return self.spec.active_deadline_seconds if self.spec else None


class NodeMeta(msgspec.Struct):
    name: str


class KubeNode(msgspec.Struct):
    """The fields of a v1.Node that we read."""

    metadata: NodeMeta


class NodeList(msgspec.Struct):
    items: list[KubeNode] | None = None


class ExtenderArgs(msgspec.Struct, rename="pascal"):
    """The question of filter and prioritize: a pod, and nodes by name or as whole objects."""

    pod: KubePod | None = None
    nodes: NodeList | None = None
    node_names: list[str] | None = None


class FilterResult(msgspec.Struct, rename="pascal"):
    """The nodes that pass, and the reason why each other node does not pass.

    Nodes have the form of the question: names or whole objects.
    """

    nodes: NodeList | None
    node_names: list[str] | None
    failed_nodes: dict[str, str]
    failed_and_unresolvable_nodes: dict[str, str]
    error: str = ""


class HostPriority(msgspec.Struct, rename="pascal"):
    host: str
    score: int


class MetaPod(msgspec.Struct):
    uid: str = msgspec.field(name="UID")


class MetaVictims(msgspec.Struct, rename="pascal"):
    pods: list[MetaPod] | None = None
    num_pdb_violations: int = msgspec.field(name="NumPDBViolations", default=0)


class Victims(msgspec.Struct, rename="pascal"):
    pods: list[KubePod] | None = None
    num_pdb_violations: int = msgspec.field(name="NumPDBViolations", default=0)

    def make_meta_victims(self) -> MetaVictims:
        ids = [MetaPod(pod.metadata.uid) for pod in self.pods or () if pod.metadata]
        return MetaVictims(ids, self.num_pdb_violations)


class PreemptionArgs(msgspec.Struct, rename="pascal"):
    """The question of preempt: the nodes on which jobs could make room for a pod, and the victims there."""

    pod: KubePod | None = None
    node_name_to_victims: dict[str, Victims] | None = None
    node_name_to_meta_victims: dict[str, MetaVictims] | None = None


class PreemptionResult(msgspec.Struct, rename="pascal"):
    node_name_to_meta_victims: dict[str, MetaVictims]


def _count_slices(container: KubeContainer) -> int:
    """Return the GPUs that a container requests, in sevenths of a GPU."""
    resources = container.resources
    if resources is None:
        return 0
    asked = (resources.requests or {}, resources.limits or {})
    names = {name for part in asked for name in part}
    return sum(
        size * max(_parse_count(part.get(name, 0)) for part in asked)
        for name in names
        if (size := _compute_unit_slices(name))
    )


def _compute_unit_slices(resource: str) -> int:
    """Return the size of one unit of a resource in sevenths of a GPU, 0 if the resource is no GPU.

    An unknown MIG profile counts as a whole GPU.

    >>> names = ("nvidia.com/gpu", "nvidia.com/mig-3g.40gb", "nvidia.com/mig-half", "cpu")
    >>> [_compute_unit_slices(name) for name in names]
    [7, 3, 7, 0]
    """
    if resource.startswith(MIG_RESOURCE):
        profile = parse_mig_profile(resource.removeprefix(MIG_RESOURCE))
        return profile.slices if profile else SLICES
    return SLICES if is_gpu_resource(resource) else 0


def _parse_count(quantity: str | int | float) -> int:
    """Parse a quantity of GPUs, which are always whole units. Returns 0 for any other text.

    >>> _parse_count("8"), _parse_count(2), _parse_count("500m")
    (8, 2, 0)
    """
    if isinstance(quantity, str):
        return int(quantity[:9]) if quantity.isdecimal() else 0
    return max(0, int(quantity))
