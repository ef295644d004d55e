"""Answers to outside schedulers, made from the newest board.

Each kind of question is a verb. Without a fresh board, each verb has its own neutral answer.
"""

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.errors import StaleError
from fleetcast.schedulers.adapter import NotKnown
from fleetcast.schedulers.bands import Bands
from fleetcast.service.board.board import Board
from fleetcast.service.board.cache import BoardCache
from fleetcast.service.config import Config
from fleetcast.service.doors import make_answerers
from fleetcast.service.weather import WeatherStation, make_band_rule


class Answerers:
    """The adapters of one api process that answer outside schedulers."""

    def __init__(self, config: Config, clock: Clock, cache: BoardCache) -> None:
        self._cache = cache
        self._station = WeatherStation(config, clock, Bands(make_band_rule(config.adapters, shared=False)))
        self._adapters = make_answerers()

    def answer_verb(self, adapter: str, verb: str, body: bytes) -> tuple[bytes, Board | None]:
        """Answer one verb of an adapter. Returns the answer, and the board that it was made from.

        Without a fresh board, returns the verb's neutral answer and None. Raises StaleError if the verb has no
        neutral answer, and any error of the verb for a bad body.
        """
        asked = self._adapters[adapter].verbs[verb]
        board = self._cache.latest()
        weather = self._station.make_weather(board)
        why = "there is no fresh board to answer from"
        try:
            if weather is not None:
                return asked.answer(weather, body), board
        except NotKnown as error:
            why = str(error)
        neutral = asked.stale(body)
        if neutral is None:
            raise StaleError(f"{adapter}/{verb}: {why}")
        return neutral, None
