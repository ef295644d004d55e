"""The registry of built-in adapters, and the writers that a configuration names.

Some adapters answer other systems, and the others write to them.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from fleetcast.fleet.errors import ConfigError
from fleetcast.schedulers.adapter import Adapter, Door
from fleetcast.schedulers.expander import ExpanderAdapter
from fleetcast.schedulers.external_metrics import ExternalMetrics
from fleetcast.schedulers.keda import KedaAdapter
from fleetcast.schedulers.kube_extender import KubeAdapter
from fleetcast.schedulers.trimaran import TrimaranAdapter
from fleetcast.schedulers.volcano import VolcanoAdapter
from fleetcast.service.config import AdapterConfig, AdaptersConfig
from fleetcast.service.plugins import call_plugin, load_plugin

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


class ConfiguredDoor(NamedTuple):
    """A writer from the configuration, with its name."""

    name: str
    row: AdapterConfig
    door: Door


def make_answerers() -> dict[str, Adapter]:
    """Make one answerer of each kind, for one process."""
    return {name: make() for name, make in ANSWERERS.items()}


def make_door(use: str, options: Mapping[str, Any]) -> Door:
    """Make a built-in writer, or call `package.module:name` with the options. This opens no connection.

    Raises ConfigError.
    """
    make = load_plugin(f"adapters.adapter.use (built in: {', '.join(sorted(WRITERS))})", WRITERS.get(use, use))
    return cast(Door, call_plugin("adapters.adapter.use", use, make, options))


def open_doors(config: AdaptersConfig) -> list[ConfiguredDoor]:
    """Make all writers of a configuration. Raises ConfigError that names the table entry and its key."""
    doors: list[ConfiguredDoor] = []
    for number, row in enumerate(config.adapter):
        name = row.name or row.use
        if not NAME.fullmatch(name):
            raise ConfigError(f"adapters.adapter[{number}].name = {name!r}: letters, digits and _.:- alone")
        if name in {*ANSWERERS, *(door.name for door in doors)}:
            raise ConfigError(f"adapters.adapter[{number}].name = {name!r}: used already, give it another `name`")
        try:
            doors.append(ConfiguredDoor(name, row, make_door(row.use, row.options)))
        except ConfigError as error:
            raise ConfigError(f"adapters.adapter[{number}] {name}: {error}") from None
    return doors
