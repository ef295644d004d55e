"""Conversion of raw counter readings to increments.

A counter that fell was reset and counts from zero. Old 32-bit counters wrap. Classic InfiniBand
counters stop at their largest value until they are reset, so their rate is unknown (InfiniBand
Architecture Specification 1, 16.1.3.5, PortCounters).
"""

import numpy as np
from numpy.typing import NDArray

_WORDS_32 = float(2**32)

SATURATES_AT: dict[str, float] = {
    "rx_bytes": 4 * (_WORDS_32 - 1),  # counted in words of 4 bytes
    "tx_bytes": 4 * (_WORDS_32 - 1),
    "rx_packets": _WORDS_32 - 1,
    "tx_packets": _WORDS_32 - 1,
    "tx_wait": _WORDS_32 - 1,
    "link_downed": 255.0,
    "link_recoveries": 255.0,
    "symbol_errors": 65535.0,
    "rx_errors": 65535.0,
    "tx_discards": 65535.0,
    "rx_remote_physical_errors": 65535.0,
    "integrity_errors": 15.0,
    "buffer_overruns": 15.0,
    "constraint_errors": 255.0,
}
WRAPS_AT: dict[str, float] = {
    "rx_bytes": 4 * _WORDS_32,
    "tx_bytes": 4 * _WORDS_32,
    "rx_packets": _WORDS_32,
    "tx_packets": _WORDS_32,
    "tx_wait": _WORDS_32,
    "pcie_replays": _WORDS_32,
    "nvlink_crc_flit_errors": _WORDS_32,
    "nvlink_crc_data_errors": _WORDS_32,
}


def compute_increments(
    before: NDArray[np.float64],
    now: NDArray[np.float64],
    saturates: NDArray[np.float64],
    wraps: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return (n,) the increments between two readings.

    NaN if `before` is NaN or a counter stays at its largest value. `saturates`, `wraps`: (n,) largest value
    and modulus, inf for none. A fall from the last tenth of the modulus to the first tenth is a wrap. Any
    other fall is a reset.

    >>> inf = np.inf
    >>> compute_increments(np.array([5.0, 9.0, 255.0]), np.array([8.0, 2.0, 255.0]), np.array([inf, inf, 255.0]),
    ...            np.array([inf, inf, inf]))
    array([ 3.,  2., nan])
    """
    moved = now - before
    fell = moved < 0
    if fell.any():
        wrapped = fell & (before > 0.9 * wraps) & (before < wraps) & (now < 0.1 * wraps)
        moved = np.where(fell, now, moved)
        moved[wrapped] = (wraps - before + now)[wrapped]
    stuck = (now == saturates) & (before == saturates)
    if stuck.any():
        moved[stuck] = np.nan
    return moved
