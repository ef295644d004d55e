"""`fleetcast actions`: lists the actions on running jobs, and stops all of them."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fleetcast.cli.kit.screen import echo, echo_text
from fleetcast.cli.kit.service_call import JsonFlag, UrlOption, ask_service, format_utc
from fleetcast.fleet.errors import ConfigError, UnknownEntity

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Actions on running jobs: which are stopped, shrunk, grown or moved, for which request and why "
    "(docs/actions.md).\n\n"
    "A service with tokens needs yours in FLEETCAST_TOKEN: scope read to list, admin to pause, resume and reset.\n\n"
    "Example:  fleetcast actions list",
)

PAGE = 1000
OPEN = ("proposed", "sent", "accepted")
FEW = 8  # nodes in a sentence
TERMS = {
    "lost": "work since the last checkpoint, done again",
    "restart": "until the job works again",
    "wait": "until the job has GPUs again",
    "risk": "more likely failures on other nodes",
    "slow": "slower steps on other nodes",
    "fragments": "free GPUs that fit fewer gangs",
    "gain": "saved by the action",
}
IdArgument = Annotated[str, typer.Argument(help="The action's id, from `fleetcast actions list`.", metavar="ID")]


@app.command("list")
def list_actions(
    url: UrlOption = None,
    queue: Annotated[str | None, typer.Option(help="Only jobs of this queue and of queues below it.")] = None,
    job: Annotated[str | None, typer.Option(help="Only actions on this job.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Also actions that have ended.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """List open actions in the order of their last changes, and say whether actions are sent.

    Example:  fleetcast actions list --queue research --all
    """
    chosen = {"queue": queue, "job": job, "state": None if every else "open"}
    query = {name: value for name, value in chosen.items() if value is not None}
    rows, switches = list[dict[str, Any]](), dict[str, Any]()
    cursor = 0
    while True:
        body = ask_service("GET", url, "/v1/actions", {**query, "limit": str(PAGE), "after": str(cursor)})
        rows, switches, cursor = [*rows, *body["rows"]], body["switches"], body["cursor"]
        if len(body["rows"]) < PAGE:
            break
    if as_json:
        echo_text(json.dumps({"rows": rows, "switches": switches}, indent=2))
        return
    for line in _describe_switches(switches):
        echo(line)
    for row in rows:
        echo(f"{row['action_id']:<28} {row['state']:<9} {row['sentence']}")
    if not rows:
        of = "".join(f", {name} {value!r}" for name, value in (("queue", queue), ("job", job)) if value is not None)
        echo(f"{'no actions' if every else 'no open actions'}{of}")


@app.command("show")
def show(action_id: IdArgument, url: UrlOption = None, as_json: JsonFlag = False) -> None:
    """Show an action: its cost by term, the sets of jobs that were dearer, and its life.

    Example:  fleetcast actions show 5b1d0c7e9a3f4e2b8c6d7f01-1
    """
    from urllib.parse import quote

    try:
        body = ask_service("GET", url, f"/v1/actions/{quote(action_id, safe='')}")
    except UnknownEntity:
        raise UnknownEntity(f"no action {action_id!r}; `fleetcast actions list --all` names those there are") from None
    if as_json:
        echo_text(json.dumps(body, indent=2))
        return
    echo(f"{body['sentence']}; {_describe_executor(body['executor'])}")
    expires = f"; it expires at {format_utc(body['by_ms'])}" if body["state"] in OPEN else ""
    echo(f"{body['state']}{expires}; time for a last checkpoint: {body['grace_s']:g} s")
    for name, gpu_s in body["cost"].items():
        if gpu_s:
            echo(f"  {name:<10} {gpu_s / 3600:10,.2f} GPU-hours: {TERMS.get(name, name)}")
    echo(f"  {'total':<10} {body['cost_gpu_s'] / 3600:10,.2f} GPU-hours")
    for other in body["rejected"]:
        cost = f"{other['cost_gpu_s'] / 3600:,.2f} GPU-hours for {other['gpus']:g} GPUs"
        echo(f"not chosen: {', '.join(other['jobs'])} ({other['code']}: {cost})")
    for earlier in body.get("after", ()):
        echo(f"it is sent once this action is seen: {earlier}")
    for step in body["life"]:
        echo(f"{format_utc(step['time_ms'])}  {step['state']}")
    if body["why"]:
        echo(f"{body['state']}: {body['why']}")


@app.command("plan")
def show_plan(url: UrlOption = None, as_json: JsonFlag = False) -> None:
    """Show the last pass's plan: actions with their costs, requests that start, promised places, the next request.

    Example:  fleetcast actions plan
    """
    body = ask_service("GET", url, "/v1/plan", {"limit": str(PAGE)})
    if as_json:
        echo_text(json.dumps(body, indent=2))
        return
    for line in _describe_switches(body["switches"]):
        echo(line)
    if body["stalled"]:
        echo(body["stalled"])
    for row in body["actions"]:
        echo(f"{row['state']:<9} {row['sentence']}; {_describe_costs(row['cost'])}")
    for row in body["starts"]:
        echo(f"starts    {row['request_id']} on {_name_nodes(row['ranks'])}")
    for row in body["promised"]:
        place, until = _name_nodes(row["ranks"]), format_utc(row["until_ms"])
        echo(f"promised  {place} to {row['request_id']} alone, until {until}")
    if (head := body["next"]) is not None:
        echo(f"next      {head['request_id']} at {format_utc(head['start_ms'])}, when {head['waits_for']} has ended")
        if head["sentence"]:
            echo(f"          {head['sentence']}")
    if not (body["actions"] or body["starts"] or body["promised"] or head):
        echo("nothing is planned")


@app.command("preview")
def preview(
    file: Annotated[
        Path, typer.Argument(help="The request as JSON, as for POST /v1/placements; - reads stdin.", metavar="FILE")
    ],
    url: UrlOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Say which jobs would be stopped or shrunk for a request if it waited now. Nothing is recorded.

    A service with tokens needs yours in FLEETCAST_TOKEN: scope place.

    Example:  fleetcast actions preview request.json
    """
    body = ask_service("POST", url, "/v1/placements", body={**_read_request(file), "dry_run": True})
    if as_json:
        echo_text(json.dumps(body, indent=2))
        return
    echo(body["sentence"])
    found = body.get("reclaim")
    if found is None:
        if body["outcome"] == "refused":
            echo('no job would stop for it: there are no queues, or reclaim is "off" in their [policy]')
        return
    echo(found["sentence"])
    for action in found["actions"]:
        echo(f"  {action['sentence']}; {_describe_costs(action['cost'])}; {_describe_executor(action['executor'])}")
    if found["ranks"]:
        echo(f"then it starts on {_name_nodes(found['ranks'])}")
    if found["not_before_ms"] is not None:
        echo(f"no job stops for it before {format_utc(found['not_before_ms'])}")


