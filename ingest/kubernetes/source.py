"""The source "kubernetes": jobs and nodes of a cluster, by list and watch.

    priority classes, nodes, device claims, Jobs, JobSets, PyTorchJobs, pods
        ── each listed, then watched ── converters of workloads (`jobs.py`) and nodes (`nodes.py`) ── events

The position holds the observed objects and each collection's version. After a restart, the source
resumes from these versions, or compares a new list with the objects. It delivers nothing until every
collection has answered. Otherwise it would misjudge a pod whose Job is unknown.
"""

import base64
import logging
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from fleetcast.clients.kubernetes import (
    Changes,
    Cluster,
    Collection,
    CollectionAbsent,
    Follower,
    Listing,
    Message,
    Server,
    ServerAway,
)
from fleetcast.fleet.clock import Clock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError, RecordError, SourceError
from fleetcast.fleet.events import JobEvent, NodeEvent
from fleetcast.fleet.topology import NodeSpec
from fleetcast.ingest.inbox.job_events import NO_FUTURE_LIMIT_MS, check_event
from fleetcast.ingest.kubernetes.asked_gpus import list_unread_resources
from fleetcast.ingest.kubernetes.claims import (
    ClaimTable,
    KnownClaim,
    ResourceClaim,
    ResourceClaimTemplate,
    read_claim,
    read_template,
)
from fleetcast.ingest.kubernetes.jobs import JobState, WorkloadConverter
from fleetcast.ingest.kubernetes.machines import HOST_LABELS, PodPlace, find_pod_place
from fleetcast.ingest.kubernetes.nodes import KnownNode, NodeConverter
from fleetcast.ingest.kubernetes.objects import (
    Job,
    JobSet,
    Meta,
    Node,
    Pod,
    PriorityClass,
    PyTorchJob,
    UndecodedObject,
    decode,
)
from fleetcast.ingest.kubernetes.owners import NO_JOBS, find_owner
from fleetcast.ingest.kubernetes.workloads import Member, SiteTerms, Workload, WorkloadReader
from fleetcast.ingest.preemptible import list_unread_words
from fleetcast.ingest.source import Batch, Source, read_options
from fleetcast.ingest.tally import MAX_UNREAD_NAMES, RecordTally, SkipRule

logger = logging.getLogger(__name__)

QUIET_POLL_S = 0.5  # wall; how often what has to settle is looked at
RATE_WINDOW_S = 60.0
CLAIM_VERSIONS = ("v1", "v1beta2", "v1beta1")
KINDS: dict[str, tuple[type[msgspec.Struct], str]] = {  # in the order in which first lists are taken in
    "priorityclasses": (PriorityClass, "/apis/scheduling.k8s.io/v1/priorityclasses"),
    "nodes": (Node, "/api/v1/nodes"),
    "resourceclaimtemplates": (ResourceClaimTemplate, "/apis/resource.k8s.io/v1/{}resourceclaimtemplates"),
    "resourceclaims": (ResourceClaim, "/apis/resource.k8s.io/v1/{}resourceclaims"),
    "jobs": (Job, "/apis/batch/v1/{}jobs"),
    "jobsets": (JobSet, "/apis/jobset.x-k8s.io/v1alpha2/{}jobsets"),
    "pytorchjobs": (PyTorchJob, "/apis/kubeflow.org/v1/{}pytorchjobs"),
    "pods": (Pod, "/api/v1/{}pods"),
}
CLAIMS: dict[str, Callable[[Any, tuple[str, ...]], KnownClaim]] = {
    "resourceclaimtemplates": read_template,
    "resourceclaims": read_claim,
}
WORKLOADS = {"jobs": "Job", "jobsets": "JobSet", "pytorchjobs": "PyTorchJob"}


