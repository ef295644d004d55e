"""A self-contained HTML page about a play: waits by size, use and shares over time, and every number."""

from collections.abc import Mapping, Sequence

import numpy as np

from fleetcast.training.judges.played import PlayScene
from fleetcast.training.judges.played_numbers import (
    PlayNumbers,
    UseOverTime,
    describe_fairness_price,
)
from fleetcast.training.reports.page import (
    render_list,
    render_page,
    render_panel,
    render_panel_grid,
    render_section,
    render_table,
)
from fleetcast.training.reports.plots import OURS_INK, PANEL, RIVAL_DASHES, RIVAL_INKS, choose_styles, open_canvas

HATCHES = ("", "////", "....")  # where there are more methods than inks
HEAD = (
    "method",
    "mean wait, s",
    "median, s",
    "p99, s",
    "longest, s",
    "use",
    "Jain, users",
    "Jain, queues",
    "ms a pass",
)


def render_play_report(
    scene: PlayScene, found: Sequence[PlayNumbers], over_time: UseOverTime, skipped: Sequence[str]
) -> str:
    """Return the HTML page of a play.

    skipped: sentences about jobs and methods that were left out.
    """
    machine = f"{scene.nodes:,} nodes of {scene.each} GPUs" if scene.nodes else f"{scene.each:,} GPUs"
    lead = f"{len(scene.trace):,} jobs on {machine}; all methods play the same jobs on the same machine."
    price = describe_fairness_price(found)
    body = [
        render_section(
            "Methods",
            render_panel_grid(
                [render_panel(render_table(HEAD, [_make_row(one) for one in found]), note=price, kind="wide")]
            ),
        ),
        render_section(
            "Waits",
            render_panel_grid(
                [render_panel(draw_wait_by_size(found), "Mean wait by GPUs of a job, hours", kind="wide")]
            ),
        ),
        render_section("Over time", render_panel_grid(_plot_use_over_time(over_time))),
        render_section(
            "Queues",
            render_panel_grid(
                [render_panel(render_table(*_make_queue_table(found)), "Mean wait by queue, s", kind="wide")]
            ),
        ),
    ]
    if skipped:
        body.append(render_section("Left out", render_list(skipped, "")))
    return render_page("Play", lead, body)


def _make_row(one: PlayNumbers) -> list[object]:
    wait = one.wait
    numbers = [wait.mean_s, wait.p50_s, wait.p99_s, wait.max_s, one.utilisation, one.jain, one.jain_queues, one.pass_ms]
    return [one.method.replace("_", " "), *numbers]


def _make_queue_table(found: Sequence[PlayNumbers]) -> tuple[list[str], list[list[object]]]:
    head = ["queue", "jobs", *(one.method.replace("_", " ") for one in found)]
    names = found[0].by_queue if found else []
    rows = [[known.name, known.jobs, *(one.by_queue[at].mean_s for one in found)] for at, known in enumerate(names)]
    return head, rows


def draw_wait_by_size(found: Sequence[PlayNumbers]) -> str:
    """Draw a bar chart of the mean wait: one group for each size class, one bar for each method."""
    names = [one.name for one in found[0].by_size]
    style_of = choose_styles([one.method for one in found])
    thick = 0.84 / len(found)
    with open_canvas("mean wait by size", width=11.5, height=3.4) as canvas:
        for at, one in enumerate(found):
            x = np.arange(len(names)) + (at - (len(found) - 1) / 2) * thick
            hours = [row.mean_s / 3600 for row in one.by_size]
            more = {"color": style_of[one.method]["color"], "hatch": HATCHES[at // len(RIVAL_INKS) % len(HATCHES)]}
            canvas.axes.bar(x, hours, width=thick * 0.88, edgecolor=PANEL, linewidth=0.5, label=one.method, **more)
        canvas.axes.set_xticks(range(len(names)), names)
        canvas.figure.legend(loc="outside upper left", ncols=6, fontsize=8)
    return canvas.svg


def _plot_use_over_time(over_time: UseOverTime) -> list[str]:
    """Plot the use of GPUs by each method, and the shares of the largest queues."""
    days, main = over_time.days, over_time.shares_of
    use = draw_lines_over_days(days, over_time.use, "use over time")
    shares = draw_lines_over_days(days, over_time.shares, "shares over time")
    return [
        render_panel(use, "Share of the GPUs in use, over days", kind="wide"),
        render_panel(shares, f"Shares of queues, {main}, over days", kind="wide"),
    ]


def draw_lines_over_days(days: Sequence[float], lines: Mapping[str, Sequence[float]], label: str) -> str:
    """Draw one line over the days for each name. The first line has the strong colour."""
    inks = (OURS_INK, *RIVAL_INKS)
    with open_canvas(label, width=11.5, height=2.9) as canvas:
        for at, (name, values) in enumerate(lines.items()):
            dashes = RIVAL_DASHES[at % len(RIVAL_DASHES)] if at >= len(inks) else "solid"
            canvas.axes.plot(days, values, color=inks[at % len(inks)], linestyle=dashes, linewidth=1.2, label=name)
        canvas.axes.set_ylim(0, 1.02)
        canvas.axes.margins(x=0.005)
        canvas.figure.legend(loc="outside upper left", ncols=6, fontsize=8)
    return canvas.svg
