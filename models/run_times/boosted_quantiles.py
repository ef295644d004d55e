"""BoostedQuantiles: one LightGBM model for each quantile level, stored as text files without pickle.

Predicted levels may cross, so the caller sorts them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.errors import ModelError

Array = NDArray[np.float64]
Features = NDArray[np.float32]

TREES = 120
LEAF_ROWS = 100
PARAMETERS: dict[str, Any] = {
    "objective": "quantile",
    "learning_rate": 0.05,
    "num_leaves": 15,
    "feature_fraction": 0.5,
    "max_bin": 63,
    "bagging_fraction": 0.6,
    "bagging_freq": 1,
    "verbose": -1,
    "deterministic": True,
    "force_row_wise": True,
}


class BoostedQuantiles:
    """A model that predicts quantiles of one number.

    With few rows, the trees get small leaves. So even a tiny data set can be fitted.
    """

    def __init__(self, levels: Sequence[float], *, seed: int = 0, threads: int = 1) -> None:
        self.levels = tuple(levels)
        self._seed, self._threads = seed, threads
        self._boosters: list[Any] = []

    def fit(self, features: Features, target: Array, weight: Array) -> "BoostedQuantiles":
        """Fit the model. features: (row, feature). target: (row,) or (row, level). weight: (row,)."""
        import lightgbm

        columns = target if target.ndim == 2 else np.repeat(target[:, None], len(self.levels), axis=1)
        least = int(min(LEAF_ROWS, max(2, len(features) // 50)))
        shared = {**PARAMETERS, "min_data_in_leaf": least, "seed": self._seed, "num_threads": self._threads}
        data = lightgbm.Dataset(features, columns[:, 0], weight=weight, params=shared, free_raw_data=False)
        self._boosters = []
        for level, column in zip(self.levels, columns.T, strict=True):
            data.set_label(np.ascontiguousarray(column))
            self._boosters.append(lightgbm.train({**shared, "alpha": level}, data, TREES))
        return self

    def predict(self, features: Features) -> Array:
        """Return (level, row) the predicted quantiles. Levels may cross."""
        rows = [booster.predict(features, num_threads=self._threads) for booster in self._boosters]
        return np.asarray(rows, np.float64).reshape(len(self.levels), len(features))

    def save(self, folder: Path, name: str) -> dict[str, Any]:
        """Write NAME_0.txt and so on, one file for each level, and return the facts that `load` needs.

        The caller writes the returned value into a JSON file in the same folder.
        """
        sums = []
        for row, booster in enumerate(self._boosters):
            text = booster.model_to_string().encode()
            (folder / f"{name}_{row}.txt").write_bytes(text)
            sums.append(crc32(text))
        return {"levels": self.levels, "crc32": sums}

    @classmethod
    def load(cls, folder: Path, name: str, about: dict[str, Any], threads: int = 1) -> "BoostedQuantiles":
        """Load a model that `save` wrote. Raises ModelError if a file is missing or damaged."""
        import lightgbm

        made = cls(about["levels"], threads=threads)
        for row, known in enumerate(about["crc32"]):
            path = folder / f"{name}_{row}.txt"
            try:
                text = path.read_bytes()
            except OSError as error:
                raise ModelError(f"cannot read {path}: {error.strerror}") from None
            if crc32(text) != known:
                raise ModelError(f"{path} is damaged: its checksum is {crc32(text)}, expected {known}")
            made._boosters.append(lightgbm.Booster(model_str=text.decode()))
        return made
