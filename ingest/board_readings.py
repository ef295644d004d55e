"""Readings that distinguish GPU boards on DCGM pages whose lines carry no UUID.

A board counts its energy since its driver started. So two pages of one board differ at most by the energy
that the board can use between them. Two different machines mostly differ in the memory that their GPUs use.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

MOST_W = 1000.0  # that one board draws
LATE_MS = 60_000  # an exporter prints readings that are as old as this
LEAST_SHARE = 100  # of what a board can use in between: an energy says nothing below so many times as much
MIB_APART = 2048.0  # exporters disagree by less on what the driver keeps for itself
_LINE = re.compile(
    rb"(?mi)^DCGM_FI_DEV_(TOTAL_ENERGY_CONSUMPTION|FB_USED)\{[^\n]*?\bgpu=\"(\d{1,4})\"[^\n]*\}[ \t]+([0-9.eE+]{1,32})"
)


@dataclass(slots=True)
class BoardReadings:
    """The readings of one page by GPU index.

    energy_j: energy since the driver started. used_mib: memory in use.
    """

    time_ms: int = 0
    energy_j: dict[int, float] = field(default_factory=dict)
    used_mib: dict[int, float] = field(default_factory=dict)


def parse_board_readings(page: bytes, time_ms: int) -> BoardReadings:
    r"""Return the readings of a DCGM page. They are empty if another exporter wrote the page.

    >>> parse_board_readings(b'DCGM_FI_DEV_FB_USED{gpu="1",Hostname="n1"} 70000\n', 0).used_mib
    {1: 70000.0}
    """
    found = BoardReadings(time_ms)
    for name, gpu, text in _LINE.findall(page):
        try:
            value = float(text)
        except ValueError:
            continue
        if name.upper() == b"FB_USED":
            found.used_mib[int(gpu)] = value
        else:
            found.energy_j[int(gpu)] = value / 1000
    return found


def have_same_boards(first: BoardReadings, second: BoardReadings) -> bool | None:
    """Return whether two pages count the energy of the same boards.

    Returns None if the counters are too low to decide. The pages may number the boards in different orders, and
    one page may lack some of the boards.
    """
    apart_s = (abs(first.time_ms - second.time_ms) + LATE_MS) / 1000
    most_j = MOST_W * apart_s
    rows = [readings.energy_j for readings in (first, second)]
    if not all(row and min(row.values()) > LEAST_SHARE * most_j for row in rows):
        return None
    fewer, more = sorted(rows, key=len)
    return all(any(abs(energy - other) <= most_j for other in more.values()) for energy in fewer.values())


def have_different_memory_use(first: BoardReadings, second: BoardReadings) -> bool:
    """Return whether most GPUs of two pages hold different amounts of memory."""
    return _differ_on_most_gpus(first.used_mib, second.used_mib)


def _differ_on_most_gpus(first: Mapping[int, float], second: Mapping[int, float]) -> bool:
    both = first.keys() & second.keys()
    apart = sum(abs(first[gpu] - second[gpu]) > MIB_APART for gpu in both)
    return bool(both) and 2 * apart > len(both)
