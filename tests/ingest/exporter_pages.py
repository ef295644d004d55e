"""Exporter pages for tests, written in the forms of the exporters' generations."""

from collections.abc import Sequence

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.metrics import METRICS
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.pages.text import PageDecoder, Target
from fleetcast.ingest.source import Batch


def labels(gpu: int, node: str = "n001", **more: str) -> str:
    pairs = {
        "gpu": str(gpu),
        "UUID": f"GPU-00000000-{node}-{gpu}",
        "device": f"nvidia{gpu}",
        "modelName": "NVIDIA H100 80GB HBM3",
        "Hostname": node,
        **more,
    }
    return "{" + ",".join(f'{key}="{value}"' for key, value in pairs.items() if value) + "}"


def page(*lines: str) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def dcgm_page(gpus: int = 2, node: str = "n001", power_w: float = 400.0) -> bytes:
    lines = ["# HELP DCGM_FI_DEV_POWER_USAGE Power draw (in W).", "# TYPE DCGM_FI_DEV_POWER_USAGE gauge"]
    lines += [f"DCGM_FI_DEV_POWER_USAGE{labels(gpu, node)} {power_w + gpu:.3f}" for gpu in range(gpus)]
    lines += [f"DCGM_FI_DEV_GPU_TEMP{labels(gpu, node)} {50 + gpu}" for gpu in range(gpus)]
    return page(*lines)


class Desk:
    """A decoder with its entities, and its batches in words. tally: of the last page."""

    def __init__(self, node: str = "host", *, fixed: bool = False, max_series: int = 50_000) -> None:
        self.entities = Entities()
        self.resolver = ExporterResolver(self.entities)
        self.decoder = PageDecoder(self.resolver, Target(node, fixed), max_series=max_series)

    def decode(self, *lines: str, now_ms: int = 1000) -> dict[str, float]:
        batch = self.decoder.decode(page(*lines), now_ms)
        self.tally = batch.get_tally()
        return self.words(batch)

    def words(self, batch: Batch) -> dict[str, float]:
        """{"metric entity": value} of all samples."""
        return {
            f"{METRICS[samples.kind][metric].name} {self.entities[samples.kind].names[entity]}": value
            for samples in batch.samples
            for metric, entity, value in zip(
                samples.metric.tolist(), samples.entity.tolist(), samples.value.tolist(), strict=True
            )
        }

    def names(self, kind: EntityKind) -> list[str]:
        return self.entities[kind].names


def reasons(batch: Batch) -> Sequence[str]:
    """The reason of each bad line."""
    return [error.reason for error in batch.bad for _ in range(error.count)]
