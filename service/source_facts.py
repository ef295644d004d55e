"""What some sources tell beside their batches."""

from collections.abc import Sequence

from ingest.source import Source


def gpu_models(sources: Sequence[Source]) -> dict[str, str]:
    """Node → GPU model, of nodes that only telemetry knows."""
    told: list[dict[str, str]] = [getattr(source, "models", dict)() for source in sources]
    return {node: model for models in told for node, model in models.items()}


def backlog_bytes(source: Source) -> int:
    """What a source that reads from disk has not read yet; 0 for others."""
    backlog = getattr(source, "backlog_bytes", None)
    return int(backlog()) if backlog is not None else 0
