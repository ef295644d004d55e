"""`fleetcast state`: checks the parts of the state, and accepts the loss of one.

The command also makes backups of all parts and restores them.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleetcast.cli.kit.options import ConfigOption, StateOption, check_outputs, load_site_config
from fleetcast.cli.kit.screen import echo
from fleetcast.fleet.errors import ConfigError

if TYPE_CHECKING:
    from fleetcast.service.config import Config
    from fleetcast.service.state_identity import Doubt, StateParts

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="The parts of the state folder (ledger, snapshots, board, inbox): check, back up, restore.\n\n"
    "Example:  fleetcast state show",
)

JsonOption = Annotated[str | None, typer.Option("--json", help="Write it as JSON here; - is stdout.")]
UNITS = {"ledger": "line", "snapshot": "number", "board": "number"}  # of positions
MEANS = {
    "ledger": "requests that the lost lines had decided are decided again, and GPUs that they had promised look free "
    "until their jobs are seen running",
    "snapshot": "jobs that run and are not reported again look idle, and their GPUs free",
    "board": "what the lost board said of running jobs is read from snapshot and inbox",
    "inbox": "events that were acknowledged and lay in the lost part are gone: send them again",
}


@app.command("show")
def show_state(config: ConfigOption = None, state: StateOption = None, json_path: JsonOption = None) -> None:
    """Show each part of the state: its identity, its position, and whether it is intact.

    The command also shows which identity and position the other parts have recorded for this part. The command only
    reads files, and Fleetcast may run meanwhile. Exit code 0: the parts agree; 1: one is in doubt, and nothing is
    placed; 2: wrong usage.

    Example:  fleetcast state show --json -
    """
    import msgspec

    from fleetcast.service.state_identity import find_doubts
    from fleetcast.service.state_parts import read_state_parts

    check_outputs(Path(json_path) if json_path else None)
    parts = read_state_parts(load_settings(config, state))
    body = make_report(parts, find_doubts(parts))
    if json_path is None:
        print_report(body)
    elif json_path == "-":
        sys.stdout.buffer.write(msgspec.json.encode(body) + b"\n")
    else:
        Path(json_path).write_bytes(msgspec.json.encode(body) + b"\n")
    if not body["whole"]:
        raise typer.Exit(1)


@app.command("accept")
def accept_loss(config: ConfigOption = None, state: StateOption = None) -> None:
    """Continue with the present state, although a part is lost or old and cannot be restored.

    The state gets a new identity. The records of the other parts about the lost part no longer count, and a
    part that is restored later is refused. The ledger's audit records who accepted what. Fleetcast may
    be running: it continues within a tick.

    Example:  fleetcast state accept
    """
    from fleetcast.service.state_identity import describe_doubt, find_doubts
    from fleetcast.service.state_parts import read_state_parts

    settings = load_settings(config, state)
    parts = read_state_parts(settings)
    found = find_doubts(parts)
    if not found:
        echo("the parts of the state agree: there is nothing to accept")
        return
    for doubt in found:
        echo(f"accepted: {describe_doubt(doubt)}")
        echo(f"    it means: {MEANS[doubt.part]}")
    identity = renew_identity(settings, parts, found)
    echo(f"the state is {identity} from now on; the ledger's audit says so")


@app.command("downgrade")
def downgrade(config: ConfigOption = None, state: StateOption = None) -> None:
    """Make the ledger one that the previous version of Fleetcast reads. Stop Fleetcast before.

    Everything stays except the record of actions, which lies in a copy next to the ledger. The command refuses
    while an action is open. A later start of this version migrates the ledger again.

    Example:  fleetcast state downgrade
    """
    import getpass

    from fleetcast.placement.ledger.ledger import Ledger
    from fleetcast.placement.ledger.migrate import DOWNGRADED
    from fleetcast.service.state_folder import lock_role

    settings = load_settings(config, state)
    if not settings.ledger.is_file():
        raise ConfigError(f"{settings.ledger}: there is no ledger")
    with lock_role(settings, "placer", patience_s=0.0):
        Ledger(settings.ledger).downgrade(settings.make_clock().now_ms(), getpass.getuser())
    echo(f"{settings.ledger} has version {DOWNGRADED} now")


def load_settings(config: Path | None, state: str | None) -> "Config":
    """Return the configuration. Raises ConfigError if its state folder does not exist.

    Without this check, the parts of a mistyped folder would seem to agree.
    """
    settings = load_site_config(config, state)
    if not settings.folder.is_dir():
        raise ConfigError(f"state = {settings.state!r}: no such folder; name another with --state or --config")
    return settings


def renew_identity(config: "Config", parts: "StateParts", found: "list[Doubt]") -> str:
    """Give the present state a new identity, and return that identity.

    Writes the identity into the inbox, and into the ledger if no placer runs.
    """
    import getpass
    import uuid

    from fleetcast.placement.ledger.rows import LedgerError
    from fleetcast.service.state_parts import AcceptedParts, StateFile, read_snapshot_headers, write_identity

    if parts.ledger is None:
        raise LedgerError(f"{config.ledger} cannot be read: move it away, or restore a copy, and accept then")
    was = parts.find_identity() or "without an identity"
    file = StateFile(uuid.uuid4().hex)
    why = "; ".join(doubt.what for doubt in found)
    accepted = AcceptedParts(
        time_ms=config.make_clock().now_ms(),
        by=getpass.getuser(),
        sentence=f"the state, {was} before, is accepted as it is, and is {file.identity} from now on: {why}",
        ledger=(parts.ledger.identity, parts.ledger.position),
        snapshots=[
            (number, row.saved_ms)
            for number, row in read_snapshot_headers(config.get_pipeline_folder(0) / "snapshot").items()
        ],
        expect_head=config.placer.expect_head,
    )
    write_identity(config.inbox, StateFile(file.identity, accepted))
    _write_ledger_identity(config)
    return file.identity


def _write_ledger_identity(config: "Config") -> None:
    """Write the state's identity into the ledger. If a placer runs, print that the placer writes it."""
    from fleetcast.placement.ledger.ledger import Ledger
    from fleetcast.service.placer.state_watch import adopt_identity
    from fleetcast.service.state_folder import StateError, lock_role
    from fleetcast.service.state_parts import read_identity

    try:
        with lock_role(config, "placer", patience_s=0.0):
            ledger, file = Ledger(config.ledger), read_identity(config.inbox)
            if file is not None:
                adopt_identity(ledger, file, [], config.make_clock().now_ms())
            ledger.close()
    except StateError:
        echo("the placer runs: it takes this over by itself", err=True)


