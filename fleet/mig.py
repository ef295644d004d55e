"""MIG profiles: the part of a GPU that an instance is."""

import re
from dataclasses import dataclass

SLICES = 7  # of compute, on every GPU that can be divided
_PROFILE = re.compile(r"(?:\d+c\.)?(\d)g\.(\d+)gb(?:[.+][a-z.+]+)?")


@dataclass(frozen=True, slots=True)
class MigProfile:
    """A MIG profile. slices: of compute, 1 to SLICES. memory_gib: as in its name."""

    slices: int
    memory_gib: int


def parse_mig_profile(name: str) -> MigProfile | None:
    """Return the profile that the name of a resource or a device states. Returns None if it states none.

    >>> parse_mig_profile("3g.40gb"), parse_mig_profile("1c.2g.20gb.me"), parse_mig_profile("half")
    (MigProfile(slices=3, memory_gib=40), MigProfile(slices=2, memory_gib=20), None)
    """
    found = _PROFILE.fullmatch(name)
    if found is None or not 1 <= int(found[1]) <= SLICES:
        return None
    return MigProfile(int(found[1]), int(found[2]))
