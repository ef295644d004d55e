"""What some sources tell beside their batches."""

import asyncio
import time
from collections.abc import Sequence

from service.guarded_source import GuardedSource

CATCH_UP_POLL_S, CATCH_UP_PATIENCE_S = 0.02, 1.0  # wall


def gpu_models(sources: Sequence[GuardedSource]) -> dict[str, str]:
    """Node → GPU model, of nodes that only telemetry knows."""
    return {node: model for source in sources for node, model in source.models().items()}


async def caught_up(sources: Sequence[GuardedSource]) -> None:
    """Wait until what is on disk was folded: before the first board, else the GPUs of jobs in there would look free.

    A backlog that shrinks no more is not waited for: it is a torn tail, or grows as fast as it is read.
    """
    left, shrank = _backlog_bytes(sources), time.monotonic()
    while left and time.monotonic() - shrank < CATCH_UP_PATIENCE_S:
        await asyncio.sleep(CATCH_UP_POLL_S)
        now = _backlog_bytes(sources)
        if now < left:
            left, shrank = now, time.monotonic()


def _backlog_bytes(sources: Sequence[GuardedSource]) -> int:
    """What the sources that read from disk have not read yet."""
    return sum(source.backlog_bytes() for source in sources)
