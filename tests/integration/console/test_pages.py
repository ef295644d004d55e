"""The pages of a node and of a job: what they show is what the API says, by mouse, by keyboard, in both themes."""

import re
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.integration.console.page import Console, Opener
from tests.integration.console.test_states import CONTRAST, MARKUP, NAMELESS, REPEATED_IDS
from tests.service.console_scene import Scene

pytestmark = pytest.mark.integration

NODE, JOB = "n042", "research-8835"
GAP = "\u202f"


def clock(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).strftime("%H:%M")


def still(state: str = "live") -> Scene:
    """A scene whose fleet clock stands: what is asked twice is the same."""
    return Scene(state=state, drift=False, speed=0.001)


def open_page(open_console: Opener, anchor: str, scene: Scene | None = None, **choices: Any) -> Console:
    console = open_console(scene or still(), **choices)
    console.page.goto(f"{console.url}/#{anchor}")
    console.page.reload()
    expect(console.page.locator("#drawer h2")).to_be_visible()
    return console


def entries(page: Page, kind: str) -> Any:
    return page.locator(f".plot .entry-{kind}")


def test_the_timeline_has_every_entry_of_the_api(open_console: Opener) -> None:
    console = open_page(open_console, f"node={NODE}")
    page, body = console.page, console.get(f"/nodes/{NODE}/timeline?minutes=60")
    expect(entries(page, "signal")).to_have_count(len(body["signals"]))
    expect(page.locator(".plot").locator(".entry-fault, .entry-event")).to_have_count(len(body["events"]))
    running = [row for row in body["jobs"] if row["ended_ms"] is None or row["ended_ms"] >= body["from_ms"]]
    expect(entries(page, "job")).to_have_count(len(running))
    expect(entries(page, "action")).to_have_count(len(body["actions"]))
    for at, scores in enumerate(body["scores"]):
        worst = scores["steps"][-1]["p"]
        shown = f">99{GAP}%" if worst > 0.99 else f"{round(worst * 100)}{GAP}%"
        expect(page.locator(".plot .lane-now").nth(at)).to_have_text(shown)
    page.locator(".axis summary").click()
    lines = page.locator(".axis details li")
    told = [*body["signals"], *body["events"], *running, *body["actions"]]
    expect(lines).to_have_count(len(told))
    text = " ".join(lines.all_inner_texts())
    for row in told:
        assert clock(row.get("began_ms") or row["time_ms"]) in text or row["began_ms"] < body["from_ms"]
        assert str(row.get("sentence") or row["job"]).rstrip(".").lower() in text.lower()


def test_entries_stand_where_their_times_are(open_console: Opener) -> None:
    console = open_page(open_console, f"node={NODE}", width=1500)
    body = console.get(f"/nodes/{NODE}/timeline?minutes=60")
    expect(entries(console.page, "fault")).to_have_count(1)
    plot = console.page.locator(".plot svg").bounding_box()
    bar = entries(console.page, "signal").first.locator(".bar").bounding_box()
    assert plot
    assert bar
    share = (body["signals"][0]["began_ms"] - body["from_ms"]) / (body["as_of_ms"] - body["from_ms"])
    assert bar["x"] == pytest.approx(plot["x"] + share * plot["width"], abs=4)
    assert bar["x"] + bar["width"] == pytest.approx(plot["x"] + plot["width"], abs=4)


def test_arrow_keys_go_through_time_and_lanes_and_the_sentence_is_said(open_console: Opener) -> None:
    page = open_page(open_console, f"node={NODE}").page
    expect(entries(page, "fault")).to_have_count(1)
    readout = page.locator(".readout")
    assert readout.get_attribute("aria-live") == "polite"
    page.locator(".plot").focus()
    page.keyboard.press("End")
    expect(readout).to_contain_text("XID 63: row remapping pending (reported by kernel-log)")
    page.keyboard.press("ArrowDown")
    expect(readout).to_contain_text(JOB)
    expect(page.locator(".plot .pointed")).to_have_count(1)
    page.keyboard.press("ArrowDown")
    expect(readout).to_contain_text("Advised: place nothing big")
    page.keyboard.press("Home")
    expect(readout).not_to_contain_text("Advised")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Escape")
    expect(page.locator("#drawer")).to_be_hidden()


