"""The registry of built-in adapters, and the writers and executors that a configuration names.

Some adapters answer other systems, and the others write to them. Executors carry out actions on running jobs.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from fleetcast.fleet.errors import ConfigError
from fleetcast.schedulers.adapter import Adapter, Door
from fleetcast.schedulers.executor import Executor
from fleetcast.schedulers.expander import ExpanderAdapter
from fleetcast.schedulers.external_metrics import ExternalMetrics
from fleetcast.schedulers.keda import KedaAdapter
from fleetcast.schedulers.kube_extender import KubeAdapter
from fleetcast.schedulers.trimaran import TrimaranAdapter
from fleetcast.schedulers.volcano import VolcanoAdapter
from fleetcast.service.config import AdapterConfig, AdaptersConfig
from fleetcast.service.plugins import call_plugin, load_plugin

Made = TypeVar("Made")
ANSWERERS: Mapping[str, Callable[[], Adapter]] = {
    "expander": ExpanderAdapter,
    "external_metrics": ExternalMetrics,
    "keda": KedaAdapter,
    "kube": KubeAdapter,
    "trimaran": TrimaranAdapter,
    "volcano": VolcanoAdapter,
}
NAME = re.compile(r"\w[\w.:-]{0,99}")  # it becomes part of a file's name
WRITERS: Mapping[str, str] = {
    "band_file": "fleetcast.service.ports.band_file:make_band_file_door",
    "buffers": "fleetcast.service.ports.buffers:make_buffers_door",
    "kueue": "fleetcast.service.ports.kueue:make_kueue_door",
    "nodes": "fleetcast.service.ports.nodes:make_nodes_door",
    "slurm": "fleetcast.service.ports.slurm:make_slurm_door",
    "slurm_durations": "fleetcast.service.ports.slurm_durations:make_slurm_durations_door",
    "topology": "fleetcast.service.ports.topology:make_topology_door",
}
EXECUTORS: Mapping[str, str] = {
    "kubernetes": "fleetcast.service.ports.kubernetes_executor:make_kubernetes_executor",
    "slurm": "fleetcast.service.ports.slurm_executor:make_slurm_executor",
}
NOT_CONFIGURED = frozenset({"agents", "advice"})  # executors that need no row


class ConfiguredDoor(NamedTuple):
    """A writer from the configuration, with its name."""

    name: str
    row: AdapterConfig
    door: Door


class ConfiguredExecutor(NamedTuple):
    """An executor from the configuration, with its name."""

    name: str
    row: AdapterConfig
    executor: Executor


def make_answerers() -> dict[str, Adapter]:
    """Make one answerer of each kind, for one process."""
    return {name: make() for name, make in ANSWERERS.items()}


def make_door(use: str, options: Mapping[str, Any]) -> Door:
    """Make a built-in writer, or call `package.module:name` with the options. This opens no connection.

    Raises ConfigError.
    """
    make = load_plugin(f"adapters.adapter.use (built in: {', '.join(sorted(WRITERS))})", WRITERS.get(use, use))
    return cast(Door, call_plugin("adapters.adapter.use", use, make, options))


def make_executor(use: str, options: Mapping[str, Any]) -> Executor:
    """Make a built-in executor, or call `package.module:name` with the options. This opens no connection.

    Raises ConfigError.
    """
    built_in = ", ".join(sorted(EXECUTORS)) or "none"
    make = load_plugin(f"adapters.executor.use (built in: {built_in})", EXECUTORS.get(use, use))
    return cast(Executor, call_plugin("adapters.executor.use", use, make, options))


def open_doors(config: AdaptersConfig) -> list[ConfiguredDoor]:
    """Make all writers of a configuration. Raises ConfigError that names the table entry and its key."""
    rows = _name_rows("adapter", config.adapter, set(ANSWERERS))
    return [ConfiguredDoor(name, row, _make_row(where, make_door, row)) for where, name, row in rows]


def open_executors(config: AdaptersConfig) -> list[ConfiguredExecutor]:
    """Make all executors of a configuration. Raises ConfigError that names the table entry and its key."""
    used = {*ANSWERERS, *NOT_CONFIGURED, *(row.name or row.use for row in config.adapter)}
    rows = _name_rows("executor", config.executor, used)
    return [ConfiguredExecutor(name, row, _make_row(where, make_executor, row)) for where, name, row in rows]


def _name_rows(key: str, rows: Sequence[AdapterConfig], used: set[str]) -> Iterator[tuple[str, str, AdapterConfig]]:
    """Yield (key of the row and its name, name, row) for each row.

    used: names that no row may have. Raises ConfigError for a name that is used or unreadable.
    """
    for number, row in enumerate(rows):
        name = row.name or row.use
        where = f"adapters.{key}[{number}]"
        if not NAME.fullmatch(name):
            raise ConfigError(f"{where}.name = {name!r}: letters, digits and _.:- alone")
        if name in used:
            raise ConfigError(f"{where}.name = {name!r}: used already, give it another `name`")
        used = used | {name}
        yield f"{where} {name}", name, row


def _make_row(where: str, make: Callable[[str, Mapping[str, Any]], Made], row: AdapterConfig) -> Made:
    try:
        return make(row.use, row.options)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
