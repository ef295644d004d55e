"""Limits on wrong tokens from each address.

An address may send `BURST` wrong tokens at once, and one more every `REFILL_S`. After that, its refusals
are delayed. Right tokens never wait, even from the same address. The table is bounded: a new address
replaces the address with the oldest attempt.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from fleetcast.service.http.addresses import normalise_client_address

BURST = 10.0
REFILL_S = 6.0
LATE_S = 1.0  # wall; how long one who guesses waits for each further answer
MOST_ADDRESSES = 4096


class WrongTokens:
    """The counts of wrong tokens by address. `now_s`: a clock that is never set back."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # address -> what was left, and when

    def __len__(self) -> int:
        return len(self._buckets)

    def count_wrong_token(self, host: str) -> int | None:
        """Count a wrong token from an address.

        Returns None if the address may send more wrong tokens. Otherwise, returns the seconds until it may send
        the next one.
        """
        address, now_s = normalise_client_address(host), self._now_s()
        left, then_s = self._buckets.pop(address, (BURST, now_s))
        left = min(BURST, left + (now_s - then_s) / REFILL_S)
        is_forgiven = left >= 1.0
        self._buckets[address] = (left - 1.0 if is_forgiven else left, now_s)
        if len(self._buckets) > MOST_ADDRESSES:
            self._buckets.popitem(last=False)
        return None if is_forgiven else math.ceil((1.0 - left) * REFILL_S)
