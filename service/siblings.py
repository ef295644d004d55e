"""The other pipelines, as the first one sees them: their boards are read, their words joined to its own.

    pipeline-1/board/board ── at its ticks ──> evidence and readings of its nodes, joined by names into the fleet's
    pipeline-1/board/urgent ── at once ──────> its hard signals, on the fleet's board within a tenth of a second

One that is away keeps its last word, which ages: after `stale_after_s` its nodes are said to be stale.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from features.extract import Frames
from features.frame import FeatureFrame
from fleet.samples import EntityKind
from models.score import Local
from service.board import Board, BoardReader
from service.config import Config
from service.exposition import Page
from service.locals import SHOWN, Report, read_local, shown
from service.publish import Given

logger = logging.getLogger(__name__)

GPU, NODE = EntityKind.GPU, EntityKind.NODE
AGE = {kind: names.index("age_s") for kind, names in SHOWN.items()}
UP = SHOWN[NODE].index("scrape_up")
SUMMED = ("samples_per_s", "events_per_s", "bad_total", "samples_total", "late_total", "events_total")


@dataclass(slots=True)
class Sibling:
    """One other pipeline. urgent: its hard signals that its report does not know of yet."""

    instance: int
    reader: BoardReader
    report: Report | None = None
    gpus: dict[str, int] = field(default_factory=dict)  # node -> GPUs that it has seen there
    urgent: list[dict[str, Any]] = field(default_factory=list)
    _board: Board | None = None
    _told: list[dict[str, Any]] = field(default_factory=list)  # hard signals as of the last look

    def look(self) -> list[dict[str, Any]]:
        """Read the board anew if it was replaced; the hard signals that came since the last look."""
        board = self.reader.latest()
        if board is None or board is self._board:
            return []
        first, self._board = self._board is None, board
        try:
            report = read_local(board, self.report)
            _check(report)
            told = _urgent_rows(board)
        except (LookupError, TypeError, ValueError, msgspec.MsgspecError) as error:
            logger.error("pipeline %d: its board cannot be read (%s), its last word stays", self.instance, error)
            return []
        if self.report is None or report.local.gpu.names is not self.report.local.gpu.names:
            self.gpus = _gpu_counts(report.local.gpu.names)
        self.report = report
        fresh = self._fresh(told)
        return self.urgent if first else fresh  # at our start, what its scores know of is old

    def _fresh(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        fresh = [row for row in rows if row not in self._told]
        self._told = rows
        scored_ms = self.report.local.time_ms if self.report else 0
        self.urgent = [row for row in (*self.urgent, *fresh) if row["taken_ms"] > scored_ms]
        return fresh


class _Urgent(msgspec.Struct):
    """`doc.urgent`, as far as it is looked at here."""

    rows: list[dict[str, Any]]


def _urgent_rows(board: Board) -> list[dict[str, Any]]:
    """Raises what decoding does."""
    try:
        raw = board.raw("doc.urgent")
    except KeyError:
        return []
    return [row for row in msgspec.json.decode(raw, type=_Urgent).rows if isinstance(row.get("taken_ms"), int)]


def _check(report: Report) -> None:
    """Raises ValueError where columns do not fit each other: what is read later would fail in the middle of a tick."""
    local = report.local
    nodes = len(local.nodes)
    shapes = {
        "local.known": (local.known, (nodes,)),
        "local.own": (local.own, (nodes,)),
        "local.heard_ms": (local.heard_ms, (2, nodes)),
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


class Siblings:
    """All other pipelines; none where there is one."""

    def __init__(self, config: Config, stale_after_s: float) -> None:
        self.stale_after_ms = round(stale_after_s * 1000)
        self.each = [
            Sibling(instance, BoardReader(config.home(instance) / "board"))
            for instance in range(1, config.pipeline.instances)
        ]

    def __len__(self) -> int:
        return len(self.each)

    def reports(self) -> Iterator[Report]:
        return (sibling.report for sibling in self.each if sibling.report is not None)

    def look(self) -> tuple[list[dict[str, Any]], bool]:
        """Hard signals since the last look; and whether scores came that know of hard signals from before it."""
        waiting = [sibling for sibling in self.each if sibling.urgent]
        rows = [row for sibling in self.each for row in sibling.look()]
        return rows, any(not sibling.urgent for sibling in waiting)

    def unscored(self) -> list[dict[str, Any]]:
        """Hard signals that no report knows of yet."""
        return [row for sibling in self.each for row in sibling.urgent]

    def nodes(self) -> Iterator[str]:
        """Names of the nodes that the others have heard of."""
        for report in self.reports():
            known = report.local.known.tolist()
            yield from (name for name, heard in zip(report.local.nodes, known, strict=True) if heard)

    def gpus(self) -> dict[str, int]:
        """Node -> GPUs that the others have seen there."""
        counts: dict[str, int] = {}
        for sibling in self.each:
            for node, count in sibling.gpus.items():
                counts[node] = max(counts.get(node, 0), count)
        return counts

    def models(self) -> dict[str, str]:
        return {node: model for report in self.reports() for node, model in report.about.models.items()}

    def join(self, given: Given, local: Local) -> tuple[Given, list[Local]]:
        """The readings of all pipelines by rows of the fleet's topology, and the evidence of each."""
        reports = [self._aged(report, given.now_ms) for report in self.reports()]
        if not reports:
            return given, [local]
        rows = {name: row for row, name in enumerate(given.topology.names)}
        gpu, gpu_rows = _joined_gpus(given, reports, rows)
        frames = Frames(gpu, given.frames.port, _joined_nodes(given, reports, rows))
        served = [*given.served, *(one for report in reports for one in report.about.served)]
        mig = {**given.mig, **{gpu: found for report in reports for gpu, found in report.about.mig.items()}}
        return replace(given, frames=frames, gpu_rows=gpu_rows, served=served, mig=mig), [
            local,
            *(report.local for report in reports),
        ]

    def _aged(self, report: Report, now_ms: int) -> Report:
        """Its readings as old as they are now; nodes of a pipeline that is away answer nobody."""
        for_ms = max(0, now_ms - report.local.time_ms)
        gpu, node = report.gpu.copy(), report.node.copy()
        gpu[:, AGE[GPU]] += for_ms / 1000
        node[:, AGE[NODE]] += for_ms / 1000
        if for_ms > self.stale_after_ms:
            heard = report.local.known[: len(node)]
            node[heard, UP] = 0.0
        return replace(report, gpu=gpu, node=node)

    def ingestion(self, own: dict[str, Any]) -> dict[str, Any]:
        """The document of the first pipeline with what the others take in."""
        document = {**own, "sources": list(own["sources"])}
        for report in self.reports():
            told = report.about.ingestion
            number, as_of_ms = report.about.instance, report.local.time_ms
            for row in told.get("sources", ()):
                document["sources"].append({**row, "name": f"{row['name']} ({number})", "as_of_ms": as_of_ms})
            for key in SUMMED:
                document[key] = round(document[key] + told.get(key, 0), 2)
            if document.get("archive") and told.get("archive"):
                document["archive"] = _archives(document["archive"], told["archive"])
            for key in ("bad_records", "targets"):
                document[key] = _sum(document[key], told.get(key, {}))
            document["bad_examples"] = {**told.get("bad_examples", {}), **document["bad_examples"]}
            newest = (document["newest_sample_ms"], told.get("newest_sample_ms"))
            document["newest_sample_ms"] = max((time_ms for time_ms in newest if time_ms), default=None)
        return document

    def page(self, now_ms: int) -> bytes:
        """Metrics: how old the word of each is."""
        page = Page()
        if self.each:
            ages = [({"pipeline": str(row.instance)}, _age_s(row.report, now_ms)) for row in self.each]
            page.gauge("pipeline_report_age_seconds", "Fleet time since another pipeline's last report.", ages)
        return page.encode()


