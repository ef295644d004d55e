"""Nodes in trouble, for the made-up fleet of the console."""

from dataclasses import dataclass


@dataclass(slots=True)
class Trouble:
    """Why a node is at risk: probabilities at an hour and the evidence."""

    fail: float
    drain: float
    slow: float
    feature: str
    entity: str
    value: float
    usual: float | None
    unit: str
    sentence: str
    action: str
    advice: str
    since_s: float


TROUBLES = {
    41: Trouble(
        0.21,
        0.12,
        0.83,
        "sm_clock_mhz",
        "n042/3",
        990.0,
        1980.0,
        "MHz",
        "GPU 3: SM clock 990 MHz, usual 1,980 (thermal slowdown)",
        "avoid",
        "Place no gang here until the clock is back; check the airflow of GPU 3.",
        460,
    ),
    16: Trouble(
        0.57,
        0.36,
        0.09,
        "ecc_sbe_volatile_count_30m",
        "n017/6",
        1240.0,
        0.0,
        "errors",
        "GPU 6: 1,240 corrected memory errors in 30 min, usual 0",
        "drain_at_job_end",
        "Drain when its job ends and run memory diagnostics.",
        2900,
    ),
    100: Trouble(
        0.12,
        0.05,
        0.41,
        "link_downed_count_30m",
        "n101/mlx5_4",
        7.0,
        0.0,
        "times",
        "Port mlx5_4 went down 7 times in 30 min, usual 0",
        "avoid",
        "Place no gang here; reseat or replace the cable of mlx5_4.",
        1320,
    ),
    76: Trouble(
        0.04,
        0.03,
        0.22,
        "pcie_link_width",
        "n077/1",
        8.0,
        16.0,
        "lanes",
        "GPU 1: PCIe link is 8 lanes wide, usual 16",
        "watch",
        "Watch: host transfers are at half speed.",
        8400,
    ),
    118: Trouble(
        0.93,
        0.88,
        0.02,
        "silent_s",
        "n119/5",
        610.0,
        0.0,
        "s",
        "GPU 5: series vanished 10 min ago while the exporter answers (fell off the bus, XID 79)",
        "drain_now",
        "Drain now and power-cycle the node.",
        610,
    ),
}
