"""Checks before any role starts: settings that a role would refuse, and ports that are in use.

The supervisor and `fleetcast check-config` run them. Each raises ConfigError with the key, the value and
the fix.
"""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from fleetcast.fleet.errors import ConfigError
from fleetcast.ingest.pages.targets import TargetList
from fleetcast.ingest.topology.load import load_topology
from fleetcast.service.config import PLACER_HOST, Config
from fleetcast.service.doors import open_doors, open_executors
from fleetcast.service.http.access import load_access
from fleetcast.service.http.listening import bind_socket
from fleetcast.service.http.tls import Tls
from fleetcast.service.plugins import check_callable, load_functions, make_forecaster
from fleetcast.service.state_folder import PATIENCE_S, POLL_S, is_role_held


def check_role_settings(config: Config) -> None:
    """Check the settings that the roles would refuse when they start.

    These are access, certificates, gRPC, targets, topology, sources and other plugins, and adapters.
    """
    load_access(config.api.host, subjects=config.access.subjects)
    if config.api.tls_cert:
        Tls(config.api)
    if config.external_metrics.port:
        Tls(config.external_metrics, "external_metrics", must_show=True)
    if config.api.grpc_port:
        from fleetcast.service.api.grpc_extra import require_grpc

        require_grpc(config.api.grpc_port)
    if config.fleet.topology:
        load_topology(Path(config.fleet.topology))
    TargetList(config.scrape.targets)
    if config.pipeline.sources:
        from fleetcast.fleet.entities import Entities
        from fleetcast.service.pipeline.role import open_sources

        open_sources(config, config.make_clock(), Entities())  # connects nowhere
    for path in config.pipeline.forecasters:
        make_forecaster(path)
    for key, paths in (("placer.filters", config.placer.filters), ("placer.scorers", config.placer.scorers)):
        for path, (_, function) in zip(paths, load_functions(key, paths), strict=True):
            check_callable(key, path, function)
    open_doors(config.adapters)
    open_executors(config.adapters)


def check_ports_available(config: Config, roles: Iterable[str] = ()) -> None:
    """Check that the service can bind every port. If one of our `roles` is still ending, wait for its ports.

    roles: the names of the roles' locks in the state folder.
    """
    names = tuple(roles)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        one_ends = any(is_role_held(config, name) for name in names)  # asked first: it gives its port back before that
        try:
            for host, port, keys in _list_ports(config):
                bind_socket(host, port, keys).close()
        except ConfigError:
            if time.monotonic() > deadline or not one_ends:
                raise
            time.sleep(POLL_S)
        else:
            return


def _list_ports(config: Config) -> Iterator[tuple[str, int, str]]:
    """Yield (host, port, configuration keys) of each port that the roles listen on."""
    yield config.api.host, config.api.port, "api.host, api.port"
    if not config.api.board:
        yield PLACER_HOST, config.placer.port, "placer.port"
    for port, key in ((config.api.grpc_port, "api.grpc_port"), (config.external_metrics.port, "external_metrics.port")):
        if port:
            yield config.api.host, port, f"api.host, {key}"
