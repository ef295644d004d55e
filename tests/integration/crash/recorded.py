"""Recorded exporter pages as a source of a supervised pipeline: each when its moment comes, or at once if late."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.entities import Entities
from fleetcast.ingest.pages.recorded import PageReplay

NODES = ("p1", "p2")
GPUS = 2
EVERY_MS = 15_000


class PunctualReplay(PageReplay):
    """Moments are fleet times. One that passed while nobody read is delivered at once, so a restart catches up."""

    async def _wait_until_due(self, recorded_ms: int) -> None:
        await self._clock.sleep(max(0, recorded_ms - self._clock.now_ms()) / 1000)


def recorded_pages(entities: Entities, clock: Clock, options: Mapping[str, str | int | float | bool]) -> PunctualReplay:
    """For `pipeline.sources`; options: folder."""
    return PunctualReplay(entities, Path(str(options["folder"])), clock)


def record(folder: Path, begin_ms: int, moments: int, seed: int) -> None:
    """Gauges that wander, counters that grow, are reset now and then and stop: every way a ring is written."""
    rng = np.random.default_rng([seed, 1])
    counters = np.zeros((len(NODES), GPUS))
    for number in range(moments):
        here = folder / str(begin_ms + number * EVERY_MS)
        here.mkdir(parents=True)
        counters += rng.integers(0, 5, counters.shape)
        counters[rng.random(counters.shape) < 0.02] = 0
        for row, node in enumerate(NODES):
            (here / f"{node}.dcgm.prom").write_text(_page(node, counters[row], rng))


def _page(node: str, counters: "np.ndarray[tuple[int], np.dtype[np.float64]]", rng: np.random.Generator) -> str:
    lines = []
    for gpu in range(GPUS):
        if rng.random() < 0.05:
            continue
        labels = f'gpu="{gpu}",UUID="GPU-{node}-{gpu}",modelName="NVIDIA A100-SXM4-80GB",Hostname="{node}"'
        values = {
            "DCGM_FI_DEV_SM_CLOCK": 1410 - rng.integers(0, 3) * 15,
            "DCGM_FI_DEV_GPU_TEMP": rng.integers(50, 70),
            "DCGM_FI_DEV_POWER_USAGE": round(float(rng.uniform(200, 400)), 3),
            "DCGM_FI_DEV_GPU_UTIL": rng.integers(0, 101),
            "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": int(counters[gpu]) // 50,
            "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": int(counters[gpu]),
            "DCGM_FI_DEV_XID_ERRORS": 0,
        }
        lines += [f"{name}{{{labels}}} {value}" for name, value in values.items()]
    return "\n".join(lines) + "\n"
