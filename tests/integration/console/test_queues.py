"""The tree of queues and why a request waits: what they show is what the API says; empty, refused and gone are said."""

import re
from typing import Any

import pytest
from playwright.sync_api import Locator, expect

from tests.integration.console.page import Console, Opener
from tests.integration.console.test_pages import GAP, clock, still
from tests.integration.console.test_states import CONTRAST, MARKUP, NAMELESS, REPEATED_IDS

pytestmark = pytest.mark.integration


def width_of(part: Locator) -> float:
    box = part.bounding_box()
    assert box
    return box["width"]


def test_the_tree_shows_what_each_queue_is_owed_and_holds(open_console: Opener) -> None:
    console = open_console(still())
    page, rows = console.page, console.get("/queues")["rows"]
    shown = page.locator("#queues li")
    expect(shown).to_have_count(len(rows))
    names = [row["queue"].rpartition("/")[2] for row in rows]
    assert page.locator("#queues .name").all_inner_texts() == names
    expect(shown.nth(0)).to_contain_text("620 of 400 GPUs, borrows 220")
    expect(shown.nth(0)).to_contain_text("share 0.31")
    expect(shown.nth(0)).to_contain_text(f"9 run · 7 wait (120 GPUs) · waited 6–87{GAP}min")
    expect(shown.nth(1)).to_contain_text("500 GPUs")
    expect(shown.nth(1)).not_to_contain_text("borrow")  # it holds of what language has
    expect(shown.nth(3)).to_contain_text("190 of 200 GPUs, limit 400")
    expect(shown.nth(5)).to_contain_text("class urgent · 0 run · 0 wait")
    expect(shown.nth(6)).to_contain_text("190 of 400 GPUs, lends 210")
    expect(shown.nth(6)).to_contain_text("placed at once · 1,000 GPU-hours in the bank")
    expect(page.locator("#queues-sub")).to_have_text("7 queues share 1,064 GPUs")
    expect(page.locator("#queues-foot")).to_contain_text("Credits come first in the order, and protect no job")
    indent = [
        float(name.evaluate("item => parseFloat(item.style.paddingLeft)"))
        for name in page.locator("#queues .name").all()
    ]
    assert indent == [0, 16, 16, 0, 16, 0, 0]


def test_the_bars_are_to_one_scale(open_console: Opener) -> None:
    page = open_console(still()).page
    rows = page.locator("#queues li")
    expect(rows).to_have_count(7)
    whole = width_of(rows.nth(0).locator(".bar-of"))  # the widest holds 620 GPUs
    for row, part, gpus in (
        (0, "guaranteed", 400),
        (0, "used", 400),
        (0, "borrowed", 220),
        (6, "used", 190),
        (6, "lent", 210),
    ):
        assert width_of(rows.nth(row).locator(f".part-{part}")) == pytest.approx(whole * gpus / 620, abs=1.5)
    expect(rows.nth(0).locator(".part-lent")).to_have_css("width", "0px")
    days = rows.nth(0).locator(".days")
    expect(days.locator("rect")).to_have_count(7)
    expect(days.locator(".day-unknown")).to_have_count(1)
    expect(days).to_have_attribute("aria-label", re.compile(rf"38{GAP}% in 7 days; by day 31{GAP}%, 33{GAP}%, –"))


def test_without_a_file_of_queues_and_with_a_refused_one_it_says_so(open_console: Opener) -> None:
    page = open_console(still("empty")).page
    expect(page.locator("#queues-foot")).to_have_text("No file of queues is configured: all wait in one line")
    expect(page.locator("#queues-refused")).to_be_hidden()
    console = open_console(still())
    refused = {**console.get("/queues"), "refused": "line 3: queue.a.weight: is -1, must be above 0"}
    console.answers.override["/v1/queues"] = refused
    console.page.reload()
    expect(console.page.locator("#queues-refused")).to_contain_text("line 3: queue.a.weight: is -1")
    expect(console.page.locator("#queues li")).to_have_count(7)


def test_an_answer_that_is_missing_or_nonsense_breaks_nothing(open_console: Opener) -> None:
    page = open_console(still(), override={"/v1/queues": None}).page
    expect(page.locator("#queues-foot")).to_have_text("Not available: no such thing")
    wrong: list[Any] = [None, 7, {}, {"queue": MARKUP, "held": [], "share": "x", "share_days": {}, "parent": MARKUP}]
    wrong.append({"queue": "a", "parent": "gone", "share_days": [None, "x", 7], "guaranteed": {"gpu": "many"}})
    body = {"rows": wrong, "notes": 5, "refused": MARKUP, "capacity": None}
    page = open_console(still(), override={"/v1/queues": body}).page
    expect(page.locator("#queues-refused")).to_contain_text("<img src=x")
    assert page.locator("img").count() == 0


def open_why(open_console: Opener, at: int, **choices: Any) -> tuple[Console, dict[str, Any]]:
    console = open_console(still(), **choices)
    row = console.get("/queue")["rows"][at]
    console.page.locator("#queue li button").nth(at).click()
    expect(console.page.locator("#drawer h2")).to_have_text(row["request_id"])
    return console, console.get(f"/queue/{row['request_id']}/why")


def test_a_waiting_request_says_why_step_by_step(open_console: Opener) -> None:
    console, body = open_why(open_console, 2)
    drawer = console.page.locator("#drawer")
    steps = drawer.locator(".ladder li")
    expect(steps).to_have_count(len(body["ladder"]))
    titles = ["Who is before it", "What is short", "When it starts"]
    assert drawer.locator(".ladder h4").all_inner_texts() == titles
    for at, step in enumerate(body["ladder"]):
        expect(steps.nth(at)).to_contain_text(step["sentence"][1:])
    expect(drawer.locator(".facts")).to_have_text(
        f"queue {body['queue']} · number 3 in the order · number 1 in its queue · its queue's share is 0.21"
    )
    expect(drawer).to_contain_text(f"Starts {clock(body['start_ms']['p50'])} (")
    first = body["ladder"][0]["requests"][0]
    steps.nth(0).get_by_role("button", name=first).click()
    expect(drawer.locator("h2")).to_have_text(first)
    assert console.page.url.endswith(f"#why={first}")
    console.page.go_back()
    expect(drawer.locator("h2")).to_have_text(body["request_id"])
    console.page.keyboard.press("Escape")
    expect(drawer).to_be_hidden()


def test_who_waits_no_more_is_told(open_console: Opener) -> None:
    console = open_console(still(), override={"/v1/queue/train-9/why": None})
    console.page.goto(f"{console.url}/#why=train-9")
    console.page.reload()
    expect(console.page.locator("#drawer .facts")).to_contain_text("It waits no more")


@pytest.mark.parametrize("width", [320, 900, 1440])
def test_neither_scrolls_sideways(open_console: Opener, width: int) -> None:
    console, _ = open_why(open_console, 2, width=width)
    page = console.page
    expect(page.locator(".ladder li")).to_have_count(3)
    expect(page.locator("#queues li")).to_have_count(7)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#drawer").evaluate("item => item.scrollWidth - item.clientWidth") <= 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_have_contrast_names_and_no_repeated_ids(open_console: Opener, theme: str) -> None:
    console, _ = open_why(open_console, 2, theme=theme, reduced_motion="reduce")
    page = console.page
    expect(page.locator(".ladder li")).to_have_count(3)
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(NAMELESS) == []
    assert page.evaluate(REPEATED_IDS) == []
