"""What the console shows and how it is worked, in a real headless Chromium against a made-up fleet moved by hand."""

import re
import time
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.integration.console.page import SETTLED_COLOUR, Console, Opener
from tests.service.console_scene import Scene
from tests.service.console_troubles import TROUBLES

pytestmark = pytest.mark.integration

GAP = "\u202f"


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
        ("#gpus-out", f"{fleet['gpus']['total'] - fleet['gpus']['running'] - fleet['gpus']['free']:,}"),
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
    expect(console.page.locator("#risk li").first.locator(".name")).to_have_text("n005")
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
    expect(page.locator("#demand-foot")).to_contain_text("dashed: the forecast of")
    expect(page.locator("#demand-foot")).to_contain_text("0.97 of the best naive")
    for part in ("band90", "band50", "median", "history", "old", "now"):
        assert len(page.locator(f".fan-{part}").get_attribute("d") or "") > 10, part
    page.get_by_role("radio", name="arriving").check()
    expect(page.locator("#demand-foot")).to_contain_text("seasonal naive")
    page.locator("#pool").select_option("queue train")
    expect(page.locator("#fan title")).to_contain_text("queue train")
    page.locator("#class").select_option("training")
    expect(page.locator("#fan title")).to_contain_text("class training")
    expect(page.locator("#demand-foot")).to_contain_text("model persistence to 60 min, theta to 24 h")


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


def test_adapters_say_what_they_wrote_and_why_and_what_they_hold_back(open_console: Opener) -> None:
    console = open_console()
    nodes, slurm = (console.page.locator("#doors li").nth(at) for at in (0, 1))
    expect(nodes.locator(".state")).to_have_text("writes")
    expect(nodes.locator(".place")).to_have_text("133 marked · 14 written · 2 held back")
    expect(nodes.locator(".why")).to_contain_text(
        "n041: label fleetcast.io/risk = high. Risk 81% within 1 h: SM clock 990 MHz"
    )
    expect(slurm.locator(".state")).to_have_text("fails")
    expect(slurm.locator(".why")).to_have_text("Slurmctld does not answer. Trying again.")
    expect(console.page.locator("#doors-sub")).to_have_text("on request: kube")


def test_hard_signals_are_announced(open_console: Opener) -> None:
    console = open_console()
    expect(console.page.locator(".node")).to_have_count(133)
    at = console.scene.now_ms()
    console.scene.signals.append(
        {"node": "n077", "gpu": 1, "type": "xid", "code": 79, "time_ms": at, "sentence": "XID 79 on GPU 1 of n077"}
    )
    expect(console.page.locator("#signal")).to_contain_text("XID 79 on GPU 1 of n077")
    assert console.page.locator("#signal").get_attribute("aria-live") == "polite"
