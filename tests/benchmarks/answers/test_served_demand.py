"""The load on served demand checks the bodies that it receives."""

from pathlib import Path

import pytest

from fleetcast.benchmarks.answers.served_demand import NOW_MS, _make_answer_check, make_histories
from fleetcast.models.demand.forecaster import DemandForecaster
from fleetcast.models.demand.sparse import SparseForecaster
from fleetcast.service.api.routes.demand import encode_demand
from fleetcast.service.board.board import BoardWriter
from fleetcast.service.board.cache import BoardCache
from fleetcast.service.pipeline.demand.sections import make_demand_sections


def test_a_body_is_checked_for_its_pool(tmp_path: Path) -> None:
    forecaster = DemandForecaster([SparseForecaster()], [SparseForecaster()])
    rows = forecaster.forecast_all(make_histories(1), NOW_MS)
    BoardWriter(tmp_path).publish(make_demand_sections(rows, forecaster.make_chart_record(), [], NOW_MS), NOW_MS)
    cache = BoardCache(tmp_path, hold_s=0.0)
    query = {"queue": "pool0", "class": "all", "group": "all", "target": "running", "horizon_s": None}
    body = encode_demand(cache, cache.get_board(), query, NOW_MS)
    _make_answer_check("pool0")(b"", body)
    with pytest.raises(AssertionError, match="pool0 was served for pool1"):
        _make_answer_check("pool1")(b"", body)
