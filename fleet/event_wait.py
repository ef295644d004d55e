"""A function that waits for an event for a limited time without losing a cancellation."""

import asyncio


async def wait_for_event(event: asyncio.Event, most_s: float | None) -> bool:
    """Wait until an event is set, for at most `most_s` seconds. Return whether it is set.

    None as `most_s` means no limit. `asyncio.wait_for` of Python 3.11 may lose a cancellation that arrives
    when the event is set. The task would then run on, while its canceller waits for its end.
    """
    try:
        await asyncio.wait_for(event.wait(), most_s)
    except TimeoutError:
        return False
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
    return True
