"""The console in a real headless Chromium, against a made-up fleet that tests move by hand."""

import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, expect, sync_playwright

from tests.service.console_fixture import Answers, serving
from tests.service.console_scene import TROUBLES, Scene

pytestmark = pytest.mark.integration

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
UPDATE_MS = 50  # of the main thread, for a new board of 10,000 nodes
GAP = "\u202f"
MARKUP = "<img src=x onerror=\"document.title='owned'\">"
SETTLED_COLOUR = """item => Promise.all(item.getAnimations().map((a) => a.finished))
    .then(() => getComputedStyle(item).backgroundColor)"""
NAMELESS = """() => [...document.querySelectorAll('button, input, select, a')]
    .filter((control) => !(control.textContent.trim() || control.ariaLabel || control.labels?.length))
    .map((control) => control.outerHTML)"""
REPEATED_IDS = """() => { const ids = [...document.querySelectorAll('[id]')].map((item) => item.id);
    return ids.filter((id, at) => ids.indexOf(id) !== at); }"""
CONTRAST = (Path(__file__).parent / "contrast.js").read_text()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        reason = f"no Chromium at {CHROMIUM} (Debian: apt-get install chromium, or set CHROMIUM)"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
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
    expected = console.answers.scene.state == "broken" or console.answers.token
    if message.type in ("error", "warning") and not (expected and "Failed to load resource" in message.text):
        console.errors.append(f"{message.type}: {message.text}")


def _watch(console: Console, url: str) -> None:
    if not url.startswith((console.url, "data:", "blob:")):
        console.strays.append(url)


def percent(p: float) -> str:
    if p < 0.01:
        return f"<1{GAP}%"
    return f">99{GAP}%" if p > 0.99 else f"{int(p * 100 + 0.5)}{GAP}%"


def node(console: Console, name: str) -> Any:
    return console.page.locator(".node", has_text=name)


def redness(console: Console, name: str) -> tuple[float, float]:
    """How much redder than green a node's cell is, and its lightness (sum of channels)."""
    colour = node(console, name).evaluate(SETTLED_COLOUR)
    red, green, blue = (float(part) for part in re.findall(r"[\d.]+", colour)[:3])
    return red - green, red + green + blue


def test_header_shows_the_numbers_of_the_api(open_console: Opener) -> None:
    console = open_console()
    fleet = console.get("/fleet")
    page = console.page
    for field, value in (
        ("#gpus-running", f"{fleet['gpus']['running']:,}"),
        ("#gpus-free", f"{fleet['gpus']['free']:,}"),
        ("#gpus-total", f"{fleet['gpus']['total']:,}"),
        ("#at-risk", str(fleet["at_risk"])),
        ("#queued", f"{fleet['queued_gpus']} GPUs in {fleet['queued_jobs']} jobs"),
        ("#fleet-name", "venus"),
        ("#speed", "15× speed"),
    ):
        expect(page.locator(field)).to_have_text(value)
    expect(page.locator("#notice")).to_contain_text("Live.")


def test_riskiest_rows_are_those_of_the_api_with_reason_and_action(open_console: Opener) -> None:
    console = open_console()
    expect(console.page.locator("#risk li")).to_have_count(10)
    for at, row in enumerate(console.get("/risk/nodes?limit=5&horizon_s=3600")["rows"]):
        shown = console.page.locator("#risk li").nth(at)
        expect(shown.locator(".name")).to_have_text(row["node"])
        expect(shown.locator(".chance")).to_have_text(percent(row["p"]))
        expect(shown.locator(".why")).to_have_text(row["reason"])
        expect(shown.locator(".act")).to_have_text(row["action"]["sentence"].rstrip("."))


def test_another_horizon_shows_its_probabilities(open_console: Opener) -> None:
    console = open_console()
    console.page.get_by_role("radio", name=f"7{GAP}d").check()
    first = console.get("/risk/nodes?limit=1&horizon_s=604800")["rows"][0]
    expect(console.page.locator("#risk li").first.locator(".chance")).to_have_text(percent(first["p"]))
    expect(console.page.locator("#risk-foot")).to_contain_text(f"Within 7{GAP}d")


def test_a_node_that_turns_risky_turns_red_and_leads_the_list(open_console: Opener) -> None:
    console = open_console()
    expect(node(console, "n005")).to_be_visible()
    calm, light = redness(console, "n005")
    console.scene.troubles[4] = replace(TROUBLES[41], slow=0.99, entity="n005/2")
    expect(console.page.locator("#risk li").first.locator(".name")).to_have_text("n005", timeout=6000)
    expect(node(console, "n005").locator(".figure")).to_have_text(f"97{GAP}%")
    risky, dark = redness(console, "n005")
    assert risky > calm + 60
    assert dark < light - 100, "the scale must differ in lightness, for those who see no red"
    expect(console.page.locator("#look")).to_contain_text("n005")


