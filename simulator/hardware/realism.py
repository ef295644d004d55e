"""The likeness of a healthy simulated fleet to real H100 runs: distances between distributions.

Recorded steady phases are compared with simulated gangs of the same work. The distance is the
Kolmogorov-Smirnov statistic (0 to 1):

    power shape         W around each GPU's median, averaged over a second
    warmth              °C above 29.5 per W, which separates the two cooling groups of a chassis
    port equality       largest over mean of a node's active ports, traffic per second
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from pyarrow import csv

from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.requests import RankPlacement
from fleetcast.simulator.hardware.cluster import FleetSpec, SimulatedFleet
from fleetcast.simulator.hardware.h100 import FOLDER
from fleetcast.simulator.hardware.telemetry import GPU_ROW, PORT_ROW
from fleetcast.simulator.hardware.workload import WorkloadProfile, draw_job_profile

if TYPE_CHECKING:
    from pandas import DataFrame

KIND_OF = {"t2": "data_parallel", "t3": "accumulation", "t13_node0": "tensor_pipeline"}
NETWORK_OF = {
    "t10_node0": "data_parallel",
    "t10_node1": "data_parallel",
    "t11_node0": "tensor_pipeline",
    "t11_node1": "tensor_pipeline",
}
INLET_C = 29.5
GPUS = 8
JOBS, SECONDS, SETTLED_S = 8, 140, 60
ACTIVE_BYTES_PER_S = 1e7

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Likeness:
    """The comparison of one quantity in one run.

    distance: from 0 to 1. real, simulated: the 10th, 50th and 90th percentiles.
    """

    run: str
    quantity: str
    distance: float
    real: tuple[float, float, float]
    simulated: tuple[float, float, float]

    @classmethod
    def from_values(cls, run: str, quantity: str, real: Values, simulated: Values) -> "Likeness":
        return cls(
            run, quantity, compute_ks_distance(real, simulated), _compute_quantiles(real), _compute_quantiles(simulated)
        )

    def format_row(self) -> str:
        sides = [" ".join(f"{value:9.4g}" for value in side) for side in (self.real, self.simulated)]
        return f"{self.run:10} {self.quantity:14} {self.distance:6.3f}   {sides[0]}   {sides[1]}"


HEADER = f"{'run':10} {'quantity':14} {'KS':>6}   {'real p10, p50, p90':>29}   {'simulated p10, p50, p90':>29}"


def compute_ks_distance(one: Values, other: Values) -> float:
    """Return the largest gap between the empirical distribution functions of two samples.

    >>> compute_ks_distance(np.array([1.0, 2.0]), np.array([3.0, 4.0]))
    1.0
    """
    both = np.sort(np.concatenate([one, other]))
    shares = [np.searchsorted(np.sort(side), both, side="right") / len(side) for side in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


def _compute_quantiles(values: Values) -> tuple[float, float, float]:
    low, middle, high = np.quantile(values, (0.1, 0.5, 0.9)).tolist()
    return low, middle, high


def compare_with_recordings(data: Path, seed: int = 1) -> Iterator[Likeness]:
    """Yield a comparison for each run and quantity. Runs that the folder does not contain are left out.

    Raises ConfigError.
    """
    for run, kind in KIND_OF.items():
        path = data / FOLDER / f"{run}_telemetry.csv.gz"
        if path.exists():
            real, made = read_recorded_gpus(path), simulate_gpus(kind, seed)
            for quantity in real:
                yield Likeness.from_values(run, quantity, real[quantity], made[quantity])
    for run, kind in NETWORK_OF.items():
        path = data / FOLDER / f"{run}_ib.csv.gz"
        if path.exists() and len(real_ports := read_recorded_ports(path)):
            yield Likeness.from_values(run, "port equality", real_ports, simulate_ports(kind, seed))


def read_recorded_gpus(path: Path) -> dict[str, Values]:
    """Return quantity → its values in the steady phase of a recorded run, over GPUs and seconds."""
    names = ["power_w", "temp_c"]
    table = _read_steady_rows(path, ["gpu", *names])
    second = (table["timestamp"] - table["timestamp"].min()).astype(int)
    means = table.groupby([table["gpu"], second])[names].mean().dropna()
    grids = [means[name].unstack(0).dropna().to_numpy(np.float64) for name in names]
    return _compute_quantities(*grids)


def _read_steady_rows(path: Path, names: list[str]) -> "DataFrame":
    """Read the columns `timestamp` and `names` of the steady phase.

    Raises ConfigError that names the file.
    """
    columns = ["phase", "timestamp", *names]
    try:
        table = csv.read_csv(path, convert_options=csv.ConvertOptions(include_columns=columns)).to_pandas()
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path}: no table of {', '.join(columns)} ({error})") from None
    steady = table[table["phase"] == "steady"]
    if steady.empty:
        raise ConfigError(f"{path}: no row of the phase steady")
    return steady


def simulate_gpus(kind: str, seed: int) -> dict[str, Values]:
    """Return quantity → its values for simulated gangs of one node each, every second after their warm-up."""
    fleet = _make_fleet(kind, seed, nodes_a_job=1)
    rows = [GPU_ROW["DCGM_FI_DEV_POWER_USAGE"], GPU_ROW["DCGM_FI_DEV_GPU_TEMP"]]
    seen = []
    for second in range(SECONDS):
        fleet.advance(second * 1000)
        seen.append(fleet.sensors.gpu[rows].reshape(len(rows), -1).copy())
    power, temp = np.stack(seen, axis=1)[:, SETTLED_S:]
    return _compute_quantities(power, np.trunc(temp))


def _compute_quantities(power: Values, temp: Values) -> dict[str, Values]:
    """Return quantity → its values. power, temp: (second, GPU) in W and °C."""
    return {
        "power shape": (power - np.median(power, axis=0)).ravel(),
        "warmth": ((temp - INLET_C) / power).ravel(),
    }


def read_recorded_ports(path: Path) -> Values:
    names = [f"ib{port}_tx_bytes_s" for port in range(GPUS)]
    table = _read_steady_rows(path, names)
    second = (table["timestamp"] - table["timestamp"].min()).astype(int)
    return _compute_peak_ratios(table.groupby(second)[names].mean().to_numpy(np.float64))


def simulate_ports(kind: str, seed: int) -> Values:
    fleet = _make_fleet(kind, seed, nodes_a_job=2)
    counts = []
    for second in range(SECONDS):
        fleet.advance(second * 1000)
        counts.append(fleet.sensors.port[PORT_ROW["port_data_transmitted_bytes_total"]].copy())
    rates = np.diff(np.stack(counts), axis=0)
    return np.concatenate([_compute_peak_ratios(rates[:, row]) for row in range(rates.shape[1])])


def _compute_peak_ratios(rates: Values) -> Values:
    """Return the busiest port's traffic divided by the mean of the ports, for each second with traffic.

    Ports without traffic are left out. rates: (second, port).
    """
    active = rates[:, np.median(rates, axis=0) > ACTIVE_BYTES_PER_S]
    if not active.shape[1]:
        return np.empty(0)
    active = active[active.mean(axis=1) > ACTIVE_BYTES_PER_S]
    largest: Values = active.max(axis=1) / active.mean(axis=1)
    return largest


def _make_fleet(kind: str, seed: int, nodes_a_job: int) -> SimulatedFleet:
    """Make a healthy fleet with steady gangs of one kind of work, each on `nodes_a_job` nodes."""
    fleet = SimulatedFleet(FleetSpec(nodes=JOBS * nodes_a_job), seed)
    every = tuple(range(GPUS))
    for job, profile in enumerate(_draw_profiles(kind, seed, nodes_a_job * GPUS)):
        names = fleet.names[job * nodes_a_job : (job + 1) * nodes_a_job]
        ranks = [RankPlacement(rank, node, every) for rank, node in enumerate(names)]
        fleet.start_job(f"j{job}", 1, ranks, profile, -200_000)
    return fleet


def _draw_profiles(kind: str, seed: int, gpus: int) -> Iterator[WorkloadProfile]:
    drawn = (draw_job_profile(f"{kind}-{number}", gpus, seed=seed) for number in range(10_000))
    alike = (profile for profile in drawn if profile.kind == kind and profile.checkpoint_every_s > SECONDS + 200)
    return (profile for _, profile in zip(range(JOBS), alike, strict=False))
