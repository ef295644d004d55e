"""Adapters to other schedulers and autoscalers: the state and the writes of each adapter."""

import msgspec

from fleetcast.service.adapter_records import AdapterAuditLine, AdapterStatus


class Adapters(msgspec.Struct):
    as_of_ms: int
    rows: list[AdapterStatus]


class AdapterDetails(msgspec.Struct):
    """One adapter with its latest writes, newest first."""

    as_of_ms: int
    adapter: AdapterStatus
    writes: list[AdapterAuditLine]
