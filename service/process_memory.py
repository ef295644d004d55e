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

    By default, glibc gives each thread a heap, and no other thread can use the freed arrays in it. One heap
    saves about a tenth of the memory at 32,000 GPUs (58.9 instead of 65.4 KiB a GPU). Arrays of LARGE_BYTES
    or more are outside the heap. They return to the system when they are freed. FREE_BYTES of freed heap
    stay, because decoding allocates and frees memory all the time. pyarrow uses this heap, too, because its
    own allocator needs 6 MiB for the smallest file.
    """
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, FREE_BYTES)


@contextlib.contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector in the context. Imports make many objects and little garbage.

    Do not use this in a process that will fork, because its children would copy pages with garbage. At four
    hosts, this cost all roles together 12 MiB.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