def test_every_node_is_on_the_map_in_its_rack_and_unknown_is_hatched(open_console: Opener) -> None:
    console = open_console()
    expect(console.page.locator(".node")).to_have_count(133)
    expect(console.page.locator(".rack")).to_have_count(7)
    expect(console.page.get_by_role("group", name="rack r03").locator(".node")).to_have_count(19)
    assert "gradient" in node(console, "n121").evaluate("cell => getComputedStyle(cell).backgroundImage")
    expect(node(console, "n058").locator(".figure")).to_have_text("drained")


def test_rows_keep_their_elements_and_order_while_numbers_wobble(open_console: Opener) -> None:
    console = open_console(Scene(drift=True, speed=60.0))
    rows = console.page.locator("#risk li")
    expect(rows).to_have_count(10)
    mark = "items => items.slice(0, 5).map((item, at) => (item.mine ??= at))"
    names = rows.locator(".name").all_inner_texts()[:5]
    assert rows.evaluate_all(mark) == [0, 1, 2, 3, 4]
    time.sleep(3)
    assert rows.evaluate_all(mark) == [0, 1, 2, 3, 4]
    assert rows.locator(".name").all_inner_texts()[:5] == names


def test_slash_finds_a_node_and_escape_gives_the_focus_back(open_console: Opener) -> None:
    page = open_console().page
    expect(page.locator(".node")).to_have_count(133)
    page.locator(".node").first.focus()
    page.keyboard.press("/")
    page.keyboard.type("n042")
    page.keyboard.press("Enter")
    expect(page.locator("#drawer h2")).to_have_text("n042")
    expect(page.locator(".reasons .sentence").first).to_contain_text("SM clock 990 MHz, usual 1,980")
    expect(page.locator(".reasons .code").first).to_contain_text("sm_clock_mhz of n042/3")
    expect(page.locator(".gpus tbody tr")).to_have_count(8)
    page.keyboard.press("Escape")
    expect(page.locator("#drawer")).to_be_hidden()


def test_arrows_move_on_the_map_and_enter_opens_the_node(open_console: Opener) -> None:
    page = open_console().page
    expect(page.locator(".node")).to_have_count(133)
    page.locator(".node").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".node:focus .name")).to_have_text("n021")
    expect(page.locator("#tip")).to_contain_text("n021")
    page.keyboard.press("Enter")
    expect(page.locator("#drawer h2")).to_have_text("n021")
    page.keyboard.press("Escape")
    expect(page.locator(".node:focus .name")).to_have_text("n021")


def test_selecting_a_slow_job_outlines_its_gang(open_console: Opener) -> None:
    console = open_console()
    slow = next(row for row in console.get("/jobs")["rows"] if row["slow"])
    row = console.page.locator("#stragglers li", has_text=slow["job"])
    expect(row).to_contain_text("holds the gang back")
    row.locator("button").click()
    expect(console.page.locator(".node.gang")).to_have_count(len(slow["nodes"]))
    assert console.page.locator(".node.gang .name").all_inner_texts() == slow["nodes"]
    expect(console.page.locator("#chosen")).to_contain_text(f"{slow['gpus']} GPUs on {len(slow['nodes'])} node")
    console.page.keyboard.press("Escape")
    expect(console.page.locator(".node.gang")).to_have_count(0)


def test_demand_names_its_model_and_record_and_switches_target(open_console: Opener) -> None:
    page = open_console().page
    expect(page.locator("#demand-foot")).to_contain_text("model persistence")
    expect(page.locator("#demand-foot")).to_contain_text("0.97 of the best naive")
    for part in ("band90", "band50", "median", "history", "old", "now"):
        assert len(page.locator(f".fan-{part}").get_attribute("d") or "") > 10, part
    page.get_by_role("radio", name="arriving").check()
    expect(page.locator("#demand-foot")).to_contain_text("seasonal naive")
    page.locator("#pool").select_option("train")
    expect(page.locator("#fan title")).to_contain_text("pool train")


def test_queue_says_who_what_why_and_when(open_console: Opener) -> None:
    console = open_console()
    for at, row in enumerate(console.get("/queue")["rows"][:6]):
        shown = console.page.locator("#queue li").nth(at)
        expect(shown.locator(".name")).to_have_text(row["job"])
        expect(shown.locator(".why")).to_have_text(row["why"], ignore_case=True)
        expect(shown.locator(".place")).to_contain_text(row["user"])
        expect(shown.locator(".chance")).to_contain_text("min")
    console.page.get_by_text("show all 11").click()
    expect(console.page.locator("#queue li")).to_have_count(11)


