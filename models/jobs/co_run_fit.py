"""CoRunFit: the past co-runs of a site, stored as a model version (`fleetcast train interference`).

A co-run is one job next to another on shared hardware. The model is a Gaussian process over co-runs
(interference.py), so its fit is the co-runs themselves. A service that has just started uses them in addition
to the co-runs that it observes. So does a service that has dropped its own co-runs.
"""

from pathlib import Path

import msgspec
import numpy as np

from fleetcast.features.co_runs import CoRun, Keys
from fleetcast.features.sharing import Share
from fleetcast.fleet.decode_faults import explain_json_error
from fleetcast.fleet.errors import ModelError

CO_RUN_FILE = "co_runs.json"


class PastCoRun(msgspec.Struct, frozen=True, array_like=True):
    """A past co-run: an attempt that ran next to one partner. speed: relative to running alone, 1 if as fast."""

    share: Share
    keys: Keys
    partner_keys: Keys
    speed: float


class CoRunFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fit of a site: its past co-runs, and the loads of jobs that ran alone.

    rows: the co-runs, oldest first. loads, turns: key of a job or kind -> its loads and its step times when
    it ran alone (features/co_runs.py).
    """

    rows: tuple[PastCoRun, ...]
    loads: dict[int, tuple[float | None, ...]] = {}
    turns: dict[int, tuple[float, ...]] = {}

    @property
    def co_runs(self) -> list[CoRun]:
        """The co-runs in the form that the service uses."""
        return [CoRun(row.share, row.keys, row.partner_keys, row.speed) for row in self.rows]

    def make_load_table(self) -> dict[int, tuple[float, ...]]:
        """Return key of a job or kind -> its loads when it ran alone, NaN if unknown."""
        return {key: tuple(np.nan if value is None else value for value in row) for key, row in self.loads.items()}

    def save(self, folder: Path) -> None:
        """Write the fit into an empty folder, which the registry provides."""
        (folder / CO_RUN_FILE).write_bytes(msgspec.json.encode(self) + b"\n")

    @classmethod
    def load(cls, folder: Path) -> "CoRunFit":
        """Load the fit from a version's folder. Raises ModelError if it is missing or damaged."""
        path = folder / CO_RUN_FILE
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls, strict=False)
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(f"{path} is no fit of co-runs: {explain_json_error(error)}") from None
