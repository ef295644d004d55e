"""`fleetcast evaluate straggler|risk --curve`: quality and false alarms along an axis.

The axis is the magnitude of faults, the scrape interval or the missing telemetry. Small fleets with faults
and look-alikes are simulated at each point, from the same seeds. They are evaluated like runs of
`fleetcast simulate faults`. A run needs about ten seconds of one core.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from fleetcast.cli.kit.options import check_outputs, write_json
from fleetcast.cli.kit.results_table import write_table
from fleetcast.fleet.errors import ConfigError

if TYPE_CHECKING:
    from fleetcast.simulator.faults.fault_file import FaultFile
    from fleetcast.training.reports.curves import CurvePoint

CURVES: dict[str, tuple[float, ...] | tuple[str, ...]] = {
    "magnitude": (0.25, 0.5, 0.75, 1.0, 1.25),
    "interval": (15.0, 30.0, 60.0),
    "drop": ("nothing", "prof", "host", "xid", "ib", "default", "default+ib+xid"),
}
UNITS = {
    "magnitude": "times the usual magnitude",
    "interval": "seconds from scrape to scrape",
    "drop": "telemetry left out",
}
NODES, HOURS = 12, 2.0
FAULT_SCALE, DECOY_SCALE = 2500.0, 6.0  # ten faults and as many look-alikes a run
LONGEST_S = 1200.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class CurveOutputs:
    """The files that the evaluation of a curve writes. A file that is None is not written."""

    json: Path | None
    results: Path | None
    plot: Path | None


def evaluate_curve(
    task: str,
    curve: str | None,
    beside: Mapping[str, object],
    seeds: range,
    drop: Sequence[str],
    to: CurveOutputs,
    say: Say,
) -> None:
    """Evaluate every point of a curve, and write the files.

    beside: the other options on the command line. drop: telemetry that is left out
    (`fleetcast.training.sets.dropped`). Raises ConfigError for options that cannot be combined.
    """
    from fleetcast.training.reports.curves import draw_curve, make_curve_table
    from fleetcast.training.sets.dropped import find_dropped_metrics

    find_dropped_metrics(drop)
    named = check_curve(task, curve, {**beside, "drop": drop or None} if curve == "drop" else beside)
    check_outputs(to.json, results=to.results, plot=to.plot)
    without = {"drop": list(drop)} if drop else {}
    points = evaluate_points(task, named, seeds, say, **without)
    axis, runs = UNITS[named], [f"--curve={named}", f"--seed={seeds.start}", f"--runs={len(seeds)}"]
    left_out = [f"--drop={name}" for name in drop]
    write_json(to.json, {"task": task, "curve": named, "seeds": list(seeds), **without, "points": points})
    if to.plot is not None:
        to.plot.write_text(draw_curve(task, axis, points), encoding="utf-8")
        say(f"wrote {to.plot}")
    if to.results is not None:
        name = " ".join(["evaluate", task, f"--curve={named}", *left_out])
        write_table(
            to.results, name, ["fleetcast", "evaluate", task, *runs, *left_out], make_curve_table(task, axis, points)
        )
        say(f"wrote {to.results}")


def check_curve(task: str, curve: str | None, beside: Mapping[str, object]) -> str:
    """Return the curve's name. Raises ConfigError if it is unknown, or for options that it cannot have.

    beside: the other options on the command line.
    """
    if curve not in CURVES:
        raise ConfigError(f"--curve {curve}: expected one of {', '.join(CURVES)}")
    if task not in ("straggler", "risk"):
        raise ConfigError(f"--curve is of `evaluate straggler` and `evaluate risk`; {task} judges no simulated fleet")
    named = [f"--{name}" for name, value in beside.items() if value is not None]
    if named:
        raise ConfigError(f"--curve simulates what it judges: leave out {', '.join(named)}")
    return curve


def evaluate_points(task: str, curve: str, seeds: Sequence[int], say: Say, **options: Any) -> "list[CurvePoint]":
    """Return the results at each point of a curve: each magnitude, interval or set of left-out telemetry.

    options: passed on to the evaluation.
    """
    from fleetcast.simulator.instrument import simulate_faults
    from fleetcast.training.reports.curves import format_point_label, make_curve_point

    points = []
    evaluate = import_module(f"fleetcast.training.judges.{task}").evaluate
    with TemporaryDirectory(prefix="fleetcast-curve-") as root:
        for at in CURVES[curve]:
            folder = Path(root) / (curve if isinstance(at, str) else f"{at:g}")  # the same fleets, whatever is left out
            if not folder.exists():
                for seed in seeds:
                    simulate_faults(make_fault_settings(curve, at, seed), folder)
            left_out = {"drop": at.split("+")} if isinstance(at, str) and at != "nothing" else {}
            results = evaluate(folder, folder, seeds[0], lambda line: None, **options, **left_out)
            points.append(make_curve_point(task, at, results))
            say(f"{format_point_label(at)} {UNITS[curve]}: {points[-1].format_values()}")
    return points


def make_fault_settings(curve: str, at: float | str, seed: int) -> "FaultFile":
    """Return the settings of the simulated run with one seed at one point of a curve.

    at: the strength of the faults, or the seconds between scrapes. Look-alikes keep their full strength. On
    the curve of missing telemetry all runs have the usual settings, because telemetry is left out afterwards.
    """
    from msgspec.structs import replace

    from fleetcast.simulator.faults.fault_file import DrawTable, FaultFile, FleetTable, JobsTable
    from fleetcast.simulator.faults.magnitudes import scale_faults

    file = FaultFile(
        name=curve if isinstance(at, str) else f"{curve}-{at:g}",
        seed=seed,
        hours=HOURS,
        fleet=FleetTable(nodes=NODES),
        jobs=JobsTable(sizes=(1, 2, 4), weights=(0.2, 0.4, 0.4)),
        draw=DrawTable(scale=FAULT_SCALE, decoy_scale=DECOY_SCALE, precursor_share=0.5, limit_s=LONGEST_S),
    )
    if isinstance(at, str):
        return file
    if curve == "interval":
        return replace(file, interval_s=at)
    return replace(file, kinds=scale_faults(file.kinds, at))