def _age_s(report: Report | None, now_ms: int) -> float | None:
    return None if report is None else max(0, now_ms - report.local.time_ms) / 1000


def _archives(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """What two pipelines tell of their shares of the archive, as of one."""
    worst = {"full": first["full"] or second["full"], "failing": first["failing"] or second["failing"]}
    return {key: worst[key] if key in worst else value + second.get(key, 0) for key, value in first.items()}


def _sum(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {
        key: first.get(key, 0) + second.get(key, 0) for key in (*first, *(key for key in second if key not in first))
    }


def _gpu_counts(names: tuple[str, ...]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        node, _, index = name.rpartition("/")
        if index.isdigit():
            counts[node] = max(counts.get(node, 0), int(index) + 1)
    return counts


def _joined_gpus(
    given: Given, reports: list[Report], rows: Mapping[str, int]
) -> tuple[FeatureFrame, NDArray[np.int32]]:
    """The readings of all GPUs, one pipeline's after the other's, and where (n, g) each node's are."""
    values, nodes = [shown(given.frames.gpu)], [given.frames.gpu.node]
    at, offset = given.gpu_rows.copy(), len(given.frames.gpu.values)
    at[at >= offset] = -1  # registered since the frame was made
    age_s = _ages(values[0], GPU)
    for report in reports:
        node = _places(report, rows)[report.local.gpu.node] if len(report.gpu) else report.local.gpu.node
        index = np.array([_index(name) for name in report.local.gpu.names], np.int32)
        told_s = _ages(report.gpu, GPU)
        inside = np.flatnonzero((node >= 0) & (index >= 0) & (index < at.shape[1]))
        before = at[node[inside], index[inside]]
        known_s = np.append(age_s, np.inf)[before]  # -1, none yet, is the last
        better = inside[(before < 0) | (told_s[inside] < known_s)]
        at[node[better], index[better]] = offset + better
        values.append(report.gpu)
        nodes.append(node)
        age_s = np.append(age_s, told_s)
        offset += len(report.gpu)
    return _frame(GPU, np.concatenate(values), np.concatenate(nodes).astype(np.int32), given.now_ms), at


def _joined_nodes(given: Given, reports: list[Report], rows: Mapping[str, int]) -> FeatureFrame:
    """The readings of all nodes by rows of the topology: of each, what the pipeline says that heard of it last."""
    values = np.full((len(rows), len(SHOWN[NODE])), np.nan, np.float32)
    own = shown(given.frames.node)[: len(rows)]
    values[: len(own)] = own
    for report in reports:
        node = _places(report, rows)[: len(report.node)]
        inside = np.flatnonzero(node >= 0)
        better = inside[_ages(report.node, NODE)[inside] < _ages(values, NODE)[node[inside]]]
        values[node[better]] = report.node[better]
    return _frame(NODE, values, np.arange(len(rows), dtype=np.int32), given.now_ms)


def _places(report: Report, rows: Mapping[str, int]) -> NDArray[np.int32]:
    """(node there,) row of the topology, -1 where it has none of that name."""
    return np.array([rows.get(name, -1) for name in report.local.nodes], np.int32)


def _ages(values: NDArray[np.float32], kind: EntityKind) -> NDArray[np.float32]:
    return np.where(np.isfinite(values[:, AGE[kind]]), values[:, AGE[kind]], np.float32(np.inf))


def _index(name: str) -> int:
    last = name.rpartition("/")[2]
    return int(last) if last.isdigit() else -1


def _frame(kind: EntityKind, values: NDArray[np.float32], node: NDArray[np.int32], now_ms: int) -> FeatureFrame:
    return FeatureFrame(kind, SHOWN[kind], values, node, np.zeros(values.shape, np.int64), now_ms)
