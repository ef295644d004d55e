"""The calibration record of node risk (fleetcast.models.risk.record).

Each tick publishes it. When due, the hazard of nodes with past faults is fitted again.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from fleetcast.fleet.clock import Clock
from fleetcast.models.risk.hazard import fit_history
from fleetcast.models.risk.record import Calibration
from fleetcast.models.risk.state import RiskState
from fleetcast.service.answers.risk import CalibrationRecord
from fleetcast.service.board.board import Section
from fleetcast.service.exposition import Page, format_horizon
from fleetcast.service.pipeline.capability import Capability
from fleetcast.service.pipeline.publish import encode
from fleetcast.service.pipeline.state import FleetState
from fleetcast.service.pipeline.tick import Tick
from fleetcast.service.thread_work import run_in_thread

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 3600.0  # of fleet time


class RiskCalibration(Capability):
    """The capability that publishes the calibration record. When due, it fits the hazard of past faults again."""

    def __init__(self, memory: RiskState, free: asyncio.Lock, clock: Clock) -> None:
        """Start without a record. free: the lock to hold while the state of the risk rules is used."""
        self._memory, self._free, self._clock = memory, free, clock
        self._rows: Sequence[Calibration] = ()

    def make_sections(self, tick: Tick) -> list[Section]:
        document = make_calibration_document(self._memory)
        self._rows = document.rows
        return [Section("doc.risk_calibration", encode(document), tick.now_ms)]

    def make_page(self, tick: Tick) -> bytes:
        return make_calibration_page(self._rows, get_fault_rate_multiple(self._memory))

    async def work(self, state: FleetState) -> None:
        while True:
            await self._clock.sleep(CHECK_INTERVAL_S)
            await refit_if_due(self._memory, self._free, state.topology.names, self._clock.now_ms())


def make_calibration_document(memory: RiskState) -> CalibrationRecord:
    """Make the section `doc.risk_calibration`: a row for each horizon, and facts about the hazard's fit."""
    faults = memory.faults
    times = get_fault_rate_multiple(memory)
    notes = (faults.fit or faults.prior).notes
    return CalibrationRecord(
        memory.record.list_calibrations(), notes if times is None else {**notes, "times": round(times, 2)}
    )


def get_fault_rate_multiple(memory: RiskState) -> float | None:
    """Return the site's fault rate as a multiple of the published rate.

    Returns None if the site's own fit replaces the published rate.
    """
    return memory.rate.times if memory.faults.fit is None else None


def make_calibration_page(rows: Sequence[Calibration], times: float | None = None) -> bytes:
    """Make the metrics page of the record. A horizon without a matured forecast has only a count.

    times: the site's fault rate as a multiple of the published rate.
    """
    page = Page()

    def add_gauge(name: str, text: str, value: Callable[[Calibration], float | None]) -> None:
        page.add_gauge(name, text, [({"horizon": format_horizon(row.horizon_s)}, value(row)) for row in rows])

    add_gauge("node_risk_matured_forecasts", "Probabilities of failing whose time is over.", lambda row: row.matured)
    add_gauge("node_risk_mean_forecast_ratio", "Mean of these probabilities.", lambda row: row.mean_p)
    add_gauge("node_risk_observed_ratio", "Share of them to which a fault came.", lambda row: row.observed)
    add_gauge("node_risk_brier_skill_ratio", "Brier skill against the observed share.", lambda row: row.brier_skill)
    text = "Multiple of the published fault rate that this fleet's own faults explain."
    page.add_gauge("fault_rate_ratio", text, [({}, times)])
    return page.encode()


async def refit_if_due(memory: RiskState, free: asyncio.Lock, names: Sequence[str], now_ms: int) -> bool:
    """Fit the hazard of past faults again if that is due. Returns whether it was fitted."""
    async with free:
        if not memory.faults.is_fit_due(now_ms):
            return False
        given = memory.faults.make_fit_inputs(names, now_ms)
    try:
        fit = await run_in_thread(lambda: fit_history(*given))
    except ValueError as error:
        logger.warning("the hazard of faults stays as it is: %s", error)
        return False
    async with free:
        memory.faults.set_fit(fit, now_ms)
    logger.info("the hazard of faults is fitted on %s", fit.notes)
    return True
