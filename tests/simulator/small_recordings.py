"""Small recordings in the layout of the public H100 runs: a run at work, and one that is idle with a model loaded."""

import gzip
from pathlib import Path

from fleetcast.simulator.hardware.h100 import FOLDER, PORTS

COLUMNS = (
    "timestamp,phase,gpu,gpu_model,power_w,temp_c,mem_used_mib,mem_total_mib,gpu_util_pct,mem_util_pct,sm_active,"
    "tensor_active,dram_active,fp16_active,pcie_tx_bytes_s,pcie_rx_bytes_s,nvlink_tx_bytes_s,nvlink_rx_bytes_s,"
    "throttle_reasons,energy_mj"
)


def write_recording(folder: Path, name: str, lines: list[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with gzip.open(folder / name, "wt") as file:
        file.write("\n".join(lines) + "\n")


def record_small_runs(data: Path, gpus: int = 8) -> None:
    """Write `t1`, a job's run, and `b1`, which is idle with a model loaded. Ten seconds, a sample a second."""
    for name, watts, memory_mib, used in (("t1", 600, 70_000, "90,40,0.5,0.2,0.3"), ("b1", 120, 16_564, "0,0,0,0,0")):
        rows = [
            f"{1000 + second}.5,steady,{gpu},H100,{watts + second},40,{memory_mib},81559,{used},0,10,20,30,40,4,"
            f"{5000 + 100 * second}"
            for second in range(10)
            for gpu in range(gpus)
        ]
        write_recording(data / FOLDER, f"{name}_telemetry.csv.gz", [COLUMNS, *rows])


def record_ports(data: Path, name: str) -> None:
    """Write steady rates of all ports of a run."""
    names = [f"ib{port}_{column}" for port in range(PORTS) for column in ("tx_bytes_s", "rx_bytes_s")]
    names += [f"ib{port}_{column}" for port in range(PORTS) for column in ("tx_pkts_s", "rx_pkts_s")]
    rates = [f"{1000 + second}.5,steady," + ",".join(["1000"] * 16 + ["10"] * 16) for second in range(10)]
    write_recording(data / FOLDER, f"{name}_ib.csv.gz", ["timestamp,phase," + ",".join(names), *rates])