def test_decisions_and_ingestion_are_in_words(open_console: Opener) -> None:
    console = open_console()
    latest = console.get("/placements?limit=1000")["rows"][-1]
    expect(console.page.locator("#decisions")).to_contain_text(latest["sentence"], ignore_case=True)
    expect(console.page.locator("#ingestion")).to_contain_text("not a number")
    expect(console.page.locator("#ingestion-sub")).to_have_text("263 of 266 targets answer")


def test_hard_signals_are_announced(open_console: Opener) -> None:
    console = open_console()
    expect(console.page.locator(".node")).to_have_count(133)
    at = console.scene.now_ms()
    console.scene.signals.append(
        {"node": "n077", "gpu": 1, "type": "xid", "code": 79, "time_ms": at, "sentence": "XID 79 on GPU 1 of n077"}
    )
    expect(console.page.locator("#signal")).to_contain_text("XID 79 on GPU 1 of n077")
    assert console.page.locator("#signal").get_attribute("aria-live") == "polite"


@pytest.mark.parametrize("width", [320, 390, 900])
def test_narrow_pages_do_not_scroll_sideways(open_console: Opener, width: int) -> None:
    page = open_console(width=width).page
    expect(page.locator(".node")).to_have_count(133)
    expect(page.locator("#queue li")).to_have_count(6)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("#risk button").first.click()
    expect(page.locator(".gpus tbody tr")).to_have_count(8)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_stale_data_turn_the_strip_amber_and_say_since_when(open_console: Opener) -> None:
    console = open_console(Scene(state="stale", drift=False))
    expect(console.page.locator("#notice")).to_contain_text("Stale: no new sample since 19:19 UTC")
    expect(console.page.locator("#trust")).to_have_text("No, it is old")
    colour = console.page.locator(".strip").evaluate(SETTLED_COLOUR)
    red, green, blue = (int(part) for part in re.findall(r"\d+", colour)[:3])
    assert red > blue + 60
    assert green > blue + 40


def test_warming_says_how_much_history_there_is(open_console: Opener) -> None:
    page = open_console(Scene(state="warming", drift=False)).page
    expect(page.locator("#notice")).to_contain_text("Warming: 4 of 30 minutes of history")


def test_an_empty_fleet_is_told_how_to_begin(open_console: Opener) -> None:
    page = open_console(Scene(state="empty", drift=False)).page
    expect(page.locator("#map")).to_contain_text("fleetcast run --scrape")
    expect(page.locator("#queue-foot")).to_have_text("Nobody waits.")
    expect(page.locator("#health")).to_have_text("No node yet")


def test_an_api_that_goes_away_leaves_the_last_data_greyed_until_it_is_back(open_console: Opener) -> None:
    console = open_console()
    expect(console.page.locator(".node")).to_have_count(133)
    console.scene.state = "broken"
    expect(console.page.locator("#notice")).to_contain_text("The API does not answer since", timeout=15_000)
    expect(console.page.locator(".node")).to_have_count(133)
    assert "grayscale" in console.page.locator("main").evaluate("main => getComputedStyle(main).filter")
    console.scene.state = "live"
    expect(console.page.locator("#notice")).to_contain_text("Live.", timeout=10_000)


def _nonsense() -> dict[str, Any]:
    """Every document with missing keys, nulls, wrong types and names that would like to be markup."""
    wrong = [None, 7, "text", {}, []]
    bad_node = {
        "node": MARKUP,
        "rack": MARKUP,
        "state": MARKUP,
        "p": "high",
        "gpus": [None, {"job": MARKUP}],
        "reason": MARKUP,
    }
    return {
        "/v1/fleet": {
            "as_of_ms": None,
            "gpus": None,
            "name": MARKUP,
            "newest_sample_ms": "now",
            "nodes": [*wrong, bad_node, bad_node],
        },
        "/v1/risk/nodes": {
            "rows": [*wrong, {"node": MARKUP, "p": 7, "reason": MARKUP, "action": MARKUP}, {"node": "n002", "p": None}]
        },
        "/v1/demand": {
            "series": [
                *wrong,
                {"pool": MARKUP, "target": "wanted", "values": None},
                {"target": "wanted", "quantiles": ["x"]},
            ]
        },
        "/v1/demand/record": {"history": [[None, 1], 5], "old": {"a": 1}},
        "/v1/queue": {"rows": [*wrong, {"request_id": MARKUP, "gang": None, "start_ms": {"p50": "x"}, "why": MARKUP}]},
        "/v1/jobs": {"rows": [*wrong, {"job": MARKUP, "slow": True, "nodes": None, "remaining_s": 3}]},
        "/v1/placements": {"rows": [*wrong, {"sentence": MARKUP, "time_ms": 1e300, "cursor": {}}], "cursor": []},
        "/v1/ingestion": {
            "sources": [*wrong, {"name": MARKUP}],
            "bad_records": {MARKUP: "many"},
            "targets": 5,
            "tick_ms": [],
        },
        "/v1/nodes/n002": {
            "node": "n002",
            "reasons": [None, {"sentence": MARKUP}],
            "gpus": [None, {}],
            "risk": [{}],
            "jobs": [None, MARKUP],
        },
    }


