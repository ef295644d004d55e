"""What the tiles claim never contradicts what stands beside them; addresses lead where they say."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from tests.integration.console.page import Opener
from tests.service.console_scene import Scene

pytestmark = pytest.mark.integration

GAP = "\u202f"
NODE, OTHER = "n043", "n044"
CONTRADICTIONS = """async () => {
    const { verdict } = await import('/trust.js');
    let seed = 7;
    const chance = () => (seed = (seed * 48271) % 2147483647) / 2147483647;
    const small = () => 10 ** (-4 * chance());
    const wrong = [];
    for (let turn = 0; turn < 20000; turn++) {
        const row = { horizon_s: 3600, matured: Math.round(10 ** (6 * chance())), mean_p: small(), observed: small() };
        const above = Math.round(40 * chance());
        row.bins = [{ low: 0.02, high: 0.05, n: 99 }, { low: 0.05, high: 0.1, n: above }];
        const demand = chance() < 0.3 ? {} : { origins: Math.round(200 * chance()), coverage_80: chance() };
        const [n50, n90] = [Math.round(200 * chance()), Math.round(40 * chance())];
        const [p50, p90] = [n50 ? chance() : null, n90 ? chance() : null];
        const first = { n: n50 + 9, n_p50: n50, n_p90: n90, by_p50: p50, by_p90: p90 };
        const queue = chance() < 0.3 ? null : { first };
        const asked = { risk: chance() < 0.2 ? [] : [row], horizonS: 3600, demand, queue };
        const { headline, figures } = verdict(asked);
        const events = row.matured * Math.max(row.mean_p, row.observed);
        const ratio = Math.max(row.mean_p / row.observed, row.observed / row.mean_p);
        const off = asked.risk.length && row.matured > 0 && events >= 5 && ratio > 2 && above >= 20;
        const unjudged = asked.risk.length && row.matured > 0 && (above < 20 || events < 5);
        const missed = queue && ((n90 >= 20 && p90 < 0.75) || (n50 >= 20 && Math.abs(p50 - 0.5) > 0.25));
        const narrow = demand.origins >= 20 && demand.coverage_80 < 0.65;
        if ((off || missed || narrow) && !headline.startsWith('No: ')) wrong.push([headline, asked]);
        if (headline.startsWith('Yes') && !figures.length) wrong.push([headline, asked]);
        if (headline === 'Yes, live' && unjudged) wrong.push([headline, asked]);
        if (unjudged && /^No: failures/.test(headline)) wrong.push([headline, asked]);
        if ([headline, ...figures].some((text) => /NaN|undefined|null/.test(text))) wrong.push([headline, figures]);
    }
    return wrong.slice(0, 3);
}"""


class Wrong(Scene):
    """A fleet whose nodes fail seven times as often as predicted."""

    above = 40  # forecasts above 5 %

    def risk(self, limit: int, horizon_s: int) -> dict[str, Any]:
        record = {"horizon_s": horizon_s, "matured": 5210, "mean_p": 0.008, "observed": 0.057}
        bins = [{"low": 0.05, "high": 0.1, "n": self.above, "p": 0.07, "observed": 0.3}]
        return super().risk(limit, horizon_s) | {"calibration": [record | {"bins": bins}]}


def test_the_tile_says_what_the_record_says(open_console: Opener) -> None:
    page = open_console(Wrong(drift=False)).page
    expect(page.locator("#trust")).to_have_text("No: failures came 7.1× as often as predicted")
    figures = f"failures within 1{GAP}h: 0.8{GAP}% predicted, 5.7{GAP}% observed (of 5,210)"
    expect(page.locator("#trust-detail")).to_contain_text(figures)
    expect(page.locator("#risk-foot")).to_contain_text(figures)


class FirstDay(Wrong):
    """The same fleet before it has issued enough forecasts above 5 %."""

    above = 3


def test_too_few_forecasts_above_5_percent_give_no_verdict(open_console: Opener) -> None:
    page = open_console(FirstDay(drift=False)).page
    expect(page.locator("#trust")).to_have_text(f"Not yet: 297 failures, 3 forecasts above 5{GAP}%")
    expect(page.locator("#trust-detail")).to_contain_text(f"(of 5,210; 3 above 5{GAP}%, too few to judge)")


def test_a_record_that_holds_is_trusted_and_one_too_short_decides_nothing(open_console: Opener) -> None:
    page = open_console(Scene(drift=False)).page
    expect(page.locator("#trust")).to_have_text("Yes, live")


def test_no_record_is_ever_contradicted(open_console: Opener) -> None:
    assert open_console(Scene(drift=False)).page.evaluate(CONTRADICTIONS) == []


def test_room_is_what_the_queue_says(open_console: Opener) -> None:
    console = open_console(Scene(drift=False, speed=0.001))
    rows = console.get("/queue")["rows"]
    foreseen = [at for at, row in enumerate(rows) if row["start_ms"]]
    soonest = min(foreseen, key=lambda at: rows[at]["start_ms"]["p50"])
    said = console.page.locator("#queue .chance").nth(soonest)
    expect(said).not_to_have_text("start unknown")  # until the page knows the time
    expect(console.page.locator("#room")).to_have_text(f"For the next job {said.inner_text()}")
    expect(console.page.locator("#room-detail")).to_contain_text(f"{len(rows)} jobs wait")


class Unforeseen(Scene):
    """Nobody can tell when those who wait start, while the forecast of demand sees room at once."""

    def queue(self) -> dict[str, Any]:
        body = super().queue()
        return body | {"rows": [row | {"start_ms": None} for row in body["rows"]]}


def test_where_the_queue_knows_no_start_no_room_is_promised(open_console: Opener) -> None:
    page = open_console(Unforeseen(drift=False)).page
    expect(page.locator("#room")).to_have_text("Not known yet")
    expect(page.locator("#queue .chance").first).to_have_text("start unknown")


def title(page: Page) -> Any:
    return page.locator("#drawer h2")


def test_back_and_a_pasted_address_open_what_they_name(open_console: Opener) -> None:
    console = open_console(Scene(drift=False))
    page = console.page
    for name in (NODE, OTHER):
        page.evaluate("hash => { location.hash = hash; }", f"node={name}")
        expect(title(page)).to_have_text(name)
    page.go_back()
    expect(title(page)).to_have_text(NODE)
    page.go_back()
    expect(page.locator("#drawer")).to_be_hidden()
    page.go_forward()
    expect(title(page)).to_have_text(NODE)
    page.keyboard.press("Escape")
    expect(page.locator("#drawer")).to_be_hidden()
    assert page.url == f"{console.url}/"
    page.go_back()
    expect(title(page)).to_have_text(NODE)


class Doomed(Scene):
    """The riskiest node fails for certain."""

    def risk(self, limit: int, horizon_s: int) -> dict[str, Any]:
        body = super().risk(limit, horizon_s)
        body["rows"][0]["p"] = 0.9999
        return body


@pytest.mark.parametrize("width", [320, 1440])
def test_a_probability_is_never_cut_off(open_console: Opener, width: int) -> None:
    chance = open_console(Doomed(drift=False), width=width).page.locator("#risk .chance").first
    expect(chance).to_have_text(f">99{GAP}%")
    assert chance.evaluate("item => item.scrollWidth <= item.clientWidth")


@pytest.fixture
def hung(open_console: Opener) -> Iterator[Page]:
    """A page whose API takes every request and answers none any more."""
    console = open_console(Scene(drift=False))
    page = console.page
    expect(page.locator("#notice")).to_contain_text("Live.")
    waiting: list[Route] = []

    def hold(route: Route) -> None:
        waiting.append(route)

    page.context.route("**/v1/**", hold)
    yield page
    console.scene.state = "broken"  # what is aborted now is logged, and expected
    for route in waiting:
        route.abort()
    page.context.unroute("**/v1/**")


def test_of_an_api_that_hangs_nobody_says_that_the_pipeline_is_down(hung: Page) -> None:
    expect(hung.locator("#notice")).to_contain_text("The API does not answer since")
    expect(hung.locator("#notice")).not_to_contain_text("pipeline")
    expect(hung.locator("#trust")).to_have_text("No, the API is away")


def test_what_is_old_is_as_the_service_says(open_console: Opener) -> None:
    """At 15 times the speed four seconds of wall time are a minute of fleet time, and no outage."""

    class Slow(Scene):
        def fleet(self) -> dict[str, Any]:
            return super().fleet() | {"newest_sample_ms": self.as_of_ms() - 90_000, "stale_after_s": 225.0}

    notice = open_console(Slow(drift=False)).page.locator("#notice")
    expect(notice).to_contain_text(re.compile(r"^Live\."))
