"""A flag stays while its evidence is merely unreadable: late pages, hangs and restarts of ours change nothing."""

from pathlib import Path

import pytest

from fleetcast.fleet.events import NodeEvent
from fleetcast.ingest.source import Batch
from tests.field.scraped_world import ScrapedWorld, without

FIELD = Path(__file__).parents[2] / "field"
EIGHT = (FIELD / "05-idle-gpus-vanish-before.prom").read_bytes()
ONE = (FIELD / "05-idle-gpus-vanish-after.prom").read_bytes()
URL = "http://10.0.0.1:9400/metrics"
LOST = "GPU 3: series vanished"


def with_xid(page: bytes, gpu: int, code: int) -> bytes:
    lines = page.split(b"\n")
    mark = f'DCGM_FI_DEV_XID_ERRORS{{gpu="{gpu}"'.encode()
    return b"\n".join(
        line.rpartition(b" ")[0] + f" {code}".encode() if line.startswith(mark) else line for line in lines
    )


def one_gpu_gone(world: ScrapedWorld) -> None:
    """GPU 3 reports XID 79, and then it is on no page any more."""
    world.run(120, {URL: EIGHT})
    world.run(30, {URL: with_xid(EIGHT, 3, 79)})
    world.run(60, {URL: without(EIGHT, 3)})


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScrapedWorld:
    return ScrapedWorld(tmp_path, [URL], monkeypatch)


def flag(world: ScrapedWorld) -> tuple[str, bool]:
    """(action, whether a reason names the vanished GPU) of the node now."""
    node = world.nodes()["dra-1"]
    return node["action"]["code"], any(LOST in reason["sentence"] for reason in node["reasons"])


def lanes(world: ScrapedWorld) -> dict[str, int]:
    """Timeline lanes of GPU 3 by what they show."""
    features = [spell.feature for spell in world.spells("dra-1") if spell.entity == "dra-1/3"]
    return {feature: features.count(feature) for feature in features}


def test_an_exporter_that_hangs_ten_times_for_a_minute_makes_one_spell_of_a_lost_gpu(world: ScrapedWorld) -> None:
    one_gpu_gone(world)
    assert flag(world) == ("drain_now", True)
    seen, alerts = set(), set()
    for _ in range(10):
        for page in (None, without(EIGHT, 3)):
            for _ in range(4):
                world.run(15, {URL: page})
                seen.add(flag(world))
                alerts |= set(world.metrics("fleetcast_node_flagged"))
    assert seen == {("drain_now", True)}
    assert len(alerts) == 1
    assert lanes(world) == {"xid": 1, "silent_s": 1}
    past = [span.code for span in world.past("dra-1").actions]
    assert past == ["drain_now"]


def test_a_restart_of_the_pipeline_amid_a_hang_keeps_the_flag_and_its_spell(world: ScrapedWorld) -> None:
    one_gpu_gone(world)
    world.run(45, {URL: None})
    world.save()
    world.clock.advance(300)
    world.restart()
    seen = set()
    for page in (None, without(EIGHT, 3), None, without(EIGHT, 3)):
        for _ in range(4):
            world.run(15, {URL: page})
            seen.add(flag(world))
    assert seen == {("drain_now", True)}
    assert lanes(world) == {"xid": 1, "silent_s": 1}


def test_a_gpu_that_is_on_the_page_again_clears_its_absence(world: ScrapedWorld) -> None:
    one_gpu_gone(world)
    world.run(60, {URL: None})
    world.run(60, {URL: EIGHT})
    assert flag(world)[1] is False
    assert world.spells("dra-1")[-1].ended_ms is not None


@pytest.mark.parametrize("event", ["undrain", "healthy", "healthy gpu"])
def test_a_repair_or_a_healthy_word_clears_what_nobody_can_read(world: ScrapedWorld, event: str) -> None:
    one_gpu_gone(world)
    world.run(60, {URL: None})
    about = {"node": "dra-1", "source": "operator", "sequence": 1, "time_ms": world.clock.now_ms()}
    kinds = {
        "undrain": NodeEvent(**about, type="undrain"),
        "healthy": NodeEvent(**about, type="health", severity="ok"),
        "healthy gpu": NodeEvent(**about, type="health", severity="ok", gpu=3),
    }
    world.pipeline.apply_batch(Batch(node_events=(kinds[event],)))
    world.run(1200)
    assert flag(world)[1] is False
    world.run(120, {URL: without(EIGHT, 3)})
    features = [reason["feature"] for reason in world.nodes()["dra-1"]["reasons"]]
    assert "exporter_partial" in features, "it is still not on the page"


def test_a_healthy_word_about_one_check_or_another_gpu_clears_nothing(world: ScrapedWorld) -> None:
    one_gpu_gone(world)
    about = {"node": "dra-1", "source": "operator", "time_ms": world.clock.now_ms(), "type": "health", "severity": "ok"}
    events = NodeEvent(**about, sequence=1, check="fan"), NodeEvent(**about, sequence=2, gpu=4)
    world.pipeline.apply_batch(Batch(node_events=events))
    world.run(30)
    assert flag(world) == ("drain_now", True)


def test_idle_gpus_that_an_exporter_no_longer_lists_are_the_exporters_fault(world: ScrapedWorld) -> None:
    world.run(120, {URL: EIGHT})
    world.run(600, {URL: ONE})
    node = world.nodes()["dra-1"]
    assert node["action"]["code"] == "watch"
    assert [reason["feature"] for reason in node["reasons"]] == ["exporter_partial"]
    assert max(row["p"] for row in node["risk"] if row["horizon_s"] == 3600) < 0.2
    world.run(60, {URL: EIGHT})
    assert world.nodes()["dra-1"]["reasons"] == []