def make_report(parts: "StateParts", found: "list[Doubt]") -> dict[str, Any]:
    """Return the document that `fleetcast state show --json` writes.

    A position is a number. For the inbox it is segment -> offset in bytes.
    """
    from fleetcast.ingest.inbox.segments import format_segment_name

    doubts, rows = {doubt.part: doubt for doubt in found}, []
    end = {format_segment_name(writer, number): offset for writer, (number, offset) in parts.inbox.end.items()}
    for name in ("ledger", "snapshot", "board", "inbox"):
        part, doubt = getattr(parts, name), doubts.get(name)
        claimed = {other: getattr(seen, name) for other, seen in parts.find_views().items()}
        rows.append(
            {
                "part": name,
                "identity": part.identity if part else "",
                "position": end if name == "inbox" else part.position if part else None,
                "seen_by": {other: seen for other, seen in claimed.items() if seen or (name == "ledger" and seen == 0)},
                "whole": part is not None and doubt is None,
                "verdict": doubt.what if doubt else "whole" if part else "cannot be read",
                "since_ms": doubt.since_ms if doubt else None,
            }
        )
    return {"identity": parts.find_identity(), "whole": all(row["whole"] for row in rows), "parts": rows}


def print_report(body: dict[str, Any]) -> None:
    """Print the document of `make_report` as lines of text."""
    echo(f"state {body['identity'] or 'without an identity: it was never started'}")
    for row in body["parts"]:
        unit = UNITS.get(row["part"], "")
        echo(f"{row['part']:9} {row['verdict']}")
        echo(f"          it is at {_format_position(row['position'], unit)}, of the state {row['identity'] or '-'}")
        for other, seen in row["seen_by"].items():
            echo(f"          {other} saw it at {_format_position(seen, unit)}")
    if not body["whole"]:
        echo("Nothing is placed. Put the part back that is lost, or go on without it: fleetcast state accept")


def _format_position(position: int | dict[str, int] | None, unit: str) -> str:
    if isinstance(position, dict):
        return ", ".join(f"byte {offset:,} of {name}" for name, offset in position.items()) or "its beginning"
    return f"{unit} {position:,}" if position else "its beginning"
