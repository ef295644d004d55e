"""Actions on running jobs: the panel, a job and a waiting request show what the API says; switches ask first."""

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.integration.console.page import Console, Opener
from tests.integration.console.test_pages import open_page, still
from tests.integration.console.test_states import CONTRAST, MARKUP, NAMELESS, REPEATED_IDS
from tests.placement.actions.action_world import make_action
from tests.service.placer_world import NOW_MS
from tests.service.served_placer import serve_placer

pytestmark = pytest.mark.integration

OVERLAPS = """() => [...document.querySelectorAll('.actions .row')].flatMap((row) => {
    const boxes = [...row.children].filter((part) => part.textContent).map((part) => part.getBoundingClientRect());
    const meets = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
        && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1;
    return boxes.filter((a, at) => boxes.slice(at + 1).some((b) => meets(a, b))).map(() => row.textContent);
})"""


def test_the_panel_shows_open_actions_first_then_the_latest(open_console: Opener) -> None:
    console = open_console(still())
    found = {row["action_id"]: row for row in console.get("/actions")["rows"]}
    shown = console.page.locator("#actions li")
    expect(shown).to_have_count(len(found))
    keys = [row.get_attribute("data-key") for row in shown.all()]
    states = [found[key or ""]["state"] for key in keys]
    assert states == ["accepted", "sent", "proposed", "seen", "seen", "refused", "seen"]
    ended = [found[key or ""]["since_ms"] for key in keys[3:]]
    assert ended == sorted(ended, reverse=True)
    first, row = shown.first, found[keys[0] or ""]
    expect(first).to_contain_text(f"stops {row['job']}")
    expect(first).to_contain_text(f"for {row['payer']}")
    expect(first).to_contain_text("64 GPUs, costs 4.75 GPU-hours")
    expect(first).to_contain_text("accepted 19:23, expires 19:27")
    expect(first).to_contain_text("A queue gets back what it is guaranteed (guaranteed 400, held 340)")
    expect(shown.nth(2)).to_contain_text("advice only")
    expect(shown.nth(4)).to_contain_text("16 GPUs, saves 21 GPU-hours")
    expect(shown.nth(3)).to_contain_text("replaced nodes of")
    expect(shown.nth(5)).to_contain_text("did not stop")
    expect(console.page.locator("#actions-sub")).to_have_text("3 open, 4 ended lately")
    first.get_by_role("button", name=row["job"]).click()
    expect(console.page.locator("#drawer h2")).to_have_text(row["job"])


def test_a_job_shows_what_was_done_to_it(open_console: Opener) -> None:
    scene = still()
    page = open_page(open_console, f"job={scene.jobs[5].name}", scene).page
    stops = page.locator("#drawer .actions")
    expect(page.locator("#drawer")).to_contain_text("Stopped 1 time; none is open.")
    expect(stops.locator("li")).to_have_count(1)
    expect(stops).to_contain_text(f"stopped {scene.jobs[5].name}")
    expect(stops).to_contain_text("seen 18:43")
    untouched = open_page(open_console, f"job={scene.jobs[8].name}").page
    expect(untouched.locator("#drawer")).to_contain_text("It was not stopped, shrunk or moved.")


def test_a_waiting_request_shows_its_reclaim_step_and_its_actions(open_console: Opener) -> None:
    console = open_console(still())
    request = console.get("/queue")["rows"][0]["request_id"]
    body = console.get(f"/queue/{request}/why")
    body["ladder"].append({"code": "reclaim", "sentence": "would stop 2 jobs: 14 GPU-hours", "requests": []})
    console.answers.override[f"/v1/queue/{request}/why"] = body
    page = console.page
    page.goto(f"{console.url}/#why={request}")
    page.reload()
    step = page.locator(".ladder li").last
    expect(step.locator("h4")).to_have_text("Who would be stopped for it")
    expect(step).to_contain_text("Would stop 2 jobs: 14 GPU-hours")
    own = [row for row in console.get("/actions")["rows"] if row["payer"] == request]
    expect(page.locator("#drawer .actions li")).to_have_count(len(own))


