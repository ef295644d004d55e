"""The restore drill: back a site up while it writes, lose it, and start from the copy."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleetcast.cli.main import app
from fleetcast.fleet import failpoints
from fleetcast.fleet.errors import ConfigError
from fleetcast.ingest.inbox.segments import KEEP_LOCK
from fleetcast.service.config import Config
from fleetcast.service.state_backup import BackupError, back_up_state, restore_state, verify_backup
from fleetcast.service.state_parts import read_state_parts
from tests.service.pipeline.test_lost_parts import NODES, Site, state


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path / "site")
    yield made
    made.close()


class Writes:
    """Writes to a site at each step of a backup.

    `acknowledged`: replies and jobs before the backup's moment.
    """

    def __init__(self, site: Site, until: str = "ledger") -> None:
        self.site, self.until, self.number, self.open = site, until, 0, True
        self.replies: dict[str, bytes] = {}
        self.jobs: list[str] = []

    def __call__(self, step: str) -> None:
        self.open = self.open and step != self.until
        name = f"w{self.number}"
        self.number += 1
        reply = self.site.promise(name)
        job = f"run-{name}"
        self.site.tell(job, NODES[self.number % len(NODES)])
        self.site.turn()
        self.site.save()
        if self.open:
            self.replies[name] = reply.content
            self.jobs.append(job)


def test_a_site_that_is_restored_from_a_backup_made_while_it_wrote_goes_on(site: Site, tmp_path: Path) -> None:
    before = site.live()
    writes = Writes(site)
    manifest = back_up_state(site.config, tmp_path / "copy", writes)
    assert writes.number >= 5
    assert not (site.config.inbox / KEEP_LOCK).exists(), "the inbox's lock is given back"
    promised = {row.request_id: row.ranks for row in site.service.ledger.list_active_intents()}
    site.close()
    shutil.rmtree(site.folder)

    fresh = Config(state=str(tmp_path / "new"))
    assert restore_state(fresh, tmp_path / "copy", lambda _: None) == manifest
    assert "whole" in state("show", folder=fresh.folder)
    copy = Site(fresh.folder, site.clock.now_ms())
    try:
        assert copy.doubted() == copy.on_disk() == []
        assert copy.promise("p").content == before
        for name, reply in writes.replies.items():
            assert copy.promise(name).content == reply, "an acknowledged decision is lost"
        told = {row.job for row in copy.pipeline.state.jobs}
        assert told >= {"a", "b", *writes.jobs}, "an acknowledged event is lost"
        held: dict[tuple[str, int], str] = {}
        for intent in copy.service.ledger.list_active_intents():
            for rank in intent.ranks:
                for gpu in rank.gpus:
                    assert held.setdefault((rank.node, gpu), intent.request_id) == intent.request_id, "held twice"
        assert copy.service.ledger.head.audit_id >= manifest.head_line
        assert promised.keys() >= {row.request_id for row in copy.service.ledger.list_active_intents()}
    finally:
        copy.close()


@pytest.mark.parametrize("name", ["b.tar", "b.tar.gz"])
def test_a_tar_file_is_a_backup_too(site: Site, tmp_path: Path, name: str) -> None:
    site.live()
    manifest = back_up_state(site.config, tmp_path / name, lambda _: None)
    assert verify_backup(site.config, tmp_path / name, tmp_path / "scratch", lambda _: None) == manifest
    fresh = Config(state=str(tmp_path / "new"))
    restore_state(fresh, tmp_path / name, lambda _: None)
    assert read_state_parts(fresh).find_identity() == manifest.identity == read_state_parts(site.config).find_identity()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.tar" + name[5:], "new", "scratch", "site"]


def test_every_file_is_checked_when_a_backup_is_verified(site: Site, tmp_path: Path) -> None:
    site.live()
    copy = tmp_path / "copy"
    manifest = back_up_state(site.config, copy, lambda _: None)
    for row in manifest.files:
        path = copy / "state" / row.path
        kept = path.read_bytes()
        path.write_bytes(kept + b"x")
        with pytest.raises(BackupError, match="not what was written"):
            verify_backup(site.config, copy, tmp_path, lambda _: None)
        path.write_bytes(kept)
    (copy / "state" / "more").write_text("x")
    with pytest.raises(BackupError, match="more was added"):
        restore_state(Config(state=str(tmp_path / "new")), copy, lambda _: None)
    assert not (tmp_path / "new").exists()
    (copy / "state" / "more").unlink()
    (copy / "state" / manifest.files[0].path).unlink()
    with pytest.raises(BackupError, match="is gone"):
        restore_state(Config(state=str(tmp_path / "new")), copy, lambda _: None)


def test_a_backup_is_whole_or_absent(site: Site, tmp_path: Path) -> None:
    """Wherever it breaks off."""
    site.live()
    points = [point for point in failpoints.POINTS if point.startswith("backup.before")]
    assert points
    for point in points:

        def fail(reached: str, point: str = point) -> float:
            if reached == point:
                raise OSError(28, "No space left on device")
            return failpoints.KEEP_ALL

        failpoints.set_hook(fail)
        try:
            with pytest.raises(OSError, match="No space"):
                back_up_state(site.config, tmp_path / "copy", lambda _: None)
        finally:
            failpoints.set_hook(None)
        assert [path.name for path in tmp_path.iterdir()] == ["site"]


def test_bad_places_are_refused_with_the_fix(site: Site, tmp_path: Path) -> None:
    site.live()
    (tmp_path / "there").mkdir()
    for to, why in (("there", "exists already"), ("no/where", "make it first"), ("site/in", "on another disk")):
        with pytest.raises(ConfigError, match=why):
            back_up_state(site.config, tmp_path / to, lambda _: None)
    with pytest.raises(BackupError, match="is no backup"):
        restore_state(Config(state=str(tmp_path / "new")), tmp_path / "there", lambda _: None)
    back_up_state(site.config, tmp_path / "copy", lambda _: None)
    with pytest.raises(ConfigError, match="not empty"):
        restore_state(site.config, tmp_path / "copy", lambda _: None)
    (tmp_path / "bad.tar").write_bytes(b"no tar")
    with pytest.raises(BackupError, match="cannot be unpacked"):
        restore_state(Config(state=str(tmp_path / "new")), tmp_path / "bad.tar", lambda _: None)


def test_a_state_in_doubt_is_not_backed_up(site: Site, tmp_path: Path) -> None:
    site.live()
    site.close()
    for path in site.folder.glob("ledger.sqlite*"):
        path.unlink()
    with pytest.raises(BackupError, match="the ledger is gone"):
        back_up_state(site.config, tmp_path / "copy", lambda _: None)
    assert not (tmp_path / "copy").exists()


def test_private_files_stay_private(site: Site, tmp_path: Path) -> None:
    site.live()
    key = site.folder / "placer.key"
    key.write_text("secret")
    key.chmod(0o600)
    back_up_state(site.config, tmp_path / "copy", lambda _: None)
    assert (tmp_path / "copy" / "state" / "placer.key").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "copy").stat().st_mode & 0o077 == 0


def test_the_commands_say_what_they_did(site: Site, tmp_path: Path) -> None:
    site.live()
    runner = CliRunner()
    words = ["state", "backup", str(tmp_path / "b"), "--state", str(site.folder)]
    made = runner.invoke(app, words)
    assert made.exit_code == 0, made.output
    assert f"state {read_state_parts(site.config).find_identity()}; head of the audit: line " in made.output
    assert runner.invoke(app, ["state", "verify", str(tmp_path / "b")]).exit_code == 0
    again = runner.invoke(app, words)
    assert again.exit_code != 0
    restored = runner.invoke(app, ["state", "restore", str(tmp_path / "b"), "--state", str(tmp_path / "new")])
    assert restored.exit_code == 0, restored.output
    assert runner.invoke(app, ["state", "show", "--state", str(tmp_path / "new")]).exit_code == 0
    assert runner.invoke(app, ["audit", "verify", "--state", str(tmp_path / "new")]).exit_code == 0
