"""`fleetcast why`: explains why a request waits, and lists the actions for it and on its job."""

import json
from typing import Annotated, Any
from urllib.parse import quote

import typer

from fleetcast.cli.kit.screen import echo, echo_text
from fleetcast.cli.kit.service_call import JsonFlag, UrlOption, ask_service, format_utc
from fleetcast.fleet.errors import FleetcastError, UnknownEntity
from fleetcast.placement.actions.action import RECOVERY

RECENT = "1000"  # how many of the latest actions are searched for those that serve the request
NameArgument = Annotated[str, typer.Argument(help="A request, or the job that it is for.", metavar="JOB")]


def explain(name: NameArgument, url: UrlOption = None, as_json: JsonFlag = False) -> None:
    """Explain why a job waits, step by step. List the actions for it and on it, and say what a stop would cost it.

    A service with tokens needs yours in FLEETCAST_TOKEN: scope read.

    Example:  fleetcast why train-43
    """
    waiting = _find_reasons(name, url)
    actions = ask_service("GET", url, "/v1/actions", {"order": "newest", "limit": RECENT})["rows"]
    payer = waiting["request_id"] if waiting else name
    serving = [row for row in actions if row["payer"] == payer or row["payer"].startswith(f"{RECOVERY}{name}, ")]
    done = ask_service("GET", url, "/v1/actions", {"order": "newest", "limit": RECENT, "job": name})["rows"]
    runs = _find_change_times(name, url)
    if waiting is None and not serving and not done and runs is None:
        raise UnknownEntity(
            f"no request or job {name!r} waits or runs, and no action concerns it; `fleetcast actions list --all` "
            "names the jobs that actions concern, and GET /v1/queue the requests that wait"
        )
    if as_json:
        echo_text(json.dumps({"waiting": waiting, "serving": serving, "done": done, "change_times": runs}, indent=2))
        return
    if waiting:
        _print_reasons(waiting)
    _print_actions("for it", serving)
    _print_actions("on it", done)
    if runs:
        _print_change_times(runs)


def _find_reasons(name: str, url: str | None) -> dict[str, Any] | None:
    """Return why a request waits, or the first waiting request of a job. Returns None if neither waits."""
    requests = [row["request_id"] for row in ask_service("GET", url, "/v1/queue")["rows"] if row.get("job") == name]
    for request_id in [name, *requests[:1]]:
        try:
            return ask_service("GET", url, f"/v1/queue/{quote(request_id, safe='')}/why")
        except UnknownEntity:
            continue
    return None


def _find_change_times(name: str, url: str | None) -> dict[str, Any] | None:
    """Return how long a restart and a resize of a job should last, and how size changes its speed.

    Returns None if it does not run, or if the service knows no running jobs yet.
    """
    try:
        found: dict[str, Any] | None = ask_service("GET", url, f"/v1/jobs/{quote(name, safe='')}").get("change_times")
    except FleetcastError:
        return None
    return found


def _print_change_times(times: dict[str, Any]) -> None:
    sources = {field: "learnt" if field in times["learnt"] else "default" for field in times}
    echo(
        f"a stop costs it {times['restart_s']:g} s to restart ({sources['restart_s']}), "
        f"a resize {times['resize_pause_s']:g} s ({sources['resize_pause_s']}); "
        f"its speed is members^{times['speed_exponent']:g} ({sources['speed_exponent']})"
    )


def _print_reasons(waiting: dict[str, Any]) -> None:
    echo(f"{waiting['request_id']}: number {waiting['position']} in the order, queue {waiting['queue'] or '-'}")
    for number, step in enumerate(waiting["ladder"], 1):
        echo(f"  {number}. {step['sentence']}")
    if start := waiting.get("start_ms"):
        echo(f"  starts at {format_utc(start['p50'])} (p90 {format_utc(start['p90'])})")


def _print_actions(relation: str, rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    echo(f"actions {relation}, details by `fleetcast actions show ID`:")
    for row in reversed(rows):
        because = f"; {row['why']}" if row["why"] else ""
        cost = f"{row['cost_gpu_s'] / 3600:,.2f} GPU-hours"
        echo(f"  {row['action_id']:<28} {row['state']:<9} {cost}: {row['sentence']}{because}")
