import re
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise

import msgspec
import pytest

from fleetcast.training.reports.contests import (
    MAIN,
    describe_comparisons,
    format_lead,
    format_metric,
    make_comparisons,
    select_better,
    select_pooled_rows,
    select_undecided,
    select_worse,
)
from fleetcast.training.reports.fans import count_served_models, make_courses
from fleetcast.training.reports.page import RawHtml, format_cell_text, render_table
from fleetcast.training.reports.plots import STANDS_FOR, draw_calibration, draw_lines
from fleetcast.training.reports.report import render_report
from fleetcast.training.reports.results import ResultRow, Results
from tests.training.made_results import demand_results, duration_results, start_results

VOID = {"meta", "path", "use", "rect", "br"}


class Balanced(HTMLParser):
    """Complains of an end without its beginning, and keeps the ids and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attributes if name == "id" and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.ids += [value for name, value in attributes if name == "id" and value]

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(html: str) -> Balanced:
    page = Balanced()
    page.feed(html)
    assert not page.open
    return page


def a_row(**changes: object) -> ResultRow:
    row = ResultRow("venus", "running", "all", 3600, "ours", "trees", "wql", 0.9, 0.85, 0.95, 100)
    return msgspec.structs.replace(row, **changes)


@pytest.fixture(scope="module")
def demand_html() -> str:
    return render_report(demand_results())


def test_a_demand_report_says_where_it_wins_and_where_it_loses(demand_html: str) -> None:
    text = " ".join(read(demand_html).text)
    assert "8 of 20 better" in text
    assert "venus, running, WQL: better by 20 % at 1 h, 20 % at 3 h, 20 % at 6 h, 20 % at 12 h (theta)" in text
    assert "venus, running, WQL: worse by 4.0 % at 24 h (theta)" in text
    assert "serving: no folder" in text
    assert "trees 100 %" in text
    assert "What was forecast" in text


def test_a_report_needs_nothing_beside_it(demand_html: str) -> None:
    assert not re.search(r'(src|href)="(?!#)', demand_html)
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", demand_html)


def test_what_plots_refer_to_is_there_once_and_colours_are_the_pages(demand_html: str) -> None:
    ids = Counter(read(demand_html).ids)
    referred = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', demand_html))
    assert referred
    assert {ids[one or other] for one, other in referred} == {1}
    assert not [ink for ink in STANDS_FOR if ink in demand_html]


def test_a_report_is_the_same_twice() -> None:
    assert render_report(start_results()) == render_report(start_results())


def test_a_duration_report_shows_quantiles_remaining_times_and_every_method() -> None:
    text = " ".join(read(render_report(duration_results())).text)
    assert "ricc, run time, pinball loss at p90: better by 22 % (group quantiles)" in text
    assert "ricc, remaining time, MAE of log seconds: better by 22 % at 10 min, 22 % at 1 h," in text
    assert "Remaining time: log error by time already run" in text
    assert "share within a factor of 2" in text


def test_a_start_report_compares_shares_side_by_side() -> None:
    text = " ".join(read(render_report(start_results())).text)
    assert "share of starts within 10 min: better by 24 points, 44.0 % against 20.0 % (group median)" in text


@pytest.mark.parametrize("task", ["demand", "duration", "start"])
def test_a_report_of_nothing_is_a_page(task: str) -> None:
    assert "0 of 0 better" in render_report(Results(task))


def test_names_from_data_are_escaped() -> None:
    results = Results("demand", rows=[a_row(dataset="<b>&"), a_row(dataset="<b>&", method='"theta"')])
    html = render_report(results)
    assert "<b>" not in html
    read(html)


def test_a_missing_number_leaves_its_place_empty() -> None:
    results = Results("demand", rows=[a_row(value=None, low=None, high=None), a_row(method="theta")])
    assert "0 of 0 better" in render_report(results)


def test_very_many_rows_are_cut_and_the_rest_is_told() -> None:
    rows = [a_row(series=f"s{n}") for n in range(4100)]
    assert "100 more rows, of single series, are in the JSON." in render_report(Results("demand", rows=rows))


# -- contests -------------------------------------------------------------------------------------------------------


def test_the_best_baseline_is_the_rival_and_a_hundredth_is_no_difference() -> None:
    rows = [a_row(), a_row(method="persistence", value=1.0), a_row(method="theta", value=0.905)]
    (contest,) = make_comparisons(rows, MAIN["demand"])
    assert contest.rival.method == "theta"
    assert (select_better([contest]), select_worse([contest]), select_undecided([contest])) == ([], [], [contest])
    assert describe_comparisons([contest]) == ["venus, running, WQL: as good at 1 h (theta)"]


def test_more_is_better_for_shares_of_successes() -> None:
    rows = [
        a_row(metric="within_10min", value=0.4, horizon_s=None),
        a_row(metric="within_10min", value=0.0, method="limits", horizon_s=None),
    ]
    (contest,) = make_comparisons(rows, MAIN["start"])
    assert contest.relative_gain == 0.4


def test_what_is_much_worse_is_told_as_a_factor() -> None:
    found = make_comparisons([a_row(value=9.0), a_row(method="theta", value=0.9)], MAIN["demand"])
    assert describe_comparisons(found) == ["venus, running, WQL: worse by a factor of 10 at 1 h (theta)"]


def test_intervals_are_apart_when_they_share_nothing() -> None:
    near, far = (a_row(method="theta", value=1.0, low=low, high=1.1) for low in (0.94, 0.96))
    assert [make_comparisons([a_row(), rival], ["wql"])[0].has_separate_intervals for rival in (near, far)] == [
        False,
        True,
    ]


def test_a_set_with_one_series_is_its_own_pool() -> None:
    rows = [a_row(series="a"), a_row(dataset="earth", series="b"), a_row(dataset="earth", series="c")]
    assert [row.series for row in select_pooled_rows(rows)] == ["a"]


def test_metrics_and_leads_have_words() -> None:
    assert format_metric("pinball_05") == "pinball loss at p5"
    assert format_metric("something_new") == "something new"
    assert (format_lead(None), format_lead(86_400), format_lead(90)) == ("", "24 h", "1.5 min")


# -- fans and plots -------------------------------------------------------------------------------------------------


def test_fans_do_not_lie_on_each_other_and_end_with_the_data() -> None:
    course = make_courses(demand_results().predictions)["venus", "running"]
    issued = [fan.issued_ms for fan in course.fans]
    assert len(issued) == 7
    assert all(later - earlier >= 86_400_000 for earlier, later in pairwise(issued))
    assert course.at_ms[-1] == course.fans[-1].at_ms[-1]
    assert course.fans[0].values.shape == (7, 5)


def test_predictions_of_jobs_and_of_one_horizon_make_no_fans() -> None:
    (block,) = demand_results(origins=12).predictions
    one = [at for at, horizon in enumerate(block["horizon_s"]) if horizon == 3600]
    single = {name: [column[at] for at in one] for name, column in block.items()}
    assert make_courses([single, {"dataset": ["ricc"], "job": ["7"]}]) == {}


def test_models_are_counted_once_a_forecast() -> None:
    (block,) = demand_results(origins=12).predictions
    models = ["theta" if horizon == 3600 else "trees" for horizon in block["horizon_s"]]
    shares = count_served_models([{**block, "model": models}, {"dataset": ["ricc"], "job": ["7"]}])["venus", "running"]
    assert (shares[3600], shares[86_400]) == ({"theta": 2}, {"trees": 2})


def test_without_predictions_the_rows_say_which_models_served() -> None:
    rows = [a_row(model="trees+theta"), a_row(method="theta", model="theta")]
    assert "trees, theta" in render_report(Results("demand", rows=rows))


def test_the_largest_series_is_drawn() -> None:
    (block,) = demand_results(origins=12).predictions
    small = {**block, "series": ["small"] * len(block["series"]), "actual": [1.0] * len(block["series"])}
    assert make_courses([small, block])["venus", "running"].name == "all"


def test_a_plot_says_what_it_shows_and_keeps_its_text() -> None:
    svg = draw_lines([a_row(), a_row(horizon_s=7200)], "WQL by horizon")
    assert svg.startswith('<svg role="img" aria-label="WQL by horizon"')
    assert ">2 h</text>" in svg
    assert "var(--ours)" in svg


def test_calibration_is_drawn_with_one_point() -> None:
    assert "share promised" in draw_calibration({"ours": [(0.8, 0.78)]}, "calibration")


def test_cells_are_escaped_and_marked() -> None:
    assert format_cell_text(RawHtml("<b>")) == "<b>"
    assert [format_cell_text(value) for value in ("<", None, 0.12345, 12_345, 12_345.6)] == [
        "&lt;",
        "–",
        "0.1235",
        "12,345",
        "12,346",
    ]
    assert '<td class="n off">1</td>' in render_table(("a",), [(1,)], frozenset({(0, 0)}))
