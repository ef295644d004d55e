"""The webhook of actions: each change of an action that was sent, as an HTTP POST to one receiver of the site.

The receiver can notify the owner of a job while its grace lasts. A notice is sent at least once, in the order of the
changes. The position is a mark in the ledger, so a restart forgets none. If several changes of one action follow each
other quickly, the receiver may get only the last of them.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import msgspec

from fleetcast.fleet.redaction import redact_secrets
from fleetcast.placement.actions.life import ActionRecord
from fleetcast.placement.ledger.ledger import Ledger, LedgerError
from fleetcast.service.answers.actions import ActionNotice
from fleetcast.service.placer.actions import ActionControl
from fleetcast.service.placer.http_actions import make_action_row
from fleetcast.service.placer.metrics import ActionMetrics

if TYPE_CHECKING:
    import aiohttp

logger = logging.getLogger(__name__)

TOKEN = "FLEETCAST_WEBHOOK_TOKEN"  # in the environment
NOTIFIED = "actions_notified"  # the ledger's mark: the number of the last change that was sent or given up
POLL_S = 0.5  # wall, as all times here
ANSWER_S = 5.0  # of one try
MOST_TRIES = 8  # of one notice; after a notice that failed, the next ones have one until the receiver answers
LONGEST_PAUSE_S = 60.0
PAGE = 100
DELIVERED, FAILED, GIVEN_UP = "delivered", "failed", "given_up"

Post = Callable[[bytes], Awaitable[str]]
"""Send one body. Return why the receiver did not accept it, or ""."""


class ActionWebhook:
    """The sender of notices. Only changes after its first start are sent."""

    def __init__(self, ledger: Ledger, control: ActionControl, metrics: ActionMetrics) -> None:
        self._ledger = ledger
        self._control = control
        self._metrics = metrics
        self._most_tries = MOST_TRIES
        if ledger.find_mark(NOTIFIED) is None:
            newest = ledger.actions.read_after(0, 1, newest=True)
            ledger.record_marks(**{NOTIFIED: newest[0].changed if newest else 0})

    async def run(self, url: str, token: str = "") -> None:
        """Send notices to `url` until the task is cancelled."""
        import aiohttp  # a placer without a webhook does not load it

        headers = {"content-type": "application/json", **({"authorization": f"Bearer {token}"} if token else {})}
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            while True:
                try:
                    await self.send_due(lambda body: _post(session, url, body))
                except LedgerError as error:
                    logger.error("%s; notices of actions wait", error)
                except Exception:  # a fault of notices must not end the placer
                    logger.exception("notices of actions wait")
                await asyncio.sleep(POLL_S)

    async def send_due(self, post: Post) -> None:
        """Send the notices of all changes since the last one. Raises LedgerError if the ledger is unreadable."""
        while rows := self._ledger.actions.read_after(self._ledger.find_mark(NOTIFIED) or 0, PAGE):
            for record in rows:
                if record.was_sent:
                    await self._send(record, post)
                with self._ledger.transaction():
                    self._ledger.record_marks(**{NOTIFIED: record.changed})

    async def _send(self, record: ActionRecord, post: Post) -> None:
        """Send one notice. After the last try it is given up."""
        body = msgspec.json.encode(self._make_notice(record))
        for number in range(self._most_tries):
            if number:
                await asyncio.sleep(min(2.0 ** (number - 1), LONGEST_PAUSE_S))
            why = await post(body)
            self._metrics.notices.labels(FAILED if why else DELIVERED).inc()
            if not why:
                self._most_tries = MOST_TRIES
                return
        self._most_tries = 1
        self._metrics.notices.labels(GIVEN_UP).inc()
        logger.error("the webhook did not accept the notice of action %s: %s", record.action_id, redact_secrets(why))

    def _make_notice(self, record: ActionRecord) -> ActionNotice:
        request = self._ledger.find_request(record.action.job, record.action.attempt)
        row = msgspec.structs.asdict(make_action_row(self._control, record))
        return ActionNotice(**row, user=request.user if request else "")


async def _post(session: "aiohttp.ClientSession", url: str, body: bytes) -> str:
    import aiohttp

    try:
        async with session.post(url, data=body, allow_redirects=False) as answer:
            return "" if 200 <= answer.status < 300 else f"it answers {answer.status}"
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        return f"it does not answer ({str(error) or type(error).__name__})"
