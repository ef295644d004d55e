"""Usual temperatures of GPU slots by load. A deviation from them points to the GPU itself.

    residual = (T - usual(slot, P)) - median of the same for the node's GPUs

A slot is an index in the chassis on nodes of one GPU model. At the same power, slots differ by more
than ten degrees, and nodes hardly differ. The usual temperature of a slot at a step of power is a running
mean of the fleet's medians. So it is also known in small fleets. The median residual of a node shows the
effect of its room and its fans, and is subtracted. If fewer than three of its GPUs work, there is
no residual.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.topology import Topology
from fleetcast.models.peers import Groups

STEP_W, STEPS = 25.0, 64  # of power
LEAST_W = 150.0  # below it a GPU hardly warms
LEAST_ROUNDS = 20  # of samples before a usual is one
EASES_S = 7200.0
LEAST_SIBLINGS = 3  # in the node, to tell of the room

Array = NDArray[np.float64]
Rows = NDArray[np.int64]


@dataclass(slots=True)
class SlotTemperatures:
    """The usual temperature of each slot at each step of power, and the number of rounds behind it.

    A round is one observation of all GPUs. usual_c: (slot, step of power) °C, NaN if unknown.
    """

    names: list[str] = field(default_factory=list)
    usual_c: Array = field(default_factory=lambda: np.zeros((0, STEPS)))
    rounds: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, STEPS), np.int64))
    learned_ms: int = 0
    _made_of: tuple[int, int, int] = (-1, -1, -1)  # GPUs, topology generation, known models
    _of: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def compute_residuals(
        self, temp_c: Array, power_w: Array, node: NDArray[np.int32], nodes: int, slot: Rows
    ) -> Array:
        """Return (gpu,) how many °C each GPU is warmer than usual, less the median of its node's GPUs.

        The usual temperature is that of its slot at its power. The result is NaN if unknown. slot: (gpu,) the result
        of `find_slots`. temp_c, power_w: (gpu,) means over minutes, NaN where the GPU does not work.
        """
        key, known = self._find_cells(temp_c, power_w, slot)
        usual = np.where(self.rounds.ravel() >= LEAST_ROUNDS, self.usual_c.ravel(), np.nan)
        above = temp_c - np.where(known, usual[key] if len(usual) else np.nan, np.nan)
        of_node = Groups(node, nodes)
        room, count = of_node.compute_medians(above)
        room = np.where(count >= LEAST_SIBLINGS, room, np.nan)
        return above - of_node.copy_to_members(room)

    def learn_round(self, temp_c: Array, power_w: Array, slot: Rows, now_ms: int, interval_s: float) -> None:
        """Update the usual temperatures with a round of samples: a running mean of the fleet's medians.

        At first, the running mean covers all rounds. Later, it follows the last two hours.
        """
        elapsed_s = (now_ms - self.learned_ms) / 1000
        if 0 <= elapsed_s < 0.9 * interval_s:
            return
        self.learned_ms = now_ms
        key, known = self._find_cells(temp_c, power_w, slot)
        middle, count = Groups(np.where(known, key, -1), self.usual_c.size).compute_medians(temp_c)
        seen = np.flatnonzero(count)
        rounds, usual = self.rounds.reshape(-1), self.usual_c.reshape(-1)
        ease = np.maximum(1 / (rounds[seen] + 1), interval_s / EASES_S)
        before = np.where(rounds[seen] > 0, usual[seen], middle[seen])
        usual[seen] = before + ease * (middle[seen] - before)
        rounds[seen] += 1

    def find_slots(
        self, gpus: Sequence[str], node: NDArray[np.int32], topology: Topology, models: Mapping[str, str] | None = None
    ) -> NDArray[np.int64]:
        """Return (gpu,) the row of each GPU's slot, -1 if its node is not in the topology.

        gpus: "node/index". models: GPU → its model, if known. Otherwise the node's model is used.
        """
        models = models or {}
        key = (len(gpus), topology.generation, len(models))
        if self._made_of == key and len(self._of) == len(gpus):
            return self._of
        rows = {name: row for row, name in enumerate(self.names)}
        found = np.full(len(gpus), -1, np.int64)
        for gpu, (name, row) in enumerate(zip(gpus, node.tolist(), strict=True)):
            if 0 <= row < len(topology):
                slot = f"{models.get(name) or topology.nodes[row].gpu_model}/{name.partition('/')[2]}"
                found[gpu] = rows.setdefault(slot, len(rows))
        more = len(rows) - len(self.names)
        self.names = list(rows)
        self.usual_c = np.pad(self.usual_c, ((0, more), (0, 0)), constant_values=np.nan)
        self.rounds = np.pad(self.rounds, ((0, more), (0, 0)))
        self._made_of, self._of = key, found
        return found

    def dump(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return a copy of the known usual temperatures for a snapshot."""
        slot, step = np.nonzero(self.rounds)
        parts = (slot, step, self.usual_c[slot, step], self.rounds[slot, step])
        rows = zip(*(part.tolist() for part in parts), strict=True)
        return {"slots": self.names, "learned_ms": self.learned_ms, "rows": [list(row) for row in rows]}, {}

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Fill an empty object with the state that `dump` returned."""
        self.names, self.learned_ms = list(about["slots"]), about["learned_ms"]
        self.usual_c = np.full((len(self.names), STEPS), np.nan)
        self.rounds = np.zeros((len(self.names), STEPS), np.int64)
        for slot, step, usual, rounds in about["rows"]:
            self.usual_c[slot, step], self.rounds[slot, step] = usual, rounds

    def shift_times(self, by_ms: int) -> None:
        """Shift the time of the last round by `by_ms`, because the clock was set."""
        self.learned_ms += by_ms if self.learned_ms else 0

    def _find_cells(self, temp_c: Array, power_w: Array, slot: Rows) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        known = np.isfinite(temp_c) & (power_w >= LEAST_W) & (slot >= 0)
        step = np.clip(np.nan_to_num(power_w) / STEP_W, 0, STEPS - 1).astype(np.int64)
        return np.where(known, slot * STEPS + step, 0), known
