"""Actions on this rank's job: polled in a thread, so that a training loop never waits for them."""

from __future__ import annotations

import json
import logging
import os
import threading
from typing import cast
from urllib.parse import quote, urlencode
from urllib.request import OpenerDirector

from fleetcast_client.answers import ActionRow
from fleetcast_client.errors import ApiError, Unreachable
from fleetcast_client.transport import send_request

logger = logging.getLogger("fleetcast_client")

TIMEOUT_S = 10.0
EXECUTOR = "agents"


class ActionPoller:
    """A thread that polls the actions on one attempt of a job, from the first call of `list_pending`."""

    def __init__(self, through: OpenerDirector, base: str, token: str, job: str, attempt: int, every_s: float) -> None:
        self._through, self._base, self._token = through, base, token
        self._job, self._attempt = job, attempt
        self._every_s = every_s
        self._pending: list[ActionRow] = []
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()
        self._process = os.getpid()
        self._failed = ""

    def list_pending(self) -> list[ActionRow]:
        """Return the actions that were sent to this attempt and have no reply, as polled last."""
        if os.getpid() != self._process:
            return []
        if self._thread is None and not self._stopped.is_set():
            self._thread = threading.Thread(target=self._run, name="fleetcast actions", daemon=True)
            self._thread.start()
        return list(self._pending)

    def list_accepted(self) -> list[ActionRow]:
        """Return the actions that this attempt has accepted and that are not seen yet. Waits for the service."""
        return self._read_own("accepted") or []

    def reply(self, action: ActionRow, verb: str, why: str) -> bool:
        """Send a reply. Returns whether the service stored it. A failure is logged."""
        body = {"job": self._job, "attempt": self._attempt, **({"why": why} if why else {})}
        url = f"{self._base}/v1/actions/{quote(action['action_id'], safe='')}/{verb}"
        self._pending = [row for row in self._pending if row["action_id"] != action["action_id"]]
        for is_last in (False, True):
            try:
                send_request(self._through, "POST", url, json.dumps(body).encode(), self._token, TIMEOUT_S)
                return True
            except Unreachable as error:
                if is_last:
                    logger.warning("%s; the action expires by itself", error)
            except ApiError as error:
                logger.warning("action %s: %s", action["action_id"], error)
                return False
        return False

    def close(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            rows = self._read_own("sent")
            if rows is not None:
                self._pending = rows
            self._stopped.wait(self._every_s)

    def _read_own(self, state: str) -> list[ActionRow] | None:
        """Return the actions on this attempt in a state, or None if they cannot be read. A new failure is logged."""
        query = urlencode({"job": self._job, "state": state, "limit": 1000})
        try:
            answer = send_request(
                self._through, "GET", f"{self._base}/v1/actions?{query}", None, self._token, TIMEOUT_S
            )
            rows = cast("list[ActionRow]", answer["rows"])
            own = [row for row in rows if row["attempt"] == self._attempt and row["executor"] == EXECUTOR]
        except (Unreachable, ApiError, KeyError, TypeError) as error:
            if str(error) != self._failed:
                self._failed = str(error)
                logger.warning("no actions can be read: %s", error)
            return None
        self._failed = ""
        return own
