"""The window store: writing a scrape of the fleet, extracting features, saving a minute's changes.

The peer for writing is one deque for each series in plain Python. The peer for the features is pandas,
over the same windows and metrics.
"""

import tempfile
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd  # the peer; nothing of ours runs on it

from fleetcast.benchmarks.kit.case import Peer, fits_memory, measure
from fleetcast.features.extract import extract_frames
from fleetcast.features.layout import SUMMED
from fleetcast.features.store import WindowStore
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.metrics import METRICS, find_metric_row, list_plausible_ranges
from fleetcast.fleet.samples import EntityKind, SampleBatch

GPUS_PER_NODE = 8
INTERVAL_MS = 15_000
T0 = 1_700_000_100_000
SAMPLES_OF_PEER = 100_000  # the slow peer works on a part; both report samples per second
BYTES_PER_GPU = 80_000  # store and batches


def run(sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Measure a fleet of each size in GPUs, with a port for each GPU.

    Sizes that do not fit the memory are left out.
    """
    for gpus in sizes:
        if fits_memory(gpus, BYTES_PER_GPU):
            yield from _measure_cases(ScrapedFleet(gpus))


class ScrapedFleet:
    """A fleet that is scraped every 15 s. All its values change each time."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self.now_ms = T0
        self.store = WindowStore(_make_entities(gpus))
        self._values: dict[EntityKind, np.ndarray[Any, np.dtype[np.float64]]] = {}
        for kind in (EntityKind.GPU, EntityKind.PORT, EntityKind.NODE):
            low, high = np.clip(list_plausible_ranges(kind), 0.0, 100.0)
            shape = (len(self.store.entities[kind]), len(METRICS[kind]))
            self._values[kind] = low + np.random.default_rng(1).random(shape) * (high - low) * 0.9

    def make_batch(self, kind: EntityKind) -> SampleBatch:
        """Make one scrape of all entities of a kind, entity by entity, with all metrics of each."""
        values = self._values[kind]
        values *= 1.0001
        entities, metrics = values.shape
        return SampleBatch(
            kind,
            np.tile(np.arange(metrics, dtype=np.int16), entities),
            np.repeat(np.arange(entities, dtype=np.int32), metrics),
            np.full(values.size, self.now_ms, np.int64),
            values.ravel().copy(),
        )

    def write_scrape(self) -> int:
        """Write a scrape of the whole fleet. Returns the number of applied samples."""
        self.now_ms += INTERVAL_MS
        return sum(self.store.write(self.make_batch(kind), self.now_ms).applied for kind in self._values)


def _make_entities(gpus: int) -> Entities:
    entities = Entities()
    for gpu in range(gpus):
        node, index = f"n{gpu // GPUS_PER_NODE:05d}", gpu % GPUS_PER_NODE
        entities.add_to_node(EntityKind.GPU, node, index)
        entities.add_to_node(EntityKind.PORT, node, f"mlx5_{index}", 1)
    return entities


def _measure_cases(fleet: ScrapedFleet) -> Iterator[dict[str, Any]]:
    size = {"gpus": fleet.gpus}
    for _ in range(4):
        fleet.write_scrape()

    def write_batch() -> int:
        fleet.now_ms += INTERVAL_MS
        return fleet.store.write(batches.pop(), fleet.now_ms).applied

    batches = _make_later_batches(fleet, 6)
    yield measure(
        "store", "write", size, write_batch, "samples/s", peer=Peer("deque a series", _make_deque_writer(fleet))
    )

    def extract_features() -> int:
        fleet.now_ms += INTERVAL_MS
        frames = extract_frames(fleet.store, fleet.now_ms)
        assert np.isfinite(frames.gpu.column("power_w_std_30m")).all()
        return len(frames.gpu.values)

    yield measure("store", "extract", size, extract_features, "ms", peer=Peer("pandas", _make_pandas_features(fleet)))

    with tempfile.TemporaryDirectory() as folder:

        def save_minute() -> int:
            for _ in range(4):
                fleet.write_scrape()
            fleet.store.save(Path(folder))
            return fleet.gpus

        save_minute()
        yield measure("store", "save of a minute, with its writes", size, save_minute, "ms", repeats=3)


def _make_later_batches(fleet: ScrapedFleet, count: int) -> list[SampleBatch]:
    """Make `count` later scrapes of the GPUs, 15 s apart, the last one first."""
    start = fleet.now_ms
    batches = []
    for _ in range(count):
        fleet.now_ms += INTERVAL_MS
        batches.append(fleet.make_batch(EntityKind.GPU))
    fleet.now_ms = start
    return batches[::-1]


def _make_deque_writer(fleet: ScrapedFleet) -> Any:
    batch = fleet.make_batch(EntityKind.GPU)
    rows = list(
        zip(
            batch.metric[:SAMPLES_OF_PEER].tolist(),
            batch.entity[:SAMPLES_OF_PEER].tolist(),
            batch.value[:SAMPLES_OF_PEER].tolist(),
            strict=True,
        )
    )
    rings: dict[tuple[int, int], deque[tuple[int, float]]] = defaultdict(lambda: deque(maxlen=120))
    clock = [0]

    def write_to_deques() -> int:
        clock[0] += INTERVAL_MS
        applied = 0
        for metric, entity, value in rows:
            ring = rings[metric, entity]
            if not ring or ring[-1][0] < clock[0]:
                ring.append((clock[0], value))
                applied += 1
        return applied

    return write_to_deques


def _make_pandas_features(fleet: ScrapedFleet) -> Any:
    """Return a function that computes the same features with pandas.

    The features are means and standard deviations over 2 and 30 minutes of the same metrics, from one frame
    for each metric.
    """
    ring = fleet.store.ring(EntityKind.GPU)
    names = SUMMED[EntityKind.GPU]
    assert all(find_metric_row(EntityKind.GPU, name) >= 0 for name in names)
    frames = [pd.DataFrame(ring.read_slots(name, 120)) for name in names]

    def compute_features() -> int:
        for frame in frames:
            frame.tail(8).mean()
            frame.mean()
            frame.std(ddof=0)
        return fleet.gpus

    return compute_features
