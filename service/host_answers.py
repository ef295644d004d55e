"""What a node's page says of its host, as node_exporter told it. Shares are of time, rates per second."""

from typing import Any

import numpy as np

from features.frame import FeatureFrame

# What an answer calls it -> feature (of a counter: its rate).
HOST = {
    "cpu_idle": "cpu_idle_s",
    "cpu_steal": "cpu_steal_s",
    "cpu_pressure": "cpu_pressure",
    "memory_pressure": "memory_pressure",
    "io_pressure": "io_pressure",
    "memory_total_bytes": "memory_total_bytes",
    "memory_available_bytes": "memory_available_bytes",
    "numa_misses_per_s": "numa_misses",
    "nvme_busy": "nvme_busy_s",
    "nvme_read_bytes_per_s": "nvme_read_bytes",
    "nvme_written_bytes_per_s": "nvme_written_bytes",
    "net_rx_bytes_per_s": "net_rx_bytes",
    "net_tx_bytes_per_s": "net_tx_bytes",
    "bmc_power_w": "bmc_power_w",
}
SHARES = [list(HOST).index(name) for name in HOST if name.endswith(("idle", "steal", "pressure", "busy"))]
MOST_SHARE = 1.05  # a little above 1 by the clocks; further above only when a CPU or a drive came or went


def host_answers(node: FeatureFrame | None, n: int) -> list[dict[str, Any] | None]:
    """Of each of n nodes what is known of its host, None where nothing is. Four digits are what such counters tell."""
    answers: list[dict[str, Any] | None] = [None] * n
    if node is None:
        return answers
    columns = np.stack([node.column(feature)[:n] for feature in HOST.values()], axis=1).astype(np.float64)
    known = np.isfinite(columns)
    known[:, SHARES] &= columns[:, SHARES] <= MOST_SHARE
    for row in np.flatnonzero(known.any(axis=1)).tolist():
        told = zip(HOST, columns[row].tolist(), known[row].tolist(), strict=True)
        answers[row] = {name: float(f"{value:.4g}") for name, value, there in told if there}
    return answers
