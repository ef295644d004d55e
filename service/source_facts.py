"""What some sources tell beside their batches."""

import asyncio
import time
from collections.abc import Sequence

from ingest.source import Source

CATCH_UP_POLL_S, CATCH_UP_PATIENCE_S = 0.02, 1.0  # wall


def gpu_models(sources: Sequence[Source]) -> dict[str, str]:
    """Node → GPU model, of nodes that only telemetry knows."""
    told: list[dict[str, str]] = [getattr(source, "models", dict)() for source in sources]
    return {node: model for models in told for node, model in models.items()}


def backlog_bytes(source: Source) -> int:
    """What a source that reads from disk has not read yet; 0 for others."""
    backlog = getattr(source, "backlog_bytes", None)
    return int(backlog()) if backlog is not None else 0


async def caught_up(sources: Sequence[Source]) -> None:
    """Wait until what is on disk was folded: before the first board, else the GPUs of jobs in there would look free.

    A backlog that shrinks no more is not waited for: it is a torn tail, or grows as fast as it is read.
    """
    left, shrank = sum(map(backlog_bytes, sources)), time.monotonic()
    while left and time.monotonic() - shrank < CATCH_UP_PATIENCE_S:
        await asyncio.sleep(CATCH_UP_POLL_S)
        now = sum(map(backlog_bytes, sources))
        if now < left:
            left, shrank = now, time.monotonic()