def test_the_mouse_reads_entries_and_the_risk_between_them(open_console: Opener) -> None:
    page = open_page(open_console, f"node={NODE}").page
    entries(page, "signal").first.hover()
    expect(page.locator(".readout")).to_contain_text("SM clock 990 MHz, usual 1,980")
    box = page.locator(".plot svg").bounding_box()
    assert box
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] - 5)
    expect(page.locator(".readout")).to_contain_text(re.compile(r"UTC: risk <1.% within 1.h, 1.% within 24.h\."))


def test_of_an_outage_nobody_says_that_nothing_happened(open_console: Opener) -> None:
    console = open_console(still())
    body = console.get(f"/nodes/{NODE}/timeline?minutes=60")
    outage = {"state": "unknown", "began_ms": body["from_ms"] - 1000, "ended_ms": body["from_ms"] + 1_200_000}
    quiet = {**body, **{key: [] for key in ("signals", "events", "jobs", "actions")}, "states": [outage]}
    console.page.route("**/timeline?*", lambda route: route.fulfill(json=quiet))
    console.page.goto(f"{console.url}/#node={NODE}")
    console.page.reload()
    expect(console.page.locator(".axis")).to_contain_text(re.compile(r"It is unknown what was here for 20.min"))
    expect(console.page.locator(".axis")).not_to_contain_text("Nothing happened")


def test_another_span_asks_for_it(open_console: Opener) -> None:
    console = open_page(open_console, f"node={NODE}")
    expect(entries(console.page, "job")).to_have_count(1)
    console.page.get_by_role("radiogroup", name="How far back").get_by_role("radio", name="24 h").check()
    expect(entries(console.page, "job")).to_have_count(2)  # the one before is in sight
    expect(console.page.locator(".plot")).to_have_attribute("aria-label", re.compile(r"24.h"))


def test_what_a_drain_would_change_is_what_the_api_works_out(open_console: Opener) -> None:
    console = open_page(open_console, f"node={NODE}")
    body, drain = console.get(f"/nodes/{NODE}/drain"), console.page.locator(".drain")
    expect(drain.locator(".sentence")).to_have_text(body["sentence"])
    [job] = body["jobs"]
    expect(drain.locator("li")).to_contain_text(f"{job['gpus']} GPUs on {job['nodes']} nodes, {job['gpus_here']} here")
    expect(drain.locator("li")).to_contain_text(f"about 13{GAP}min of work since its last checkpoint")
    expect(drain.locator("li")).to_contain_text(f"It would start again elsewhere in 20–22{GAP}min")
    facts = drain.locator("dd").all_inner_texts()
    assert facts[:2] == [f"{body['gpus_free_now']:,} → {body['gpus_free_after']:,}", "1,064 → 1,056"]
    expect(drain).to_contain_text(f"What it does to the queue is not known: {body['queue_reason']}")
    drain.locator("li button").click()
    expect(console.page.locator("#drawer h2")).to_have_text(JOB)


