"""`fleetcast adapters`: lists, shows and withdraws adapters to other schedulers and autoscalers."""

import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleetcast.cli.kit.options import ConfigOption, StateOption, load_site_config
from fleetcast.cli.kit.screen import echo, echo_text

if TYPE_CHECKING:
    from fleetcast.service.adapter_records import AdapterRecords, AdapterStatus
    from fleetcast.service.config import Config

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Doors to schedulers and autoscalers: which ones act on forecasts, and how (docs/schedulers/index.md).\n\n"
    "Example:  fleetcast adapters list",
)

NameArgument = Annotated[str, typer.Argument(help="Its name in `fleetcast adapters list`.", metavar="NAME")]
JsonFlag = Annotated[bool, typer.Option("--json", help="As JSON.")]
LINES = 20
TAKES_S = 30.0
POLL_S = 0.2


@app.command("list")
def list_adapters(config: ConfigOption = None, state: StateOption = None, as_json: JsonFlag = False) -> None:
    """List every adapter: its name, whether it answers, observes or writes, and its status.

    Example:  fleetcast adapters list --config config.toml
    """
    rows = _read_rows(_load_config(config, state))
    if as_json:
        echo_text(json.dumps(rows, indent=2))
        return
    for row in rows:
        echo(f"{row['name']:<20} {row['kind']:<9} {row['mode']:<8} {_describe_standing(row)}".rstrip())


@app.command("show")
def show_adapter(
    name: NameArgument, config: ConfigOption = None, state: StateOption = None, as_json: JsonFlag = False
) -> None:
    """Show the status of one adapter, its last write and the reason for it.

    Example:  fleetcast adapters show band_file --config config.toml
    """
    import msgspec

    from fleetcast.service.adapter_records import AdapterRecords

    loaded = _load_config(config, state)
    row = _find_row(loaded, name)
    lines = AdapterRecords(loaded.folder).read_newest_lines(name, LINES)
    if as_json:
        echo_text(json.dumps({**row, "audit": msgspec.to_builtins(lines)}, indent=2))
        return
    for key, value in row.items():
        echo(f"{key:<12} {value}")
    for line in lines:
        change = f"{line.seen or '-'} -> {line.value or '-'}"
        echo(f"{_format_time(line.time_ms)}  {line.outcome:<9} {line.key} {line.field}: {change}  {line.why}".rstrip())


@app.command("withdraw")
def withdraw_adapter(
    name: Annotated[str | None, typer.Argument(help="Its name in `fleetcast adapters list`.", metavar="NAME")] = None,
    config: ConfigOption = None,
    state: StateOption = None,
    every: Annotated[bool, typer.Option("--all", help="Every adapter that writes, instead of NAME.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Let it write again.")] = False,
) -> None:
    """Undo everything that an adapter has written, and stop it from writing until --undo.

    The command may run while the service runs. The service then does the work. Exit code 1: not everything could
    be undone yet.

    Examples:

      fleetcast adapters withdraw band_file --config config.toml

      fleetcast adapters withdraw band_file --config config.toml --undo

      fleetcast adapters withdraw --all --config config.toml
    """
    from fleetcast.service.adapter_records import AdapterRecords

    loaded = _load_config(config, state)
    records = AdapterRecords(loaded.folder)
    if every == (name is not None):
        raise typer.BadParameter("give the NAME of an adapter, or --all")
    written = (*loaded.adapters.adapter, *loaded.adapters.executor)
    names = [name] if name else [row.name or row.use for row in written]
    done = [_withdraw_and_print(loaded, records, one, undo) for one in names]
    if not all(done):
        raise typer.Exit(1)


