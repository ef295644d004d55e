"""`fleetcast train`: fits models on a site's history or on data sets.

The command also fits, on the simulator, the coefficients that ship with the program.
"""

import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetcast.cli.kit.options import (
    ArchiveOption,
    ConfigOption,
    DaskOption,
    DataOption,
    ForecasterOption,
    ModelsOption,
    ProcessesOption,
    SeedOption,
    SetOption,
    StateOption,
    UntilOption,
    choose_training_inputs,
    load_own_forecasters,
    load_site_config,
    load_site_topology,
    print_progress,
)
from fleetcast.cli.kit.screen import echo
from fleetcast.cli.lab.drift import measure_recent_drift
from fleetcast.fleet.redaction import redact_secrets

if TYPE_CHECKING:
    from fleetcast.models.risk.hazard import HistoryFit
    from fleetcast.models.risk.node_risk import RiskFit
    from fleetcast.training.fits.retrain import TrainingOutcome, TrainingPlan
    from fleetcast.training.replay.dataset import RiskRows

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Fit models: judged out of sample, stored as a version with a card, serving where the gate allows.\n\n"
    "Examples:  fleetcast train demand\n\n"
    "           fleetcast train duration --data ~/data --set jobs/ricc",
)

EPOCH_MS = 1_750_000_000_000
SCRAPE_MS = 15_000
OWN = "own"  # archive: the one that the configuration names
KEEP_EVERY = 4  # scrapes: a row a node and minute

PromoteOption = Annotated[
    bool, typer.Option("--promote/--no-promote", help="Let it serve, if it beats the best baseline out of sample.")
]
WindowsOption = Annotated[int, typer.Option(min=1, max=50, help="Windows of the back-test that judges it.")]
MlflowOption = Annotated[str | None, typer.Option("--mlflow", help="Tracking URI that gets card and files, too.")]
DriftOption = Annotated[
    bool, typer.Option("--if-drift", help="Only where none serves, or the one that does asks for it. For cron.")
]


def fit_forecaster(
    context: typer.Context,
    data: DataOption = None,
    archive: ArchiveOption = None,
    sets: SetOption = None,
    until: UntilOption = None,
    seed: SeedOption = 0,
    windows: WindowsOption = 1,
    models: ModelsOption = None,
    promote: PromoteOption = True,
    if_drift: DriftOption = False,
    forecaster: ForecasterOption = None,
    mlflow: MlflowOption = None,
    dask: DaskOption = None,
    processes: ProcessesOption = 1,
    config: ConfigOption = None,
    state: StateOption = None,
) -> None:
    """Fit the model that the command names: a forecaster of demand or of run times."""
    from fleetcast.training.fits.retrain import TrainingPlan

    kind = context.info_name or ""
    own = tuple(load_own_forecasters(forecaster, kind, "train"))
    plan = TrainingPlan(kind, _format_command_line(context), seed, windows, dask, processes, own)
    _train_version(plan, (data, archive, sets, until), (config, state, models), promote, if_drift, mlflow)


DEMAND_HELP = """Fit the demand forecaster on this site's archive, or on data sets.

Examples:

  fleetcast train demand

  fleetcast train demand --data ~/data --set demand/venus --until 2020-08-10 --no-promote

  fleetcast train demand --if-drift          (in a cron job, next to a running service)
"""
DURATION_HELP = """Fit the run times of jobs on this site's archive, or on data sets.

Examples:

  fleetcast train duration

  fleetcast train duration --data ~/data --set jobs/ricc --windows 3
"""
app.command("demand", help=DEMAND_HELP)(fit_forecaster)
app.command("duration", help=DURATION_HELP)(fit_forecaster)


def _format_command_line(context: typer.Context) -> str:
    """Return the command line with the options that were given, without the secrets in URLs."""
    words = ["fleetcast", "train", context.info_name or ""]
    for option in context.command.params:
        name = option.name or ""
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[name]
        if isinstance(value, bool):
            words.append(option.opts[0] if value else (option.secondary_opts or option.opts)[0])
        else:
            for one in value if isinstance(value, list | tuple) else [value]:
                words += [option.opts[0], redact_secrets(str(one))]
    return shlex.join(words)


