"""How a process asks the system for memory."""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h of glibc
LARGE_BYTES = 4 * 2**20
FREE_BYTES = 16 * 2**20


def keep_one_heap() -> None:
    """One heap for all threads, and arrays of LARGE_BYTES or more beside it, given back as soon as they are freed.

    glibc gives every thread a heap of its own and puts arrays of up to 32 MiB on it, so what a tick frees in one is not
    there for the next: with 32,000 GPUs 65.4 KiB a GPU were held, and are 58.9 now; ticks take the same time. Other C
    libraries have no such call, and are left as they are.

    Up to FREE_BYTES at the end of the heap are kept when they are freed: what decodes pages and requests frees and
    takes some hundred KiB again and again, and to get them anew from the system costs as much as to decode them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(_M_TRIM_THRESHOLD, FREE_BYTES)
