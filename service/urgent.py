"""Hard signals: what a batch holds that no scheduler should wait a tick for."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fleet.entities import Entities
from fleet.events import NodeEvent
from fleet.metrics import metric_row
from fleet.samples import EntityKind, SampleBatch

XID = metric_row(EntityKind.GPU, "xid")
HARD_EVENTS = frozenset({"drain", "undrain", "lost", "returned", "xid"})


class HardSignals:
    """Tells new ones from old. Remembers each GPU's last XID, since the gauge is sticky."""

    def __init__(self, entities: Entities) -> None:
        self._gpus = entities[EntityKind.GPU]
        self._last_xid = np.zeros(0)

    def rows(self, fresh: Sequence[NodeEvent], samples: Sequence[SampleBatch]) -> list[dict[str, Any]]:
        """Rows of `doc.urgent`; `fresh`: the node events of a batch that were new, `samples`: all of it."""
        return [_event_row(event) for event in fresh if event.type in HARD_EVENTS] + self._new_xids(samples)

    def _new_xids(self, batches: Sequence[SampleBatch]) -> list[dict[str, Any]]:
        """XIDs that appeared on a GPU whose last scrape showed another code."""
        if len(self._last_xid) < len(self._gpus):
            grown = np.full(len(self._gpus) + 64, np.nan)
            grown[: len(self._last_xid)] = self._last_xid
            self._last_xid = grown
        rows: list[dict[str, Any]] = []
        for samples in batches:
            if samples.kind is not EntityKind.GPU:
                continue
            at = np.flatnonzero((samples.metric == XID) & np.isfinite(samples.value))
            entity, value = samples.entity[at], samples.value[at]
            before = self._last_xid[entity]
            for index in np.flatnonzero((value > 0) & (value != before) & ~np.isnan(before)).tolist():
                node, _, gpu = self._gpus.names[entity[index]].rpartition("/")
                code = int(value[index])
                rows.append(
                    {
                        "node": node,
                        "gpu": int(gpu),
                        "type": "xid",
                        "code": code,
                        "time_ms": int(samples.time_ms[at][index]),
                        "sentence": f"XID {code} on GPU {gpu} of {node}",
                    }
                )
            self._last_xid[entity] = value
        return rows


def _event_row(event: NodeEvent) -> dict[str, Any]:
    what = f"XID {event.code}" if event.type == "xid" else event.type
    where = event.node if event.gpu is None else f"GPU {event.gpu} of {event.node}"
    return {
        "node": event.node,
        "gpu": event.gpu,
        "type": event.type,
        "code": event.code,
        "time_ms": event.time_ms,
        "sentence": f"{what} on {where}" + (f": {event.message}" if event.message else ""),
    }
