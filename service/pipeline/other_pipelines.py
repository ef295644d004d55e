"""The reader of the other pipelines' boards. It joins their evidence to the evidence of the first pipeline.

    pipeline-1/board/board ── at its ticks ──> evidence and readings of its nodes, joined by names into the fleet's
    pipeline-1/board/urgent ── at once ──────> its hard signals, on the fleet's board within a tenth of a second

If a pipeline is down, its last report remains in use and grows older. After `stale_after_s`, its nodes are
stale.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.features.extract import Frames
from fleetcast.features.frame import FeatureFrame
from fleetcast.fleet.clock import Clock
from fleetcast.fleet.file_changes import REPLACED, FileChanges
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.archive.archive import ArchiveHealth
from fleetcast.ingest.label_jobs import LabelHold
from fleetcast.models.risk.local import LocalEvidence
from fleetcast.models.stragglers.gang import GPU_CHANNELS
from fleetcast.service.answers.fleet import Ingestion
from fleetcast.service.answers.risk import HardSignal
from fleetcast.service.board.board import Board, BoardReader
from fleetcast.service.board.urgent import decode_urgent
from fleetcast.service.config import Config
from fleetcast.service.exposition import Page
from fleetcast.service.pipeline.capability import Capability
from fleetcast.service.pipeline.inventory import count_gpus_by_node
from fleetcast.service.pipeline.reports import SHOWN, Report, read_pipeline_report, select_shown_readings
from fleetcast.service.pipeline.state import FleetState
from fleetcast.service.pipeline.tick import Tick, TickInputs

logger = logging.getLogger(__name__)

GPU, NODE = EntityKind.GPU, EntityKind.NODE
AGE = {kind: names.index("age_s") for kind, names in SHOWN.items()}
UP = SHOWN[NODE].index("scrape_up")
POLL_WALL_S = 0.1  # the least time between two boards
ARCHIVE_COUNTS = ("rows", "events", "files", "bytes", "repeats", "too_old", "waiting_bytes")
SUMMED = ("samples_per_s", "events_per_s", "bad_total", "samples_total", "late_total", "events_total")


@dataclass(slots=True)
class OtherPipeline:
    """One other pipeline with its last report.

    urgent: its hard signals that this report does not cover yet.
    """

    instance: int
    reader: BoardReader
    report: Report | None = None
    gpus: dict[str, int] = field(default_factory=dict)  # node -> GPUs that it has seen there
    urgent: list[HardSignal] = field(default_factory=list)
    _board: Board | None = None
    _observed: list[HardSignal] = field(default_factory=list)  # hard signals as of the last poll

    def poll(self) -> list[HardSignal]:
        """Read the board if it was replaced. Returns the hard signals that are new since the last poll."""
        board = self.reader.latest()
        if board is None or board is self._board:
            return []
        first, self._board = self._board is None, board
        try:
            report = read_pipeline_report(board, self.report)
            _check_report(report)
            urgent_rows = _read_hard_signals(board)
        except (LookupError, TypeError, ValueError, msgspec.MsgspecError) as error:
            logger.error("pipeline %d: its board cannot be read (%s), its last word stays", self.instance, error)
            return []
        if self.report is None or report.local.gpu.names is not self.report.local.gpu.names:
            self.gpus = count_gpus_by_node(report.local.gpu.names)
        self.report = report
        fresh = self._record_signals(urgent_rows)
        return self.urgent if first else fresh  # at our start, what its scores know of is old

    def _record_signals(self, rows: list[HardSignal]) -> list[HardSignal]:
        fresh = [row for row in rows if row not in self._observed]
        self._observed = rows
        scored_ms = self.report.local.time_ms if self.report else 0
        self.urgent = [row for row in (*self.urgent, *fresh) if row.taken_ms > scored_ms]
        return fresh


def _read_hard_signals(board: Board) -> list[HardSignal]:
    """Return the hard signals on a board, or [] without their section.

    Raises msgspec's errors if the section cannot be decoded.
    """
    try:
        raw = board.raw("doc.urgent")
    except KeyError:
        return []
    return [row for row in decode_urgent(raw).rows if row.taken_ms]


def _check_report(report: Report) -> None:
    """Check that the columns of a report have matching shapes. Raises ValueError if they do not.

    Without this check, a tick could fail halfway through a report.
    """
    local = report.local
    nodes = len(local.nodes)
    if missing := set(GPU_CHANNELS) - set(local.gpu.last):
        raise ValueError(f"gpu.last lacks {', '.join(sorted(missing))}: it is another version's")
    shapes = {
        "local.known": (local.known, (nodes,)),
        "local.own": (local.own, (nodes,)),
        "local.newest_sample_ms": (local.newest_sample_ms, (2, nodes)),
        "frame.gpu": (report.gpu, (len(local.gpu.names), len(SHOWN[GPU]))),
        "frame.node": (report.node[:nodes], (len(report.node[:nodes]), len(SHOWN[NODE]))),
        "signals.node": (local.signals.node, (len(local.signals.entity),)),
    }
    for kind, columns in (("gpu", local.gpu), ("port", local.port)):
        one = (len(columns.names),)
        shapes |= {f"{kind}.{at}": (part, one) for at, part in (*columns.last.items(), *columns.mean.items())}
        shapes[f"{kind}.node"] = columns.node, one
    for name, (part, shape) in shapes.items():
        if part.shape != shape:
            raise ValueError(f"{name} has shape {part.shape}, not {shape}")
    for name, node in (("signals", local.signals.node), ("gpu", local.gpu.node), ("port", local.port.node)):
        if node.size and not (node.dtype.kind in "iu" and node.min() >= -1 and node.max() < nodes):
            raise ValueError(f"{name}.node names nodes that it does not have")


class OtherPipelines(Capability):
    """All pipelines except the first one. There are none if the service runs only one pipeline."""

    def __init__(
        self, config: Config, clock: Clock, publish: Callable[[Sequence[HardSignal]], None], wake: asyncio.Event
    ) -> None:
        """Prepare to read the boards of the other pipelines.

        publish: publishes hard signals at once. wake: an event that is set when reports cover the published
        signals.
        """
        self._publish, self._wake = publish, wake
        self.stale_after_ms = round(config.compute_stale_after_s(clock) * 1000)
        self.each = [
            OtherPipeline(instance, BoardReader(config.get_pipeline_folder(instance) / "board"))
            for instance in range(1, config.pipeline.instances)
        ]

    def __len__(self) -> int:
        return len(self.each)

    def iterate_reports(self) -> Iterator[Report]:
        return (other.report for other in self.each if other.report is not None)

    async def work(self, state: FleetState) -> None:
        """Poll the other pipelines' boards as soon as they change, so that no hard signal waits for a tick."""
        changes = FileChanges({other.reader.folder: REPLACED for other in self.each}, POLL_WALL_S)
        with contextlib.closing(changes):
            while self.each:
                await changes.wait()
                if self.poll():
                    self._wake.set()

    def poll(self) -> bool:
        """Publish the hard signals that are new since the last poll.

        Returns True if at least one pipeline had urgent signals, and its report now covers all of them.
        """
        waiting = [other for other in self.each if other.urgent]
        if rows := [row for other in self.each for row in other.poll()]:
            self._publish(rows)
        return any(not other.urgent for other in waiting)

    def republish_unscored_signals(self) -> None:
        """Publish again the hard signals that no report covers yet. A new board lacks them."""
        if rows := [row for other in self.each for row in other.urgent]:
            self._publish(rows)

    def list_node_names(self) -> Iterator[str]:
        """Yield the names of the nodes from which the other pipelines have received samples."""
        for report in self.iterate_reports():
            known = report.local.known.tolist()
            yield from (name for name, is_known in zip(report.local.nodes, known, strict=True) if is_known)

    def count_gpus(self) -> dict[str, int]:
        """Return node → the number of its GPUs that the other pipelines have observed."""
        counts: dict[str, int] = {}
        for other in self.each:
            for node, count in other.gpus.items():
                counts[node] = max(counts.get(node, 0), count)
        return counts

    def list_label_holds(self) -> Iterator[LabelHold]:
        """Yield the holders of GPUs that exporters' labels name, as the other pipelines report them."""
        return (hold for report in self.iterate_reports() for hold in report.about.labelled)

    def merge_gpu_models(self) -> dict[str, str]:
        return {node: model for report in self.iterate_reports() for node, model in report.about.models.items()}

    def join_readings(self, inputs: TickInputs, local: LocalEvidence) -> tuple[TickInputs, list[LocalEvidence]]:
        """Join the readings of all pipelines, by the rows of the fleet's topology.

        Returns the joined inputs, and the evidence of each pipeline.
        """
        reports = [self._update_ages(report, inputs.now_ms) for report in self.iterate_reports()]
        if not reports:
            return inputs, [local]
        rows = {name: row for row, name in enumerate(inputs.topology.names)}
        gpu, gpu_rows = _merge_gpu_readings(inputs, reports, rows)
        frames = Frames(gpu, inputs.frames.port, _merge_node_readings(inputs, reports, rows))
        served = [*inputs.served, *(one for report in reports for one in report.about.served)]
        mig = {**inputs.mig, **{gpu: found for report in reports for gpu, found in report.about.mig.items()}}
        return replace(inputs, frames=frames, gpu_rows=gpu_rows, served=served, mig=mig), [
            local,
            *(report.local for report in reports),
        ]

    def _update_ages(self, report: Report, now_ms: int) -> Report:
        """Return a copy of a report in which the readings have their present ages.

        If the report is older than `stale_after_ms`, its nodes count as down.
        """
        for_ms = max(0, now_ms - report.local.time_ms)
        gpu, node = report.gpu.copy(), report.node.copy()
        gpu[:, AGE[GPU]] += for_ms / 1000
        node[:, AGE[NODE]] += for_ms / 1000
        if for_ms > self.stale_after_ms:
            known = report.local.known[: len(node)]
            node[known, UP] = 0.0
        return replace(report, gpu=gpu, node=node)

    def merge_ingestion(self, own: Ingestion) -> Ingestion:
        """Add the counts of the other pipelines to the first pipeline's ingestion document, and return it."""
        for report in self.iterate_reports():
            other = report.about.ingestion
            if other is None:
                continue
            number, as_of_ms = report.about.instance, report.local.time_ms
            own.sources += [{**row, "name": f"{row['name']} ({number})", "as_of_ms": as_of_ms} for row in other.sources]
            for key in SUMMED:
                setattr(own, key, round(getattr(own, key) + getattr(other, key), 2))
            if own.archive and other.archive:
                own.archive = _merge_archive_health(own.archive, other.archive)
            own.bad_records = _sum_counts(own.bad_records, other.bad_records)
            own.targets = _sum_counts(own.targets, other.targets)
            own.labels = _sum_counts(own.labels, other.labels)
            own.noted = _sum_counts(own.noted, other.noted)
            own.bad_examples = {**other.bad_examples, **own.bad_examples}
            newest = (own.newest_sample_ms, other.newest_sample_ms)
            own.newest_sample_ms = max((time_ms for time_ms in newest if time_ms), default=None)
        return own

    def make_page(self, tick: Tick) -> bytes:
        """Return the metrics of the reports' ages, with one series for each other pipeline."""
        if not self.each:
            return b""
        page = Page()
        ages = [({"pipeline": str(row.instance)}, _compute_age_s(row.report, tick.now_ms)) for row in self.each]
        page.add_gauge("pipeline_report_age_seconds", "Fleet time since another pipeline's last report.", ages)
        return page.encode()


