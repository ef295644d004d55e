"""Work in threads that always runs to its end."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def run_in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread, and return its result.

    If the caller is cancelled, it first waits until the work has finished. So nothing else uses the data of
    the work meanwhile.
    """
    done = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait({done})
        done.exception()  # nobody else asks for it
        raise
