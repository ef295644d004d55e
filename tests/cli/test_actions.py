"""`fleetcast actions` against the api and a real placer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fleetcast.cli import actions
from fleetcast.cli.kit.service_call import ask_service
from fleetcast.cli.main import app
from fleetcast.fleet.errors import ConfigError, FleetcastError, SourceError
from fleetcast.placement.ledger.ledger import Ledger
from fleetcast.service.state_folder import StateError, lock_role
from tests.placement.actions.action_world import make_action
from tests.service.placer.test_reclaim import FILE, OLD_S, AdvisedWorld
from tests.service.placer_world import GPUS, NOW_MS
from tests.service.served_placer import ServedPlacer, serve_placer


@pytest.fixture
def served(tmp_path: Path) -> Iterator[ServedPlacer]:
    with serve_placer(tmp_path) as found:
        yield found


def run(served: ServedPlacer | None, *words: object, code: int = 0) -> str:
    url = [] if served is None else ["--url", served.url]
    result = CliRunner().invoke(app, [*map(str, words), *url])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def propose(served: ServedPlacer, *jobs: str) -> list[str]:
    actions = [make_action(job, by_ms=NOW_MS + 10**7, gpus=2.0) for job in jobs]
    return [row.action_id for row in served.world.service.actions.propose(actions, NOW_MS).opened]


def test_actions_are_listed_and_shown(served: ServedPlacer) -> None:
    assert run(served, "actions", "list").splitlines() == [
        "not paused; the circuit breaker is closed",
        'reclaim is "off": nothing is proposed or sent',
        "no open actions",
    ]
    first, second = propose(served, "j0", "j1")
    served.world.service.actions.withdraw(second, "the request was cancelled", NOW_MS)
    *_, line = run(served, "actions", "list").splitlines()
    assert line.startswith(f"{first:<28} proposed  stops attempt 1 of j0 (2 GPUs) for request urgent: a queue gets")
    assert len(run(served, "actions", "list", "--all").splitlines()) == 4
    assert [row["job"] for row in json.loads(run(served, "actions", "list", "--job", "j0", "--json"))["rows"]] == ["j0"]
    text = run(served, "actions", "show", second)
    for part in (
        "lost             0.33 GPU-hours",
        "total            0.42",
        "not chosen: other (dearer: 2.50 GPU-hours for 4 GPUs)",
    ):
        assert part in text
    assert text.splitlines()[-1] == "withdrawn: the request was cancelled"
    assert text.splitlines()[1] == "withdrawn; time for a last checkpoint: 120 s"
    assert "proposed; it expires at 2020-" in run(served, "actions", "show", first)
    assert json.loads(run(served, "actions", "show", second, "--json"))["state"] == "withdrawn"
    for nonsense in ("nothing", "", "../queue"):
        with pytest.raises(FleetcastError, match=f"no action '{nonsense}'; `fleetcast actions list --all` names"):
            run(served, "actions", "show", nonsense)
    assert run(served, "actions", "list", "--job", "j9").splitlines()[2] == "no open actions, job 'j9'"


def test_more_actions_than_a_page_are_listed(served: ServedPlacer) -> None:
    propose(served, *(f"j{number}" for number in range(1203)))
    assert len(json.loads(run(served, "actions", "list", "--json"))["rows"]) == 1203


def test_actions_are_paused_and_resumed_and_the_breaker_is_reset(served: ServedPlacer) -> None:
    assert run(served, "actions", "pause").startswith("paused by unknown since 2020-05-12 ")
    assert run(served, "actions", "resume").startswith("not paused; the circuit breaker is closed\n")
    control = served.world.service.actions
    *three, last = propose(served, "j0", "j1", "j2", "j3")
    assert (len(control.send(three, NOW_MS)), control.send([last], NOW_MS)) == (3, [])
    assert "the circuit breaker is open" in run(served, "actions", "list")
    assert json.loads(run(served, "actions", "reset", "--json"))["opened_ms"] is None
    assert not control.switches.breaker.is_open


def test_what_an_older_service_leaves_out_is_said(served: ServedPlacer, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask_old_service(*asked: Any, **options: Any) -> Any:
        answer = ask_service(*asked, **options)
        (answer.get("switches") or answer).pop("mode", None)
        return answer

    monkeypatch.setattr(actions, "ask_service", ask_old_service)
    said = "this service is too old to say whether its policy sends actions"
    for verb in ("list", "plan", "pause", "resume", "reset"):
        assert said in run(served, "actions", verb).splitlines()


def test_a_service_that_does_not_answer_is_named() -> None:
    with pytest.raises(SourceError, match=r"http://127\.0\.0\.1:9 does not answer"):
        run(None, "actions", "list", "--url", "http://127.0.0.1:9")
    with pytest.raises(
        ConfigError, match=r"nonsense is no address of a service: give one like http://127\.0\.0\.1:8080"
    ):
        run(None, "actions", "list", "--url", "nonsense")


def test_the_queues_in_which_actions_are_sent_are_named(tmp_path: Path) -> None:
    for name, line, said in (
        ("all", 'reclaim = "act"', 'reclaim is "act"'),
        (
            "two",
            'reclaim = "act"\nact_in = ["owed", "batch"]',
            'reclaim is "act" in owed, batch; elsewhere it is "advise"',
        ),
    ):
        (tmp_path / name).mkdir()
        world = AdvisedWorld(tmp_path / name, FILE.replace('reclaim = "advise"', line))
        with serve_placer(tmp_path / name, world) as served:
            assert run(served, "actions", "list").splitlines()[1] == said


def test_the_ledger_goes_back_to_the_previous_version(tmp_path: Path) -> None:
    with serve_placer(tmp_path) as served:
        propose(served, "j0")
        with pytest.raises(FleetcastError, match="1 actions are open"):
            run(None, "state", "downgrade", "--state", tmp_path)
        served.world.clock.advance(10**5)
        served.world.service.actions.expire(served.world.clock.now_ms())
        with lock_role(served.world.config, "placer"), pytest.raises(StateError):
            run(None, "state", "downgrade", "--state", tmp_path)
    path = served.world.config.ledger
    assert run(None, "state", "downgrade", "--state", tmp_path) == f"{path} has version 3 now\n"
    Ledger(path).close()


def test_why_names_what_is_done_for_a_request_and_to_a_job(served: ServedPlacer) -> None:
    (first,) = propose(served, "j0")
    for name, whose in (("urgent", "for it"), ("j0", "on it")):
        heading, line = run(served, "why", name).splitlines()
        assert heading == f"actions {whose}, details by `fleetcast actions show ID`:"
        assert line.startswith(f"  {first:<28} proposed  0.42 GPU-hours: stops attempt 1 of j0 (2 GPUs)")
    with pytest.raises(FleetcastError, match=r"no request or job 'nobody' waits.*fleetcast actions list --all"):
        run(served, "why", "nobody")


def test_why_explains_the_wait_of_a_request_and_of_its_job(served: ServedPlacer) -> None:
    queued = {"request_id": "r-1", "job": "big", "gang": 900, "gpus_per_node": 8}
    assert served.world.ask("POST", "/queue", queued).status_code in (200, 201, 202)
    served.world.step()
    text = run(served, "why", "r-1")
    assert text.splitlines()[0].startswith("r-1: number 1 in the order, queue ")
    assert "  1. " in text
    assert run(served, "why", "big") == text
    assert json.loads(run(served, "why", "big", "--json"))["waiting"]["request_id"] == "r-1"


def test_the_plan_names_actions_the_next_request_and_what_was_found_for_it(tmp_path: Path) -> None:
    world = AdvisedWorld(tmp_path)
    world.fill(own=("owed", 4), a=("lender", 4), b=("lender", 8))
    with serve_placer(tmp_path, world) as served:
        assert run(served, "actions", "plan").splitlines() == [
            "not paused; the circuit breaker is closed",
            'reclaim is "advise": no action is sent',
            "nothing is planned",
        ]
        world.wait_for("p", "owed", 4)
        world.pass_at(OLD_S)
        switches, mode, action, head, found = run(served, "actions", "plan").splitlines()
        assert switches == "not paused; the circuit breaker is closed"
        assert mode == 'reclaim is "advise": no action is sent'
        assert action.startswith("proposed  stops attempt 1 of a (32 GPUs) for request p: a queue gets back")
        assert action.endswith("; GPU-hours: lost 17.78, restart 2.67")
        assert head.startswith("next      p at 2020-05-12 ")
        assert found.startswith("          would stop 1 job for it (a), at ")
        assert json.loads(run(served, "actions", "plan", "--json"))["next"]["request_id"] == "p"


def test_a_preview_says_what_would_stop_for_a_request(tmp_path: Path) -> None:
    file, world = tmp_path / "request.json", AdvisedWorld(tmp_path)
    file.write_text(json.dumps({"request_id": "p", "queue": "owed", "gang": 4, "gpus_per_node": GPUS}))
    world.fill(own=("owed", 4), a=("lender", 4), b=("lender", 8))
    world.beat(1000 * OLD_S)
    with serve_placer(tmp_path, world) as served:
        refused, would, action, then, since = run(served, "actions", "preview", file).splitlines()
        assert refused.startswith("refused: ")
        assert would.startswith("would stop 1 job for it (a), at ")
        assert "stops attempt 1 of a (32 GPUs) for request p" in action
        assert "GPU-hours: lost 17.78, restart" in action
        assert then == "then it starts on n05, n06, n07, n08"
        assert since.startswith("no job stops for it before 2020-")
        body = json.loads(run(served, "actions", "preview", file, "--json"))
        assert body["reclaim"]["code"] == "found"
        assert world.service.ledger.list_queue_entries() == world.service.actions.list_open() == []


def test_a_preview_says_so_where_no_job_may_stop(tmp_path: Path) -> None:
    file, world = tmp_path / "request.json", AdvisedWorld(tmp_path, FILE.replace('"advise"', '"off"'))
    file.write_text(json.dumps({"request_id": "p", "queue": "owed", "gang": 4, "gpus_per_node": GPUS}))
    world.fill(own=("owed", 4), a=("lender", 12))
    with serve_placer(tmp_path, world) as served:
        assert run(served, "actions", "preview", file).splitlines()[1].startswith("no job would stop for it: ")


@pytest.mark.parametrize(
    ("text", "said"),
    [("[1]", "a request is a JSON object, not list"), ("{", "no request can be read"), (None, "No")],
)
def test_a_preview_of_no_request_says_so(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "request.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        run(None, "actions", "preview", file)
