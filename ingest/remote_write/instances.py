"""The scrape targets that the label `instance` identifies.

Two machines that share a name are separate targets while both of them send.
"""

import numpy as np
from numpy.typing import NDArray

from fleetcast.ingest.machines import Target


class InstanceTargets:
    """The targets by `instance`, and the target of each row in the table of series."""

    def __init__(self) -> None:
        self._targets: dict[str, Target] = {}
        self._numbered: list[Target] = []
        self._numbers: dict[str, int] = {}
        self._of_row = np.full(1024, -1, np.int32)
        self._now_ms = 0

    def record_arrival(self, rows: NDArray[np.int64], now_ms: int) -> list[Target]:
        """Record that samples of known series arrived, and return their targets.

        rows: (n,) rows in the table of series, negative for unknown series.
        """
        self._now_ms = now_ms
        owned = rows[(rows >= 0) & (rows < len(self._of_row))]  # rows beyond belong to no instance
        numbers = np.unique(self._of_row[owned])
        targets = [self._numbered[number] for number in numbers[numbers >= 0].tolist()]
        for target in targets:
            target.last_page_ms = now_ms
        return targets

    def find_or_add_target(self, address: str, node: str) -> Target:
        """Return the target of an `instance`, and record that it has just sent.

        node: the target's name if the exporter's labels state none.
        """
        target = self._targets.get(address)
        if target is None:
            target = self._targets[address] = Target(node, address=address)
            self._numbers[address] = len(self._numbered)
            self._numbered.append(target)
        target.node, target.last_page_ms = node, self._now_ms
        return target

    def assign_row(self, row: int, address: str) -> None:
        """Record that a row of the table of series belongs to the target at an address."""
        while row >= len(self._of_row):
            self._of_row = np.concatenate([self._of_row, np.full_like(self._of_row, -1)])
        self._of_row[row] = self._numbers.get(address, -1)

    def pop_renamed_instances(self) -> list[str]:
        """Return the instances whose series must be resolved again. Each is returned once."""
        found = [address for address, target in self._targets.items() if target.forgets]
        for address in found:
            self._targets[address].forgets = False
        return found
