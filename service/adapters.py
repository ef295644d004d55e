"""The adapters role: feed each new board to other schedulers, by `band_file` or by a class of your own."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np

from service.board.board import Board, BoardReader
from service.config import Config
from service.plugins import load

logger = logging.getLogger(__name__)

BUILT_IN = {"band_file": "schedulers.band_file:BandFile"}
POLL_S = 0.25


class Adapter(Protocol):
    def update(self, nodes: Sequence[str], risk: Sequence[float], now_ms: int) -> int:
        """Push what changed; risk is the highest probability of each node within an hour, NaN unknown."""


def make_adapter(use: str, options: Mapping[str, Any]) -> Adapter:
    """`band_file` or `package.module:Class`, made with its options. Raises ConfigError for any other name."""
    kind = load(f"adapters.adapter.use (built in: {', '.join(sorted(BUILT_IN))})", BUILT_IN.get(use, use))
    return cast(Adapter, kind(options))


def node_risk(board: Board) -> np.ndarray[Any, np.dtype[np.float64]]:
    """(n,) highest probability over kinds at the shortest horizon, NaN where nothing is known."""
    risk = board.array("node.risk")[:, 0, :]
    known = ~np.isnan(risk).all(axis=0)
    worst = np.full(risk.shape[1], np.nan)
    worst[known] = np.nanmax(risk[:, known], axis=0)
    return worst


async def serve(config: Config) -> None:
    """Run all adapters until SIGTERM. One that fails is logged and tried again at the next board."""
    adapters = [(row.use, make_adapter(row.use, row.options)) for row in config.adapters.adapter]
    reader = BoardReader(config.board)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    done = -1
    while not stopped.is_set():
        board = reader.latest()
        if board is not None and board.sequence != done:
            done = board.sequence
            for name, adapter in adapters:
                await _push(name, adapter, board)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), POLL_S)


async def _push(name: str, adapter: Adapter, board: Board) -> None:
    try:
        changed = await asyncio.to_thread(
            adapter.update, board.names("names.node"), node_risk(board).tolist(), board.as_of_ms
        )
    except OSError as error:
        logger.warning("adapter %s failed (%s), trying again at the next board", name, error)
        return
    if changed:
        logger.info("adapter %s wrote %d changes", name, changed)
