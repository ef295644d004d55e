"""The challenger: a version of the demand trees that does not serve, the newest or a chosen one, runs beside it.

The gate scores it like the others and never serves it, so that `fleetcast models promote demand VERSION` is decided by
what it would have said here. What it learnt from, and what it cannot forecast, counts as if it had said what
persistence says.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from fleet.errors import ModelError
from service.served_trees import KIND, ServedTrees


class Shadow(msgspec.Struct, frozen=True):
    """A challenger's record. Losses are in units of persistence's: below 1 is better; serving: of the champion's trees,
    None where none serve."""

    kind: str
    version: str
    loss_vs_persistence: float
    serving_vs_persistence: float | None
    forecasts: int


class ShadowTrees(ServedTrees):
    """As `ServedTrees`, of the registry's challenger."""

    name = "shadow"

    def _wanted(self) -> str | None:
        return self._registry.challenger(KIND)

    def _load(self, version: str) -> None:
        damage = self._registry.damage(KIND, version)
        if damage is not None:
            self._fail(f"the challenger {version} is damaged: {damage}")
            return
        try:
            self._use(self._registry.path(KIND, version))
        except ModelError as error:
            self._fail(f"the challenger {version}: {error}")


def shadow_of(
    losses: Mapping[str, Mapping[str, tuple[float, int]]], shadow: ServedTrees, serving: ServedTrees
) -> Shadow | None:
    """The record over all targets, by how many forecasts matured; None without a challenger.

    losses: target -> forecaster -> mean loss in units of persistence's, and of how many.
    """
    if not shadow.version:
        return None

    def mean(name: str) -> tuple[float, int]:
        told = [rows[name] for rows in losses.values() if name in rows]
        n = sum(count for _, count in told)
        return (sum(loss * count for loss, count in told) / n if n else 1.0), n

    loss, n = mean(shadow.name)
    champion = round(mean(serving.name)[0], 4) if serving.version else None
    return Shadow(KIND, shadow.version.rpartition("-")[2], round(loss, 4), champion, n)


def shadow_row(shadow: Shadow) -> dict[str, Any]:
    """Of `GET /v1/models`."""
    row: dict[str, Any] = msgspec.to_builtins(shadow)
    return row
