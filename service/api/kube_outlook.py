"""ExtenderCache: the answers for kube-scheduler from the newest fresh board, prepared once a board."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.clock import Clock
from fleet.nodes import NodeState
from models.risk.scores import RISK_KINDS
from schedulers.kube_extender import KubeExtender
from schedulers.ratings import Outlook
from service.board.age import why_stale
from service.board.board import Board
from service.board.cache import BoardCache
from service.board.free import unheld
from service.board.urgent import forbids, struck
from service.config import Config, PlacerConfig

BLIND = KubeExtender()  # has seen nothing, and so changes nothing


class ExtenderCache:
    """Holds the extender that answers, and updates it once a board."""

    def __init__(self) -> None:
        self._extender = KubeExtender()
        self._board: Board | None = None
        self._names = b""
        self._rows: dict[str, int] = {}

    def newest(self, cache: BoardCache, config: Config, clock: Clock) -> tuple[KubeExtender, Board | None]:
        """Who answers now, and from which board: from none where none is whole, or younger than `api.stale_after_s`."""
        board = cache.latest()
        if board is None or why_stale((clock.now_ms() - board.as_of_ms) / 1000, config.stale_after_s(clock)):
            return BLIND, None
        if board is not self._board:
            try:
                self._extender.update(self._outlook(board, config.placer))
            except KeyError:  # the very first board may lack a section
                return BLIND, None
            self._board = board
        return self._extender, board

    def _outlook(self, board: Board, placer: PlacerConfig) -> Outlook:
        """Raises KeyError when a section is not there. A section may be one topology generation behind the names."""
        names = bytes(board.raw("names.node"))
        if names != self._names:
            self._names, self._rows = names, {name: row for row, name in enumerate(board.names("names.node"))}
        n = len(self._rows)
        risk = board.array("node.risk")
        usable = board.array("gpu.usable")
        return Outlook(
            rows=self._rows,
            risk=_fitted(np.fmax(risk[RISK_KINDS.index("fail")], risk[RISK_KINDS.index("slow")]).T, n, np.nan).T,
            state=_fitted(board.array("node.state"), n, NodeState.IN_SERVICE),
            gpus=_fitted(np.count_nonzero(usable, axis=1), n, 0),
            free=_fitted(np.count_nonzero(usable & unheld(board, placer), axis=1), n, 0),
            reasons=board.json("risk.reason"),
            urgent=_forbidden(board),
            max_risk=placer.max_risk,
        )


def _fitted(array: NDArray[Any], n: int, fill: Any) -> NDArray[Any]:
    """`array` with exactly n rows."""
    missing = np.full((max(0, n - len(array)), *array.shape[1:]), fill, array.dtype)
    return np.concatenate([array[:n], missing])


def _forbidden(board: Board) -> dict[str, str]:
    """Why not, of nodes struck by a hard signal that the scores do not know of yet."""
    return {node: row.sentence for node, rows in struck(board).items() for row in rows if forbids(row)}
