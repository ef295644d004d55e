"""`fleetcast check-config`: read a configuration and say what it means, without starting anything."""

from pathlib import Path
from typing import Annotated

import typer


def check_config_file(
    path: Annotated[Path, typer.Argument(help="The configuration file.", metavar="CONFIG.toml")],
) -> None:
    """Check a configuration file: unknown keys, wrong types, impossible values, missing files.

    Example:  fleetcast check-config config.toml
    """
    from fleet.entities import Entities
    from fleet.redaction import redacted
    from ingest.archive_files import ArchiveFiles
    from ingest.topology import load_topology
    from service.access import load_access
    from service.config import load_config
    from service.pipeline_role import open_sources

    config = load_config(path)
    access = load_access(config.api.host)
    sources = open_sources(config, config.make_clock(), Entities())  # connects nowhere, refuses what cannot be
    archive = redacted(ArchiveFiles(config.archive_url).url) if config.archive.enabled else "none"
    typer.echo(f"{path}: fine")
    if config.fleet.topology:
        topology = load_topology(Path(config.fleet.topology))
        typer.echo(f"topology: {len(topology)} nodes, {int(topology.gpus.sum())} GPUs")
    else:
        typer.echo("topology: none named, every node will be unplaced")
    typer.echo(f"sources: {', '.join(source.name for source in sources)}")
    typer.echo(f"scrape targets: {len(config.scrape.targets)}, every {config.scrape.interval_s:g} s")
    typer.echo(f"api: http://{config.api.host}:{config.api.port}/  placer: port {config.placer.port}")
    typer.echo(f"access: {'everybody on this machine' if access.is_open else ', '.join(access.names())}")
    typer.echo(f"pipelines: {config.pipeline.instances}  archive: {archive}")
    typer.echo(f"state: {config.folder}  adapters: {[row.use for row in config.adapters.adapter] or 'none'}")
