"""`fleetcast train`: fit the coefficients that ship, or your own. The only place where training meets the simulator."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from training.dataset import Rows

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Fit models.\n\nExample:  fleetcast train risk --seed 7 --out node_risk.json",
)

EPOCH_MS = 1_750_000_000_000
SCRAPE_MS = 15_000
KEEP_EVERY = 4  # scrapes: a row a node and minute


@app.callback()
def _group() -> None:
    """Keeps `risk` a command of its own while it is the only one."""


@app.command("risk")
def risk(
    out: Annotated[Path, typer.Option(help="Where to write the coefficients (JSON).")] = Path("node_risk.json"),
    seed: Annotated[int, typer.Option(help="Same seed, same coefficients.")] = 7,
    runs: Annotated[int, typer.Option(min=3, help="Simulated fleets; the last fifth judges.")] = 10,
    hours: Annotated[float, typer.Option(min=1.0, help="Fleet time of each run.")] = 4.0,
    nodes: Annotated[int, typer.Option(min=4, help="Nodes of each fleet.")] = 24,
) -> None:
    """Fit node risk on simulated faults.

    Example:  fleetcast train risk --seed 7 --out models/fitted/node_risk.json
    """
    import msgspec

    from training.fit import HORIZON_S, fit_risk
    from training.splits import by_run

    rows = []
    for run in range(runs):
        rows.append(simulate_rows(seed * 1000 + run, hours, nodes, HORIZON_S))
        typer.echo(f"run {run + 1} of {runs}: {len(rows[-1]):,} rows", err=True)
    notes = {"seed": seed, "runs": runs, "hours": hours, "nodes": nodes, "source": "fleetcast train risk"}
    fit = fit_risk(by_run(rows), notes)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(msgspec.json.format(msgspec.json.encode(fit), indent=1) + b"\n")
    typer.echo(msgspec.json.encode(fit.notes).decode(), file=sys.stdout)


def simulate_rows(seed: int, hours: float, nodes: int, horizon_s: float) -> "Rows":
    """One run: a fleet with jobs and faults, watched through its pages for `hours`."""
    from cli.watch import WatchedFleet
    from training.dataset import Observer

    fleet = WatchedFleet(seed, nodes)
    observer = Observer(fleet.topology)
    for scrape in range(int(hours * 3600_000) // SCRAPE_MS):
        now_ms = EPOCH_MS + scrape * SCRAPE_MS
        events = fleet.step(now_ms)
        evidence = observer.scrape(fleet.pages(), events, now_ms)
        if scrape % KEEP_EVERY == KEEP_EVERY - 1:
            observer.keep(evidence, now_ms)
    return observer.rows(fleet.faults(), horizon_s)
