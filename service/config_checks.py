"""Configuration checks beyond types and ranges. Each raises ConfigError that names key, value and fix."""

import itertools
from collections.abc import Collection
from functools import reduce
from typing import Any

from fleetcast.fleet.errors import ConfigError

PERIOD_S = (0.001, 31_536_000.0)
BYTES = (1024, 2**34)
LIMITS: dict[str, tuple[float, float]] = {
    "clock.epoch_ms": (0, 2**47),  # the year 6429
    "clock.wall_ms": (0, 2**47),
    "clock.speed": (0.001, 1_000_000),
    "scrape.interval_s": (1, 3600),
    "scrape.timeout_s": PERIOD_S,
    "scrape.concurrency": (1, 1_000_000),
    "scrape.max_body_bytes": BYTES,
    "pipeline.instances": (1, 256),
    "pipeline.tick_s": PERIOD_S,
    "pipeline.snapshot_s": PERIOD_S,
    "pipeline.future_limit_s": (0, 600),
    "pipeline.history_days": (1, 3650),
    "models.keep_versions": (1, 100_000),
    "models.retrain_after_days": (0, 36_500),
    "models.retrain_coverage_off": (0, 1),
    "models.retrain_loss_ratio": (0, 1000),
    "archive.buffer_bytes": (2**20, 2**40),
    "archive.file_rows": (1000, 100_000_000),
    "archive.keep_days": (0, 36_500),
    "archive.look_s": (0, 600),
    "limits.live_jobs": (1, 1_000_000),
    "limits.unknown_nodes": (0, 150_000),
    "limits.unknown_gpus": (0, 10_000_000),
    "limits.names_per_minute": (1, 1_000_000),
    "limits.names_at_once": (1, 1_000_000),
    "api.port": (1, 65_535),
    "api.max_body_bytes": BYTES,
    "api.max_backlog_bytes": (2**28, 2**50),  # a segment goes when it is full and two snapshots cover it
    "api.body_budget_bytes": (2**20, 2**40),
    "api.max_connections": (1, 1_000_000),
    "api.max_connections_per_address": (1, 1_000_000),
    "api.header_timeout_s": PERIOD_S,
    "api.body_timeout_s": PERIOD_S,
    "api.stale_after_s": PERIOD_S,
    "api.grpc_port": (0, 65_535),
    "external_metrics.port": (0, 65_535),
    "placer.port": (1, 65_535),
    "placer.queue_period_s": PERIOD_S,
    "placer.intent_expires_s": PERIOD_S,
    "placer.outage_pause_s": (0, 604_800),
    "adapters.elevated": (0, 1),
    "adapters.high": (0, 1),
    "adapters.max_share": (0, 1),
    "adapters.writes_per_minute": (1, 1_000_000),
    "adapters.withdraw_after_s": PERIOD_S,
}
PORTS = ("api.port", "placer.port", "api.grpc_port", "external_metrics.port")


def check_ranges(config: object) -> None:
    """Check every number in LIMITS. Raises ConfigError."""
    for key, (least, most) in LIMITS.items():
        value = _get_value(config, key)
        if not least <= value <= most:
            raise ConfigError(f"{key} = {value}: must lie in {_format_number(least)}..{_format_number(most)}")


def check_ports_differ(config: object) -> None:
    """Check that no two ports have the same number, except 0 for no port. Raises ConfigError."""
    for key, other in itertools.combinations(PORTS, 2):
        port = _get_value(config, key)
        if port == _get_value(config, other) != 0:
            raise ConfigError(f"{key} and {other} are both {port}: they must differ")


def check_names(key: str, names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"{key} holds {name!r}: expected some of {', '.join(known)}")


def _get_value(config: object, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def _format_number(value: float) -> str:
    """Format a number as in a configuration file."""
    return str(int(value)) if float(value).is_integer() else f"{value:g}"
