"""`fleetcast check-config`: reads a configuration and prints what it means, without starting anything."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetcast.cli.kit.screen import echo

if TYPE_CHECKING:
    from fleetcast.service.config import Config
    from fleetcast.service.http.tls import Tls


def check_config_file(
    path: Annotated[Path, typer.Argument(help="The configuration file.", metavar="CONFIG.toml")],
) -> None:
    """Check a configuration file: unknown keys, wrong types, impossible values, missing files.

    Example:  fleetcast check-config config.toml
    """
    from fleetcast.fleet.entities import Entities
    from fleetcast.fleet.redaction import redact_secrets
    from fleetcast.ingest.archive.files import ArchiveFiles
    from fleetcast.ingest.topology.load import load_topology
    from fleetcast.service.config import add_lines_to_errors, load_config
    from fleetcast.service.doors import open_doors, open_executors
    from fleetcast.service.http.access import load_access
    from fleetcast.service.http.tls import Tls
    from fleetcast.service.pipeline.role import open_sources
    from fleetcast.service.start_checks import check_role_settings

    config = load_config(path)
    with add_lines_to_errors(path):
        check_role_settings(config)
        access = load_access(config.api.host, subjects=config.access.subjects)
        tls = Tls(config.api) if config.api.tls_cert else None
        sources = open_sources(config, config.make_clock(), Entities())  # connects nowhere, refuses what cannot be
        doors = [f"{door.name} ({door.row.mode})" for door in open_doors(config.adapters)]
        doors += [f"{one.name} ({one.row.mode})" for one in open_executors(config.adapters)]
    archive = redact_secrets(ArchiveFiles(config.archive_url).url) if config.archive.enabled else "none"
    echo(f"{path}: fine")
    if config.fleet.topology:
        topology = load_topology(Path(config.fleet.topology))
        echo(f"topology: {len(topology)} nodes, {int(topology.gpus.sum())} GPUs")
    else:
        echo("topology: none named, every node will be unplaced")
    echo(f"sources: {', '.join(source.name for source in sources)}")
    echo(f"scrape targets: {len(config.scrape.targets)}, every {config.scrape.interval_s:g} s")
    echo(f"api: {config.url}  placer: port {config.placer.port}")
    if config.api.grpc_port:
        echo(f"grpc: {config.api.host}:{config.api.grpc_port}")
    echo(f"tls: {describe_tls(config, tls)}")
    echo(f"access: {'everybody on this machine' if access.is_open else ', '.join(access.list_names())}")
    echo(f"pipelines: {config.pipeline.instances}  archive: {archive}")
    echo(f"state: {config.folder}  adapters: {', '.join(doors) or 'none'}")


def describe_tls(config: "Config", tls: "Tls | None") -> str:
    """Describe the certificate in use, its expiry, and how many names of client certificates have access."""
    from fleetcast.service.http.tls import format_date

    if tls is None:
        return "none, requests and tokens travel in the clear"
    asked = f"; {len(config.access.subjects)} names of certificates of {config.api.client_ca} may ask"
    return f"{config.api.tls_cert}, valid until {format_date(tls.until_s)}{asked if config.api.client_ca else ''}"
