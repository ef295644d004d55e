"""One pipeline's evidence as board sections, and the first pipeline's reader of these sections.

Rows are matched by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.features.frame import FeatureFrame
from fleetcast.features.serving import ServedInstance
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.label_jobs import LabelHold
from fleetcast.ingest.shares import Share
from fleetcast.models.node_load import GPU_FEATURES
from fleetcast.models.risk.local import LocalEvidence
from fleetcast.models.risk.rules import ROW, RULES
from fleetcast.models.risk.signals import COLUMNS, Signals
from fleetcast.models.stragglers.gang import GangColumns
from fleetcast.service.answers.fleet import Ingestion
from fleetcast.service.board.board import Board, Section, encode_names
from fleetcast.service.pipeline.documents import HOST, READINGS
from fleetcast.service.pipeline.jobs.interference import FEATURES
from fleetcast.service.pipeline.jobs.isolation import OBSERVED
from fleetcast.service.pipeline.old_names import SECTIONS
from fleetcast.service.pipeline.publish import encode
from fleetcast.service.pipeline.tick import TickInputs

SHOWN: dict[EntityKind, tuple[str, ...]] = {  # features that answers and metrics show
    EntityKind.GPU: tuple(dict.fromkeys(("silent_s", *READINGS, "fb_used_bytes", *FEATURES, *OBSERVED, *GPU_FEATURES))),
    EntityKind.NODE: ("scrape_up", "age_s", *HOST.values()),
}


class PipelineFacts(msgspec.Struct):
    """The board section `doc.local`: facts about the pipeline itself, not about its nodes.

    models: node → GPU model.
    """

    instance: int
    instances: int
    models: dict[str, str] = {}
    ingestion: Ingestion | None = None
    served: list[ServedInstance] = []
    mig: Mapping[str, Mapping[str, float | None]] = {}
    labelled: list[LabelHold] = []


@dataclass(frozen=True, slots=True)
class Report:
    """The report of one other pipeline, read from its board.

    gpu, node: (entity, SHOWN) readings. GPU rows are as in `local.gpu`, and node rows are the pipeline's own.
    """

    about: PipelineFacts
    local: LocalEvidence
    gpu: NDArray[np.float32]
    node: NDArray[np.float32]
    names: dict[str, tuple[str, ...]] = field(repr=False)  # by section: what the next one need not decode again


def select_shown_readings(frame: FeatureFrame) -> NDArray[np.float32]:
    """Return the readings of a frame that a report includes: (entity, SHOWN) float32."""
    columns = [frame.column(name) for name in SHOWN[frame.kind]]
    return np.stack(columns, axis=1) if columns else np.zeros((len(frame.values), 0), np.float32)


def make_report_sections(local: LocalEvidence, inputs: TickInputs, share: Share) -> list[Section]:
    """Return the board sections with everything that the first pipeline needs from this pipeline."""
    own = dict(inputs.gpu_models), inputs.ingestion, list(inputs.served), inputs.mig, list(inputs.labelled)
    about = PipelineFacts(share.instance, share.instances, *own)
    data: dict[str, NDArray[Any] | bytes] = {
        "doc.local": encode(about),
        "names.node": encode_names(local.nodes),
        "local.known": local.known,
        "local.own": local.own,
        "local.newest_sample_ms": local.newest_sample_ms,
        "names.rule": encode_names([rule.name for rule in RULES]),
        "signals.rule": local.signals.rule,
        "signals.entity": encode_names(local.signals.entity),
        "signals.words": encode_names(local.signals.words),
        **{f"signals.{name}": getattr(local.signals, name) for name in COLUMNS},
        **_encode_gang_columns("gpu", local.gpu),
        **_encode_gang_columns("port", local.port),
    }
    for frame in (inputs.frames.gpu, inputs.frames.node):
        data[f"frame.{frame.kind}"] = np.ascontiguousarray(select_shown_readings(frame))
        data[f"frame.{frame.kind}.names"] = encode_names(SHOWN[frame.kind])
    return [
        Section(name, np.ascontiguousarray(part) if isinstance(part, np.ndarray) else part, inputs.now_ms)
        for name, part in data.items()
    ]


def read_pipeline_report(board: Board, before: Report | None = None) -> Report:
    """Read the report of another pipeline from its board.

    before: the previous report. Its names are reused if they are equal. Raises KeyError, ValueError or
    msgspec.MsgspecError for a board of another version.
    """
    names = _NamesReader(board, before.names if before else {})
    rows = _find_rule_rows(names("names.rule"))
    rule = rows[board.array("signals.rule")]
    columns = {name: board.array(f"signals.{name}") for name in COLUMNS}
    words = names("signals.words") if "signals.words" in board else ()
    signals = Signals(rule, entity=names("signals.entity"), words=words, **columns)
    local = LocalEvidence(
        time_ms=board.meta("local.known")["as_of_ms"],
        nodes=names("names.node"),
        known=board.array("local.known"),
        own=board.array("local.own"),
        newest_sample_ms=_read_newest_sample_times(board),
        signals=signals.select_rows(rule >= 0),
        gpu=_read_gang_columns("gpu", board, names),
        port=_read_gang_columns("port", board, names),
    )
    about = msgspec.json.decode(board.raw("doc.local"), type=PipelineFacts)
    gpu, node = (_read_frame(kind, board, names) for kind in (EntityKind.GPU, EntityKind.NODE))
    return Report(about, local, gpu, node, names.read)


def _read_newest_sample_times(board: Board) -> NDArray[np.int64]:
    """Return `local.newest_sample_ms` of a board. A pipeline of the previous version has an old name for it."""
    section = "local.newest_sample_ms"
    return board.array(section if section in board else SECTIONS[section])


class _NamesReader:
    """A reader of the sections of names. For equal bytes, it returns the same tuple as last time."""

    def __init__(self, board: Board, known: Mapping[str, tuple[str, ...]]) -> None:
        self._board = board
        self._known = known
        self.read: dict[str, tuple[str, ...]] = {}

    def __call__(self, section: str) -> tuple[str, ...]:
        known = self._known.get(section, ())
        if not known or encode_names(known) != self._board.raw(section):
            known = self._board.names(section)
        self.read[section] = known
        return known


def _find_rule_rows(names: Sequence[str]) -> NDArray[np.int16]:
    """Return our row of each rule of the other pipeline: (rule,) int16, -1 if we lack the rule."""
    return np.array([ROW.get(name, -1) for name in names], np.int16)


def _encode_gang_columns(kind: str, columns: GangColumns) -> dict[str, NDArray[Any] | bytes]:
    parts: dict[str, NDArray[Any] | bytes] = {
        f"{kind}.names": encode_names(columns.names),
        f"{kind}.node": columns.node,
    }
    for window in ("last", "mean"):
        channels: dict[str, NDArray[np.float64]] = getattr(columns, window)
        parts |= {f"{kind}.{window}.{channel}": values for channel, values in channels.items()}
    return parts


def _read_gang_columns(kind: str, board: Board, names: _NamesReader) -> GangColumns:
    def read_channels(window: str) -> dict[str, NDArray[np.float64]]:
        prefix = f"{kind}.{window}."
        found = [section for section in board.sections() if section.startswith(prefix)]
        return {section.removeprefix(prefix): board.array(section) for section in found}

    return GangColumns(
        names(f"{kind}.names"), board.array(f"{kind}.node"), read_channels("last"), read_channels("mean")
    )


def _read_frame(kind: EntityKind, board: Board, names: _NamesReader) -> NDArray[np.float32]:
    """Return readings: (entity, SHOWN), NaN for a feature that the other pipeline lacks."""
    there = names(f"frame.{kind}.names")
    values = board.array(f"frame.{kind}")
    columns = [
        values[:, there.index(name)] if name in there else np.full(len(values), np.nan, np.float32)
        for name in SHOWN[kind]
    ]
    return np.stack(columns, axis=1)
