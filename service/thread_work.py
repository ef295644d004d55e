"""Work in a thread that is never left half done."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(work: Callable[[], T]) -> T:
    """In a thread, to its end: who is cancelled meanwhile waits, so that what it works on is nobody's twice."""
    done = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait({done})
        done.exception()  # nobody else asks for it
        raise
