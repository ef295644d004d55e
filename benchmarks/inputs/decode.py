"""Exporter pages → samples: a scrape round over n nodes with 8 GPUs × 40 fields each.

    steady                  only numbers change
    steady, into the ring   the same, also written to the window store
    changed                 a GPU disappears and comes back
    reordered               the metrics in another order
    cold                    new series

The peer is prometheus_client's parser, which stops at labels and numbers.

Decoding is a small part of the cost of a sample. Excluded are fetching pages, waking up for each of
them, ticks, forecasts, the archive and the board. `fleetcast bench ingest` measures all of it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from fleetcast.benchmarks.kit.case import Peer, fits_memory, measure
from fleetcast.features.store import WindowStore
from fleetcast.fleet.entities import Entities
from fleetcast.ingest.pages.dcgm import FIELD_IDS
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.pages.text import PageDecoder, Target
from fleetcast.ingest.source import Batch

GPUS = 8
RARE = frozenset({164, 206, 207, 235, 236, 253, 390, 391, 392, 395})
FIELDS = [field for field in sorted(set(FIELD_IDS.values())) if field not in RARE]
PEER_NODES, CHANGED_NODES, COLD_NODES = 4, 1250, 50
PAGES_A_BATCH = 40  # what 100,000 GPUs send in the 50 ms that the scraper gathers for
INTERVAL_MS = 15_000
T0 = 1_700_000_100_000
ORDERS = 3
VARIANTS = 64  # pages with numbers of their own; nodes share them, but for their names
BYTES_PER_GPU = 90_000  # pages, decoders and rings
NODE = "@@@@@@"

Pages = Mapping[str, bytes]
Value = Callable[[int, np.random.Generator], str]  # (field, …) → what the page says


def draw_wide_value(field: int, rng: np.random.Generator) -> str:
    """Draw the text of a number with as many digits as a busy GPU can report.

    On a real page most error counters are 0.
    """
    if field == 155 or 1001 <= field <= 1008:  # power, ratios
        return f"{67 + rng.random() * 633 if field == 155 else rng.random():.6f}"
    if field in (140, 150, 203, 204):  # degrees, percent
        return str(rng.integers(1, 101))
    if field in (100, 101, 237, 238):  # clocks, links
        return str(rng.integers(345, 1981) if field < 200 else rng.integers(1, 6))
    widest = 10**12 if field == 156 else 5 * 10**10 if field > 1008 else 100_000  # energy; bytes a second; the rest
    return str(rng.integers(1, widest))


def make_page(node: str, rng: np.random.Generator, gpus: int = GPUS, value: Value = draw_wide_value) -> bytes:
    """Make a page of one node, as dcgm-exporter 4.x prints it. value: draws the text of a field's value."""
    names = {field: name for name, field in reversed(FIELD_IDS.items())}
    lines = []
    for field in FIELDS:
        name = names[field]
        lines.append(f"# HELP {name} A field of the benchmark.\n# TYPE {name} gauge\n")
        for gpu in range(gpus):
            labels = (
                f'gpu="{gpu}",UUID="GPU-{gpu:08d}-0000-0000-0000-{node:>12}",pci_bus_id="00000000:{gpu}A:00.0",'
                f'device="nvidia{gpu}",modelName="NVIDIA H100 80GB HBM3",Hostname="{node}",'
                'DCGM_FI_DRIVER_VERSION="535.129.03"'
            )
            lines.append(f"{name}{{{labels}}} {value(field, rng)}\n")
    return "".join(lines).encode()


def make_round_pages(
    nodes: int, rng: np.random.Generator, gpus: int = GPUS, value: Value = draw_wide_value
) -> dict[str, bytes]:
    """Make the pages of one scrape round. Returns node → page.

    At most VARIANTS pages have their own numbers, and the other nodes repeat these pages. Drawing all numbers
    would take longer than the measurement.
    """
    variants = [make_page(NODE, rng, gpus, value) for _ in range(min(nodes, VARIANTS))]
    names = [f"n{node:05d}" for node in range(nodes)]
    return {name: variants[row % len(variants)].replace(NODE.encode(), name.encode()) for row, name in enumerate(names)}


