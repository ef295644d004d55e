"""The `fleetcast` command, with one file for each group.

Heavy imports happen inside the functions that need them.
"""

import os
import re
import sys
from importlib import metadata
from typing import Annotated, NoReturn

import typer

from fleetcast.cli import (
    actions,
    adapters,
    audit,
    backfill,
    check,
    history,
    produce,
    queues,
    run,
    state,
    state_backup,
    topology,
    why,
)
from fleetcast.cli.demo import demo
from fleetcast.cli.kit import logs
from fleetcast.cli.kit.checked_command import use_checked_commands
from fleetcast.cli.kit.lab_extra import explain_missing_module
from fleetcast.cli.kit.screen import echo
from fleetcast.cli.lab import backtest, bench, data, drift, evaluate, models, play, simulate, train
from fleetcast.fleet.errors import ConfigError, FleetcastError
from fleetcast.fleet.process import PARENT_VARIABLE, watch_parent

UMASK_VARIABLE = "FLEETCAST_UMASK"
PRIVATE_UMASK = "077"

app = typer.Typer(
    name="fleetcast",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich would swallow "[now]" as markup and break lines where the source does
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="A weather service for GPU fleets: node risk, stragglers, demand and placement from live telemetry.\n\n"
    "Start here:  fleetcast demo   (a simulated fleet, the console at http://127.0.0.1:8080/)\n\n"
    "Your fleet:  fleetcast run --scrape http://node1:9400/metrics --scrape http://node2:9400/metrics",
)
app.command("run")(run.run)
app.command("demo")(demo.demo)
app.command("backfill")(backfill.backfill)
app.command("bench")(bench.run_benchmarks)
app.command("check-config")(check.check_config_file)
app.add_typer(actions.app, name="actions")
app.command("why")(why.explain)
app.add_typer(adapters.app, name="adapters")
app.add_typer(produce.app, name="produce")
app.add_typer(simulate.app, name="simulate")
for command in (state_backup.backup, state_backup.verify, state_backup.restore):
    state.app.command(command.__name__)(command)
app.add_typer(state.app, name="state")
app.add_typer(history.app, name="history")
app.add_typer(audit.app, name="audit")
app.add_typer(data.app, name="data")
app.add_typer(topology.app, name="topology")
app.add_typer(queues.app, name="queues")
app.add_typer(train.app, name="train")
app.add_typer(models.app, name="models")
app.command("play")(play.play)
app.command("evaluate")(evaluate.evaluate)
app.command("backtest")(backtest.backtest)
app.command("drift")(drift.report_drift)
use_checked_commands(app)


def _print_version(asked: bool) -> None:
    if asked:
        echo(f"fleetcast {metadata.version('fleetcast')}")
        raise typer.Exit


@app.callback()
def define_global_options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Say the version and stop.")
    ] = False,
) -> None:
    """Define the options that come before a command's name."""


def main() -> NoReturn:
    """Run the command and exit. Exit codes: 0 done, 1 the work failed, 2 wrong usage or configuration.

    The reason of a failure is printed on stderr.
    """
    if PARENT_VARIABLE in os.environ:
        from fleetcast.service.process_memory import use_one_heap

        use_one_heap()  # before the thread that watches the parent gets a heap of its own
    watch_parent()
    try:
        set_private_umask()
        logs.configure_logging()
        app()
    except FleetcastError as error:
        logs.report_error(error)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
    except ModuleNotFoundError as error:
        missing = explain_missing_module(error)
        if missing is None:
            raise
        logs.report_error(missing)
        sys.exit(2)
    sys.exit(0)


def set_private_umask() -> None:
    """Set the umask of this process, so that only its own user can read the files that it writes.

    FLEETCAST_UMASK replaces the default. The files contain the names of users and jobs, and may contain
    passwords. Raises ConfigError for an invalid umask.
    """
    text = os.environ.get(UMASK_VARIABLE) or PRIVATE_UMASK
    if not re.fullmatch("0*[0-7]{1,3}", text) or int(text, 8) & 0o700:
        raise ConfigError(f"{UMASK_VARIABLE} = {text!r}: expected an umask such as 077, 027 or 022")
    os.umask(int(text, 8))


if __name__ == "__main__":
    main()
