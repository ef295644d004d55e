"""What the process around a simulation must not bring into it: the machine's time, its failpoints, its patience."""

import contextlib
import sys
import time
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import patch

from fleetcast.fleet import failpoints
from fleetcast.service.pipeline import archive_writer as history

if TYPE_CHECKING:
    from tests.simulation.world import World

PACKAGES = tuple(
    f"fleetcast.{name}."
    for name in ("clients", "fleet", "ingest", "features", "models", "placement", "schedulers", "service")
)
REST_S, TIDY_S = 2.0, 60.0  # of the archive: a flush is a step, and an episode has twenty minutes of them


@contextlib.contextmanager
def simulated(world: "World") -> Iterator[None]:
    """Modules of the product see the world's time in `time`, and its failpoints act."""
    ours = [module for name, module in list(sys.modules.items()) if name.startswith(PACKAGES)]
    patched = [module for module in ours if getattr(module, "time", None) is time]
    clock = SimpleNamespace(
        monotonic=lambda: world.steady_ms / 1000,
        monotonic_ns=lambda: world.steady_ms * 1_000_000,
        perf_counter=lambda: world.steady_ms / 1000,
        time=lambda: world.now_ms / 1000,
        time_ns=lambda: world.now_ms * 1_000_000,
        sleep=world.sleep,
    )
    for module in patched:
        module.time = clock  # type: ignore[attr-defined]
    names = [module for module in ours if getattr(module, "uuid", None) is uuid]
    for module in names:
        module.uuid = SimpleNamespace(uuid4=lambda: uuid.UUID(int=world.rng.getrandbits(128)))  # type: ignore
    failpoints.set_hook(world.reach, world.end_running)
    try:
        with patch.multiple(history, REST_WALL_S=REST_S, TIDY_S=TIDY_S):
            yield
    finally:
        failpoints.set_hook(None)
        for module in names:
            module.uuid = uuid  # type: ignore[attr-defined]
        for module in patched:
            module.time = time  # type: ignore[attr-defined]
