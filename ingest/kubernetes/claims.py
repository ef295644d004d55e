"""A reader of device claims (DRA, resource.k8s.io): the GPUs of a ResourceClaim or of its template.

    v1, v1beta2    a request has `exactly` one kind of device, or `firstAvailable` of several
    v1beta1        a request names its device class itself, or `firstAvailable`

An allocation takes precedence over the request, because it lists the devices. Requests with admin access
do not count: they only observe devices that others hold.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

import msgspec

from fleetcast.fleet.requests import WHOLE_GPU
from fleetcast.ingest.kubernetes.objects import Meta, PodSpec, PodStatus

GPU_CLASSES = ("*gpu*", "mig.*")
MAX_DEVICES = 1024


class _Object(msgspec.Struct, frozen=True, rename="camel"):
    pass


class ExactDevices(_Object, frozen=True):
    """A request for devices of one class. allocation_mode: ExactCount, or All for all devices of a node."""

    device_class_name: str = ""
    allocation_mode: str = ""
    count: int | None = None
    admin_access: bool | None = None


class DeviceRequest(_Object, frozen=True):
    name: str = ""
    exactly: ExactDevices | None = None
    first_available: tuple[ExactDevices, ...] | None = None
    device_class_name: str = ""
    allocation_mode: str = ""
    count: int | None = None
    admin_access: bool | None = None

    @property
    def choices(self) -> tuple[ExactDevices, ...]:
        """The choices that satisfy the request, in order of preference."""
        if self.first_available:
            return self.first_available
        own = ExactDevices(self.device_class_name, self.allocation_mode, self.count, self.admin_access)
        return (self.exactly or own,)


class DeviceClaim(_Object, frozen=True):
    requests: tuple[DeviceRequest, ...] | None = None


class ClaimSpec(_Object, frozen=True):
    devices: DeviceClaim = DeviceClaim()


class AllocatedDevice(_Object, frozen=True):
    """A device that was allocated to a claim.

    request: the request's name. If the request had several choices, the name of the choice follows (`gpus/big`).
    """

    request: str = ""
    admin_access: bool | None = None


class AllocatedDevices(_Object, frozen=True):
    results: tuple[AllocatedDevice, ...] | None = None


class Allocation(_Object, frozen=True):
    devices: AllocatedDevices = AllocatedDevices()


class Consumer(_Object, frozen=True):
    resource: str = ""
    uid: str = ""


class ClaimStatus(_Object, frozen=True):
    allocation: Allocation | None = None
    reserved_for: tuple[Consumer, ...] | None = None


class ResourceClaim(_Object, frozen=True):
    metadata: Meta
    spec: ClaimSpec = ClaimSpec()
    status: ClaimStatus = ClaimStatus()


class TemplateSpec(_Object, frozen=True):
    spec: ClaimSpec = ClaimSpec()


class ResourceClaimTemplate(_Object, frozen=True):
    metadata: Meta
    spec: TemplateSpec = TemplateSpec()


class ClaimedGpus(NamedTuple):
    """The GPUs of a pod's device claims.

    milli: the pod's part of them in thousandths of a GPU. unread: claims without a known object.
    """

    gpus: int = 0
    milli: float = 0.0
    unread: tuple[str, ...] = ()


class KnownClaim(msgspec.Struct, frozen=True, array_like=True):
    """The number of GPUs of a device claim, and the number of pods that share the claim.

    For a template, these are the numbers of each claim that is made from it.
    """

    gpus: int
    pods: int = 1


class ClaimTable(msgspec.Struct):
    """The known claims and templates by NAMESPACE/NAME. They are a part of the source's position."""

    claims: dict[str, KnownClaim] = {}
    templates: dict[str, KnownClaim] = {}

    def count_claimed_gpus(self, namespace: str, spec: PodSpec, status: PodStatus) -> ClaimedGpus:
        """Return the GPUs of a pod's claims. A claim without a known object counts as one GPU."""
        made = {row.name: row.resource_claim_name for row in status.resource_claim_statuses or ()}
        gpus, milli, unread = 0, 0.0, list[str]()
        for row in spec.resource_claims or ():
            name, template = row.resource_claim_name or made.get(row.name) or "", row.resource_claim_template_name or ""
            known = self.claims.get(f"{namespace}/{name}") or self.templates.get(f"{namespace}/{template}")
            if known is None:
                unread.append(name or template or row.name)
                known = KnownClaim(1)
            gpus += known.gpus
            milli += WHOLE_GPU * known.gpus / known.pods
        return ClaimedGpus(gpus, milli, tuple(unread))


def read_claim(claim: ResourceClaim, classes: tuple[str, ...]) -> KnownClaim:
    """Return the GPUs of a claim: the allocated ones, else the requested ones.

    classes: patterns of the device classes of GPUs.
    """
    pods = sum(row.resource == "pods" for row in claim.status.reserved_for or ())
    asked = _count_requested_gpus(claim.spec, classes)
    allocation = claim.status.allocation
    if allocation is None:
        return KnownClaim(sum(asked.values()), max(1, pods))
    results = allocation.devices.results or ()
    held = sum(row.request.partition("/")[0] in asked and not row.admin_access for row in results)
    return KnownClaim(held, max(1, pods))


def read_template(template: ResourceClaimTemplate, classes: tuple[str, ...]) -> KnownClaim:
    """Return the GPUs of each claim made from a template. classes: patterns of the device classes of GPUs."""
    return KnownClaim(sum(_count_requested_gpus(template.spec.spec, classes).values()))


def _count_requested_gpus(spec: ClaimSpec, classes: tuple[str, ...]) -> Mapping[str, int]:
    """Return request name → number of GPUs, by the request's first choice that asks for GPUs."""
    found: dict[str, int] = {}
    for request in spec.devices.requests or ():
        for choice in request.choices:
            is_gpu = any(fnmatchcase(choice.device_class_name, pattern) for pattern in classes)
            if is_gpu and not choice.admin_access:
                found[request.name] = 1 if choice.count is None else max(0, min(choice.count, MAX_DEVICES))
                break
    return found
