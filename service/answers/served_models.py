"""Served models: requests, KV cache, tokens and time to first token."""

import msgspec


class InstanceLoad(msgspec.Struct):
    """One engine behind one port; null where its pages do not say."""

    instance: str
    age_s: float
    requests_running: float | None
    requests_waiting: float | None
    kv_cache_used: float | None


class TimeToFirstToken(msgspec.Struct):
    """Seconds, of the last two minutes; null without requests, and beyond the histogram's last edge."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


class ServedModel(msgspec.Struct):
    """A model in a pool: sums over its instances, of the KV cache the mean."""

    pool: str
    model: str
    instances: list[InstanceLoad]
    requests_running: float | None
    requests_waiting: float | None
    kv_cache_used: float | None
    kv_cache_used_max: float | None
    requests_per_s: float | None
    prompt_tokens_per_s: float | None
    generated_tokens_per_s: float | None
    ttft_s: TimeToFirstToken


class ServedModels(msgspec.Struct):
    as_of_ms: int
    rows: list[ServedModel]
