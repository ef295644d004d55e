"""Served models: requests, KV cache, tokens and time to first token."""

import msgspec


class InstanceLoad(msgspec.Struct):
    """The load of one inference engine behind one port. A value that its metrics page lacks is null."""

    instance: str
    age_s: float
    requests_running: float | None
    requests_waiting: float | None
    kv_cache_used: float | None


class TimeToFirstToken(msgspec.Struct):
    """The mean and quantiles of the time to first token in the last two minutes, in seconds.

    A value is null without requests, or if it is beyond the last bound of the engine's histogram.
    """

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


class ServedModel(msgspec.Struct):
    """A served model in a pool.

    Values are sums over its instances. The use of the KV cache is a mean.
    """

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
