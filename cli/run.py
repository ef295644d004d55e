"""`fleetcast run`: runs all roles under a supervisor, or one role alone."""

import asyncio
import logging
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetcast.cli.kit import logs

if TYPE_CHECKING:
    from fleetcast.service.config import Config
    from fleetcast.service.launcher import Launcher


logger = logging.getLogger(__name__)


class RoleName(StrEnum):
    PIPELINE = "pipeline"
    API = "api"
    PLACER = "placer"
    ADAPTERS = "adapters"


MODULES = {  # each has a coroutine `serve(config)`
    RoleName.PIPELINE: "fleetcast.service.pipeline.role",
    RoleName.API: "fleetcast.service.api.role",
    RoleName.PLACER: "fleetcast.service.placer.role",
    RoleName.ADAPTERS: "fleetcast.service.adapters",
}

SHARED_MODULES = (
    "uvloop",
    "numpy.ma",  # numpy imports it in the first np.unique of a process, for 4 MiB
    "fleetcast.service.supervise",
    "fleetcast.service.state_folder",
)


def run(
    config: Annotated[Path | None, typer.Option(help="Configuration file; without one, the defaults.")] = None,
    scrape: Annotated[
        list[str] | None,
        typer.Option(help="An exporter to scrape; repeat it for more. Needs no configuration file."),
    ] = None,
    role: Annotated[RoleName | None, typer.Option(help="Run this role alone, in this process.")] = None,
    instance: Annotated[
        int | None, typer.Option(help="With --role pipeline: which of [pipeline] instances, from 0 [0].")
    ] = None,
    state: Annotated[str | None, typer.Option(help="Folder for inbox, board, snapshots and ledger [var].")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the API and the console [8080].", min=1, max=65_534)] = None,
    topology: Annotated[str | None, typer.Option(help="Topology file or folder; see fleetcast topology.")] = None,
    log_format: Annotated[logs.Format | None, typer.Option(help="One line an event, as text or JSON [text].")] = None,
    log_level: Annotated[logs.LogLevel | None, typer.Option(help="The lowest level of log lines [info].")] = None,
) -> None:
    """Run Fleetcast: pipeline, api, placer and (if configured) adapters. A role that dies is restarted.

    Examples:

      fleetcast run --scrape http://node1:9400/metrics      needs no file: nodes appear as unplaced

      fleetcast run --config config.toml                    everything from a file

      fleetcast run --config config.toml --role pipeline    one role, e.g. in its own container

      fleetcast run --config config.toml --role pipeline --instance 1    the second of [pipeline] instances = 2
    """
    from fleetcast.service.config import add_lines_to_errors, check_config, load_config, override_config

    logs.configure_logging(log_format, log_level, _format_process_name(role, instance))
    loaded = override_config(
        load_config(config),
        scrape_targets=tuple(scrape) if scrape else None,
        state=state,
        api_port=port,
        topology=topology,
    )
    check_config(loaded)
    _check_instance(role, instance, loaded)
    _limit_memory()  # of the launcher, too, because a role that it forks starts a thread at once
    if role is None:
        from fleetcast.service.start_checks import check_role_settings

        launched = _start_launcher(loaded)
        if not isinstance(launched, str):
            with add_lines_to_errors(config):
                check_role_settings(loaded)
            raise typer.Exit(asyncio.run(_supervise_roles(loaded, launched)))
        logs.configure_logging(log_format, log_level, launched)
        role, instance = next(pair for pair in _list_roles(loaded) if _format_process_name(*pair) == launched)
    _run_role(role, loaded, instance or 0)


def _limit_memory() -> None:
    """Set the options that keep the memory of this process, and of those that it forks, small."""
    from fleetcast.service.process_memory import use_one_heap
    from fleetcast.service.withheld_imports import withhold_imports

    use_one_heap()
    withhold_imports()


def _start_launcher(config: "Config") -> "Launcher | str | None":
    """Fork the launcher of the roles, and return it. Returns None where a fork is unsafe.

    In a process that the launcher forks for a role, this returns the name of that role.
    """
    from fleetcast.service.launcher import fork_launcher

    if sys.platform != "linux":
        return None
    modules = {MODULES[role]: None for role, _ in _list_roles(config)}
    return fork_launcher([*SHARED_MODULES, *modules])


def _format_process_name(role: RoleName | None, instance: int | None) -> str:
    """Return the name of a role's process, as log lines and `read_pids` show it.

    Without a role, the name is `supervisor`.
    """
    return role.value + ("" if instance is None else f"-{instance}") if role else "supervisor"


def _check_instance(role: RoleName | None, instance: int | None, config: "Config") -> None:
    from fleetcast.fleet.errors import ConfigError

    count = config.pipeline.instances
    if instance is not None and (role is not RoleName.PIPELINE or not 0 <= instance < count):
        raise ConfigError(
            f"--instance {instance}: expected 0..{count - 1} and --role pipeline, as pipeline.instances = {count}"
        )


def _list_roles(config: "Config") -> list[tuple[RoleName, int | None]]:
    """Return the roles that a configuration asks for, each with its instance number.

    The number is None unless there are several pipelines.
    """
    if config.api.board:  # a replica has an api, and no more
        return [(RoleName.API, None)]
    count = config.pipeline.instances
    pipelines = [(RoleName.PIPELINE, instance if count > 1 else None) for instance in range(count)]
    has_rows = bool(config.adapters.adapter or config.adapters.executor)
    others = [RoleName.API, RoleName.PLACER, *([RoleName.ADAPTERS] if has_rows else [])]
    return [*pipelines, *((role, None) for role in others)]


async def _supervise_roles(config: "Config", launcher: "Launcher | None") -> int:
    from fleetcast.fleet.errors import ConfigError
    from fleetcast.service.config import save_config
    from fleetcast.service.start_checks import check_ports_available
    from fleetcast.service.state_folder import lock_state_folder, make_state_folders
    from fleetcast.service.supervise import SupervisedRole, Supervisor, make_role_command

    make_state_folders(config)
    with lock_state_folder(config):
        roles = [(_format_process_name(role, number), role, number) for role, number in _list_roles(config)]
        check_ports_available(config, (_choose_state_name(role, number, config) for _, role, number in roles))
        path = config.folder / "config.toml"
        try:
            save_config(config, path)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        supervised = [
            SupervisedRole(
                name,
                make_role_command(role, path, *_make_instance_option(number)),
                _choose_state_name(role, number, config),
            )
            for name, role, number in roles
        ]
        logger.info("%s; console at %s", ", ".join(role.name for role in supervised), config.url)
        return await Supervisor(supervised, config.folder, launcher=launcher).run()


def _make_instance_option(number: int | None) -> list[str]:
    return [] if number is None else ["--instance", str(number)]


def _run_role(role: RoleName, config: "Config", instance: int) -> None:
    """Run a role in this process under uvloop.

    All published measurements were made with this event loop.
    """
    import importlib

    import uvloop

    from fleetcast.service.exit_reason import record_exit_reason
    from fleetcast.service.process_memory import pause_garbage_collection
    from fleetcast.service.state_folder import lock_role

    name = _choose_state_name(role, instance, config)
    with lock_role(config, name), record_exit_reason(config.folder, name):
        with pause_garbage_collection():
            serve = importlib.import_module(MODULES[role]).serve
        uvloop.run(serve(config, instance) if role is RoleName.PIPELINE else serve(config))


def _choose_state_name(role: RoleName, instance: int | None, config: "Config") -> str:
    """Return the name of a role's files in the state folder.

    These files are its lock, and the reason why it ended.
    """
    from fleetcast.service.exit_reason import make_api_name, make_pipeline_name

    if role is RoleName.PIPELINE:
        return make_pipeline_name(instance or 0)
    return make_api_name(config) if role is RoleName.API else role.value
