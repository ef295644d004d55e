"""What no type and no range can refuse in a configuration. All raise ConfigError that names key, value and fix."""

import itertools
from collections.abc import Collection, Mapping

from fleet.errors import ConfigError


def check_ports(ports: Mapping[str, int]) -> None:
    """By key; two doors of one host cannot be one. 0: no door."""
    for (key, port), (other, same) in itertools.combinations(ports.items(), 2):
        if port == same != 0:
            raise ConfigError(f"{key} and {other} are both {port}: they must differ")


def check_names(key: str, names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"{key} holds {name!r}: expected some of {', '.join(known)}")
