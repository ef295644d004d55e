"""FeatureFrame: the models' input, with one row for each entity."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.samples import EntityKind


@dataclass(frozen=True, slots=True)
class FeatureFrame:
    """Features of all entities of one kind at one time. NaN means unknown, never zero."""

    kind: EntityKind
    names: tuple[str, ...]
    values: NDArray[np.float32]  # (entity, feature), rows as in `Entities[kind]`
    node: NDArray[np.int32]  # (entity,) owning node row
    since_ms: NDArray[np.int64]  # (entity, feature) when the signal behind it last changed, 0 where untracked
    time_ms: int
    topology_generation: int = 0

    def column(self, name: str) -> NDArray[np.float32]:
        """Return (entity,) one feature. Raises KeyError with the name if the frame does not have it."""
        try:
            return self.values[:, self.names.index(name)]
        except ValueError:
            raise KeyError(f"frame of {self.kind} has no feature {name!r}; it has {list(self.names)}") from None

    def changed_ms(self, name: str) -> NDArray[np.int64]:
        """Return (entity,) when the signal behind a feature last changed, in Unix ms."""
        return self.since_ms[:, self.names.index(name)]
