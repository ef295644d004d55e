import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from fleetcast.fleet import failpoints
from fleetcast.fleet.errors import ModelError, UnknownEntity
from fleetcast.models.versions.card import (
    Card,
    CardMetric,
    FitSpan,
    GateVerdict,
    compute_calibration,
    make_card_metrics,
    read_card,
    read_package_versions,
)
from fleetcast.models.versions.registry import SHIPPED, Registry
from fleetcast.training.reports.results import ResultRow

WON = GateVerdict(True, "0.0095 against 0.0110", "wql", "persistence", 0.0095, 0.011, 504)
LOST = GateVerdict(False, "0.0120 against 0.0110", "wql", "persistence", 0.012, 0.011, 504)


def card(gate: GateVerdict | None = WON) -> Card:
    return Card(
        kind="demand",
        created_ms=1_600_000_000_000,
        made_by="fleetcast train demand --seed 7",
        seed=7,
        fitted_until_ms=1_599_000_000_000,
        data=(FitSpan("venus", 1_590_000_000_000, 1_599_000_000_000, 15_000),),
        features=("change_1h", "running"),
        gate=gate,
    )


def write(folder: Path) -> None:
    (folder / "trees").mkdir()
    (folder / "trees" / "1h.txt").write_text("tree")
    (folder / "model.json").write_text("{}")


def filled(root: Path, *gates: GateVerdict | None) -> Registry:
    """A registry with one version of demand a verdict."""
    registry = Registry(root)
    for gate in gates:
        registry.add_version("demand", write, card(gate))
    return registry


def hurt(registry: Registry, version: str) -> None:
    (registry.find_folder("demand", version) / "model.json").write_text("[]")


def test_a_version_that_is_added_has_its_files_and_a_card_and_does_not_serve(tmp_path: Path) -> None:
    registry = filled(tmp_path, WON)
    kept = registry.read_version_card("demand", "1")
    assert (kept.version, [file.path for file in kept.files]) == ("0001", ["model.json", "trees/1h.txt"])
    assert msgspec.structs.replace(kept, version="", files=()) == card()
    assert (registry.find_folder("demand", "0001") / "trees" / "1h.txt").read_text() == "tree"
    assert registry.find_serving_folder("demand") is None
    assert registry.find_current_version("demand") is None


def test_the_page_of_the_card_is_written_beside_it(tmp_path: Path) -> None:
    Registry(tmp_path).add_version("demand", write, card(), page=lambda kept: f"page of {kept.version}")
    assert (tmp_path / "demand" / "0001" / "card.html").read_text() == "page of 0001"


def test_promotion_and_rollback_change_which_version_serves(tmp_path: Path) -> None:
    registry = filled(tmp_path, WON, WON, WON)
    for version in ("0001", "0003", "2"):
        registry.promote("demand", version)
    assert registry.find_current_version("demand") == "0002"
    assert registry.find_serving_folder("demand") == tmp_path / "demand" / "0002"
    assert [registry.roll_back("demand"), registry.roll_back("demand")] == ["0003", "0001"]
    assert registry.roll_back("demand") == SHIPPED
    assert (registry.find_current_version("demand"), registry.find_serving_folder("demand")) == (None, None)
    with pytest.raises(ModelError, match="none serves, what ships does"):
        registry.roll_back("demand")
    actions = [(row.action, row.version, row.previous) for row in registry.list_promotions("demand")]
    assert actions == [
        ("promote", "0001", None),
        ("promote", "0003", "0001"),
        ("promote", "0002", "0003"),
        ("rollback", "0003", "0002"),
        ("rollback", "0001", "0003"),
        ("rollback", SHIPPED, "0001"),
    ]


def test_a_first_bad_version_gives_way_to_what_shipped(tmp_path: Path) -> None:
    registry = filled(tmp_path, WON, WON)
    registry.promote("demand", "0001")
    hurt(registry, "0001")
    assert registry.roll_back("demand") == SHIPPED
    assert registry.find_serving_folder("demand") is None
    assert registry.find_challenger("demand") == "0002"
    registry.promote("demand", "0002")
    assert registry.roll_back("demand") == SHIPPED, "what shipped served before it"
    assert filled(tmp_path, WON).list_names("demand") == ["0001", "0002", "0003"]


def test_a_promotion_twice_is_a_promotion_once(tmp_path: Path) -> None:
    registry = filled(tmp_path, WON)
    registry.promote("demand", "0001")
    registry.promote("demand", "0001")
    assert len(registry.list_promotions("demand")) == 1


def test_a_version_that_lost_is_not_promoted(tmp_path: Path) -> None:
    registry = filled(tmp_path, WON, LOST)
    registry.promote("demand", "0001")
    with pytest.raises(ModelError, match=r"it lost to persistence: wql 0\.012 against 0\.011 over 504 origins"):
        registry.promote("demand", "0002")
    assert registry.find_current_version("demand") == "0001"


