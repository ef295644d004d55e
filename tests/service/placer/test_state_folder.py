import errno
import os
import threading
from pathlib import Path

import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.placement.ledger.ledger import LedgerUnavailable
from fleetcast.service.config import ArchiveConfig, Config
from fleetcast.service.placer.role import open_service
from fleetcast.service.state_folder import StateError, lock_role, lock_state_folder, make_state_folders


def test_the_folders_are_made_and_left_empty(tmp_path: Path) -> None:
    config = Config(state=str(tmp_path / "new" / "state"))
    make_state_folders(config)
    make_state_folders(config)
    assert sorted(path.name for path in config.folder.rglob("*")) == ["board", "inbox", "snapshot"]


@pytest.mark.parametrize("name", ["inbox", "board", "snapshot"])
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match=name):
        make_state_folders(Config(state=str(tmp_path)))
    assert (tmp_path / name).read_text() == "mine"


def test_an_archive_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    archive = ArchiveConfig(url=str(tmp_path / "file" / "archive"))
    with pytest.raises(ConfigError, match=r"archive\.url = .*: cannot write"):
        make_state_folders(Config(state=str(tmp_path / "state"), archive=archive))
    with pytest.raises(ConfigError, match=r"archive\.url = 'nowhere://x'"):
        make_state_folders(Config(state=str(tmp_path / "state"), archive=ArchiveConfig(url="nowhere://x")))


def test_a_second_supervisor_is_refused_until_the_first_has_ended(tmp_path: Path) -> None:
    config = Config(state=str(tmp_path))
    with (
        lock_state_folder(config),
        pytest.raises(ConfigError, match="another `fleetcast run` uses this folder"),
        lock_state_folder(config),
    ):
        pass
    with lock_state_folder(config):
        pass


def test_a_second_process_of_a_role_is_refused_and_other_roles_are_not(tmp_path: Path) -> None:
    config = Config(state=str(tmp_path))
    with (
        lock_role(config, "placer"),
        lock_role(config, "pipeline"),
        pytest.raises(StateError, match=rf"another placer works in it \(process {os.getpid()}\)"),
        lock_role(config, "placer", patience_s=0.0),
    ):
        pass
    with lock_role(config, "placer", patience_s=0.0):
        pass


def test_a_role_that_is_ending_is_waited_for(tmp_path: Path) -> None:
    config = Config(state=str(tmp_path))
    ending, taken = threading.Event(), threading.Event()

    def earlier() -> None:
        with lock_role(config, "pipeline"):
            taken.set()
            ending.wait()

    thread = threading.Thread(target=earlier)
    thread.start()
    taken.wait()
    threading.Timer(0.2, ending.set).start()
    with lock_role(config, "pipeline"):
        assert ending.is_set()
    thread.join()


def test_a_disk_that_is_full_or_read_only_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match="Read-only file system"):
        make_state_folders(Config(state=str(tmp_path)))


def test_a_ledger_that_cannot_be_opened_now_is_tried_again_not_refused(tmp_path: Path) -> None:
    config = Config(state=str(tmp_path))
    config.ledger.mkdir()
    with pytest.raises(LedgerUnavailable):
        open_service(config)
    with pytest.raises(ConfigError, match="is no file"):
        make_state_folders(config)