def _train_version(
    plan: "TrainingPlan",
    source: tuple[Path | None, str | None, list[str] | None, str | None],
    places: tuple[Path | None, str | None, Path | None],
    promote: bool,
    if_drift: bool,
    mlflow: str | None,
) -> None:
    from fleetcast.models.versions.registry import Registry
    from fleetcast.training.fits.retrain import train

    config = load_site_config(*places[:2])
    registry = Registry(places[2] or config.models_folder)
    if if_drift:
        serving = measure_recent_drift(plan.kind, registry, config)
        if serving is not None and not serving.reasons:
            echo(f"{plan.kind} {serving.version} serves, and nothing asks for another")
            return
        echo("; ".join(serving.reasons.values()) if serving else f"no {plan.kind} model serves yet", err=True)
    with print_progress(f"train {plan.kind}") as say:
        now_ms = time.time_ns() // 1_000_000
        trained = train(choose_training_inputs(config, *source, say), plan, registry, now_ms, promote=promote, say=say)
    _print_training_outcome(plan.kind, trained)
    if mlflow is not None:
        from fleetcast.training.fits.tracking import log_version_to_mlflow

        log_version_to_mlflow(mlflow, trained.card, registry.find_folder(plan.kind, trained.version))
        echo(f"recorded in {mlflow}", err=True)


def _print_training_outcome(kind: str, trained: "TrainingOutcome") -> None:
    """Print our metrics and the baselines', and whether the new version serves now."""
    from fleetcast.training.reports.contests import MAIN, describe_comparisons, make_comparisons

    for line in describe_comparisons(make_comparisons(trained.results.rows, MAIN[kind])):
        echo(line)
    gate = trained.card.gate
    echo(f"gate: {gate.sentence if gate else 'nothing was judged'}")
    if trained.objection:
        echo(f"{kind} {trained.version} is stored, and does not serve: {trained.objection}")
    else:
        echo(f"{kind} {trained.version} serves")


@app.command("risk")
def fit_node_risk(
    context: typer.Context,
    archive: Annotated[
        str | None, typer.Option("--archive", help="Fit on what a site has archived: a folder or URL, or `own`.")
    ] = None,
    until: UntilOption = None,
    windows: Annotated[int, typer.Option(min=2, max=12, help="Windows that judge it, with --archive.")] = 4,
    models: ModelsOption = None,
    promote: PromoteOption = True,
    config: ConfigOption = None,
    state: StateOption = None,
    out: Annotated[Path, typer.Option(help="Without --archive: where to write the coefficients (JSON).")] = Path(
        "node_risk.json"
    ),
    seed: Annotated[int, typer.Option(help="Same seed, same coefficients.", min=0)] = 7,
    runs: Annotated[int, typer.Option(min=3, help="Simulated fleets; the last fifth judges.")] = 10,
    hours: Annotated[float, typer.Option(min=1.0, help="Fleet time of each run.")] = 4.0,
    nodes: Annotated[int, typer.Option(min=4, help="Nodes of each fleet.")] = 24,
) -> None:
    """Fit node risk on a site's archive, as a new version.

    Without --archive, fit the coefficients of the next hour on simulated faults.

    Examples:

      fleetcast train risk --archive own

      fleetcast train risk --archive s3://bucket/fleetcast --until 2026-11-01 --no-promote

      fleetcast train risk --seed 7 --out models/fitted/node_risk.json
    """
    if archive is not None:
        _train_site_risk(_format_command_line(context), archive, until, windows, seed, (config, state, models), promote)
        return
    from fleetcast.training.fits.fit import HORIZON_S, fit_risk, split_by_run

    rows = []
    for run in range(runs):
        rows.append(simulate_rows(seed * 1000 + run, hours, nodes, HORIZON_S))
        echo(f"run {run + 1} of {runs}: {len(rows[-1]):,} rows", err=True)
    notes = {"seed": seed, "runs": runs, "hours": hours, "nodes": nodes, "source": "fleetcast train risk"}
    fit = fit_risk(split_by_run(rows), notes)
    _write_fit(out, fit)


