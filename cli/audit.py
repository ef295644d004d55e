"""`fleetcast audit`: checks whether the ledger's audit trail and stored replies are unchanged."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleetcast.cli.kit.screen import echo, echo_text

if TYPE_CHECKING:
    from fleetcast.placement.ledger.verify import LedgerVerdict

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="The audit trail: who asked for what, what was decided; each line has the hash of the one before.\n\n"
    "Example:  fleetcast audit verify",
)


@app.callback()
def _define_group() -> None:
    """Make `verify` a subcommand. With a single command and no callback, Typer would drop its name."""


@app.command("verify")
def verify_trail(
    config: Annotated[Path | None, typer.Option(help="Configuration file that says where the state is.")] = None,
    state: Annotated[str | None, typer.Option(help="State folder with the ledger [var].")] = None,
    head: Annotated[
        str | None,
        typer.Option(help="The hash of a line, saved elsewhere when it was the last one. It must be in the chain."),
    ] = None,
    json_path: Annotated[str | None, typer.Option("--json", help="Write the result as JSON; - is stdout.")] = None,
) -> None:
    """Check the audit chain, the stored replies, the promises and the queue. Changes nothing.

    The command may run while the service runs. Exit code 0: everything is unchanged; 1: something
    has changed, or there is no ledger to read; 2: wrong usage.

    Lines cut off at the end, and a chain rewritten as a whole, show only by comparison with a head that
    was stored elsewhere. `GET /v1/audit` returns the head, and the placer logs it
    at its start, once a day and at its end.

    Examples:

      fleetcast audit verify --state var

      fleetcast audit verify --head "$(cat head-of-last-monday)"
    """
    from fleetcast.cli.kit.options import check_outputs, load_site_config
    from fleetcast.fleet.errors import ConfigError
    from fleetcast.placement.ledger.verify import verify_ledger

    if head is not None and not re.fullmatch("[0-9a-f]{64}", head):  # an empty one is a file that was not found
        raise ConfigError(f"--head {head!r}: expected the 64 hexadecimal digits of a line's hash")
    check_outputs(Path(json_path) if json_path else None)
    path = load_site_config(config, state).ledger
    verdict = verify_ledger(path, head or "")
    if json_path is None:
        for line in _describe_verdict(path, head, verdict):
            echo(line)
    else:
        _write_json(json_path, {"ledger": str(path), "ok": verdict.is_intact, **asdict(verdict)})
    if not verdict.is_intact:
        _print_findings(path, verdict)
        raise typer.Exit(1)


def _describe_verdict(path: Path, head: str | None, verdict: "LedgerVerdict") -> list[str]:
    lines = [
        f"{path}: {verdict.lines:,} lines of audit, {verdict.replies:,} replies, {verdict.intents:,} intents, "
        f"{verdict.waiting:,} waiting",
        f"head: line {verdict.head.audit_id}, {verdict.head.hash}",
    ]
    if verdict.unchained:
        lines.append(f"lines 1..{verdict.unchained} are of version 1: they were chained when it was migrated")
    if head and verdict.held is not None:
        lines.append(
            f"the head that you saved is line {verdict.held}; {verdict.head.audit_id - verdict.held} came since"
        )
    if verdict.is_intact:
        lines.append("everything is as it was written")
    return lines


def _print_findings(path: Path, verdict: "LedgerVerdict") -> None:
    echo(f"fleetcast: {path} is not what was written:", err=True)
    for finding in verdict.findings:
        echo(f"  {finding.sentence}", err=True)
    if verdict.left_out:
        echo(f"  … and {verdict.left_out:,} more", err=True)


def _write_json(path: str, document: Any) -> None:
    text = json.dumps(document) + "\n"
    if path == "-":
        echo_text(text, nl=False)
    else:
        Path(path).write_text(text, encoding="utf-8")
