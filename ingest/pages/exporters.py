"""A resolver of the lines of all supported exporters. Each exporter is a row of RESOLVERS.

Names of metrics and labels that differ from known ones only in case are read as well, because relabelling
and agents change the case.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.gpu_labels import JobLabel, find_host_pod, parse_job_label
from fleetcast.ingest.gpus import GpuInventory
from fleetcast.ingest.pages.amd import AmdResolver
from fleetcast.ingest.pages.dcgm import DcgmResolver
from fleetcast.ingest.pages.gpu_page import GpuField, PlacedGpu
from fleetcast.ingest.pages.host import HostResolver
from fleetcast.ingest.pages.infiniband import InfinibandResolver
from fleetcast.ingest.pages.resolver import Resolver
from fleetcast.ingest.pages.serving import ServingResolver
from fleetcast.ingest.pages.text import Found, Target
from fleetcast.ingest.series import Series
from fleetcast.ingest.tally import SkipRule

GPUS = (EntityKind.GPU, EntityKind.GPU_INSTANCE)
RESOLVERS: tuple[type[Resolver], ...] = (DcgmResolver, HostResolver, ServingResolver, InfinibandResolver, AmdResolver)


@dataclass(frozen=True, slots=True)
class LabelFacts:
    """The facts that follow from a line's labels alone.

    labels: in the spelling that resolvers expect. holder: the job that holds the GPU, or None. host: the pod and
    namespace of another scheduler's node, or None. divided: whether the line describes a MIG instance. stated:
    the labels as they are on the line.
    """

    labels: Mapping[str, str]
    holder: JobLabel | None
    host: tuple[str, str] | None
    divided: bool
    stated: Mapping[str, str]

    @classmethod
    def from_labels(cls, stated: Mapping[str, str]) -> "LabelFacts":
        labels = _normalise_label_names(stated)
        return cls(labels, parse_job_label(labels), find_host_pod(labels), bool(labels.get("GPU_I_ID")), stated)


class ExporterResolver:
    """A resolver of exporter lines to series, shared by all targets of a process.

    The first entry of RESOLVERS that claims a metric's name resolves its lines.
    """

    def __init__(self, entities: Entities) -> None:
        self._entities, self._nodes = entities, entities[EntityKind.NODE]
        self.inventory = GpuInventory(entities)
        self._resolvers = [make(entities, self.inventory) for make in RESOLVERS]
        self._dcgm = DcgmResolver(entities, self.inventory)
        self._page: tuple[Target, int] | None = None  # the target and number of the page that is read
        self._facts: dict[int, LabelFacts] = {}  # by id of the labels, which the lines of a page share

    def __call__(self, name: str, labels: Mapping[str, str], target: Target) -> Found:
        number, known = _find_resolver(name)
        if number is None or isinstance(number, SkipRule):
            return number
        facts = self._derive_label_facts(labels, target)
        found = self._resolvers[number](known, facts.labels, target)
        return self._add_job_label(found, facts) if isinstance(found, Series) and found.kind in GPUS else found

    def find_gpu_field(self, name: bytes) -> GpuField | SkipRule | None:
        """Return the field of a DCGM name (`fleetcast.ingest.pages.gpu_page`)."""
        return _find_gpu_field(name)

    def find_gpu_skip_rule(self, labels: Mapping[str, str]) -> SkipRule | None:
        """Return the rule that skips all DCGM lines with these labels, or None."""
        return self._dcgm.find_label_skip_rule(_normalise_label_names(labels))

    def place_new_gpu(self, labels: Mapping[str, str], target: Target) -> PlacedGpu:
        """Return the rows of a GPU that no earlier page contradicts (`fleetcast.ingest.pages.gpu_page`).

        Raises RecordError if the GPU is refused, and LookupError if its lines must be resolved one by one.
        """
        facts = LabelFacts.from_labels(labels)
        if facts.host is not None:
            raise LookupError(facts.host)
        return PlacedGpu(*self._dcgm.place_new_gpu(facts.labels, target), facts.holder)

    def _derive_label_facts(self, labels: Mapping[str, str], target: Target) -> LabelFacts:
        """Return the facts that follow from these labels. They are derived once for each page."""
        page = self._page
        if page is None or page[0] is not target or page[1] != target.pages:
            self._page, self._facts = (target, target.pages), {}
        facts = self._facts.get(id(labels))
        if facts is None:
            facts = LabelFacts.from_labels(labels)
            if target.pages:
                self._facts[id(labels)] = facts  # holds the labels, so that no others get their id
        return facts

    def get_refusal_version(self) -> tuple[int, ...]:
        """Return numbers that change whenever a refused line may have become acceptable.

        They count the changes of limits, node names and known boards.
        """
        nodes = self._nodes
        return self._entities.bounds_set, len(nodes), nodes.alias_changes, self.inventory.changes

    def _add_job_label(self, series: Series, facts: LabelFacts) -> Series:
        """Return the series with the job that its labels name, or unchanged if they name no job.

        If the labels name a pod in which another scheduler's node runs, the pod's name is recorded for the node.
        """
        if facts.host is not None:
            self._nodes.record_pod_alias(*facts.host, self._nodes.names[series.node])
        if facts.holder is None:
            return series
        return msgspec.structs.replace(series, label=facts.holder, divided=facts.divided)


@lru_cache(4096)
def _find_resolver(name: str) -> tuple[int | SkipRule | None, str]:
    """Return (row of RESOLVERS, metric name in its usual spelling) for a metric name.

    If no resolver claims the name, the first part is the rule that skips it, or None.
    """
    known = normalise_metric_name(name)
    for number, resolver in enumerate(RESOLVERS):
        if resolver.claims(known):
            return number, known
    return next((rule for pattern, rule in _RULES if pattern.match(known)), None), known


@lru_cache(1024)
def _find_gpu_field(name: bytes) -> GpuField | SkipRule | None:
    """Return the field of a DCGM name, the rule that skips the name, or None if the catalogue lacks it.

    Raises LookupError if the name is not DCGM's.
    """
    if not _PLAIN_NAME.fullmatch(name):
        raise LookupError(name)
    number, known = _find_resolver(name.decode())
    if number != RESOLVERS.index(DcgmResolver):
        raise LookupError(name)
    return DcgmResolver.find_field(known)


def normalise_metric_name(name: str) -> str:
    """Return a metric's name in the spelling of its exporter, or unchanged if it is unknown.

    >>> normalise_metric_name("dcgm_fi_dev_gpu_temp"), normalise_metric_name("up")
    ('DCGM_FI_DEV_GPU_TEMP', 'up')
    """
    return _NAMES.get(name.lower(), name)


def _normalise_label_names(labels: Mapping[str, str]) -> Mapping[str, str]:
    """Return the labels in the spelling that resolvers expect."""
    odd = _find_odd_spellings(tuple(labels))
    if not odd:
        return labels
    return {**{_LABELS[label.lower()]: labels[label] for label in odd}, **labels}


@lru_cache(4096)
def _find_odd_spellings(labels: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(label for label in labels if label not in _SPELLINGS and label.lower() in _LABELS)


_PLAIN_NAME = re.compile(rb"[a-zA-Z_:][a-zA-Z0-9_:]{,199}")
_NAMES = {name.lower(): name for resolver in RESOLVERS for name in resolver.names}
_SPELLINGS = frozenset(
    {
        *("Hostname", "hostname", "UUID", "modelName", "model_name", "GPU_I_ID", "gpu", "gpu_uuid", "gpu_id"),
        *("pci_bus_id", "serial_number", "card_model", "card_series", "clock_type", "device", "hca", "port", "mode"),
        *("chip", "nvlink", "nvswitch", "cpu", "cpucore", "pod", "namespace", "container", "hpc_job", "nodename"),
    }
)
_LABELS = {label.lower(): label for label in sorted(_SPELLINGS, reverse=True)}
_PROCESS = r"(?:go|process|promhttp|python|scrape|exporter|otel|jvm|nodejs|http_sd|prometheus_sd)_"
_RULES = (
    (
        re.compile(rf"{_PROCESS}|up$|target_info$|ALERTS|\w+_exporter_\w+|\w+_scrape_collector_|\w+_created$"),
        SkipRule.EXPORTER,
    ),
    (
        re.compile(  # other collectors of node_exporter
            r"node_(?:arp|bonding|boot_time|btrfs|context_switches|cooling|cpu|cpufreq|disk|dmi|edac|entropy|ethtool|filefd"
            r"|fibrechannel|filesystem|forks|hwmon|infiniband|intr|ipvs|kernel|load\d|lnstat|mdstat|md|memory|mountstats|netstat"
            r"|network|nf_conntrack|nfs|nfsd|nvme|os|perf|power_supply|pressure|procs|processes|rapl|schedstat|selinux|sockstat"
            r"|softnet|softirqs|swap|systemd|tape|textfile|thermal|thermal_zone|time|timex|udp|uname|vmstat|watchdog|xfrm|xfs"
            r"|zfs|zoneinfo)(?:_|\d*$)"
        ),
        SkipRule.NOT_USED,
    ),
)


def list_readable_names(names: Iterable[str]) -> list[str]:
    """Return the metric names that may belong to a series of the catalogue.

    Names that together make one sample are joined by `|`.
    """
    samples: dict[str, list[str]] = {}
    for name in names:
        known = normalise_metric_name(name)
        for resolver in RESOLVERS:
            if resolver.reads(known):
                samples.setdefault(min(resolver.together) if known in resolver.together else name, []).append(name)
    return ["|".join(parts) for parts in samples.values()]