def _train_site_risk(
    made_by: str,
    archive: str,
    until: str | None,
    windows: int,
    seed: int,
    places: tuple[Path | None, str | None, Path | None],
    promote: bool,
) -> None:
    """Train the risk of a site: replay its archive, evaluate, and add a version."""
    from fleetcast.ingest.archive.files import ArchiveFiles
    from fleetcast.models.versions.registry import Registry
    from fleetcast.training.fits.retrain import TrainingPlan
    from fleetcast.training.fits.train_site import train_risk
    from fleetcast.training.sites.archive_days import read_days
    from fleetcast.training.sites.histories import parse_moment_ms

    config = load_site_config(*places[:2])
    registry = Registry(places[2] or config.models_folder)
    url = config.archive_url if archive == OWN else archive
    with print_progress("train risk") as say:
        days = read_days(ArchiveFiles(url), parse_moment_ms("--until", until), say, load_site_topology(config))
        plan = TrainingPlan("risk", made_by, seed, windows)
        trained = train_risk(days, plan, registry, time.time_ns() // 1_000_000, promote=promote, say=say)
    _print_training_outcome("risk", trained)


@app.command("interference")
def fit_interference(
    context: typer.Context,
    archive: Annotated[
        str, typer.Option("--archive", help="What a site has archived: a folder or URL, or `own`: the configuration's.")
    ] = OWN,
    until: UntilOption = None,
    models: ModelsOption = None,
    promote: PromoteOption = True,
    config: ConfigOption = None,
    state: StateOption = None,
) -> None:
    """Fit interference on a site's past co-runs, as a new version.

    A service uses it together with the co-runs that it observes itself.

    Example:  fleetcast train interference --archive var/archive
    """
    from fleetcast.ingest.archive.files import ArchiveFiles
    from fleetcast.models.versions.registry import Registry
    from fleetcast.training.fits.retrain import TrainingPlan
    from fleetcast.training.fits.train_co_runs import read_co_runs, train_interference
    from fleetcast.training.sites.histories import parse_moment_ms

    configuration = load_site_config(config, state)
    registry = Registry(models or configuration.models_folder)
    files = ArchiveFiles(configuration.archive_url if archive == OWN else archive)
    with print_progress("train interference"):
        site = read_co_runs(files, parse_moment_ms("--until", until), load_site_topology(configuration))
        plan = TrainingPlan("interference", _format_command_line(context))
        trained = train_interference(site, plan, registry, time.time_ns() // 1_000_000, promote=promote)
    _print_training_outcome("interference", trained)


@app.command("history")
def fit_fault_history(
    faults: Annotated[Path, typer.Option(help="Parquet or CSV of faults: node, start_day, end_day, level if known.")],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the fleet, those that never failed included.")],
    until_day: Annotated[int | None, typer.Option(help="Fit on what was known by this day [the last].")] = None,
    out: Annotated[Path, typer.Option(help="Where to write the coefficients (JSON).")] = Path("fault_history.json"),
) -> None:
    """Fit how the past faults of a node predict its next one.

    A service reads the result from the folder `pipeline.models`.

    Example:  fleetcast train history --faults faults.parquet --nodes 400 --out models/fault_history.json
    """
    from fleetcast.training.judges.risk import fit_history_file

    with print_progress("train history"):
        fit = fit_history_file(faults, until_day, nodes)
    _write_fit(out, fit)


def _write_fit(out: Path, fit: "RiskFit | HistoryFit") -> None:
    """Write the coefficients, and print the notes of their fit."""
    import msgspec

    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(msgspec.json.format(msgspec.json.encode(fit), indent=1) + b"\n")
    echo(msgspec.json.encode(fit.notes).decode())


def simulate_rows(seed: int, hours: float, nodes: int, horizon_s: float) -> "RiskRows":
    """Simulate a fleet with jobs and faults for some hours, and return the training rows of this run.

    As in the service, the rows are computed from the fleet's exporter pages.
    """
    from fleetcast.cli.lab.watch import SimulatedJobs
    from fleetcast.training.replay.dataset import PageObserver

    fleet = SimulatedJobs(seed, nodes)
    observer = PageObserver(fleet.topology)
    for scrape in range(int(hours * 3600_000) // SCRAPE_MS):
        now_ms = EPOCH_MS + scrape * SCRAPE_MS
        events = fleet.advance_to(now_ms)
        evidence = observer.watch.collect_evidence(observer.apply_pages(fleet.read_pages(), events, now_ms))
        if scrape % KEEP_EVERY == KEEP_EVERY - 1:
            observer.add_training_rows(evidence, now_ms)
    return observer.make_risk_rows(fleet.list_faults(), horizon_s)
