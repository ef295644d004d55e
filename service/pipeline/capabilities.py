"""The list CAPABILITIES: everything that a pipeline adds to its ticks, in order.

Each entry may use the CapabilityInputs and the capabilities before it.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fleetcast.features.co_runs import CoRuns
from fleetcast.features.job_peaks import JobPeaks
from fleetcast.fleet.clock import Clock
from fleetcast.models.demand.forecaster import DemandForecaster
from fleetcast.models.versions.registry import Registry
from fleetcast.service.board.board import Board, Section
from fleetcast.service.config import Config
from fleetcast.service.pipeline.capability import Capability
from fleetcast.service.pipeline.demand.forecasts import DemandForecasts
from fleetcast.service.pipeline.fleet_scores import FleetScores
from fleetcast.service.pipeline.gpu_times import GpuTimes
from fleetcast.service.pipeline.guarded_source import GuardedSource
from fleetcast.service.pipeline.jobs.fingerprints import Fingerprints
from fleetcast.service.pipeline.jobs.interference import InterferenceLearner
from fleetcast.service.pipeline.jobs.verdicts import Verdicts
from fleetcast.service.pipeline.learnt_times import LearntJobTimes
from fleetcast.service.pipeline.metrics import PipelinePage
from fleetcast.service.pipeline.model_monitor import ServingModels
from fleetcast.service.pipeline.node_load import NodeLoads
from fleetcast.service.pipeline.node_past import NodePasts
from fleetcast.service.pipeline.other_pipelines import OtherPipelines
from fleetcast.service.pipeline.risk_calibration import RiskCalibration
from fleetcast.service.pipeline.run_times.forecasts import RunForecasts
from fleetcast.service.pipeline.run_times.model import ServedRunModel
from fleetcast.service.pipeline.run_times.record import RunTimeRecord
from fleetcast.service.pipeline.served_models import ServedInstances
from fleetcast.service.pipeline.snapshot import SavedState
from fleetcast.service.pipeline.tick import Tick

C = TypeVar("C", bound=Capability)


@dataclass(frozen=True, slots=True)
class CapabilityInputs:
    """The objects of a pipeline from which its capabilities are made."""

    config: Config
    clock: Clock
    saved: SavedState
    sources: Sequence[GuardedSource]
    board: Board | None  # the last one of the process before
    others: OtherPipelines | None  # None but in the first pipeline
    memory_free: asyncio.Lock  # hold it to change the memory of the rules
    caught_up: asyncio.Event  # set once the events that were on disk at the start are folded


Make = Callable[[CapabilityInputs, "Capabilities"], Capability | None]

CAPABILITIES: tuple[Make, ...] = (
    lambda at, made: FleetScores(),
    lambda at, made: DemandForecasts(at.saved.parts[DemandForecaster], at.clock, at.board, at.caught_up),
    lambda at, made: RunForecasts(
        at.saved.parts[RunTimeRecord], _make_run_model(at), at.clock, at.saved.parts[JobPeaks]
    ),
    lambda at, made: Fingerprints(at.clock),
    lambda at, made: InterferenceLearner(at.saved.parts[CoRuns], Registry(at.config.models_folder)),
    lambda at, made: ServingModels(
        at.config, made[DemandForecasts], made[RunForecasts], at.saved.state.watch, made[InterferenceLearner]
    ),
    lambda at, made: at.saved.parts[NodePasts],
    lambda at, made: at.saved.parts[Verdicts],
    lambda at, made: at.saved.parts[GpuTimes],
    lambda at, made: at.saved.parts[LearntJobTimes],
    lambda at, made: at.others,
    lambda at, made: PipelinePage(at.config.folder, at.sources),
    lambda at, made: ServedInstances(),
    lambda at, made: NodeLoads(),
    lambda at, made: RiskCalibration(at.saved.state.memory, at.memory_free, at.clock),
)


def _make_run_model(at: CapabilityInputs) -> ServedRunModel:
    return ServedRunModel(Registry(at.config.models_folder, at.clock))


class Capabilities:
    """The capabilities of one pipeline, in order.

    `capabilities[DemandForecasts]` returns the capability of this class.
    """

    def __init__(self, setting: CapabilityInputs, makes: Sequence[Make] = CAPABILITIES) -> None:
        self._made: dict[type[Any], Any] = {}  # by class, in order
        for make in makes:
            if (made := make(setting, self)) is not None:
                self._made[type(made)] = made

    def __getitem__(self, kind: type[C]) -> C:
        found: C = self._made[kind]
        return found

    def __iter__(self) -> Iterator[Capability]:
        return iter(self._made.values())

    def make_sections(self, tick: Tick) -> list[Section]:
        """Return the board sections of all capabilities, and the section with the fleet's metrics."""
        sections = [section for each in self for section in each.make_sections(tick)]
        return [*sections, Section("metrics.fleet", self.make_page(tick), tick.now_ms)]

    def make_page(self, tick: Tick) -> bytes:
        return b"".join([each.make_page(tick) for each in self])

    @contextlib.asynccontextmanager
    async def freeze_state(self) -> AsyncIterator[None]:
        """Keep threads from changing the capabilities' saved state while the context is open."""
        async with contextlib.AsyncExitStack() as stack:
            for each in self:
                await stack.enter_async_context(each.freeze_state())
            yield
