"""A finder of the MIG instances in recent telemetry, and of the memory of each."""

import numpy as np

from fleetcast.features.store import WindowStore
from fleetcast.fleet.samples import EntityKind

INSTANCE = EntityKind.GPU_INSTANCE
STALE_MS = 600_000
GIB = 2.0**30


def find_mig_instances(store: WindowStore, now_ms: int) -> dict[str, dict[str, float | None]]:
    """Return GPU (`node/index`) -> MIG instance id -> its memory in GiB, None if unknown.

    Only instances with samples in the last ten minutes are included.
    """
    if INSTANCE not in store.rings and not len(store.entities[INSTANCE]):
        return {}
    ring = store.ring(INSTANCE)
    newest_ms = ring.time_ms[:, : ring.size].max(axis=0, initial=-1)
    used, free, total = (
        ring.raw[ring.layout.metrics.index(name), : ring.size]
        for name in ("fb_used_bytes", "fb_free_bytes", "fb_total_bytes")
    )
    memory_gib = np.where(total > 0, total, used + free) / GIB
    found: dict[str, dict[str, float | None]] = {}
    for row in np.flatnonzero(newest_ms >= now_ms - STALE_MS).tolist():
        gpu, _, instance = store.entities[INSTANCE].names[row].rpartition("/")
        gib = float(memory_gib[row])
        found.setdefault(gpu, {})[instance] = round(gib, 2) if np.isfinite(gib) else None
    return found
