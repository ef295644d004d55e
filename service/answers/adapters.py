"""Doors to other schedulers and autoscalers: how each stands, and what it wrote."""

import msgspec

from service.adapter_records import AdapterAuditLine, AdapterStatus


class Adapters(msgspec.Struct):
    as_of_ms: int
    rows: list[AdapterStatus]


class AdapterDetails(msgspec.Struct):
    """One adapter, and its newest writes, the newest first."""

    as_of_ms: int
    adapter: AdapterStatus
    writes: list[AdapterAuditLine]