class KubernetesOptions(SiteTerms, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of the source `kubernetes`. docs/sources/kubernetes.md explains them."""

    name: str = "kubernetes"
    kubeconfig: str = ""
    context: str = ""
    namespace: str = ""
    collections: tuple[str, ...] = tuple(KINDS)
    host_labels: tuple[str, ...] = HOST_LABELS
    taints: dict[str, str] = msgspec.field(default_factory=dict)
    fatal_conditions: tuple[str, ...] = ("Gpu*", "SysLogs*", "*Xid*", "*XID*", "AcceleratedHardwareReady")


class _Position(msgspec.Struct, kw_only=True):
    versions: dict[str, str] = {}
    jobs: JobState = msgspec.field(default_factory=JobState)
    nodes: dict[str, KnownNode] = {}
    places: dict[str, PodPlace] = {}
    claims: ClaimTable = msgspec.field(default_factory=ClaimTable)
    priorities: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class _ObservedPod:
    """A decoded pod, its role in its job (None if it has no GPUs), and the machine that it represents.

    unread: resources that look like GPUs but are not supported.
    """

    pod: Pod
    member: Member | None
    place: PodPlace | None
    unread: tuple[str, ...] = ()

    @property
    def metadata(self) -> Meta:
        return self.pod.metadata


class KubernetesSource(Source):
    """The source for one cluster. All calls must come from one event loop."""

    reports_jobs = True

    def __init__(
        self, entities: Entities, clock: Clock, options: Mapping[str, Any], *, server: Server | None = None
    ) -> None:
        """Create the source. Raises ConfigError.

        server: replaces the server in the options, for tests.
        """
        self.options = read_options("kubernetes", options, KubernetesOptions)
        unknown = set(self.options.collections) - KINDS.keys()
        if unknown or "pods" not in self.options.collections:
            known = ", ".join(KINDS)
            raise ConfigError(
                f"pipeline.sources kubernetes: collections {sorted(unknown)}: expected pods and any of {known}"
            )
        self.name = self.options.name
        self._server = server or Cluster(self.options.kubeconfig, self.options.context)
        self._clock = clock
        self._follower: Follower | None = None
        self._states: dict[str, str] = {}  # collection → "" where it is followed, else what is wrong
        self._early: list[Message] | None = []  # what came before every collection had answered
        self._bad = 0
        self._left_out = 0  # objects of the messages under way that ask for no GPU
        self._unread_pods = 0  # likewise, pods that ask for nothing else than resources that nothing reads
        self._unread: Counter[str] = Counter()  # these resources
        self._delivered: deque[tuple[float, int]] = deque()
        self._at = _Position()
        self._restore_position(self._at)

    def _restore_position(self, at: _Position) -> None:
        self._at = at
        self._nodes = NodeConverter(at.nodes, self.name, self.options.fatal_conditions, self.options.taints, at.places)
        self._reader = WorkloadReader(self.options, at.priorities, at.claims, self._nodes.get_node_gpus)
        self._jobs = WorkloadConverter(at.jobs, self._nodes.list_lost_nodes())

    async def next(self) -> Batch:
        if self._follower is None:
            self._follower = Follower(self._server, self.list_collections(), self._at.versions)
        while True:
            messages = await self._follower.wait_for_messages(QUIET_POLL_S if self._jobs.has_pending_changes else None)
            trouble = self._record_states(messages)
            batch = self.apply_messages(messages)
            self.pending = RecordTally.sum((self.pending, batch.get_tally()))
            if len(batch) or batch.bad:
                batch, self.pending = replace(batch, tally=self.pending), RecordTally()
                self._delivered.append((time.monotonic(), len(batch)))
                return batch
            if trouble is not None:
                raise trouble

    def position(self) -> dict[str, Any]:
        """Return the versions and all observed objects, compressed.

        For 10,000 pods, that is a quarter of a megabyte.
        """
        seen = zlib.compress(msgspec.json.encode(self._at), 1)
        return {"versions": dict(self._at.versions), "seen": base64.b64encode(seen).decode()}

    def seek(self, position: Mapping[str, Any]) -> None:
        try:
            seen = zlib.decompress(base64.b64decode(position.get("seen", "")))
            self._restore_position(msgspec.json.decode(seen, type=_Position))
        except (ValueError, TypeError, zlib.error) as error:
            if not position:
                return
            logger.warning("%s: the stored state has another version (%s), listing everything again", self.name, error)
            self._restore_position(_Position())

    async def close(self) -> None:
        if self._follower is not None:
            self._follower.close()

    def nodes(self) -> Mapping[str, NodeSpec]:
        """Return node → its spec: GPUs, model and domains, from the node's labels and capacity."""
        return self._nodes.get_specs()

    def bound(self) -> Mapping[str, Mapping[str, int]]:
        """Return job → node → number of GPUs of bound pods that belong to no running attempt."""
        return self._at.jobs.bound

    def health(self) -> dict[str, Any]:
        """Return the source's row of the ingestion document.

        `collections`: "followed", or the reason why a collection is not followed.
        """
        now = time.monotonic()
        while self._delivered and self._delivered[0][0] < now - RATE_WINDOW_S:
            self._delivered.popleft()
        is_up = bool(self._states) and not self._states.get("pods", "")
        return {
            "name": self.name,
            "kind": "kubernetes",
            "rate_per_s": round(sum(count for _, count in self._delivered) / RATE_WINDOW_S, 2),
            "lag_s": 0.0 if is_up else None,
            "bad": self._bad,
            "up": is_up,
            "collections": {name: state or "followed" for name, state in self._states.items()},
            "jobs": len(self._at.jobs.workloads),
            "pods": len(self._at.jobs.members),
            "nodes": len(self._at.nodes),
            "hosts": sum(place.is_host for place in self._at.places.values()),
        }

    def list_collections(self) -> list[Collection]:
        """Return the collections to follow, with their decoders.

        The reading threads run the decoders, so the decoders do all slow work.
        """
        of = f"namespaces/{self.options.namespace}/" if self.options.namespace else ""
        return [
            Collection(
                name,
                path.format(of),
                self._decode_pod if kind is Pod else make_decoder(kind),
                _list_version_paths(path),
            )
            for name, (kind, path) in KINDS.items()
            if name in self.options.collections
        ]

    def _record_states(self, messages: Sequence[Message]) -> SourceError | None:
        """Record which collections answer.

        Returns the error of a collection that has just stopped answering, or None.
        """
        trouble = None
        for message in messages:
            before = self._states.get(message.name)
            state = ""
            if isinstance(message, ServerAway):
                state = f"away: {message.error}"
                if not (before or "").startswith("away"):
                    trouble = SourceError(f"{message.name}: {message.error}", message.error.retry_after_s)
            elif isinstance(message, CollectionAbsent):
                state = f"absent: {message.why}"
                if before != state:
                    logger.warning("%s: %s are not followed: %s", self.name, message.name, message.why)
            elif before:
                logger.info("%s: %s are followed again", self.name, message.name)
            self._states[message.name] = state
        return trouble

    def apply_messages(self, messages: Sequence[Message]) -> Batch:
        """Apply the messages, and return the events that follow from them.

        Until every collection has answered, the messages are only stored. The method never awaits, so a position always
        covers whole messages.
        """
        if self._early is not None:
            self._early += messages
            answered = {row.name for row in self._early if not isinstance(row, ServerAway)} | self._at.versions.keys()
            if not answered.issuperset(self.options.collections):
                return Batch(tally=RecordTally())
            order = list(KINDS)
            messages, self._early = sorted(self._early, key=lambda row: order.index(row.name)), None
        now_ms = self._clock.now_ms()
        bad: list[RecordError] = []
        node_events: list[NodeEvent] = []
        objects = self._left_out = self._unread_pods = 0
        for message in messages:
            if isinstance(message, Listing | Changes):
                objects += len(message.objects if isinstance(message, Listing) else message.changes)
                node_events += self._apply_message(message, bad, now_ms)
                self._at.versions[message.name] = message.version
        ignored = {SkipRule.NOT_USED: self._left_out} if self._left_out else {}
        read = objects - len(bad) - self._left_out - self._unread_pods
        self._unread.update(self._nodes.unread)
        names = tuple(self._unread)[:MAX_UNREAD_NAMES]
        tally = RecordTally(read, len(bad), ignored, self._unread_pods, names, self._nodes.unread.total())
        self._unread.clear()
        self._nodes.unread.clear()
        bad += self._nodes.faults
        self._nodes.faults.clear()
        self._jobs.lost_nodes = self._nodes.list_lost_nodes()
        events = self._jobs.make_due_events(now_ms)
        bad += list_unread_words(events)
        good = Batch(
            events=tuple(_drop_invalid_events(events, bad, now_ms)),
            node_events=tuple(_drop_invalid_events(node_events, bad, now_ms)),
        )
        self._bad += len(bad)
        return Batch(events=good.events, node_events=good.node_events, bad=tuple(bad), tally=tally)

    def _apply_message(self, message: Listing | Changes, bad: list[RecordError], now_ms: int) -> list[NodeEvent]:
        """Apply one message, and return its node events. Objects that a list does not name are dropped.

        Errors of single objects are added to `bad`.
        """
        events: list[NodeEvent] = []
        if isinstance(message, Listing):
            changes: list[tuple[str, Any]] = [("ADDED", row) for row in message.objects]
        else:
            changes = list(message.changes)
        for kind, row in changes:
            try:
                if isinstance(row, UndecodedObject):
                    raise row.error
                events += self._apply_change(message.name, kind, row, now_ms)
            except RecordError as error:
                bad.append(error.with_traceback(None))
        if isinstance(message, Listing):
            there = [row if isinstance(row, UndecodedObject) else row.metadata for row in message.objects]
            events += self._drop_missing_objects(
                message, {row.uid for row in there}, {row.name for row in there}, now_ms
            )
        return events

    def _drop_missing_objects(self, listing: Listing, uids: set[str], names: set[str], now_ms: int) -> list[NodeEvent]:
        """Drop the objects that a list no longer names, and return the events of nodes that are gone."""
        jobs = self._at.jobs
        if listing.name == "pods":
            for uid in jobs.members.keys() - uids:
                self._jobs.drop_member(uid)
            for uid in self._at.places.keys() - uids:
                self._nodes.record_place(uid, None)
        elif listing.name in WORKLOADS:
            kind = WORKLOADS[listing.name]
            for job, row in list(jobs.workloads.items()):
                if row.kind == kind and not row.alone and row.uid not in uids:
                    self._jobs.drop_workload(kind, job, row.uid)
        elif listing.name in CLAIMS:
            table = self._get_claim_table(listing.name)
            there = {
                f"{row.metadata.namespace}/{row.metadata.name}"
                for row in listing.objects
                if not isinstance(row, UndecodedObject)
            }
            for key in table.keys() - there:
                del table[key]
        elif listing.name == "nodes":
            gone = [name for name in list(self._at.nodes) if name not in names]
            return [event for name in gone for event in self._nodes.drop_node(name, listing.version, now_ms)]
        return []

    def _apply_change(self, name: str, kind: str, row: Any, now_ms: int) -> list[NodeEvent]:
        """Apply the current state of one object, or its last state if it was deleted. Returns node events."""
        deleted = kind == "DELETED"
        if name == "nodes":
            if deleted:
                return self._nodes.drop_node(row.metadata.name, row.metadata.resource_version, now_ms)
            return self._nodes.update_node(row, now_ms)
        if name == "priorityclasses":
            self._at.priorities[row.metadata.name] = row.value
        elif name in CLAIMS:
            self._update_claim(name, row, deleted)
        elif name == "pods":
            self._nodes.record_place(row.metadata.uid, None if deleted else row.place)
            if row.place is not None and row.place.is_host:
                self._jobs.drop_member(row.metadata.uid)
            self._unread.update(row.unread)
            self._unread_pods += row.member is None and bool(row.unread)
            self._left_out += row.member is None and not row.unread
            self._update_pod(row.pod, row.member)
            if deleted:
                self._jobs.drop_member(row.metadata.uid)
        else:
            workload = getattr(self._reader, f"make_{WORKLOADS[name].lower()}_workload")(row, now_ms)
            self._left_out += workload is None
            if workload is not None:
                self._jobs.put_workload(workload)
                if deleted:
                    self._jobs.drop_workload(workload.kind, workload.submitted.job, workload.uid)
        return []

    def _get_claim_table(self, name: str) -> dict[str, KnownClaim]:
        return self._at.claims.claims if name == "resourceclaims" else self._at.claims.templates

    def _update_claim(self, name: str, row: Any, deleted: bool) -> None:
        key = f"{row.metadata.namespace}/{row.metadata.name}"
        if deleted:
            self._get_claim_table(name).pop(key, None)
        else:
            self._get_claim_table(name)[key] = CLAIMS[name](row, self.options.gpu_classes)

    def _decode_pod(self, record: bytes) -> "_ObservedPod | UndecodedObject":
        try:
            pod = decode(record, Pod)
            place = find_pod_place(pod, find_owner(pod), self.options.host_labels, self.options.gpu_resources)
            if place is not None and place.is_host:
                return _ObservedPod(pod, None, place)
            unread = (
                () if find_owner(pod).kind in NO_JOBS else list_unread_resources(pod.spec, self.options.gpu_resources)
            )
            return _ObservedPod(pod, self._reader.make_member(pod, self._clock.now_ms()), place, unread)
        except RecordError as error:
            return UndecodedObject(error.with_traceback(None), record)

    def _update_pod(self, pod: Pod, member: Member | None) -> None:
        if member is None:
            return
        if not self._reader.holds_gpus(pod):  # its claims are of other devices
            self._jobs.drop_member(member.uid)
            return
        absent = {name for name, state in self._states.items() if state.startswith("absent")} - self._at.versions.keys()
        followed = {kind for name, kind in WORKLOADS.items() if name in self.options.collections and name not in absent}
        alone: Workload | None = None
        if member.kind not in followed:
            alone = self._reader.make_pod_workload(pod, member)
        self._jobs.put_member(member, alone)


def _list_version_paths(path: str) -> tuple[str, ...]:
    """Return the paths of the other API versions of a collection, for older servers."""
    first, *others = CLAIM_VERSIONS
    return tuple(path.replace(f"/{first}/", f"/{version}/") for version in others) if "resource.k8s.io" in path else ()


def make_decoder(kind: type[msgspec.Struct]) -> Any:
    """Return a function that decodes the objects of a kind.

    For an object that it cannot decode, the function returns the error, with the object's name and uid
    if they are readable.
    """

    def read(record: bytes) -> Any:
        try:
            return decode(record, kind)
        except RecordError as error:
            return UndecodedObject(error.with_traceback(None), record)

    return read


def _drop_invalid_events(events: Sequence[Any], bad: list[RecordError], now_ms: int) -> list[Any]:
    """Return the events that pass the checks of the event API.

    The errors of the others are added to `bad`.
    """
    good: list[JobEvent | NodeEvent] = []
    for event in events:
        try:
            check_event(event, now_ms, NO_FUTURE_LIMIT_MS)
            good.append(event)
        except RecordError as error:
            bad.append(error.with_traceback(None))
    return good
