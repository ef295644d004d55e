"""The forecast of job arrivals, read from a board for the sampling of start times."""

import msgspec
import numpy as np

from fleetcast.models.demand.rows import DemandRow
from fleetcast.placement.ahead.futures import ArrivalForecast
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from fleetcast.service.board.board import Board
from fleetcast.service.pipeline.demand.sections import read_demand_keys, read_demand_rows

EVERYBODY = {"pool": "all", "class": "all", "group": "all", "target": "arriving"}


def forecast_arrivals(board: Board, run_times: RunTimeQuantiles) -> ArrivalForecast | None:
    """Read the forecast of arriving GPUs from a board, and convert it into arrivals of jobs.

    The jobs get the sizes of finished jobs. Returns None without a forecast, or if no job has finished.
    """
    sizes = {gpus: count for gpus, count in run_times.seen.items() if gpus > 0 and count > 0}
    try:
        at = read_demand_keys(board).find_matching_rows(EVERYBODY)
    except KeyError:
        return None
    if not at or not sizes:
        return None
    row = msgspec.json.decode(read_demand_rows(board, at[:1])[0], type=DemandRow)
    gpus = np.array([[np.nan if value is None else value for value in path] for path in row.values], np.float64)
    known = np.isfinite(gpus).all(axis=0) if gpus.size else np.zeros(0, bool)
    if not known.any():
        return None
    return ArrivalForecast(
        horizon_s=np.array(row.horizons_s, np.float64)[known],
        quantiles=np.array(row.quantiles, np.float64),
        gpus=np.maximum(gpus[:, known], 0.0),
        sizes=np.array(list(sizes), np.int64),
        weights=np.array(list(sizes.values()), np.float64),
    )
