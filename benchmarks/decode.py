"""Exporter pages → samples: a scrape round over n nodes with 8 GPUs × 40 fields each.

Cases: `steady` (only numbers change, the usual round), `changed` (a GPU vanished since the last page), `cold` (series
never seen before). The peer is prometheus_client's text parser, which stops where we start: at labels and numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.case import Peer, measure
from fleet.entities import Entities
from ingest.dcgm_fields import FIELD_IDS
from ingest.exporters import ExporterResolver
from ingest.text import PageDecoder, Target

GPUS = 8
FIELDS = 40
PEER_NODES = 4
COLD_NODES = 50


def page_of(node: str, rng: np.random.Generator, gpus: int = GPUS) -> bytes:
    """A page as dcgm-exporter 4.x prints it; integers and floats in about equal parts."""
    by_field = {field: name for name, field in reversed(FIELD_IDS.items())}
    lines = []
    for number, name in enumerate(list(by_field.values())[:FIELDS]):
        lines.append(f"# HELP {name} A field of the benchmark.\n# TYPE {name} gauge\n")
        for gpu in range(gpus):
            labels = (
                f'gpu="{gpu}",UUID="GPU-{gpu:08d}-0000-0000-0000-{node:>12}",pci_bus_id="00000000:{gpu}A:00.0",'
                f'device="nvidia{gpu}",modelName="NVIDIA H100 80GB HBM3",Hostname="{node}",'
                'DCGM_FI_DRIVER_VERSION="535.129.03"'
            )
            value = rng.integers(0, 100_000) if number % 2 else f"{rng.random():.6f}"
            lines.append(f"{name}{{{labels}}} {value}\n")
    return "".join(lines).encode()


def run(sizes: Sequence[int] = (1_000, 10_000)) -> list[dict[str, Any]]:
    """A record for each case and size in GPUs."""
    rng = np.random.default_rng(1)
    records = []
    for gpus in sizes:
        nodes = max(1, gpus // GPUS)
        size = {"nodes": nodes, "gpus": nodes * GPUS, "series": nodes * GPUS * FIELDS}
        rounds = [{f"n{node:05d}": page_of(f"n{node:05d}", rng) for node in range(nodes)} for _ in range(2)]
        records.append(measure("decode", "steady", size, _steady(rounds), "samples/s", peer=_peer(rounds[0])))
        records.append(measure("decode", "changed", size, _changed(rounds[0], rng), "samples/s"))
        records.append(_cold(rounds[0]))
    return records


def _decoders(pages: Mapping[str, bytes]) -> dict[str, PageDecoder]:
    resolver = ExporterResolver(Entities())
    decoders = {node: PageDecoder(resolver, Target(node)) for node in pages}
    for node, decoder in decoders.items():
        batch = decoder.decode(pages[node], 0)
        assert len(batch) == GPUS * FIELDS, f"{len(batch)} samples of {GPUS * FIELDS}"
        assert not batch.bad, batch.bad[0]
    return decoders


def _steady(rounds: Sequence[Mapping[str, bytes]]) -> Callable[[], int]:
    decoders = _decoders(rounds[0])
    turn = iter(range(10**9))

    def once() -> int:
        now = next(turn)
        pages = rounds[now % len(rounds)]
        return sum(len(decoder.decode(pages[node], now)) for node, decoder in decoders.items())

    return once


def _changed(pages: Mapping[str, bytes], rng: np.random.Generator) -> Callable[[], int]:
    """Every other round lacks a GPU, so no page fits the last one's template."""
    return _steady([pages, {node: page_of(node, rng, gpus=GPUS - 1) for node in pages}])


def _cold(pages: Mapping[str, bytes]) -> dict[str, Any]:
    few = dict(list(pages.items())[:COLD_NODES])
    size = {"nodes": len(few), "gpus": len(few) * GPUS, "series": len(few) * GPUS * FIELDS}
    return measure("decode", "cold", size, lambda: len(_decoders(few)) * GPUS * FIELDS, "samples/s", repeats=3)


def _peer(pages: Mapping[str, bytes]) -> Peer:
    texts = [page.decode() for page in list(pages.values())[:PEER_NODES]]

    def once() -> int:
        return sum(len(family.samples) for text in texts for family in text_string_to_metric_families(text))

    return Peer("prometheus_client.parser", once)