def test_nonsense_breaks_nothing_and_markup_stays_text(open_console: Opener) -> None:
    page = open_console(override=_nonsense()).page
    expect(page.locator("#risk li").first).to_contain_text("<img src=x")
    expect(page.locator("#decisions")).to_contain_text("<img src=x")
    expect(page.locator("#queue")).to_contain_text("<img src=x")
    page.locator("#risk li", has_text="n002").locator("button").click()
    expect(page.locator(".reasons")).to_contain_text("<img src=x")
    assert page.locator("img").count() == 0
    assert "owned" not in page.title().split()


def test_documents_that_are_no_objects_break_nothing(open_console: Opener) -> None:
    paths = ("fleet", "risk/nodes", "demand", "demand/record", "queue", "jobs", "placements", "ingestion")
    page = open_console(override={f"/v1/{path}": [1, "x"] for path in paths}).page
    expect(page.locator("#map")).to_contain_text("No node yet")
    expect(page.locator("#queue-foot")).to_have_text("Nobody waits.")


def test_ten_thousand_nodes_are_drawn_on_a_canvas_within_the_budget(open_console: Opener) -> None:
    page = open_console(Scene(nodes=10_000, drift=False)).page
    expect(page.locator(".canvas canvas")).to_be_visible(timeout=30_000)
    measured = "performance.getEntriesByName('fleet update').map(entry => entry.duration)"
    until = time.monotonic() + 60
    while len(page.evaluate(measured)) < 4 and time.monotonic() < until:
        page.wait_for_timeout(200)
    _, *later = page.evaluate(measured)
    assert sorted(later)[len(later) // 2] < UPDATE_MS
    page.locator(".canvas").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tip")).to_contain_text("within 1 h")
    page.keyboard.press("Enter")
    expect(page.locator("#drawer h2")).to_have_text("Rack r02")
    expect(page.locator("#drawer li")).to_have_count(19)


def test_it_prints_on_one_page(open_console: Opener) -> None:
    page = open_console().page
    expect(page.locator("#queue li")).to_have_count(6)
    expect(page.locator("#decisions li").first).to_be_visible()
    assert len(re.findall(rb"/Type\s*/Page\b", page.pdf(prefer_css_page_size=True))) == 1


def test_a_token_is_asked_for_and_kept_for_the_tab(open_console: Opener) -> None:
    page = open_console(token="s3cret").page
    page.locator("#ask-token").fill("s3cret")
    page.keyboard.press("Enter")
    expect(page.locator(".node")).to_have_count(133, timeout=10_000)
    assert page.evaluate("sessionStorage.getItem('fleetcast.token')") == "s3cret"
    assert page.evaluate("localStorage.getItem('fleetcast.token')") is None


def test_the_theme_button_changes_the_page_and_is_remembered(open_console: Opener) -> None:
    page = open_console(theme="light").page
    ground = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.locator("#theme").click()
    page.locator("#theme").click()
    expect(page.locator("#theme")).to_have_text("Dark")
    assert page.evaluate(ground) != light
    page.reload()
    expect(page.locator("#theme")).to_have_text("Dark")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_contrast_and_controls_have_names(open_console: Opener, theme: str) -> None:
    page = open_console(theme=theme).page
    expect(page.locator("#queue li")).to_have_count(6)
    page.locator("#risk button").nth(1).click()
    expect(page.locator(".gpus tbody tr")).to_have_count(8)
    time.sleep(0.6)  # colour transitions end
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(NAMELESS) == []
    assert page.evaluate(REPEATED_IDS) == []
    for landmark in ("banner", "main", "contentinfo", "search"):
        expect(page.get_by_role(landmark)).to_have_count(1)  # type: ignore[arg-type]
