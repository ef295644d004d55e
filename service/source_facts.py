"""What some sources tell beside their batches."""

import asyncio
from collections.abc import Callable, Sequence

from service.guarded_source import GuardedSource

CATCH_UP_POLL_S, CATCH_UP_LOOKS = 0.02, 50  # wall


def gpu_models(sources: Sequence[GuardedSource]) -> dict[str, str]:
    """Node → GPU model, of nodes that only telemetry knows."""
    return {node: model for source in sources for node, model in source.models().items()}


async def caught_up(sources: Sequence[GuardedSource], held_up: Callable[[], bool]) -> None:
    """Wait until what is on disk was folded: before the first board, else the GPUs of jobs in there would look free.

    A backlog that shrinks no more is not waited for: it is a torn tail, or grows as fast as it is read. Unless the
    sources are held up, because the archive takes nothing: then nobody has read it yet.
    """
    left, looks = _backlog_bytes(sources), 0  # not seconds: a process that was stopped has read nothing meanwhile
    while left and looks < CATCH_UP_LOOKS:
        await asyncio.sleep(CATCH_UP_POLL_S)
        now = _backlog_bytes(sources)
        looks = 0 if now < left or held_up() else looks + 1
        left = min(left, now)


def _backlog_bytes(sources: Sequence[GuardedSource]) -> int:
    """What the sources that read from disk have not read yet."""
    return sum(source.backlog_bytes() for source in sources)