def _compute_age_s(report: Report | None, now_ms: int) -> float | None:
    return None if report is None else max(0, now_ms - report.local.time_ms) / 1000


def _merge_archive_health(first: ArchiveHealth, second: ArchiveHealth) -> ArchiveHealth:
    """Merge the archive health of two pipelines. Counts are added, and the worse state wins."""
    summed = {name: getattr(first, name) + getattr(second, name) for name in ARCHIVE_COUNTS}
    return replace(first, **summed, full=first.full or second.full, failing=first.failing or second.failing)


def _sum_counts(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {key: first.get(key, 0) + second.get(key, 0) for key in {**first, **second}}


def _merge_gpu_readings(
    inputs: TickInputs, reports: list[Report], rows: Mapping[str, int]
) -> tuple[FeatureFrame, NDArray[np.int32]]:
    """Return the readings of all pipelines' GPUs, and the row of each node's GPUs in these readings: (n, g).

    If several pipelines report a GPU, the newest reading wins.
    """
    values, nodes = [select_shown_readings(inputs.frames.gpu)], [inputs.frames.gpu.node]
    at, offset = inputs.gpu_rows.copy(), len(inputs.frames.gpu.values)
    at[at >= offset] = -1  # registered since the frame was made
    age_s = _read_ages(values[0], GPU)
    for report in reports:
        node = _find_topology_rows(report, rows)[report.local.gpu.node] if len(report.gpu) else report.local.gpu.node
        index = np.array([_parse_gpu_index(name) for name in report.local.gpu.names], np.int32)
        ages_s = _read_ages(report.gpu, GPU)
        inside = np.flatnonzero((node >= 0) & (index >= 0) & (index < at.shape[1]))
        before = at[node[inside], index[inside]]
        known_s = np.append(age_s, np.inf)[before]  # -1, none yet, is the last
        better = inside[(before < 0) | (ages_s[inside] < known_s)]
        at[node[better], index[better]] = offset + better
        values.append(report.gpu)
        nodes.append(node)
        age_s = np.append(age_s, ages_s)
        offset += len(report.gpu)
    return _make_frame(GPU, np.concatenate(values), np.concatenate(nodes).astype(np.int32), inputs.now_ms), at


def _merge_node_readings(inputs: TickInputs, reports: list[Report], rows: Mapping[str, int]) -> FeatureFrame:
    """Return the readings of all nodes, by rows of the topology. The newest reading of each node wins."""
    values = np.full((len(rows), len(SHOWN[NODE])), np.nan, np.float32)
    own = select_shown_readings(inputs.frames.node)[: len(rows)]
    values[: len(own)] = own
    for report in reports:
        node = _find_topology_rows(report, rows)[: len(report.node)]
        inside = np.flatnonzero(node >= 0)
        better = inside[_read_ages(report.node, NODE)[inside] < _read_ages(values, NODE)[node[inside]]]
        values[node[better]] = report.node[better]
    return _make_frame(NODE, values, np.arange(len(rows), dtype=np.int32), inputs.now_ms)


def _find_topology_rows(report: Report, rows: Mapping[str, int]) -> NDArray[np.int32]:
    """Return the topology row of each reported node: (reported node,) int32, -1 if the topology lacks the node."""
    return np.array([rows.get(name, -1) for name in report.local.nodes], np.int32)


def _read_ages(values: NDArray[np.float32], kind: EntityKind) -> NDArray[np.float32]:
    return np.where(np.isfinite(values[:, AGE[kind]]), values[:, AGE[kind]], np.float32(np.inf))


def _parse_gpu_index(name: str) -> int:
    last = name.rpartition("/")[2]
    return int(last) if last.isdigit() else -1


def _make_frame(kind: EntityKind, values: NDArray[np.float32], node: NDArray[np.int32], now_ms: int) -> FeatureFrame:
    return FeatureFrame(kind, SHOWN[kind], values, node, np.zeros(values.shape, np.int64), now_ms)