def reorder_metrics(page: bytes, rng: np.random.Generator) -> bytes:
    """Return the page with its metrics in a random order."""
    metrics = page.split(b"# HELP ")[1:]
    return b"".join(b"# HELP " + metrics[row] for row in rng.permutation(len(metrics)))


def run(sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield five records for each fleet size in GPUs. Sizes that do not fit the memory are left out."""
    for gpus in sizes:
        if fits_memory(gpus, BYTES_PER_GPU):
            yield from _measure_cases(max(1, gpus // GPUS), np.random.default_rng(1))


def _measure_cases(nodes: int, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    rounds = [make_round_pages(nodes, rng) for _ in range(2)]
    entities = Entities()
    decoders = _make_decoders(rounds[0], entities)
    size = _make_size(nodes)
    yield measure(
        "decode", "steady", size, _make_decode_round(decoders, rounds), "samples/s", peer=_make_peer(rounds[0])
    )
    written = _make_write_round(decoders, rounds, WindowStore(entities))
    yield measure("decode", "steady, into the ring", size, written, "samples/s")
    few = make_round_pages(min(nodes, CHANGED_NODES), rng, GPUS - 1)
    without_one = [{node: rounds[0][node] for node in few}, few]
    yield measure("decode", "changed", _make_size(len(few)), _make_decode_round(decoders, without_one), "samples/s")
    orders = [{node: reorder_metrics(page, rng) for node, page in few.items()} for _ in range(ORDERS)]
    yield measure("decode", "reordered", _make_size(len(few)), _make_decode_round(decoders, orders), "samples/s")
    yield _measure_cold_decoding(rounds[0])


def _make_size(nodes: int) -> dict[str, int]:
    return {"nodes": nodes, "gpus": nodes * GPUS, "series": nodes * GPUS * len(FIELDS)}


def _make_decoders(pages: Pages, entities: Entities) -> dict[str, PageDecoder]:
    resolver = ExporterResolver(entities)
    decoders = {node: PageDecoder(resolver, Target(node)) for node in pages}
    for node, decoder in decoders.items():
        batch = decoder.decode(pages[node], T0)
        assert len(batch) == GPUS * len(FIELDS), f"{len(batch)} samples of {GPUS * len(FIELDS)}"
        assert not batch.bad, batch.bad[0]
    return decoders


def _make_decode_round(decoders: Mapping[str, PageDecoder], rounds: Sequence[Pages]) -> Callable[[], int]:
    turn = iter(range(10**9))

    def decode_round() -> int:
        pages = rounds[next(turn) % len(rounds)]
        return sum(len(decoders[node].decode(page, T0)) for node, page in pages.items())

    return decode_round


def _make_write_round(
    decoders: Mapping[str, PageDecoder], rounds: Sequence[Pages], store: WindowStore
) -> Callable[[], int]:
    """Return a function that decodes, merges and writes a round.

    The samples of each round are newer than those of the round before.
    """
    turn = iter(range(10**9))

    def write_round() -> int:
        number = next(turn)
        now_ms = T0 + number * INTERVAL_MS
        pages = list(rounds[number % len(rounds)].items())
        applied = 0
        for first in range(0, len(pages), PAGES_A_BATCH):
            part = pages[first : first + PAGES_A_BATCH]
            batch = Batch.merge([decoders[node].decode(page, now_ms) for node, page in part])
            applied += sum(store.write(samples, now_ms).applied for samples in batch.samples)
        assert applied == len(pages) * GPUS * len(FIELDS), f"only {applied} samples were new"
        return applied

    return write_round


def _measure_cold_decoding(pages: Pages) -> dict[str, Any]:
    few = dict(list(pages.items())[:COLD_NODES])
    samples = len(few) * GPUS * len(FIELDS)

    def decode_cold() -> int:
        _make_decoders(few, Entities())
        return samples

    return measure("decode", "cold", _make_size(len(few)), decode_cold, "samples/s", repeats=3)


def _make_peer(pages: Pages) -> Peer:
    texts = [page.decode() for page in list(pages.values())[:PEER_NODES]]

    def parse_pages() -> int:
        return sum(len(family.samples) for text in texts for family in text_string_to_metric_families(text))

    return Peer("prometheus_client.parser", parse_pages)
