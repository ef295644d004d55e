"""Node samples that a scrape adds to the samples of its page.

    scrape_up, scrape_duration_s (wall seconds)    of every scrape
    gpus_reported, ports_reported                  of a page, if its exporter ever reported GPUs or ports of the node

If a node has several exporters, the first two samples come from the one that reports GPUs.
"""

from collections import Counter
from dataclasses import dataclass, field

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.ingest.pages.serving import NOWHERE
from fleetcast.ingest.pages.text import PageDecoder
from fleetcast.ingest.source import Batch

UNNAMED_ROUNDS = 3  # a target that never named its node is named after its host from this round on

_UP = find_metric_row(EntityKind.NODE, "scrape_up")
_DURATION = find_metric_row(EntityKind.NODE, "scrape_duration_s")
_GPUS = find_metric_row(EntityKind.NODE, "gpus_reported")
_PORTS = find_metric_row(EntityKind.NODE, "ports_reported")


@dataclass(slots=True, eq=False, kw_only=True)
class PageTarget:
    """One exporter. nodes: node row → whether the exporter ever reported that node's (GPUs, ports)."""

    decoder: PageDecoder
    rounds: int = 0
    nodes: dict[int, tuple[bool, bool]] = field(default_factory=dict)


class ScrapeSamples:
    """A builder of the node samples for all scrapes of a process.

    `failures`: the number of scrapes whose node cannot be named, by reason.
    """

    def __init__(self, entities: Entities, failures: Counter[str] | None = None) -> None:
        self._entities = entities
        self._failures: Counter[str] = Counter() if failures is None else failures
        self._gpu_targets: dict[int, set[PageTarget]] = {}  # node row -> those that report its GPUs

    def decode(self, target: PageTarget, page: bytes | None, duration_s: float, now_ms: int) -> tuple[SampleBatch, ...]:
        """Return all samples of one scrape: those of its page and its node samples.

        `page`: None if the exporter did not answer.
        """
        batch = Batch() if page is None else target.decoder.decode(page, now_ms)
        up = page is not None and find_page_fault(batch, target.decoder) is None
        return (*batch.samples, *self.make_samples(target, up, duration_s, now_ms))

    def make_samples(self, target: PageTarget, up: bool, duration_s: float, now_ms: int) -> tuple[SampleBatch, ...]:
        """Return a batch of samples for the target's nodes, or no batch.

        `up`: whether the decoder has just read a page. A page without a known metric says nothing about its node.
        """
        if target.decoder.why_unread and not target.nodes:
            return ()
        target.rounds += 1
        rows: list[tuple[int, int, int, float]] = []
        for node in self._find_nodes(target, up):
            if target in self._gpu_targets.get(node, (target,)):
                rows += [(_UP, node, now_ms, float(up)), (_DURATION, node, now_ms, duration_s)]
            reports_gpus, reports_ports = target.nodes[node]
            seen = target.decoder.reported.get(node)
            if up and reports_gpus:
                rows.append((_GPUS, node, now_ms, float(seen.gpus if seen else 0)))
            if up and reports_ports:
                rows.append((_PORTS, node, now_ms, float(seen.ports if seen else 0)))
        return (SampleBatch.from_rows(EntityKind.NODE, rows),) if rows else ()

    def forget_target(self, target: PageTarget) -> None:
        """Forget a target that is no longer scraped, so that other targets report for its nodes."""
        for node, targets in list(self._gpu_targets.items()):
            targets.discard(target)
            if not targets:
                del self._gpu_targets[node]

    def _find_nodes(self, target: PageTarget, up: bool) -> list[int]:
        """Return the rows of the nodes that the target's pages name.

        If its pages have named no node for UNNAMED_ROUNDS scrapes, return the row of its host.
        """
        reported = {node: seen for node, seen in target.decoder.reported.items() if up and node != NOWHERE}
        if reported.keys() - target.nodes.keys():  # a new name: those that are gone were its old ones
            target.nodes = {node: devices for node, devices in target.nodes.items() if node in reported}
        for node, seen in reported.items():
            gpus, ports = target.nodes.get(node, (False, False))
            target.nodes[node] = (gpus or seen.gpus > 0, ports or seen.ports > 0)
            if seen.gpus:
                self._gpu_targets.setdefault(node, set()).add(target)
        serves = NOWHERE in target.decoder.reported  # a model, which may be anywhere
        if not target.nodes and not serves and target.rounds >= UNNAMED_ROUNDS:
            try:
                own = target.decoder.target
                name = next(reversed(own.named), own.node)  # boards are named where all samples are refused, too
                node = self._entities.find_or_add_node(own.register_node_name(name, self._entities))
                target.nodes[node] = (False, False)
            except RecordError as error:
                self._failures[error.reason] += 1
        return list(target.nodes)


def find_page_fault(batch: Batch, decoder: PageDecoder) -> tuple[str, str] | None:
    """Return (reason, sentence) if all lines of a page are bad or no line is read, otherwise None."""
    if batch.bad and not batch.samples:
        return "no_samples", f"the page holds bad lines only: {batch.bad[0]}"
    return ("nothing_read", decoder.why_unread) if decoder.why_unread else None
