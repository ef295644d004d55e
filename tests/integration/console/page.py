"""A console page in a real headless Chromium, as fixtures: `browser` and `open_console`."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from tests.service.console_fixture import Answers, serving
from tests.service.console_scene import Scene

CHROMIUM = Path(os.environ.get("CHROMIUM", "/usr/bin/chromium"))
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SHOWN_MS = 60_000  # what a page shows at last, a busy machine shows later
SETTLED_COLOUR = """item => Promise.all(item.getAnimations().map((a) => a.finished))
    .then(() => getComputedStyle(item).backgroundColor)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        reason = f"no Chromium at {CHROMIUM} (Debian: apt-get install chromium, or set CHROMIUM)"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    expect.set_options(timeout=SHOWN_MS)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield running
        running.close()


@dataclass
class Console:
    """A page that watches itself: errors it logs and requests that leave its origin."""

    page: Page
    url: str
    answers: Answers
    errors: list[str]
    strays: list[str]

    @property
    def scene(self) -> Scene:
        return self.answers.scene

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.url}/v1{path}").json()


Opener = Callable[..., Console]


@pytest.fixture
def open_console(browser: Browser) -> Iterator[Opener]:
    """open_console(scene, width=…, theme=…, …) gives a Console; at the end nothing may have gone wrong in it."""
    opened: list[tuple[Console, Any, Any]] = []

    def start(scene: Scene | None = None, *, width: int = 1440, theme: str = "light", **choices: Any) -> Console:
        answers = Answers(scene or Scene(drift=False))
        answers.period_s = 0.3
        answers.token = choices.pop("token", "")
        answers.override |= choices.pop("override", {})
        server = serving(answers)
        url = server.__enter__()
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme, **choices)  # type: ignore[arg-type]
        page = context.new_page()
        console = Console(page, url, answers, [], [])
        page.on("console", lambda message: _note(console, message))
        page.on("pageerror", lambda error: console.errors.append(str(error)))
        page.on("request", lambda request: _watch(console, request.url))
        page.goto(url)
        opened.append((console, context, server))
        return console

    yield start
    for console, context, server in opened:
        context.close()
        server.__exit__(None, None, None)
        assert console.errors == []
        assert console.strays == []


def _note(console: Console, message: ConsoleMessage) -> None:
    answers = console.answers
    expected = answers.scene.state == "broken" or answers.token or None in answers.override.values()
    if message.type in ("error", "warning") and not (expected and "Failed to load resource" in message.text):
        console.errors.append(f"{message.type}: {message.text}")


def _watch(console: Console, url: str) -> None:
    if not url.startswith((console.url, "data:", "blob:")):
        console.strays.append(url)
