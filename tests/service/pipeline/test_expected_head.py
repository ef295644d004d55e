"""A whole state that is an older copy: `placer.expect_head` finds it, although all of its parts agree."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from fleetcast.cli.main import app
from fleetcast.fleet.errors import ConfigError
from fleetcast.service.config import Config, PlacerConfig, load_config
from fleetcast.service.state_folder import lock_role
from fleetcast.service.state_identity import describe_doubt, find_doubts
from fleetcast.service.state_parts import read_state_parts
from tests.service.pipeline.test_lost_parts import Site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path / "site")
    made.live()
    yield made
    made.close()


def expect(site: Site, head: str) -> None:
    """Start the site again with an expected head."""
    site.close()
    site.config = Config(state=str(site.folder), placer=PlacerConfig(expect_head=head))
    site.start()


def restore(site: Site, copy: Path) -> None:
    shutil.rmtree(site.folder)
    shutil.copytree(copy, site.folder)


def older_copy(site: Site, to: Path) -> str:
    """Copy the whole state, go on placing, and restore the copy. Returns the head that was lost."""
    site.close()
    shutil.copytree(site.folder, to)
    site.start()
    assert site.promise("later").json()["outcome"] == "placed"
    head = str(site.service.ledger.head)
    site.close()
    restore(site, to)
    site.start()
    return head


def state(site: Site, word: str, folder: Path, exit_code: int) -> str:
    path = folder / "config.toml"
    path.write_text(f'[placer]\nexpect_head = "{site.config.placer.expect_head}"\n', encoding="utf-8")
    result = CliRunner().invoke(app, ["state", word, "--config", str(path), "--state", str(site.folder)])
    assert result.exit_code == exit_code, result.output
    return result.output


def test_a_restored_older_copy_places_nothing_until_it_is_accepted(site: Site, tmp_path: Path) -> None:
    head = older_copy(site, tmp_path / "copy")
    assert site.doubted() == site.on_disk() == []
    found = str(site.service.ledger.head)
    expect(site, head)
    assert site.doubted() == site.on_disk() == ["ledger"]
    answer = site.promise("twice")
    assert answer.status_code == 503
    for text in (answer.text, state(site, "show", tmp_path, 1)):
        assert f"expected {head}" in text
        assert f"its head is {found}" in text
    assert "fleetcast_placer_state_doubts 1.0" in site.ask("GET", "/metrics").text

    with lock_role(site.config, "placer"):
        state(site, "accept", tmp_path, 0)
    site.turn()
    site.save()
    site.turn()
    assert site.doubted() == site.on_disk() == []
    assert site.promise("again").json()["outcome"] == "placed"
    expect(site, head)
    assert site.doubted() == []

    site.close()
    restore(site, tmp_path / "copy")
    site.start()
    assert site.doubted() == ["ledger"], "accepting one ledger accepts no other"


def test_a_ledger_that_contains_the_head_is_whole(site: Site) -> None:
    head = str(site.service.ledger.head)
    expect(site, head)
    assert site.doubted() == site.on_disk() == []
    assert site.promise("newer").json()["outcome"] == "placed"
    expect(site, head)
    assert str(site.service.ledger.head) != head
    assert site.doubted() == site.on_disk() == []


def test_a_ledger_of_another_chain_is_in_doubt(site: Site) -> None:
    line = site.service.ledger.head.audit_id
    expect(site, f"{line}:{'a' * 64}")
    (doubt,) = find_doubts(read_state_parts(site.config))
    assert f"its line {line} is {site.service.ledger.head.hash}" in describe_doubt(doubt)
    assert site.promise("p").status_code == 503


def test_an_empty_ledger_is_in_doubt(tmp_path: Path) -> None:
    site = Site(tmp_path / "new")
    expect(site, f"7:{'a' * 64}")
    assert site.doubted() == ["ledger"]
    assert "it is empty" in site.promise("p").text
    site.close()


@pytest.mark.parametrize(
    "head", ["7", "a" * 64, f"0:{'a' * 64}", f"-1:{'a' * 64}", f"7:{'a' * 63}", f"٧:{'a' * 64}", " "]
)
def test_a_head_that_is_none_is_refused_with_the_fix(tmp_path: Path, head: str) -> None:
    path = tmp_path / "config.toml"
    path.write_bytes(b"[placer]\nexpect_head = " + msgspec.json.encode(head) + b"\n")
    with pytest.raises(ConfigError, match=r"expect_head = .* must be LINE:HASH"):
        load_config(path)
