"""The webhook of actions, with a receiver on the loopback address that refuses, hangs up or is away."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.service.config import load_config
from fleetcast.service.placer import action_webhook
from fleetcast.service.placer.action_webhook import MOST_TRIES, ActionWebhook
from fleetcast.service.placer.role import serve
from tests.ports import free_port
from tests.service.placer.test_act import ActWorld, send_stop


class Receiver(ThreadingHTTPServer):
    """A receiver that answers 200, after the statuses of `answers`."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[int] = []
        self.bodies: list[dict[str, Any]] = []
        self.tokens: set[str | None] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/hook"

    @property
    def states(self) -> list[tuple[str, str]]:
        return [(body["job"], body["state"]) for body in self.bodies]


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        status = self.server.answers.pop(0) if self.server.answers else 200
        if status == 200:
            self.server.bodies.append(body)
            self.server.tokens.add(self.headers["authorization"])
        self.send_response(status)
        if status == 302:
            self.send_header("location", "/elsewhere")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def receiving() -> Iterator[Receiver]:
    server = Receiver()
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as server:
        yield server


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ActWorld]:
    monkeypatch.setattr(action_webhook, "POLL_S", 0.01)
    monkeypatch.setattr(action_webhook, "LONGEST_PAUSE_S", 0.01)
    world = ActWorld(tmp_path)
    yield world
    world.close()


def make_webhook(world: ActWorld) -> ActionWebhook:
    return ActionWebhook(world.service.ledger, world.service.actions, world.service.metrics.actions)


def run(webhook: ActionWebhook, url: str, seconds: float = 3.0) -> None:
    """Run a webhook for a while, as the placer does until it stops."""

    async def go() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(webhook.run(url, "secret"), seconds)

    asyncio.run(go())


def counted(world: ActWorld) -> dict[str, float]:
    return {
        sample.labels["outcome"]: sample.value
        for metric in world.service.metrics.actions.notices.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }


def test_the_owner_is_notified_of_a_stop_and_of_what_became_of_it(world: ActWorld, receiver: Receiver) -> None:
    webhook = make_webhook(world)
    send_stop(world)
    run(webhook, receiver.url)
    assert (receiver.states, receiver.tokens) == ([("a", "sent")], {"Bearer secret"})
    (row,) = world.ask("GET", "/actions?job=a")["rows"]
    assert receiver.bodies == [{**row, "user": ""}]
    world.reply("a", "accept")
    world.end("a")
    world.pass_at(10)
    run(webhook, receiver.url)
    assert receiver.states == [("a", "sent"), ("a", "seen")]


def test_proposals_and_what_happened_before_the_webhook_was_on_are_not_sent(
    world: ActWorld, receiver: Receiver
) -> None:
    send_stop(world)
    webhook = make_webhook(world)
    run(webhook, receiver.url)
    assert receiver.bodies == []


def test_a_receiver_that_refuses_gets_the_notice_again_and_a_redirect_is_no_acceptance(
    world: ActWorld, receiver: Receiver
) -> None:
    webhook = make_webhook(world)
    send_stop(world)
    receiver.answers = [500, 302, 429]
    run(webhook, receiver.url)
    assert receiver.states == [("a", "sent")]
    assert counted(world) == {"failed": 3, "delivered": 1}


def test_a_restart_forgets_no_notice_and_repeats_only_one_that_was_not_answered(
    world: ActWorld, receiver: Receiver
) -> None:
    make_webhook(world)
    send_stop(world)
    world.restart()
    run(make_webhook(world), receiver.url)
    assert receiver.states == [("a", "sent")]
    world.restart()
    run(make_webhook(world), receiver.url)
    assert receiver.states == [("a", "sent")]


def test_a_notice_is_given_up_after_its_last_try_and_the_next_are_sent(world: ActWorld) -> None:
    webhook = make_webhook(world)
    send_stop(world)
    run(webhook, f"http://127.0.0.1:{free_port()}/")
    assert counted(world) == {"failed": MOST_TRIES, "given_up": 1}
    world.reply("a", "refuse", why="no")
    with receiving() as receiver:
        run(webhook, receiver.url)
        assert receiver.states == [("a", "refused")]


@pytest.mark.parametrize("url", ["host/hook", "ftp://host/hook", "http://me:secret@host/hook", "http://"])
def test_an_address_that_is_none_or_holds_a_password_is_refused(tmp_path: Path, url: str) -> None:
    path = tmp_path / "config.toml"
    path.write_text(f'[placer]\nwebhook = "{url}"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"placer\.webhook.*https://HOST/PATH") as caught:
        load_config(path)
    assert "secret" not in str(caught.value)


def test_the_placer_sends_notices_while_it_runs(
    world: ActWorld, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_webhook(world)
    send_stop(world)
    world.close()
    monkeypatch.setenv("FLEETCAST_WEBHOOK_TOKEN", "secret")
    placer = msgspec.structs.replace(world.config.placer, port=free_port(), webhook=receiver.url)

    async def stop_once_received() -> None:
        while not receiver.bodies:
            await asyncio.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    async def main() -> None:
        async with asyncio.timeout(20):
            await asyncio.gather(stop_once_received(), serve(msgspec.structs.replace(world.config, placer=placer)))

    asyncio.run(main())
    assert receiver.tokens == {"Bearer secret"}
    assert receiver.bodies[0]["job"] == "a"