def test_the_page_of_a_job_says_what_the_api_says(open_console: Opener) -> None:
    console = open_page(open_console, f"job={JOB}")
    page = console.page
    slow, best = console.get(f"/jobs/{JOB}/stragglers"), console.get(f"/jobs/{JOB}/checkpoint")
    seen = console.get(f"/jobs/{JOB}/fingerprint")
    body = page.locator("#drawer")
    expect(body).to_contain_text(f"Steps take {slow['observed_step_s']:.2f} s, expected 2.41 s")
    expect(body).to_contain_text(f"Held back by worker {slow['culprit']['name']}, 91{GAP}% of the delay.")
    expect(body).to_contain_text(best["sentence"])
    expect(body).to_contain_text(f"96.5{GAP}% now, 97.2{GAP}% at best")
    ahead = seen["next_checkpoint_ms"]
    interval = f"{clock(ahead['p50'])} ({clock(ahead['p10'])}–{clock(ahead['p90'])}, 10 to 90 %)"
    expect(body.locator("div", has_text="Next checkpoint").last).to_contain_text(interval)
    expect(body).to_contain_text(f"in 5{GAP}min 35{GAP}kW (p90 37{GAP}kW)")
    assert body.locator(".chips button").all_inner_texts() == console.get(f"/jobs/{JOB}")["nodes"]
    page.get_by_role("button", name="outline its nodes on the map").click()
    expect(page.locator(".node.gang")).to_have_count(4)


def test_of_a_job_that_nobody_looked_at_nothing_is_claimed(open_console: Opener) -> None:
    why = "it was not looked at yet"
    unseen = {"as_of_ms": still().as_of_ms(), "looked_ms": None, "class": None, "class_told": "training",
              "unheard_reason": why, "period_reason": why, "expected": []}  # fmt: skip
    body = open_page(open_console, f"job={JOB}", override={f"/v1/jobs/{JOB}/fingerprint": unseen}).page.locator(
        "#drawer"
    )
    expect(body).to_contain_text(f"Telemetry reports nothing of it: {why}.")
    expect(body.locator("div", has_text="Looks like").last).to_have_text("Looks likenot known; submitted as training")
    expect(body).not_to_contain_text("Looked at")


def test_load_peaks_and_use_are_those_of_the_api(open_console: Opener) -> None:
    console = open_console(still())
    page = console.page
    first = page.locator("#spikes li").first
    expect(first).to_contain_text("rack r03")
    expect(first).to_contain_text(f"152{GAP}kW at p90: 101 % of 150{GAP}kW, more than it can take.")
    expect(page.locator("#spikes li").nth(2)).to_contain_text("its capacity is not known: no topology names it.")
    expect(page.locator("#spikes-foot")).to_contain_text("31 of 32 running jobs looked at so far")
    record = f"failures within 1{GAP}h: 0.8{GAP}% predicted, 1.1{GAP}% observed (of 5,210)"
    expect(page.locator("#risk-foot")).to_contain_text(record)
    rows = console.get("/utilisation")["rows"]
    nothing = sum(row["gpus"] for row in rows if row["verdict"] == "abandoned")
    expect(page.locator("#use-sub")).to_contain_text(f"{nothing} of {sum(row['gpus'] for row in rows):,} GPUs")
    expect(page.locator("#use li").first).to_contain_text(
        "busy 0\u202f%, SM active 0\u202f%, MFU not known (it tells no FLOPs)"
    )
    expect(page.locator("#use li").first).to_contain_text("holds 132 GiB of GPU memory")
    expect(page.locator("#use-foot")).to_contain_text(f"Of the last 2{GAP}min; busy")


def test_a_young_node_says_since_when_it_is_watched_and_unknown_is_hatched(open_console: Opener) -> None:
    page = open_page(open_console, "node=n121", still("warming")).page
    expect(page.locator(".axis-state")).to_contain_text(f"4{GAP}min of these 60{GAP}min; what was before is not known")
    expect(page.locator(".plot .lane-now").first).to_have_text("unknown")
    assert "hatch" in page.locator(".plot rect.unknown").first.evaluate("item => getComputedStyle(item).fill")
    expect(page.locator(".reasons")).to_contain_text("Nothing is known of it now")


def test_a_node_where_nothing_happened_says_so(open_console: Opener) -> None:
    page = open_page(open_console, "node=n068").page
    expect(page.locator(".axis-state")).to_contain_text("no signal, no event, no job, no action")
    expect(page.locator("#drawer")).to_contain_text("Nothing runs here.")


