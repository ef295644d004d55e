"""The process environment: the parent process, the supervisor and the API token."""

import contextlib
import os
import select
import signal
import threading
import time

PARENT_VARIABLE = "FLEETCAST_PARENT"
READY_VARIABLE = "FLEETCAST_READY_PIPE"  # the number of a file descriptor
TOKEN_VARIABLE = "FLEETCAST_TOKEN"
POLL_S = 0.5  # wall; where no descriptor of a process can be had
GRACE_S = 12.0  # wall; for a pipeline's last snapshot


def make_token_headers() -> dict[str, str]:
    """Return the HTTP headers with the API token of the environment. They are empty if no token is set."""
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    return {"Authorization": f"Bearer {token}"} if token else {}


def make_child_environment() -> dict[str, str]:
    """Return the environment for a child process, so that its `watch_parent` knows this process."""
    return {**os.environ, PARENT_VARIABLE: str(os.getpid())}


def watch_parent() -> None:
    """End this process when its parent ends, with SIGTERM and, after GRACE_S, with SIGKILL.

    This works only in a child that was started with `make_child_environment`.
    """
    named = os.environ.pop(PARENT_VARIABLE, "")  # its own children have another parent
    if named.isdecimal():
        parent = int(named)
        threading.Thread(
            target=_watch_process, args=(parent, _open_process_descriptor(parent)), daemon=True, name="parent"
        ).start()


def report_ready() -> None:
    """Report to the supervisor that this process is ready.

    Does nothing if there is no supervisor, or if it was called before.
    """
    number = os.environ.pop(READY_VARIABLE, "")
    if number.isdecimal():
        with contextlib.suppress(OSError):  # the supervisor is gone, and this process ends soon
            os.write(int(number), b"r")
            os.close(int(number))


def _open_process_descriptor(process: int) -> int | None:
    """Open a descriptor that is readable once the process has ended, or return None if that is impossible."""
    try:
        return os.pidfd_open(process)
    except (AttributeError, OSError):  # no Linux, an old kernel, or the process is gone
        return None


def _watch_process(parent: int, descriptor: int | None) -> None:
    if descriptor is not None and os.getppid() == parent:  # else another process may have the number by now
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        ended.poll()
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
