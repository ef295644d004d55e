"""Children that end with their parent, even with one that was killed and could not end them."""

import os
import signal
import threading
import time

VARIABLE = "FLEETCAST_PARENT"
POLL_S = 0.5  # wall
GRACE_S = 12.0  # wall; for a pipeline's last snapshot


def environment() -> dict[str, str]:
    """What a child is started with so that its `watch_parent` knows us."""
    return {**os.environ, VARIABLE: str(os.getpid())}


def watch_parent() -> None:
    """In a child that was started with `environment`: SIGTERM to ourselves once the parent is gone. Call it once.

    SIGKILL after GRACE_S: a successor waits for what we hold.
    """
    named = os.environ.pop(VARIABLE, "")  # our own children have another parent
    if named.isdecimal():
        threading.Thread(target=_watch, args=(int(named),), daemon=True, name="parent").start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