def test_stale_and_broken_are_said_on_the_page_and_what_was_known_stays(open_console: Opener) -> None:
    console = open_page(open_console, f"node={NODE}", Scene(state="stale", drift=False))
    notice = console.page.locator(".drawer-notice")
    expect(notice).to_contain_text("Stale: no new sample since 19:19 UTC")
    expect(entries(console.page, "fault")).to_have_count(1)
    console.scene.state = "broken"
    expect(notice).to_contain_text("The API does not answer since")
    expect(entries(console.page, "fault")).to_have_count(1)


def test_an_answer_that_is_missing_is_a_sentence(open_console: Opener) -> None:
    paths = {f"/v1/nodes/{NODE}/timeline": None, f"/v1/nodes/{NODE}/drain": None}
    console = open_console(still(), override=paths)
    console.page.locator("#risk li", has_text=NODE).locator("button").click()
    expect(console.page.locator(".axis-state")).to_have_text("No timeline: no such thing")
    expect(console.page.locator(".drain .sentence")).to_have_text("Not known now: no such thing.")


def test_nonsense_breaks_no_page_and_markup_stays_text(open_console: Opener) -> None:
    wrong: list[Any] = [None, 7, "text", {}, [], {"job": MARKUP, "began_ms": "x"}]
    spell = {"began_ms": 5, "sentence": MARKUP, "values": [None, {"value": "x"}], "ended_ms": None, "usual": "y"}
    timeline = {"as_of_ms": None, "scores": [None, {"steps": wrong}], "jobs": wrong, "events": wrong, "actions": wrong}
    override = {
        f"/v1/nodes/{NODE}/timeline": {**timeline, "signals": [*wrong, spell]},
        f"/v1/nodes/{NODE}/drain": {"sentence": MARKUP, "jobs": wrong, "gpus_lost": "many"},
        "/v1/jobs/x": {"job": MARKUP, "nodes": wrong, "remaining_s": 3, "started_ms": "y"},
        "/v1/jobs/x/fingerprint": {"class": MARKUP, "expected": [*wrong, {"metric": MARKUP, "p50": "z"}]},
        "/v1/jobs/x/stragglers": {"slow": True, "culprit": MARKUP, "sentence": MARKUP},
        "/v1/jobs/x/checkpoint": [1, 2],
        "/v1/spikes": {"rows": [*wrong, {"domain": MARKUP, "p90": 1, "capacity": 0}]},
        "/v1/utilisation": {"rows": [*wrong, {"job": MARKUP, "verdict": 5}]},
    }
    page = open_page(open_console, f"node={NODE}", override=override).page
    expect(page.locator(".drain .sentence")).to_contain_text("<img src=x")
    expect(page.locator(".axis details li").first).to_contain_text("<img src=x")
    expect(page.locator("#spikes")).to_contain_text("<img src=x")
    page.goto(f"{page.url.split('#')[0]}#job=x")
    page.reload()
    expect(page.locator("#drawer")).to_contain_text("<img src=x")
    assert page.locator("img").count() == 0
    assert "owned" not in page.title()


@pytest.mark.parametrize("anchor", [f"node={NODE}", f"job={JOB}"])
@pytest.mark.parametrize("width", [320, 900])
def test_pages_do_not_scroll_sideways(open_console: Opener, anchor: str, width: int) -> None:
    page = open_page(open_console, anchor, width=width).page
    expect(page.locator("#drawer .facts")).to_contain_text(re.compile("GPU|H100"))
    page.wait_for_timeout(300)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("#drawer").evaluate("item => item.scrollWidth - item.clientWidth") <= 0


@pytest.mark.parametrize("anchor", [f"node={NODE}", f"job={JOB}"])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pages_have_contrast_names_and_no_repeated_ids(open_console: Opener, anchor: str, theme: str) -> None:
    page = open_page(open_console, anchor, theme=theme).page
    expect(page.locator("#drawer .facts")).to_contain_text(re.compile("GPU|H100"))
    time.sleep(0.8)  # colour transitions end
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate(NAMELESS) == []
    assert page.evaluate(REPEATED_IDS) == []
