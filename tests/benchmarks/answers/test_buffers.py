import numpy as np

from fleetcast.benchmarks.answers.buffers import (
    BIN_H,
    DAY,
    BufferResult,
    ForecastBuffer,
    make_static_buffer,
    make_synthetic_demand,
    simulate_buffer,
)


def test_a_node_is_cold_when_it_is_wanted_before_it_is_there_and_idle_when_nobody_wants_it() -> None:
    wanted = np.zeros(2 * DAY)  # nodes:  0 … 0 | 2 2 1 0 …
    wanted[DAY : DAY + 3] = 16, 9, 8
    assert simulate_buffer(wanted, 1, make_static_buffer(0)) == BufferResult(cold=2, idle_h=2 * BIN_H)
    assert simulate_buffer(wanted, 1, make_static_buffer(1)) == BufferResult(
        cold=1, idle_h=(1 + 2 + 2 + (DAY - 4)) * BIN_H
    )


def test_the_forecast_buffer_has_room_for_what_varies_and_none_for_what_stands_still() -> None:
    level = np.full(15 * DAY, 80.0)
    assert ForecastBuffer(level)(len(level) - 1) == 0
    assert ForecastBuffer(make_synthetic_demand(15, seed=1))(15 * DAY - 1) > 0
