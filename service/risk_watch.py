"""What node risk learns while it serves: how true it was, and the site's own history of faults.

GET /v1/risk/nodes and metrics    the calibration record (models/risk_record.py)
refit_forever                     the history hazard anew, in a thread, once it is due (models/fault_log.py)
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from fleet.clock import Clock
from models.hazard import fit_history
from models.memory import RiskMemory
from models.risk_record import Calibration
from service.exposition import Page, span
from service.state import FleetState
from service.thread_work import in_thread

logger = logging.getLogger(__name__)

LOOK_S = 3600.0  # of fleet time


def calibration_document(memory: RiskMemory) -> dict[str, Any]:
    """`doc.risk_calibration`: a row a horizon, and what the history hazard was fitted on."""
    faults = memory.faults
    return {"rows": memory.record.summary(), "history": (faults.fit or faults.prior).notes}


def calibration_page(rows: Sequence[Calibration]) -> bytes:
    """The record as metrics; horizons of which nothing has matured have none but the count."""
    page = Page()

    def gauge(name: str, text: str, value: Callable[[Calibration], float | None]) -> None:
        page.gauge(name, text, [({"horizon": span(row.horizon_s)}, value(row)) for row in rows])

    gauge("node_risk_matured_forecasts", "Probabilities of failing whose time is over.", lambda row: row.matured)
    gauge("node_risk_mean_forecast_ratio", "Mean of these probabilities.", lambda row: row.mean_p)
    gauge("node_risk_observed_ratio", "Share of them to which a fault came.", lambda row: row.observed)
    gauge("node_risk_brier_skill_ratio", "Brier skill against the observed share.", lambda row: row.brier_skill)
    return page.encode()


async def refit_forever(memory: RiskMemory, free: asyncio.Lock, state: FleetState, clock: Clock) -> None:
    """Looks now and then whether the site's own history is due. free: held while the memory is read or written."""
    while True:
        await clock.sleep(LOOK_S)
        await refit(memory, free, state.topology.names, clock.now_ms())


async def refit(memory: RiskMemory, free: asyncio.Lock, names: Sequence[str], now_ms: int) -> bool:
    """Whether the hazard is fitted anew."""
    async with free:
        if not memory.faults.fit_due(now_ms):
            return False
        given = memory.faults.given(names, now_ms)
    try:
        fit = await in_thread(lambda: fit_history(*given))
    except ValueError as error:
        logger.warning("the hazard of faults stays as it is: %s", error)
        return False
    async with free:
        memory.faults.take(fit, now_ms)
    logger.info("the hazard of faults is fitted on %s", fit.notes)
    return True
