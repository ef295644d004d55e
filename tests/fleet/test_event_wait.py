"""A wait for an event ends by a cancellation, even one that arrives as the event is set."""

import asyncio

import pytest

from fleetcast.fleet.event_wait import wait_for_event


@pytest.mark.parametrize("turns", range(6))
def test_a_cancellation_that_arrives_with_the_event_is_not_lost(turns: int) -> None:
    async def race() -> bool:
        event = asyncio.Event()

        async def forever() -> None:
            while True:
                await wait_for_event(event, 60)

        task = asyncio.create_task(forever())
        for _ in range(3):
            await asyncio.sleep(0)
        event.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        event.clear()
        done, _ = await asyncio.wait({task}, timeout=5)
        if not done:
            task.cancel()
        return bool(done)

    assert asyncio.run(race())


def test_it_says_whether_the_event_came() -> None:
    async def both() -> tuple[bool, bool]:
        event = asyncio.Event()
        late = await wait_for_event(event, 0.01)
        event.set()
        return late, await wait_for_event(event, 60)

    assert asyncio.run(both()) == (False, True)
