"""The searches that sampled futures repeat most, as array programs or as compiled loops with equal answers."""

import importlib.util
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from fleetcast.placement.ahead.calendars import Array, Calendar, record_gang_hold
from fleetcast.placement.ahead.slot_times import Ints, Place, SlotTimes
from fleetcast.placement.machines.gang_room import Fleet

logger = logging.getLogger(__name__)


class Searches(NamedTuple):
    """The classes and the function with which the queue is played along sampled futures."""

    fleet: type[Fleet]
    slot_times: type[SlotTimes]
    record_gang_hold: Callable[[Calendar, Place, Array, int], Ints]


ARRAY_PROGRAMS = Searches(Fleet, SlotTimes, record_gang_hold)
COMPILED_FROM = 16  # waiting requests


def choose_searches(waiting: int) -> Searches:
    """Return the searches for a queue with this number of waiting requests.

    numba needs 30 MiB, so a process loads the compiled searches at its first long queue. Later it uses them
    for every queue.
    """
    is_loaded = load_searches.cache_info().currsize > 0
    return load_searches() if is_loaded or waiting >= COMPILED_FROM else ARRAY_PROGRAMS


@lru_cache(1)
def load_searches() -> Searches:
    """Return the compiled searches if numba is installed and works, otherwise the array programs."""
    if importlib.util.find_spec("numba") is None:
        return ARRAY_PROGRAMS
    try:
        from fleetcast.placement.ahead import compiled
    except (ImportError, RuntimeError) as error:  # a numpy that numba does not know, no folder for machine code
        logger.warning("numba cannot be used (%s): start times are computed without it", error)
        return ARRAY_PROGRAMS
    return Searches(compiled.CompiledFleet, compiled.CompiledSlotTimes, compiled.record_gang_hold)
