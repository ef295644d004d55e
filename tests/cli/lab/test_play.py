import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fleetcast.cli.main import app
from fleetcast.fleet.errors import FleetcastError

HEAD = "job,submit_s,run_s,gpus,user,queue,limit_s\n"
QUEUES = "[queue.a]\nweight = 3\nguaranteed = {gpu = 2}\n[queue.b]\nlimit = {gpu = 4}\n"


def trace(folder: Path, limits: bool = True) -> Path:
    """Bursts of two users on eight GPUs."""
    rows = [
        (at, 120 * (at // 4), 100 + 70 * (at % 5), (1, 2, 4, 1)[at % 4], "ab"[at % 2], "ab"[at % 2]) for at in range(32)
    ]
    lines = [f"{','.join(map(str, row))},{3 * row[2] if limits else ''}" for row in rows]
    path = folder / "jobs.csv"
    path.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")
    return path


def told(*words: object) -> dict[str, object]:
    result = CliRunner().invoke(app, ["play", *map(str, words), "--json", "-"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found: dict[str, object] = json.loads(result.stdout[result.stdout.index("{") :])
    return found


def refused(*words: object) -> str:
    error = CliRunner().invoke(app, ["play", *map(str, words)]).exception
    assert isinstance(error, FleetcastError)
    return str(error)


def test_every_method_plays_the_same_jobs_and_the_page_needs_nothing_beside_it(tmp_path: Path) -> None:
    queues, page = tmp_path / "queues.toml", tmp_path / "play.html"
    queues.write_text(QUEUES, encoding="utf-8")
    found = told(trace(tmp_path), "--nodes", 2, "--gpus-per-node", 4, "--queues", queues, "--html", page)
    methods = {one["method"]: one for one in found["methods"]}
    assert {"ours", "one_queue", "kueue_order", "one_line", "fifo", "conservative_limits", "sjf_oracle"} <= set(methods)
    assert {one["wait"]["jobs"] for one in methods.values()} == {32}
    assert methods["area_oracle"]["wait"]["mean_s"] <= methods["fifo"]["wait"]["mean_s"]
    assert 0 < methods["ours"]["utilisation"] <= 1
    assert [row["name"] for row in methods["ours"]["by_queue"]] == ["a", "b"]
    assert [row["name"] for row in methods["ours"]["by_size"]] == ["1", "2 to 4"]
    assert "price of fairness" in str(found["price"])
    over_time = found["over_time"]
    assert over_time["shares_of"] == "ours"
    assert np.mean(over_time["use"]["ours"]) == pytest.approx(methods["ours"]["utilisation"], abs=1e-3)
    assert np.sum(list(over_time["shares"].values()), axis=0) == pytest.approx(over_time["use"]["ours"], abs=1e-3)
    text = page.read_text(encoding="utf-8")
    assert text.count("<svg") == 3
    assert "src=" not in text
    assert 'href="http' not in text


def test_the_same_play_twice_is_the_same_but_for_its_cost(tmp_path: Path) -> None:
    def waits() -> list[object]:
        found = told(trace(tmp_path), "--capacity", 8, "--policy", "ours", "--refused", "0.2")
        return [{**one, "seconds": 0, "pass_ms": 0} for one in found["methods"]]

    assert waits() == waits()


def test_without_limits_their_peers_are_left_out_and_what_cannot_be_played_is_counted(tmp_path: Path) -> None:
    queues = tmp_path / "queues.toml"
    queues.write_text("[queue.a]\n[queue.c]\n", encoding="utf-8")
    path = trace(tmp_path, limits=False)
    with path.open("a", encoding="utf-8") as file:
        file.write("90,9000,10,99,a,a,\n91,9000,10,0,a,a,\n")
    found = told(path, "--capacity", 8, "--queues", queues)
    assert {"easy_limits", "limit_x_cores"}.isdisjoint(one["method"] for one in found["methods"])
    assert found["skipped"] == [
        "16 jobs: no queue 'b'; there are 'a', 'c'",
        "1 jobs: no GPUs",
        "1 jobs: larger than the fleet",
    ]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "name the machine: either --nodes"),
        (("--nodes", 2, "--capacity", 8), "name the machine"),
        (("--capacity", 8, "--policy", "best"), "--policy best: expected one of ours, one_line, fifo"),
        (("--capacity", 8, "--policy", "kueue_order"), "--policy kueue_order: needs --queues FILE"),
        (("--capacity", 8, "--exponent", 0.5), "--exponent 0.5 has no effect: add --elastic SHARE"),
        (("--capacity", 8, "--no-checkpoints", 0), "--no-checkpoints 0 has no effect: add --reclaim SECONDS"),
        (("--capacity", 8, "--gpus-per-node", 8), "--gpus-per-node 8 has no effect: --capacity 8 counts GPUs wherever"),
        (("--capacity", 8, "--seed", 1), "--seed 1 has no effect: nothing is drawn without --reclaim or --elastic"),
        (
            ("--capacity", 8, "--queues", "q.toml", "--max-wait-h", 24),
            "--max-wait-h 24 has no effect with --queues q.toml",
        ),
        (("--capacity", 8, "--queues", "none.toml"), "cannot read none.toml"),
    ],
)
def test_bad_words_are_refused_with_the_fix(tmp_path: Path, words: tuple[object, ...], why: str) -> None:
    assert why in refused(trace(tmp_path), *words)


def test_a_file_of_queues_for_a_larger_fleet_is_refused(tmp_path: Path) -> None:
    queues = tmp_path / "queues.toml"
    queues.write_text("[queue.a]\nguaranteed = {gpu = 9}\n", encoding="utf-8")
    assert "the queues are guaranteed 9 GPUs, the fleet has 8" in refused(
        trace(tmp_path), "--capacity", 8, "--queues", queues
    )


def test_what_is_no_job_history_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n", encoding="utf-8")
    assert "no job in it" in refused(other, "--capacity", 8)
    assert "no such file" in refused(tmp_path / "none.csv", "--capacity", 8)
    assert "no folder" in refused(trace(tmp_path), "--capacity", 8, "--html", "no/a.html")


def borrowed(folder: Path) -> tuple[Path, Path]:
    """One queue holds all eight GPUs when requests of another arrive that is guaranteed half of them."""
    rows = [f"{at},{60 * at},20000,2,ada,c," for at in range(4)]
    rows += [f"{at},{3000 + 60 * at},600,2,eve,a," for at in range(4, 6)]
    path, queues = folder / "borrowed.csv", folder / "lent.toml"
    path.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")
    queues.write_text("[queue.a]\nguaranteed = {gpu = 4}\n[queue.c]\n", encoding="utf-8")
    return path, queues


def test_reclaim_plays_what_is_taken_back_and_what_it_costs(tmp_path: Path) -> None:
    path, queues = borrowed(tmp_path)
    words = (path, "--nodes", 2, "--gpus-per-node", 4, "--queues", queues, "--reclaim", 0)
    found = told(*words)
    assert found == told(*words)
    plays = {one["method"]: one for one in found["reclaim"]}
    assert list(plays) == ["no_preemption", "youngest_first", "by_cost"]
    assert plays["no_preemption"]["stops"] == 0
    assert plays["no_preemption"]["at_once"] < 1
    for method in ("youngest_first", "by_cost"):
        assert plays[method]["at_once"] == 1.0
        assert plays[method]["stops"] == 2
    assert plays["by_cost"]["lost_gpu_h"] < plays["youngest_first"]["lost_gpu_h"]
    assert found["checkpoints"] == {"seed": 1, "never": 0.2}
    other = told(*words, "--policy", "by_cost", "--no-checkpoints", 1)
    assert [one["method"] for one in other["reclaim"]] == ["by_cost"]
    assert other["reclaim"][0]["lost_gpu_h"] > plays["by_cost"]["lost_gpu_h"]


def test_a_table_shows_each_method_at_each_patience(tmp_path: Path) -> None:
    path, queues = borrowed(tmp_path)
    words = ["play", str(path), "--nodes", "2", "--gpus-per-node", "4", "--queues", str(queues)]
    result = CliRunner().invoke(app, [*words, "--reclaim", "0", "--reclaim", "300"], catch_exceptions=False)
    rows = [line.split()[:2] for line in result.stdout.splitlines()]
    assert rows == [
        ["method", "patience"],
        ["no_preemption", "-"],
        ["youngest_first", "0"],
        ["youngest_first", "300"],
        ["by_cost", "0"],
        ["by_cost", "300"],
    ]


def test_elastic_gangs_let_others_start_and_no_work_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "elastic.csv"
    rows = ["0,0,20000,16,ada,,", *(f"{at},{1800 + at},600,8,eve,," for at in range(1, 5))]
    path.write_text(HEAD + "\n".join(rows) + "\n", encoding="utf-8")
    words = (path, "--nodes", 2, "--gpus-per-node", 8, "--elastic", 1, "--exponent", 0.9, "--exponent", 0.5)
    found = told(*words)
    assert found == told(*words)
    rigid, quick, slow = found["elastic"]
    assert (rigid["exponent"], quick["exponent"], slow["exponent"]) == (None, 0.9, 0.5)
    assert (rigid["shrinks"], rigid["elastic"]) == (0, 5)
    assert rigid["mean_wait_s"] > 10_000
    for one in (quick, slow):
        assert one["mean_wait_s"] < 0.1 * rigid["mean_wait_s"]
        assert one["shrinks"] > 0
        assert one["grows"] > 0
        assert one["mean_completion_s"] < rigid["mean_completion_s"]
        assert one["p99_delay_s"] < rigid["p99_delay_s"]
    assert slow["mean_completion_s"] < quick["mean_completion_s"]
    assert {one["least_p99_completion_s"] for one in found["elastic"]} == {600 + 0.96 * (20_000 - 600)}
    assert all(one["p99_completion_s"] > one["least_p99_completion_s"] for one in found["elastic"])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--elastic", 0.5, "--reclaim", 0), "leave out --reclaim and --policy"),
        (("--elastic", 0.5, "--html", "play.html"), "the page has no plays with --elastic"),
        (("--reclaim", 0), "--reclaim needs --queues FILE"),
        (("--reclaim", 0, "--queues", "lent.toml", "--policy", "ours"), "expected one of no_preemption, youngest"),
        (("--reclaim", 0, "--html", "play.html"), "the page has no plays with --reclaim"),
        (("--faults", "faults.csv"), "--faults needs --reclaim and --nodes"),
        (("--reclaim", 0, "--queues", "lent.toml", "--faults", "none.csv"), "none.csv: cannot be read"),
    ],
)
def test_reclaim_is_refused_where_it_means_nothing(
    tmp_path: Path, words: tuple[object, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = borrowed(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert why in refused(path, "--nodes", 2, "--gpus-per-node", 4, *words)


def play_with_faults(folder: Path, faults: str) -> dict[str, dict[str, object]]:
    path, queues = borrowed(folder)
    file = folder / "faults.csv"
    file.write_text("node,start,end,kind\n" + faults, encoding="utf-8")
    words = (path, "--nodes", 2, "--gpus-per-node", 4, "--queues", queues, "--reclaim", 0, "--no-checkpoints", 1)
    return {one["method"]: one for one in told(*words, "--faults", file)["reclaim"]}  # type: ignore[index]


def test_a_fault_stops_the_jobs_of_its_node_until_it_is_repaired(tmp_path: Path) -> None:
    found = play_with_faults(tmp_path, "1,1000,50000,xid\n")["no_preemption"]
    assert found["stops"] == 0
    assert found["fault_stops"] == 2
    assert found["fault_lost_gpu_h"] == pytest.approx(2 * (1000 + 940) / 3600, abs=0.1)  # started at 0 and 60 s
    assert play_with_faults(tmp_path, "1,1000,50000,drain\n")["no_preemption"]["fault_stops"] == 0


def test_jobs_wait_for_the_repair_of_the_whole_fleet(tmp_path: Path) -> None:
    found = play_with_faults(tmp_path, "1,1000,90000,xid\n2,1000,90000,xid\n")
    assert all(one["fault_stops"] == 4 for one in found.values())
    assert all(one["mean_delay_s"] > 80_000 for one in found.values())  # type: ignore[operator]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ("3,0,10,xid", "line 2: node 3: the fleet has nodes 1 to 2"),
        ("1,10,10,xid", "line 2: the end must be after the start"),
        ("1,0,inf,xid", "line 2: the end must be after the start, and both finite"),
        ("1,0,nan,xid", "line 2: the end must be after the start"),
        ("n1,0,10,xid", "line 2: node, start and end must be numbers"),
    ],
)
def test_a_fault_that_cannot_happen_is_refused_with_its_line(tmp_path: Path, row: str, why: str) -> None:
    path, queues = borrowed(tmp_path)
    file = tmp_path / "faults.csv"
    file.write_text(f"node,start,end,kind\n{row}\n", encoding="utf-8")
    words = (path, "--nodes", 2, "--gpus-per-node", 4, "--queues", queues, "--reclaim", 0, "--faults", file)
    assert why in refused(*words)
    file.write_text("node,start,end\n1,0,1\n", encoding="utf-8")
    assert "no column 'kind'" in refused(*words)
