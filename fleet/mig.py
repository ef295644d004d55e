"""MIG profiles: the sizes of the parts into which a GPU is divided."""

import re
from dataclasses import dataclass

SLICES = 7  # of compute, on every GPU that can be divided
_PROFILE = re.compile(r"(?:\d+c\.)?(\d)g\.(\d+)gb(?:[.+][a-z.+]+)?")


@dataclass(frozen=True, slots=True)
class MigProfile:
    """The size of a MIG instance. slices: compute slices, 1 to SLICES. memory_gib: the size in the profile's name."""

    slices: int
    memory_gib: int


def parse_mig_profile(name: str) -> MigProfile | None:
    """Return the profile in the name of a resource or a device, or None if the name has none.

    >>> parse_mig_profile("3g.40gb"), parse_mig_profile("1c.2g.20gb.me"), parse_mig_profile("half")
    (MigProfile(slices=3, memory_gib=40), MigProfile(slices=2, memory_gib=20), None)
    """
    found = _PROFILE.fullmatch(name)
    if found is None or not 1 <= int(found[1]) <= SLICES:
        return None
    return MigProfile(int(found[1]), int(found[2]))