def test_a_switch_asks_first_and_shows_the_state(open_console: Opener) -> None:
    console = open_console(still())
    page, actions = console.page, console.answers.actions
    pause = page.get_by_role("button", name="Pause all actions")
    pause.click()
    expect(page.locator("#confirm")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#confirm")).to_be_hidden()
    pause.click()
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#confirm")).to_be_hidden()
    assert actions.paused_ms is None
    pause.click()
    page.get_by_role("button", name="Pause", exact=True).click()
    expect(page.locator("#actions-switches")).to_contain_text("Paused since 19:24 by ada: no action is sent.")
    expect(pause).to_be_hidden()
    page.get_by_role("button", name="Resume").click()
    page.locator("#confirm-yes").click()
    expect(pause).to_be_visible()
    assert actions.paused_ms is None


def test_an_open_circuit_breaker_says_why_and_is_reset_by_hand(open_console: Opener) -> None:
    console = open_console(still())
    console.answers.actions.opened_ms = console.scene.now_ms()
    switches = console.page.locator("#actions-switches")
    expect(switches).to_contain_text("The circuit breaker is open since 19:24: nothing is sent until it is reset.")
    expect(switches).to_contain_text("Queue 'language' would lose 62 of 400 GPUs within an hour: at most 40.")
    switches.get_by_role("button", name="Reset").click()
    console.page.locator("#confirm-yes").click()
    expect(switches.get_by_role("button", name="Reset")).to_be_hidden()


@pytest.mark.parametrize(
    ("mode", "act_in", "said"),
    [
        ("off", [], "Nothing is proposed or sent: reclaim is off in the policy of the queues."),
        ("advise", [], "Advice only: no action is sent, because reclaim is “advise” in the policy of the queues."),
        ("act", ["owed", "batch"], "Actions are sent only for jobs of owed, batch. Elsewhere they are advice."),
        ("act", [], None),
        (MARKUP, [], None),
    ],
)
def test_the_policy_says_whether_actions_are_sent(
    open_console: Opener, mode: str, act_in: list[str], said: str | None
) -> None:
    scene = still()
    body = {"rows": [], "switches": {"mode": mode, "act_in": act_in, "paused_ms": scene.now_ms()}}
    page = open_console(scene, override={"/v1/actions": body}).page
    expect(page.locator("#actions-switches")).to_contain_text("Paused since")
    line = page.locator(".actions-mode")
    if said is None:
        expect(line).to_be_hidden()
    else:
        expect(line).to_have_text(said)


def test_a_refused_switch_says_what_it_needs(open_console: Opener) -> None:
    console = open_console(still(), override={"/v1/actions/pause": None})
    console.page.get_by_role("button", name="Pause all actions").click()
    console.page.locator("#confirm-yes").click()
    expect(console.page.locator("#actions-refused")).to_have_text("Not done: no such thing.")


def test_without_actions_or_with_nonsense_it_says_so(open_console: Opener) -> None:
    foot = "No action on a running job: none was stopped, shrunk or moved."
    expect(open_console(still("empty")).page.locator("#actions-foot")).to_have_text(foot)
    wrong: list[Any] = [None, 7, {}, {"action_id": "a", "kind": MARKUP, "job": MARKUP, "payer": 5, "sentence": MARKUP}]
    override = {"/v1/actions": {"rows": wrong, "switches": {"opened_ms": 5, "why": MARKUP, "paused_ms": "x"}}}
    page = open_console(still(), override=override).page
    expect(page.locator("#actions li")).to_have_count(1)
    expect(page.locator("#actions-switches")).to_contain_text("<img src=x")
    assert page.locator("img").count() == 0


@pytest.mark.parametrize("width", [320, 760, 1000, 1440])
def test_nothing_overlaps_and_nothing_scrolls_sideways(open_console: Opener, width: int) -> None:
    console: Console = open_console(still(), width=width)
    page = console.page
    request = console.get("/queue")["rows"][0]["request_id"]
    expect(page.locator("#actions li")).to_have_count(7)
    assert page.evaluate(OVERLAPS) == []
    page.goto(f"{console.url}/#why={request}")
    expect(page.locator("#drawer .actions li").first).to_be_visible()
    assert page.evaluate(OVERLAPS) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#drawer").evaluate("item => item.scrollWidth - item.clientWidth") <= 0


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_has_contrast_names_and_no_repeated_ids(open_console: Opener, theme: str) -> None:
    console = open_console(still(), theme=theme, reduced_motion="reduce")
    console.answers.actions.opened_ms = console.answers.actions.paused_ms = console.scene.now_ms()
    page = console.page
    expect(page.get_by_role("button", name="Resume")).to_be_visible()
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(NAMELESS) == []
    assert page.evaluate(REPEATED_IDS) == []
    page.get_by_role("button", name="Resume").click()
    assert page.evaluate(CONTRAST) == []


def test_a_real_placer_is_shown_and_paused(browser: Browser, tmp_path: Path) -> None:
    with serve_placer(tmp_path) as served:
        control = served.world.service.actions
        (record,) = control.propose([make_action("j0", by_ms=NOW_MS + 10**7, gpus=1.0)], NOW_MS).opened
        page = browser.new_page()
        page.goto(served.url)
        row = page.locator("#actions li")
        expect(row).to_contain_text("stops j0")
        expect(row).to_contain_text(f"1 GPU, costs {record.action.cost.total / 3600:.2f} GPU-hours")
        control.send([record.action_id], NOW_MS)
        expect(row).to_contain_text("sent ")
        page.get_by_role("button", name="Pause all actions").click()
        page.locator("#confirm-yes").click()
        expect(page.locator("#actions-switches")).to_contain_text("Paused since")
        (line,) = served.world.service.ledger.read_audit_trail(1)
        assert line["action"] == "actions_paused"
        page.close()
