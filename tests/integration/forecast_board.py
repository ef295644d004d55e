"""A board with one forecast of demand that a test sets, published again and again as a pipeline does."""

import threading
from pathlib import Path

from fleetcast.fleet.clock import Clock
from fleetcast.schedulers.weather import DemandKey
from fleetcast.service.board.board import BoardWriter
from fleetcast.service.pipeline.demand.sections import make_demand_sections
from tests.schedulers.small_demand import row

PERIOD_S = 0.5  # wall


class ForecastBoard(threading.Thread):
    """Starts on construction. `value`: of the series `key`, at every quantile and horizon."""

    def __init__(self, folder: Path, key: DemandKey, clock: Clock) -> None:
        super().__init__(daemon=True)
        self.value, self.is_published = 0.0, True
        self._key, self._clock = key, clock
        self._board = BoardWriter(folder)
        self._over = threading.Event()
        self.publish()
        self.start()

    def publish(self) -> None:
        now_ms = self._clock.now_ms()
        made = row(self._key, self.value, [[self.value] * 3 for _ in range(3)], issued_ms=now_ms)
        self._board.publish(make_demand_sections([made], {}, [], now_ms), now_ms)

    def run(self) -> None:
        while not self._over.wait(PERIOD_S):
            if self.is_published:
                self.publish()

    def end(self) -> None:
        self._over.set()
        self.join()
