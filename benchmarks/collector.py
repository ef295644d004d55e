"""The garbage collector as a pipeline's process sets it: by default it costs a tick a sixth of its time."""

import contextlib
import gc
from collections.abc import Iterator

from service.pipeline.role import spare_the_collector


@contextlib.contextmanager
def spared_collector() -> Iterator[None]:
    """Set the garbage collector as in a pipeline's process while the context is open."""
    before = gc.get_threshold()
    spare_the_collector()
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
