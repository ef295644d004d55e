"""A program that requests as many nodes from Ray's autoscaler as the demand forecast requires.

    python -m fleetcast_client.ray_resources --url http://fleetcast:8080 --bundle '{"GPU": 8}' --per-bundle 8 --most 16

Without a forecast, the request is withdrawn. Run one program on a node of each Ray cluster, because
`request_resources` remembers only the last request. SIGTERM withdraws the request. A killed process
cannot withdraw it: start the program again, and its first poll replaces the old request.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import signal
import threading
from collections.abc import Callable, Sequence

from fleetcast_client.ahead import Asked, DemandAhead, Series

logger = logging.getLogger("fleetcast_client")

Bundle = dict[str, float]
PACE_S = 5.0


class BundleWish:
    """The request to Ray for as many bundles as the forecast requires.

    ask: `ray.autoscaler.sdk.request_resources`, called with its argument `bundles`.
    """

    def __init__(self, ask: Callable[[list[Bundle]], None], bundle: Bundle, per_bundle: float, most: int) -> None:
        """Create the object without a request to Ray. Raises ValueError."""
        amounts = list(bundle.values()) if isinstance(bundle, dict) else []
        if not amounts or not all(isinstance(amount, (int, float)) and amount > 0 for amount in amounts):
            raise ValueError(f"bundle is {bundle!r}: expected resources above 0, like {{'GPU': 8}}")
        if not 0 < per_bundle < math.inf:
            raise ValueError(f"per_bundle is {per_bundle!r}: expected GPUs or requests/s of one bundle")
        if most < 1:
            raise ValueError(f"most is {most!r}: expected a number of bundles above 0")
        self._ask, self._bundle, self._per_bundle, self._most = ask, bundle, per_bundle, most
        self._held: int | None = None  # None: a process before this one may have left some

    def update_request(self, value: float | None) -> None:
        """Request the bundles for a forecast, or withdraw the request if the forecast is None.

        If there is nothing to withdraw, the method sends no request, because other programs may have sent one.
        """
        wanted = 0 if value is None else min(self._most, math.ceil(max(value, 0.0) / self._per_bundle))
        if wanted or self._held != 0:
            self._ask([dict(self._bundle) for _ in range(wanted)])  # again and again: Ray may have lost it
        if wanted != self._held:
            logger.warning("asked for %d bundles of %s", wanted, self._bundle)
        self._held = wanted


def main(arguments: Sequence[str] | None = None) -> None:
    given = _make_parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    stopped = threading.Event()
    series = Series(
        given.pool, given.job_class, given.group, given.target, given.quantile, given.horizon_s, given.queue
    )
    try:
        ahead = DemandAhead(series, Asked(given.url, given.token_file, given.ca, given.every_s, given.stale_s))
        wish = BundleWish(_request_bundles, json.loads(given.bundle), given.per_bundle, given.most)
    except ValueError as error:
        _make_parser().error(str(error))
    import ray  # type: ignore[import-not-found,unused-ignore]

    ray.init(address=given.address, log_to_driver=False)
    for number in (signal.SIGTERM, signal.SIGINT):  # after `init`, which sets its own
        signal.signal(number, lambda *_: stopped.set())
    ahead.start()
    try:
        while not stopped.wait(min(PACE_S, given.every_s)):
            wish.update_request(ahead.value())
    finally:
        wish.update_request(None)


def _request_bundles(bundles: list[Bundle]) -> None:
    from ray.autoscaler.sdk import request_resources  # type: ignore[import-not-found,unused-ignore]

    request_resources(bundles=bundles)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fleetcast_client.ray_resources", description=__doc__)
    parser.add_argument("--url", default=os.environ.get("FLEETCAST_URL", ""))
    parser.add_argument("--bundle", required=True, help="resources of one bundle, as JSON")
    parser.add_argument("--per-bundle", type=float, required=True, help="GPUs (or requests/s) of the series per bundle")
    parser.add_argument("--most", type=int, required=True, help="bundles, however high the forecast is")
    for name, value in Series()._asdict().items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    for name, value in Asked("")._asdict().items():
        if name not in ("url", "timeout_s"):
            parser.add_argument(
                f"--{name.replace('_', '-')}", type=str if value is None else type(value), default=value
            )
    parser.add_argument("--address", default="auto", help="of the Ray cluster")
    return parser


if __name__ == "__main__":
    main()
