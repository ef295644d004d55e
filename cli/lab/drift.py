"""`fleetcast drift`: compares recent features and errors with those of the data that a model was fitted on."""

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fleetcast.cli.kit.options import (
    ArchiveOption,
    ConfigOption,
    DataOption,
    HtmlOption,
    JsonOption,
    ModelsOption,
    SetOption,
    StateOption,
    UntilOption,
    check_choice,
    check_outputs,
    choose_training_inputs,
    load_site_config,
    print_progress,
    write_html,
    write_json,
)
from fleetcast.cli.kit.screen import echo

if TYPE_CHECKING:
    from fleetcast.models.versions.drift import Drift
    from fleetcast.models.versions.registry import Registry
    from fleetcast.service.config import Config
    from fleetcast.training.fits.drift_report import FeatureDrift

KINDS = ("demand", "duration")


def report_drift(
    kind: Annotated[str, typer.Argument(help="Which model.", metavar="|".join(KINDS))],
    data: DataOption = None,
    archive: ArchiveOption = None,
    sets: SetOption = None,
    since: Annotated[
        str | None, typer.Option(help="Compare what came after with what was before [the end of the model's data].")
    ] = None,
    until: UntilOption = None,
    models: ModelsOption = None,
    json: JsonOption = None,
    html: HtmlOption = None,
    config: ConfigOption = None,
    state: StateOption = None,
) -> None:
    """Show the features that moved since the model was fitted (PSI, KS), and its recent errors.

    The command also shows whether the model should be fitted again. Recent errors are those of the service that
    runs on the same state folder. `fleetcast train KIND --if-drift` acts on the same conditions.
    Features that moved are only reported.

    Examples:

      fleetcast drift demand

      fleetcast drift demand --data ~/data --set demand/venus --since 2020-08-01 --html drift.html
    """
    from fleetcast.models.versions.registry import Registry
    from fleetcast.training.fits.drift_report import measure_demand_drift, measure_duration_drift, render_drift_page

    check_choice("kind", kind, KINDS)
    check_outputs(json, html=html)
    loaded = load_site_config(config, state)
    serving = measure_recent_drift(kind, Registry(models or loaded.models_folder), loaded)
    since_ms = _choose_since_ms(since, serving, kind)
    with print_progress(f"drift {kind}") as say:
        source = choose_training_inputs(loaded, data, archive, sets, until, say)
        if kind == "demand":
            found = measure_demand_drift(source.read_panels(), since_ms)
        else:
            found = measure_duration_drift(source.read_jobs(), since_ms)
    reasons = serving.reasons if serving else {}
    _print_drift(found, serving)
    write_json(json, {"kind": kind, "since_ms": since_ms, "serving": serving, "moved": _make_rows(found)})
    write_html(html, lambda: render_drift_page(f"Drift: {kind}", found, reasons))


def measure_recent_drift(kind: str, registry: "Registry", config: "Config") -> "Drift | None":
    """Compare the serving version's recent errors with its card. Returns None if no version serves.

    The errors come from the service's board. Without errors, only the version's age counts.
    """
    from fleetcast.models.versions.drift import RecentAccuracy, judge_drift
    from fleetcast.service.board.board import BoardReader
    from fleetcast.service.pipeline.model_monitor import make_drift_limits

    version = registry.find_current_version(kind)
    if version is None:
        return None
    card, recent, now_ms = registry.read_version_card(kind, version), RecentAccuracy(), time.time_ns() // 1_000_000
    board = BoardReader(config.board).latest()
    if board is not None and "doc.models" in board:
        document = board.json("doc.models")
        for row in document["rows"]:
            if (row["kind"], row["version"]) == (kind, version):
                recent = RecentAccuracy(row["coverage_80"]["recent"], row["loss_vs_best_naive"], row["forecasts"])
                now_ms = document["as_of_ms"]
    return judge_drift(card, recent, now_ms, make_drift_limits(config))


def _choose_since_ms(since: str | None, serving: "Drift | None", kind: str) -> int:
    from fleetcast.fleet.errors import ConfigError
    from fleetcast.training.sites.histories import parse_moment_ms

    if since is not None:
        return parse_moment_ms("--since", since)
    if serving is None:
        raise ConfigError(f"no version of {kind} serves, so say --since when to compare what came after with before")
    return serving.fitted_until_ms


def _print_drift(found: "list[FeatureDrift]", serving: "Drift | None") -> None:
    for one in found:
        echo(f"{one.name}: {_describe_drifted_features(one)}")
    if serving is None:
        echo("no version serves")
    elif serving.reasons:
        echo(f"{serving.kind} {serving.version} asks to be fitted again: {'; '.join(serving.reasons.values())}")
    else:
        echo(_explain_no_refit(serving, sum(len(one.drifted_features) for one in found)))


def _describe_drifted_features(one: "FeatureDrift") -> str:
    """Describe in words which features drifted."""
    far = ", ".join(
        f"{row.feature} (PSI {row.psi:.2f}, {row.by_chance:.2f} by chance)" for row in one.drifted_features[:5]
    )
    said = f"{len(one.drifted_features)} of {len(one.rows)} features drifted{': ' + far if far else ''}"
    if one.undecided_features:
        fewest = min(row.independent for row in one.undecided_features)
        rows = "1 independent row" if fewest == 1 else f"{fewest} independent rows"
        said += f"; of {len(one.undecided_features)} too few rows to say (as few as {rows}): their PSI may be chance"
    return said


def _explain_no_refit(serving: "Drift", drifted: int) -> str:
    """Explain in words why the version need not be fitted again. drifted: the number of drifted features."""
    from fleetcast.models.versions.drift import DriftLimits

    fewest, n = DriftLimits().fewest, serving.recent.n
    said = f"{serving.kind} {serving.version} need not be fitted again: "
    said += "its errors and its age are within their limits" if n >= fewest else "its age is within its limit"
    if n < fewest:
        said += f"; {n:,} of its forecasts have matured, its errors are judged from {fewest:,} on"
    return said + ("; features that drifted ask for nothing by themselves" if drifted else "")


def _make_rows(found: "list[FeatureDrift]") -> list[dict[str, Any]]:
    import msgspec

    return [{"series": one.name, **msgspec.to_builtins(row)} for one in found for row in one.rows]
