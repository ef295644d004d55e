"""The base class of capabilities: a pipeline's tasks besides applying batches and scoring nodes.

`fleetcast.service.pipeline.capabilities` lists them.
"""

import contextlib
from collections.abc import AsyncIterator, Sequence

from fleetcast.service.board.board import Section
from fleetcast.service.pipeline.state import FleetState
from fleetcast.service.pipeline.tick import Tick


class Capability:
    """A part of a pipeline that adds sections and metrics to each tick, and works between ticks.

    A subclass overrides the methods that it needs.
    """

    def make_sections(self, tick: Tick) -> Sequence[Section]:
        """Return board sections. The pipeline calls this once a tick, in the thread that scores."""
        return ()

    def make_page(self, tick: Tick) -> bytes:
        """Return metrics in Prometheus' text format.

        The pipeline calls this after `make_sections` of all capabilities, in the same thread.
        """
        return b""

    async def work(self, state: FleetState) -> None:
        """Run in the event loop, concurrently with the ticks, until cancelled.

        A capability without such work returns at once.
        """

    @contextlib.asynccontextmanager
    async def freeze_state(self) -> AsyncIterator[None]:
        """Keep threads from changing this capability's saved state while the context is open."""
        yield
