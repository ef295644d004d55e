"""Capability: what a pipeline does beside taking in batches and scoring nodes (service.pipeline.capabilities)."""

import contextlib
from collections.abc import AsyncIterator, Sequence

from service.board.board import Section
from service.pipeline.state import FleetState
from service.pipeline.tick import Tick


class Capability:
    """Adds sections and metrics to every tick, and works beside the ticks. A subclass overrides what it has."""

    def sections(self, tick: Tick) -> Sequence[Section]:
        """Sections for the board. Called once a tick, in the thread that scores."""
        return ()

    def page(self, tick: Tick) -> bytes:
        """Metrics in Prometheus' text format. Called after the `sections` of all capabilities, in the same thread."""
        return b""

    async def work(self, state: FleetState) -> None:
        """Run in the event loop beside the ticks until cancelled. A capability without such work returns."""

    @contextlib.asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """While this is entered, no thread changes what a snapshot saves of this capability."""
        yield
