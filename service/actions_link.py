"""The link by which executors read the placer's actions and reply to them."""

from collections.abc import Sequence
from urllib.parse import quote

import msgspec

from fleetcast.fleet.decode_faults import explain_decode_error
from fleetcast.fleet.errors import SourceError
from fleetcast.placement.actions.life import ActionState
from fleetcast.service.answers.actions import ActionList, ActionReply, ActionRow
from fleetcast.service.api.placer_link import ForwardedAnswer, PlacerLink
from fleetcast.service.config import Config
from fleetcast.service.http.access import VOUCHED
from fleetcast.service.http.link_key import read_link_key

TIMEOUT_S = 3.0  # wall
PAGE = 1000
MOST_WHY = 500  # characters of a refusal
ENDED = frozenset({403, 404, 409})  # the placer does not accept a reply any more


class ActionsLink:
    """A connection to the placer on the loopback address. Methods raise SourceError if there is no answer."""

    def __init__(self, config: Config) -> None:
        self._link = PlacerLink(f"http://127.0.0.1:{config.placer.port}")
        self._folder = config.folder

    async def read_sent_actions(self) -> list[ActionRow]:
        """Return the actions that executors carry out now: those that are sent or accepted.

        An action that is accepted between the two reads is in both, and counts as accepted.
        """
        sent = await self._read_state(ActionState.SENT)
        accepted = await self._read_state(ActionState.ACCEPTED)
        return [*{row.action_id: row for row in (*sent, *accepted)}.values()]

    async def _read_state(self, state: ActionState) -> list[ActionRow]:
        rows: list[ActionRow] = []
        after = 0
        while True:
            answer = await self._ask("GET", f"/actions?state={state}&after={after}&limit={PAGE}")
            page = _decode_page(answer)
            rows += page.rows
            if len(page.rows) < PAGE:
                return rows
            after = page.cursor

    async def accept(self, row: ActionRow) -> None:
        """Reply that an action is carried out. An action that has ended meanwhile stays as it is."""
        await self._reply(row, "accept", "")

    async def refuse(self, row: ActionRow, why: str) -> None:
        """Reply that an action is not carried out. An action that has ended meanwhile stays as it is."""
        await self._reply(row, "refuse", why)

    async def _reply(self, row: ActionRow, verb: str, why: str) -> None:
        body = msgspec.json.encode(ActionReply(row.job, row.attempt, why[:MOST_WHY]))
        answer = await self._ask("POST", f"/actions/{quote(row.action_id)}/{verb}", body)
        if answer.status != 200 and answer.status not in ENDED:
            raise _make_error(answer)

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> ForwardedAnswer:
        try:
            key = read_link_key(self._folder)
        except OSError as error:
            raise SourceError(f"the key of the placer's link is unreadable: {error}") from None
        headers = {
            "authorization": f"Bearer {key}",
            VOUCHED: "read,events executors",
            **({"content-type": "application/json"} if body else {}),
        }
        return await self._link.forward_request(method, path, body, headers=headers, timeout_s=TIMEOUT_S)

    async def close(self) -> None:
        await self._link.close()


def _decode_page(answer: ForwardedAnswer) -> ActionList:
    if answer.status != 200:
        raise _make_error(answer)
    try:
        return msgspec.json.decode(answer.body, type=ActionList)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = explain_decode_error(error, msgspec.json.Decoder(ActionList).decode, answer.body)
        raise SourceError(f"the placer's list of actions is unreadable: {why}") from None


def _make_error(answer: ForwardedAnswer) -> SourceError:
    return SourceError(f"the placer answers {answer.status}: {answer.body[:200].decode('utf-8', 'replace')}")


def select_rows(rows: Sequence[ActionRow], executor: str) -> list[ActionRow]:
    """Return the rows of one executor."""
    return [row for row in rows if row.executor == executor]
