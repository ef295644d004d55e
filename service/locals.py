"""What one of several pipelines tells the first one of its share, as sections of a board of its own; and back.

    local_sections      Local, the readings that answers show, GPU models and what ingestion says
    read_local          the same from a Board

Rows are told by name: node rows, rules and features may be numbered otherwise there. Arrays come back bit for bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from features.frame import FeatureFrame
from features.serving import ServedInstance
from fleet.samples import EntityKind
from models.gang import GangColumns
from models.memory import RiskMemory
from models.rules import ROW, RULES
from models.score import Local
from models.signals import Signals
from service.board import Board, Section
from service.documents import READINGS
from service.host_answers import HOST
from service.interference import FEATURES
from service.isolation import OBSERVED
from service.publish import Given, encode

SHOWN: dict[EntityKind, tuple[str, ...]] = {  # features that answers and metrics show
    EntityKind.GPU: tuple(dict.fromkeys(("silent_s", *READINGS, "fb_used_bytes", *FEATURES, *OBSERVED))),
    EntityKind.NODE: ("scrape_up", "age_s", *HOST.values()),
}
SIGNAL_COLUMNS = ("node", "value", "usual", "strength", "since_ms", "firm")


class About(msgspec.Struct):
    """`doc.local`: what is said of the pipeline rather than of its nodes. models: node -> GPU model."""

    instance: int
    instances: int
    models: dict[str, str] = {}
    ingestion: dict[str, Any] = {}
    served: list[ServedInstance] = []
    mig: Mapping[str, Mapping[str, float | None]] = {}


@dataclass(frozen=True, slots=True)
class Report:
    """One other pipeline's word. gpu, node: (entity, SHOWN) readings, GPU rows as in `local.gpu`, node rows its own."""

    about: About
    local: Local
    gpu: NDArray[np.float32]
    node: NDArray[np.float32]
    names: dict[str, tuple[str, ...]] = field(repr=False)  # by section: what the next one need not decode again


def shown(frame: FeatureFrame) -> NDArray[np.float32]:
    """(entity, SHOWN) of a frame."""
    columns = [frame.column(name) for name in SHOWN[frame.kind]]
    return np.stack(columns, axis=1) if columns else np.zeros((len(frame.values), 0), np.float32)


def local_sections(local: Local, given: Given, about: About) -> list[Section]:
    """Everything that the first pipeline needs of this one."""
    data: dict[str, NDArray[Any] | bytes] = {
        "doc.local": encode(about),
        "names.node": _joined(local.nodes),
        "local.known": local.known,
        "local.own": local.own,
        "local.heard_ms": local.heard_ms,
        "names.rule": _joined([rule.name for rule in RULES]),
        "signals.rule": local.signals.rule,
        "signals.entity": _joined(local.signals.entity),
        "signals.words": _joined([text.replace("\n", " ") for text in local.signals.words]),
        **{f"signals.{name}": getattr(local.signals, name) for name in SIGNAL_COLUMNS},
        **_gang_parts("gpu", local.gpu),
        **_gang_parts("port", local.port),
    }
    for frame in (given.frames.gpu, given.frames.node):
        data[f"frame.{frame.kind}"] = np.ascontiguousarray(shown(frame))
        data[f"frame.{frame.kind}.names"] = _joined(SHOWN[frame.kind])
    return [
        Section(name, np.ascontiguousarray(part) if isinstance(part, np.ndarray) else part, given.now_ms)
        for name, part in data.items()
    ]


def read_local(board: Board, before: Report | None = None) -> Report:
    """Raises KeyError, ValueError or msgspec.MsgspecError on a board that another version wrote.

    before: what the pipeline told last; names that are the same now are taken from there.
    """
    names = _Names(board, before.names if before else {})
    rows = _rule_rows(names("names.rule"))
    rule = rows[board.array("signals.rule")]
    column = {name: board.array(f"signals.{name}") for name in SIGNAL_COLUMNS}
    signals = Signals(
        rule=rule,
        node=column["node"],
        entity=names("signals.entity"),
        value=column["value"],
        usual=column["usual"],
        strength=column["strength"],
        since_ms=column["since_ms"],
        firm=column["firm"],
        words=names("signals.words") if "signals.words" in board else (),
    )
    local = Local(
        time_ms=board.meta("local.known")["as_of_ms"],
        nodes=names("names.node"),
        known=board.array("local.known"),
        own=board.array("local.own"),
        heard_ms=board.array("local.heard_ms"),
        signals=signals.where(rule >= 0),
        gpu=_gang_columns("gpu", board, names),
        port=_gang_columns("port", board, names),
        memory=RiskMemory(),
    )
    about = msgspec.json.decode(board.raw("doc.local"), type=About)
    gpu, node = (_frame(kind, board, names) for kind in (EntityKind.GPU, EntityKind.NODE))
    return Report(about, local, gpu, node, names.read)


class _Names:
    """Sections of names; one with the same bytes as last time is the same tuple again."""

    def __init__(self, board: Board, known: Mapping[str, tuple[str, ...]]) -> None:
        self._board = board
        self._known = known
        self.read: dict[str, tuple[str, ...]] = {}

    def __call__(self, section: str) -> tuple[str, ...]:
        known = self._known.get(section, ())
        if not known or _joined(known) != self._board.raw(section):
            known = self._board.names(section)
        self.read[section] = known
        return known


def _joined(names: Sequence[str]) -> bytes:
    return "\n".join(names).encode()


def _rule_rows(names: Sequence[str]) -> NDArray[np.int16]:
    """(rule there,) the rule here, -1 where there is none of that name."""
    return np.array([ROW.get(name, -1) for name in names], np.int16)


def _gang_parts(kind: str, columns: GangColumns) -> dict[str, NDArray[Any] | bytes]:
    parts: dict[str, NDArray[Any] | bytes] = {f"{kind}.names": _joined(columns.names), f"{kind}.node": columns.node}
    for window in ("last", "mean"):
        channels: dict[str, NDArray[np.float64]] = getattr(columns, window)
        parts |= {f"{kind}.{window}.{channel}": values for channel, values in channels.items()}
    return parts


def _gang_columns(kind: str, board: Board, names: _Names) -> GangColumns:
    def channels(window: str) -> dict[str, NDArray[np.float64]]:
        prefix = f"{kind}.{window}."
        found = [section for section in board.sections() if section.startswith(prefix)]
        return {section.removeprefix(prefix): board.array(section) for section in found}

    return GangColumns(names(f"{kind}.names"), board.array(f"{kind}.node"), channels("last"), channels("mean"))


def _frame(kind: EntityKind, board: Board, names: _Names) -> NDArray[np.float32]:
    """(entity, SHOWN), NaN for a feature that the other does not tell."""
    there = names(f"frame.{kind}.names")
    values = board.array(f"frame.{kind}")
    columns = [
        values[:, there.index(name)] if name in there else np.full(len(values), np.nan, np.float32)
        for name in SHOWN[kind]
    ]
    return np.stack(columns, axis=1)