def test_a_version_that_nobody_judged_is_not_promoted(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no gate has judged it"):
        filled(tmp_path, None).promote("demand", "0001")


def test_a_forced_promotion_is_recorded(tmp_path: Path) -> None:
    registry = filled(tmp_path, LOST, WON)
    registry.promote("demand", "0001", force=True)
    registry.promote("demand", "0002", force=True)  # nothing to force
    assert registry.find_current_version("demand") == "0002"
    assert [row.forced for row in registry.list_promotions("demand")] == [True, False]
    assert "it lost to persistence" in registry.list_promotions("demand")[0].sentence


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        write(folder)
        raise RuntimeError("no memory")

    registry = filled(tmp_path, WON)
    with pytest.raises(RuntimeError):
        registry.add_version("demand", fail, card())
    assert registry.list_names("demand") == ["0001"]
    assert {path.name for path in (tmp_path / "demand").iterdir()} == {"0001", "lock"}


def test_a_full_disk_is_a_model_error(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelError, match="No space left"):
        Registry(tmp_path).add_version("demand", fail, card())


def test_a_killed_writer_leaves_no_version_and_the_next_one_sweeps_up(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, sys\n"
        "from fleetcast.models.versions.card import Card\n"
        "from fleetcast.models.versions.registry import Registry\n"
        "def write(folder):\n"
        "    (folder / 'model.json').write_text('{')\n"
        "    os.kill(os.getpid(), 9)\n"
        "card = Card(kind='demand', created_ms=0, made_by='', seed=0, fitted_until_ms=0)\n"
        "Registry(pathlib.Path(sys.argv[1])).add_version('demand', write, card)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[3])}
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, env=environment)
    assert ended.returncode == -9
    assert len(list((tmp_path / "demand").glob(".new-*"))) == 1
    registry = Registry(tmp_path)
    assert registry.list_names("demand") == []
    assert registry.list_cards("demand") == []
    assert registry.add_version("demand", write, card()) == "0001"
    assert not list((tmp_path / "demand").glob(".new-*"))


def test_a_version_that_another_writer_is_at_is_not_swept_away(tmp_path: Path) -> None:
    registry = Registry(tmp_path)

    def slow(folder: Path) -> None:
        write(folder)
        assert registry.add_version("demand", write, card()) == "0001"

    assert registry.add_version("demand", slow, card()) == "0002"
    assert [registry.find_damage("demand", name) for name in registry.list_names("demand")] == [None, None]


def test_writers_at_once_get_versions_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        given = list(pool.map(lambda _: Registry(tmp_path).add_version("demand", write, card()), range(24)))
    assert sorted(given) == [f"{number:04d}" for number in range(1, 25)]


def test_a_damaged_version_is_passed_over_for_the_one_that_served_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    registry = filled(tmp_path, WON, WON, WON)
    for version in ("0001", "0002", "0003"):
        registry.promote("demand", version)
    hurt(registry, "0003")
    (tmp_path / "demand" / "0002" / "model.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert registry.find_serving_folder("demand") == tmp_path / "demand" / "0001"
    assert "demand 0003 is damaged: model.json has another sha256 than its card says" in caplog.text
    assert "0001 serves in its place" in caplog.text
    assert registry.roll_back("demand") == "0001"


def test_without_a_whole_version_there_is_a_model_error(tmp_path: Path) -> None:
    registry = filled(tmp_path, WON)
    registry.promote("demand", "0001")
    hurt(registry, "0001")
    with pytest.raises(ModelError, match="demand 0001 is damaged"):
        registry.find_serving_folder("demand")


def test_a_damaged_version_is_not_promoted_even_by_force(tmp_path: Path) -> None:
    registry = filled(tmp_path, WON)
    (tmp_path / "demand" / "0001" / "card.json").write_text("{")
    with pytest.raises(ModelError, match="is no model card"):
        registry.promote("demand", "0001", force=True)
    assert registry.list_cards("demand") == []


def test_pruning_keeps_the_newest_and_those_that_a_rollback_needs(tmp_path: Path) -> None:
    registry = filled(tmp_path, *[WON] * 6)
    registry.promote("demand", "0001")
    registry.promote("demand", "0002")
    assert registry.prune("demand", keep=2) == ["0003", "0004"]
    assert registry.list_names("demand") == ["0001", "0002", "0005", "0006"]
    assert registry.roll_back("demand") == "0001"
    assert Registry(tmp_path / "nowhere").prune("demand", keep=1) == []


def test_what_runs_in_the_shadow_is_the_newest_or_the_chosen_one(tmp_path: Path) -> None:
    registry = filled(tmp_path, *[WON] * 4)
    assert registry.find_challenger("demand") == "0004"
    registry.promote("demand", "0003")
    registry.choose_shadow("demand", "1")
    assert registry.find_challenger("demand") == "0001"
    assert registry.prune("demand", keep=1) == ["0002"]
    registry.promote("demand", "0001")  # the chosen one serves: the newest is next
    assert registry.find_challenger("demand") == "0004"
    registry.roll_back("demand")
    assert registry.find_challenger("demand") == "0001"
    registry.choose_shadow("demand", "off")
    assert registry.find_challenger("demand") is None
    registry.choose_shadow("demand", "newest")
    assert registry.find_challenger("demand") == "0004"
    registry.promote("demand", "0004")
    assert registry.find_challenger("demand") is None


def test_what_serves_or_is_damaged_is_not_chosen_for_the_shadow(tmp_path: Path) -> None:
    registry = filled(tmp_path, WON, WON, WON)
    registry.promote("demand", "0001")
    hurt(registry, "0002")
    for version, why in (("0001", "serves"), ("0002", "damaged")):
        with pytest.raises(ModelError, match=why):
            registry.choose_shadow("demand", version)
    with pytest.raises(UnknownEntity, match="no version 9 of demand"):
        registry.choose_shadow("demand", "9")
    assert registry.find_challenger("demand") == "0003"
    (tmp_path / "demand" / "shadow").write_text("latest\n")
    with pytest.raises(ModelError, match="'latest': expected a version, off or newest"):
        registry.find_challenger("demand")


def test_a_number_is_never_given_twice(tmp_path: Path) -> None:
    registry = filled(tmp_path, WON, WON)
    registry.prune("demand", keep=1)
    assert registry.add_version("demand", write, card()) == "0003"


def test_unknown_kinds_and_versions_are_refused(tmp_path: Path) -> None:
    registry = filled(tmp_path, WON)
    with pytest.raises(UnknownEntity, match=r"kind '\.\./x': expected one of demand, duration"):
        registry.add_version("../x", write, card())
    with pytest.raises(UnknownEntity, match=r"no version \.\./\.\. of demand.*newest are: 0001"):
        registry.promote("demand", "../..")
    with pytest.raises(UnknownEntity, match="no version 9 of demand"):
        registry.read_version_card("demand", "9")


def test_a_card_with_a_hole_is_refused_when_it_is_added(tmp_path: Path) -> None:
    hole = msgspec.structs.replace(WON, ours=float("nan"))
    with pytest.raises(ModelError, match="is no model card"):
        filled(tmp_path, hole)
    assert Registry(tmp_path).list_names("demand") == []


def test_a_line_of_the_log_that_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    registry = filled(tmp_path, WON)
    registry.promote("demand", "0001")
    with (tmp_path / "demand" / "promotions.jsonl").open("a") as file:
        file.write('{"time_ms": 1')
    assert len(registry.list_promotions("demand")) == 1


def test_a_card_keeps_the_rows_of_an_evaluation() -> None:
    assert CardMetric.__struct_fields__ == ResultRow.__struct_fields__
    row = ResultRow("venus", "running", "all", 3600, "ours", "trees", "coverage_80", 0.79, 0.75, 0.83, 500)
    low = ResultRow("earth", "running", "all", 3600, "ours", "trees", "coverage_80", 0.83, None, None, 1500)
    metrics = make_card_metrics([row, low])
    assert msgspec.to_builtins(metrics[0]) == msgspec.to_builtins(row)
    (pooled,) = compute_calibration(metrics)
    assert (pooled.nominal, round(pooled.observed, 4), pooled.n) == (0.8, 0.82, 2000)


def test_dependencies_that_are_not_installed_are_left_out() -> None:
    assert set(read_package_versions("numpy", "no-such-package")) == {"numpy"}


def test_a_folder_without_a_card_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"card\.json: No such file"):
        read_card(tmp_path)


class Killed(BaseException):
    """Nobody handles it, as nobody handles a kill."""


STEPS = 22  # failpoints on the way from a new version to one that serves


@contextlib.contextmanager
def killed_after(steps: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process ends at the failpoint with this number: before or after a write, an fsync or a rename."""
    left = steps

    def at(point: str) -> float:
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        return failpoints.KEEP_ALL

    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)  # who is killed tidies nothing up
    failpoints.set_hook(at)
    try:
        with contextlib.suppress(Killed):
            yield
    finally:
        failpoints.set_hook(None)


@pytest.mark.parametrize("steps", range(STEPS))
def test_a_kill_at_any_step_leaves_nothing_or_a_whole_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    registry = filled(tmp_path, WON)
    registry.promote("demand", "0001")
    with monkeypatch.context() as patched, killed_after(steps, patched):
        registry.add_version("demand", write, card())
        registry.promote("demand", "0002")
    again = Registry(tmp_path)
    assert again.list_names("demand") in (["0001"], ["0001", "0002"])
    assert [again.find_damage("demand", name) for name in again.list_names("demand")] == [None] * len(
        again.list_names("demand")
    )
    assert again.find_current_version("demand") in ("0001", again.list_names("demand")[-1])
    assert again.find_serving_folder("demand") is not None
    name = again.add_version("demand", write, card())
    again.promote("demand", name)
    assert again.find_current_version("demand") == name
    assert not list((tmp_path / "demand").glob(".new-*"))


@pytest.mark.parametrize("steps", [STEPS - 1, STEPS])
def test_those_steps_are_all_that_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    registry = filled(tmp_path, WON)
    ended = False
    with monkeypatch.context() as patched, killed_after(steps, patched):
        registry.add_version("demand", write, card())
        registry.promote("demand", "0002")
        ended = True
    assert ended == (steps == STEPS)
    assert registry.find_current_version("demand") == "0002"
