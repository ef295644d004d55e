"""Recorded H100 telemetry as samples in our units: what sizes on disk are measured with."""

import os
from pathlib import Path

import numpy as np
from pyarrow import csv

from fleet.entities import Entities
from fleet.metrics import metric_row
from fleet.samples import EntityKind, SampleBatch

FOLDER = Path("telemetry") / "h100-phases"
SCRAPE_MS = 15_000
# column -> (metric, factor from the recording's unit to ours)
COLUMNS = {
    "power_w": ("power_w", 1.0),
    "temp_c": ("gpu_temp_c", 1.0),
    "mem_used_mib": ("fb_used_bytes", 2.0**20),
    "mem_total_mib": ("fb_total_bytes", 2.0**20),
    "gpu_util_pct": ("gpu_util", 0.01),
    "sm_util_pct": ("gpu_util", 0.01),
    "mem_util_pct": ("mem_copy_util", 0.01),
    "sm_active": ("sm_active", 1.0),
    "tensor_active": ("tensor_active", 1.0),
    "dram_active": ("dram_active", 1.0),
    "fp16_active": ("fp16_active", 1.0),
    "pcie_tx_bytes_s": ("pcie_tx_bytes_per_s", 1.0),
    "pcie_rx_bytes_s": ("pcie_rx_bytes_per_s", 1.0),
    "pcie_tx_kib": ("pcie_tx_bytes_per_s", 1024.0),
    "pcie_rx_kib": ("pcie_rx_bytes_per_s", 1024.0),
    "nvlink_tx_bytes_s": ("nvlink_tx_bytes_per_s", 1.0),
    "nvlink_rx_bytes_s": ("nvlink_rx_bytes_per_s", 1.0),
    "throttle_reasons": ("clock_event_reasons", 1.0),
    "energy_mj": ("energy_j", 0.001),
    "clock_sm_mhz": ("sm_clock_mhz", 1.0),
    "clock_mem_mhz": ("mem_clock_mhz", 1.0),
}


def h100_samples(entities: Entities, first_ms: int) -> SampleBatch | None:
    """Every reading of every run as a scrape: each run is a node, its readings follow one another every 15 s.

    None where the data folder (FLEETCAST_DATA, else `shared/data` beside the project) does not hold the recording.
    """
    named = os.environ.get("FLEETCAST_DATA")
    data = Path(named) if named else Path(__file__).resolve().parents[2] / "shared" / "data"
    parts = []
    for number, path in enumerate(sorted((data / FOLDER).glob("*_telemetry.csv.gz"))):
        parts += _run(path, f"h{number:02d}", entities, first_ms + number * 1_733)
    return SampleBatch.concat(parts) if parts else None


def _run(path: Path, node: str, entities: Entities, first_ms: int) -> list[SampleBatch]:
    table = csv.read_csv(path)
    gpu = table["gpu"].to_numpy()
    parts = []
    for index in np.unique(gpu).tolist():
        own = gpu == index
        row = entities.of_node(EntityKind.GPU, node, index)
        time_ms = first_ms + np.arange(int(own.sum()), dtype=np.int64) * SCRAPE_MS
        for column in set(table.column_names) & COLUMNS.keys():
            name, factor = COLUMNS[column]
            value = table[column].to_numpy()[own].astype(np.float64)
            value = np.round(value / round(1 / factor), 12) if factor < 1 else value * factor
            known = np.isfinite(value)
            n = int(known.sum())
            metric = np.full(n, metric_row(EntityKind.GPU, name), np.int16)
            parts.append(SampleBatch(EntityKind.GPU, metric, np.full(n, row, np.int32), time_ms[known], value[known]))
    return parts