def _withdraw_and_print(config: "Config", records: "AdapterRecords", name: str, undo: bool) -> bool:
    """Withdraw one adapter, and print the result. With `undo`, let the adapter write again instead.

    Returns False if not everything could be undone yet.
    """
    kind = _find_row(config, name)["kind"]
    if kind == "answerer":
        echo(f"{name} only answers: there is nothing to take back")
        return True
    if kind == "executor":
        records.mark_withdrawn(name, undo=undo)
        does = "carries out new actions again" if undo else "refuses new actions, and ends those that it began"
        echo(f"{name} {does}")
        return True
    written_ms = None if records.is_withdrawn(name) else records.read_status().as_of_ms
    records.mark_withdrawn(name, undo=undo)
    if undo:
        echo(f"{name} writes again from the next board on")
        return True
    is_done, status = _withdraw_or_wait(config, records, name, written_ms)
    if not is_done:
        why = f": {status.error}" if status and status.error else ""
        echo(f"{name} is not all withdrawn yet{why}; the adapters role goes on trying", err=True)
        return False
    echo(f"{name} is withdrawn and writes no more: fleetcast adapters withdraw {name} --undo lets it")
    return True


def _load_config(config: Path | None, state: str | None) -> "Config":
    from fleetcast.service.doors import open_doors, open_executors

    loaded = load_site_config(config, state)
    open_doors(loaded.adapters)  # refuses what cannot be
    open_executors(loaded.adapters)
    return loaded


def _read_rows(config: "Config") -> list[dict[str, Any]]:
    """Return the rows of `GET /v1/adapters`, without the last writes of the adapters."""
    import msgspec

    from fleetcast.service.adapter_rows import read_adapter_rows

    rows = msgspec.to_builtins(read_adapter_rows(config))
    return [{key: value for key, value in row.items() if key != "last"} for row in rows]


def _find_row(config: "Config", name: str) -> dict[str, Any]:
    from fleetcast.fleet.errors import ConfigError

    rows = {row["name"]: row for row in _read_rows(config)}
    if name not in rows:
        raise ConfigError(f"no adapter {name!r}: there are {', '.join(rows)}")
    return rows[name]


def _describe_standing(row: dict[str, Any]) -> str:
    from fleetcast.service.config import GRPC_SERVICES

    if row["name"] == "external_metrics":
        return "asked by a Kubernetes API server"
    if row["name"] in GRPC_SERVICES:
        return "asked by gRPC"
    if row["kind"] == "answerer":
        return f"asked at /v1/adapters/{row['name']}"
    if row["kind"] == "executor":
        words = [f"{row['wishes']} actions", f"{row['writes']} begun", f"{row['ours']} under way"]
        words += ["withdrawn"] if row["withdrawn"] else []
        return ", ".join([*words, row["error"]] if row["error"] else words)
    if row["board"] is None and not row["withdrawn"]:
        return str(row["error"] or "has not run yet")
    words = [f"{row['ours']} marked", f"{row['writes']} written", f"{row['held_back']} held back"]
    words += ["withdrawn"] if row["withdrawn"] else []
    return ", ".join([*words, row["error"]] if row["error"] else words)


def _withdraw_or_wait(
    config: "Config", records: "AdapterRecords", name: str, written_ms: int | None
) -> "tuple[bool, AdapterStatus | None]":
    """Withdraw an adapter. If the service runs, wait until the service has withdrawn it.

    Returns whether everything is undone, and the adapter's status if known.
    """
    from fleetcast.service.adapters import AdapterHost
    from fleetcast.service.state_folder import StateError, lock_role

    try:
        with lock_role(config, "adapters", patience_s=0.0):
            host = AdapterHost(config, config.make_clock())
            status = asyncio.run(host.withdraw(name))
            return status.withdrawn, status
    except StateError:
        return _wait_for_withdrawal(records, name, written_ms)


def _wait_for_withdrawal(
    records: "AdapterRecords", name: str, written_ms: int | None
) -> "tuple[bool, AdapterStatus | None]":
    """Wait for the service to withdraw an adapter, at most TAKES_S.

    Returns whether the adapter is withdrawn, and its status. written_ms: the time of the previous status. That status
    is ignored. Without a fresh board, it may say that the adapter is withdrawn although marks were written later.
    """
    deadline = time.monotonic() + TAKES_S
    while True:
        written = records.read_status()
        status = next((row for row in written.adapters if row.name == name), None)
        is_done = status is not None and status.withdrawn and status.board is None and written.as_of_ms != written_ms
        if is_done or time.monotonic() >= deadline:
            return is_done, status
        time.sleep(POLL_S)


def _format_time(ms: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
