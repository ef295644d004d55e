"""The user's own forecasters, judged offline as rows next to the baselines.

`pipeline.forecasters` names their classes. Each call of a forecaster runs in a thread of its own. So a call that
fails or never ends becomes an error that names the forecaster.
"""

import pkgutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from threading import Thread
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.errors import ConfigError, FleetcastError
from fleetcast.fleet.import_names import suggest_import_path
from fleetcast.models.forecast import QUANTILES, Forecaster, Panel

Array = NDArray[np.float64]
Answer = TypeVar("Answer")

LIMIT_S = 600.0  # of a panel: all series of a target at all origins
TAKEN = frozenset({"ours", "persistence", "seasonal_naive", "theta", "rolling_median", "ets", "mstl", "autoreg"})


@dataclass(slots=True)
class OwnForecaster:
    """A forecaster of the user, given by its import path and created once in each process.

    The object can be sent to workers, which import the class again.
    """

    path: str
    name: str
    limit_s: float = LIMIT_S

    @classmethod
    def from_path(cls, path: str, limit_s: float = LIMIT_S) -> "OwnForecaster":
        """Load the forecaster at an import path.

        Raises ConfigError if there is no forecaster, or if its name is in use.
        """
        name = getattr(call_with_limit(lambda: _make_forecaster(path), path, limit_s), "name", None)
        if not isinstance(name, str) or not name or name in TAKEN:
            raise ConfigError(f"--forecaster {path}: its name is {name!r}; give it one that no other method has")
        return cls(path, name, limit_s)

    def forecast(self, panel: Panel, origins: NDArray[np.intp], steps: Sequence[int]) -> Array:
        """Return (quantile, step, origin, series) the forecasts of the user's forecaster.

        Raises FleetcastError if the call fails or takes too long, or if the result has a wrong shape.
        """
        what = f"{len(origins):,} origins of {len(panel.names)} series of {panel.target}"
        found = call_with_limit(
            lambda: _make_forecaster(self.path).forecast(panel, origins, steps), self.path, self.limit_s, what
        )
        wanted = (len(QUANTILES), len(steps), len(origins), len(panel.names))
        if np.shape(found) != wanted:
            raise FleetcastError(f"--forecaster {self.path}: answers {np.shape(found)} where {wanted} is asked for")
        return np.asarray(found, np.float64)


@cache
def _make_forecaster(path: str) -> Forecaster:
    made: Forecaster = _import_class(path)()
    return made


def _import_class(path: str) -> Callable[[], Forecaster]:
    if advice := suggest_import_path(path):
        raise ConfigError(f"--forecaster: {path!r}: {advice}")
    try:
        found: Callable[[], Forecaster] = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--forecaster {path}: {error}; give package.module:Class, which Python finds (PYTHONPATH)"
        ) from None
    return found


def load_factory(path: str) -> Callable[[], Forecaster]:
    """Return a function that creates the forecaster at an import path, for `fleetcast.checks.check_forecaster`."""
    return _import_class(path)


def call_with_limit(answer: Callable[[], Answer], path: str, limit_s: float, what: str = "making it") -> Answer:
    """Call a function in a thread, and return its result if it comes within `limit_s` seconds.

    Raises FleetcastError that names the path if the call fails or takes longer. Errors of Fleetcast and
    failed assertions are raised unchanged.
    """
    future: Future[Answer] = Future()
    Thread(target=_set_answer, args=(future, answer), daemon=True).start()
    try:
        return future.result(limit_s)
    except (FleetcastError, AssertionError):
        raise
    except TimeoutError:
        raise FleetcastError(
            f"--forecaster {path}: {what} took longer than {limit_s:g} s; "
            "forecast all origins and series at once, or judge a shorter test folder"
        ) from None
    except Exception as error:  # whatever a plugin raises
        raise FleetcastError(f"--forecaster {path}: {what}: {type(error).__name__}: {error}") from error


def _set_answer(future: "Future[Answer]", answer: Callable[[], Answer]) -> None:
    try:
        future.set_result(answer())
    except Exception as error:  # whatever a plugin raises goes to who waits
        future.set_exception(error)