def _describe_costs(cost: dict[str, float]) -> str:
    terms = ", ".join(f"{name} {gpu_s / 3600:,.2f}" for name, gpu_s in cost.items() if gpu_s)
    return f"GPU-hours: {terms}" if terms else "no cost"


def _describe_executor(executor: str) -> str:
    return "advice, which no executor carries out" if executor == "advice" else f"by {executor}"


def _name_nodes(ranks: list[dict[str, Any]]) -> str:
    nodes = sorted({rank["node"] for rank in ranks})
    more = f" and {len(nodes) - FEW:,} more" if len(nodes) > FEW else ""
    return f"{', '.join(nodes[:FEW])}{more}"


def _read_request(file: Path) -> dict[str, Any]:
    """Return the request of a file. Raises ConfigError if it holds no JSON object."""
    try:
        request = json.loads(sys.stdin.read() if str(file) == "-" else file.read_text())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is not JSON: {error}"
        raise ConfigError(f"{file}: no request can be read from it: {why}") from None
    if not isinstance(request, dict):
        raise ConfigError(f"{file}: a request is a JSON object, not {type(request).__name__}")
    return request


@app.command("pause")
def pause(url: UrlOption = None, as_json: JsonFlag = False) -> None:
    """Send no further action of any kind until `resume`. Actions that were sent are still followed.

    Example:  fleetcast actions pause
    """
    _switch(url, "pause", as_json)


@app.command("resume")
def resume(url: UrlOption = None, as_json: JsonFlag = False) -> None:
    """Send actions again after `pause`. An open circuit breaker stays open.

    Example:  fleetcast actions resume
    """
    _switch(url, "resume", as_json)


@app.command("reset")
def reset(url: UrlOption = None, as_json: JsonFlag = False) -> None:
    """Close the circuit breaker, which opened because actions would have taken too many GPUs within an hour.

    First find out why: `fleetcast actions list --all`. The count of GPUs begins again at 0.

    Example:  fleetcast actions reset
    """
    _switch(url, "reset", as_json)


def _switch(url: str | None, verb: str, as_json: bool) -> None:
    switches = ask_service("POST", url, f"/v1/actions/{verb}")
    if as_json:
        echo_text(json.dumps(switches, indent=2))
        return
    for line in _describe_switches(switches):
        echo(line)


def _describe_switches(switches: dict[str, Any]) -> list[str]:
    """Return a sentence for each switch that stops the sending of actions, and one for the mode of the policy."""
    lines = list[str]()
    if switches["paused_ms"] is not None:
        by = f" by {switches['paused_by']}" if switches["paused_by"] else ""
        lines.append(f"paused{by} since {format_utc(switches['paused_ms'])}: fleetcast actions resume")
    if switches["opened_ms"] is not None:
        why = f": {switches['why']}" if switches["why"] else ""
        lines.append(
            f"the circuit breaker is open since {format_utc(switches['opened_ms'])}{why}; fleetcast actions reset"
        )
    return [*(lines or ["not paused; the circuit breaker is closed"]), _describe_mode(switches)]


def _describe_mode(switches: dict[str, Any]) -> str:
    mode, act_in = switches.get("mode"), switches.get("act_in")
    if mode is None:
        return "this service is too old to say whether its policy sends actions"
    if mode != "act":
        return f'reclaim is "{mode}": {"nothing is proposed or sent" if mode == "off" else "no action is sent"}'
    return f'reclaim is "act" in {", ".join(act_in)}; elsewhere it is "advise"' if act_in else 'reclaim is "act"'
