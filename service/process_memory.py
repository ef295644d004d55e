"""Settings of the C library's memory allocator and of the garbage collector."""

import contextlib
import ctypes
import gc
import os
from collections.abc import Iterator

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
LARGE_BYTES = 4 * 2**20
FREE_BYTES = 16 * 2**20


def use_one_heap() -> None:
    """Use one heap for all threads.

    Arrays of LARGE_BYTES or more are allocated outside it and returned to the system as soon as they are
    freed. By default glibc gives each thread a heap, and no other thread can use its freed arrays (up to 32
    MiB): at 32,000 GPUs that took 65.4 KiB a GPU, now 58.9. FREE_BYTES of freed heap stay, since decoding
    takes and frees memory all the time. pyarrow uses this heap, too: its own one takes 6 MiB for the smallest file.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, FREE_BYTES)


@contextlib.contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector, because imports make many objects and little garbage.

    A process that will fork must not: at four hosts, the garbage between its objects cost all roles 12 MiB together.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
