"""LocalFiles has the answers and the errors of fsspec."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.local_files import LocalFiles
from fleetcast.ingest.archive.files import ArchiveFiles, FileName
from tests.fuzz.bounds import examples

THEIRS = fsspec.filesystem("file")
PATHS = st.lists(
    st.lists(st.sampled_from(["a", "day=1", "x.parquet", ".h", "ü b"]), min_size=1, max_size=4), max_size=8
)


def make_tree(folder: Path, paths: list[list[str]]) -> None:
    """Make files of different sizes. A path below an existing file, or equal to a folder, is left out."""
    for size, parts in enumerate(paths):
        path = folder.joinpath(*parts)
        if path.exists() or any(parent.is_file() for parent in path.parents):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)


def outcome(work: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Return the answer of a call, or the type of its OSError. Listings are sorted, open files are read and closed."""
    try:
        found = work(*given, **named)
    except OSError as error:
        return type(error)
    if hasattr(found, "read"):
        with found as file:
            return file.read()
    return sorted(found) if isinstance(found, list) else found


@examples(40)
@given(PATHS, PATHS)
def test_listings_sizes_and_reads_equal_those_of_fsspec(
    tmp_path_factory: pytest.TempPathFactory, made: list[list[str]], asked: list[list[str]]
) -> None:
    folder, ours = tmp_path_factory.mktemp("tree"), LocalFiles()
    make_tree(folder, made)
    for path in [str(folder), *(str(folder.joinpath(*parts)) for parts in (*made, *asked))]:
        for name, more, is_meant in (
            ("find", (), not os.path.isfile(path)),  # an archive lists folders
            ("ls", (False,), not os.path.isfile(path)),
            ("size", (), not os.path.isdir(path)),
            ("open", ("rb",), not os.path.isdir(path)),
        ):
            if is_meant:
                mine, other = (outcome(getattr(fs, name), path, *more) for fs in (ours, THEIRS))
                assert mine == other, (name, path)


def test_removals_and_renames_equal_those_of_fsspec(tmp_path: Path) -> None:
    left = {}
    for name, fs in (("ours", LocalFiles()), ("theirs", THEIRS)):
        folder = tmp_path / name
        make_tree(folder, [["day", "a"], ["day", "b"], ["gone", "x", "y"], ["c"]])
        at = str(folder)
        fs.mv(f"{at}/day/b", f"{at}/day/a")
        fs.rm_file(f"{at}/c")
        fs.rm(f"{at}/gone", recursive=True)
        errors = [outcome(fs.rm_file, f"{at}/c"), outcome(fs.rm, f"{at}/gone", recursive=True)]
        left[name] = errors, sorted(str(path.relative_to(folder)) for path in folder.rglob("*")), fs.size(f"{at}/day/a")
    assert left["ours"] == left["theirs"]
    assert left["ours"][0] == [FileNotFoundError, FileNotFoundError]


@pytest.mark.parametrize(
    "url", ["archive", "./archive", "a/../archive", "/tmp/archive/", "~/archive", "~nobody-here/x"]
)
def test_a_folder_has_the_place_that_fsspec_gives_it(url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    theirs = fsspec.core.url_to_fs(url)[1]
    assert ArchiveFiles(url).folder == Path(theirs).absolute()


def test_a_url_of_a_folder_is_that_folder(tmp_path: Path) -> None:
    for url in (f"file://{tmp_path}", f"local://{tmp_path}", f"file:{tmp_path}"):
        files = ArchiveFiles(url)
        assert files.folder == tmp_path
    name = FileName("events", "2026-11-21", "", 13, "0", 1, 1)
    ArchiveFiles(str(tmp_path)).write_file(name, b"rows")
    assert files.list_files("events") == ArchiveFiles(str(tmp_path)).list_files("events") == [name]
