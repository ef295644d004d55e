"""The folder of run times that Slurm's job_submit plugin reads."""

import asyncio
from pathlib import Path

from fleetcast.fleet.entities import MAX_NAME_LENGTH
from fleetcast.schedulers.adapter import Write, WriteOutcome
from fleetcast.schedulers.slurm_durations import FILE, MINUTES, UNTIL
from fleetcast.service.ports.slurm_durations import MOST_BYTES, DurationsPort, compute_bucket_name

DONE, CONFLICT, REFUSED = WriteOutcome.DONE, WriteOutcome.CONFLICT, WriteOutcome.REFUSED


def written(port: DurationsPort, *rows: tuple[str, str, str | None, str | None]) -> list[WriteOutcome]:
    return list(asyncio.run(port.write([Write(key, field, value, seen, "") for key, field, value, seen in rows])))


def test_a_name_is_in_the_small_file_of_its_hash_and_all_goes_when_it_is_withdrawn(tmp_path: Path) -> None:
    port = DurationsPort(tmp_path / "durations")
    assert asyncio.run(port.read()) == {}
    rows = [(FILE, UNTIL, "99", None), ("ada big run", MINUTES, "60 90 7", None), ("bob x", MINUTES, "1 2 7", None)]
    assert written(port, *rows) == [DONE] * 3
    assert (port.folder / compute_bucket_name("ada big run")).read_text() == "60 90 7 ada big run\n"
    assert (port.folder / "until").read_text() == "99\n"
    seen = asyncio.run(port.read())
    assert seen == {FILE: {UNTIL: "99"}, "ada big run": {MINUTES: "60 90 7"}, "bob x": {MINUTES: "1 2 7"}}
    back = [(key, field, None, value) for key, values in seen.items() for field, value in values.items()]
    assert written(port, *back) == [DONE] * 3
    assert list(port.folder.iterdir()) == []


def test_what_is_not_as_it_was_seen_or_no_line_is_not_written(tmp_path: Path) -> None:
    port = DurationsPort(tmp_path / "durations")
    assert written(port, ("a x", MINUTES, "1 2 7", "5 6 7"), ("a\nb", MINUTES, "1 2 7", None)) == [CONFLICT, REFUSED]
    assert asyncio.run(port.read()) == {}


def test_lines_that_are_none_are_skipped(tmp_path: Path) -> None:
    port = DurationsPort(tmp_path)
    (tmp_path / "00").write_bytes(b"\xff\n60 90\n60 90 7 ada train\n60 90 7")
    (tmp_path / "README").write_text("1 2 3 no row\n")
    assert asyncio.run(port.read()) == {"ada train": {MINUTES: "60 90 7"}}


def test_a_file_never_grows_beyond_what_the_script_reads(tmp_path: Path) -> None:
    port = DurationsPort(tmp_path / "durations")
    same = [
        f"ada {'x' * 250}{number}"
        for number in range(100_000)
        if compute_bucket_name(f"ada {'x' * 250}{number}") == "61"
    ]
    assert len(same) > 300
    outcomes = written(port, *((key, MINUTES, "60 90 7", None) for key in same))
    assert outcomes[:200] == [DONE] * 200
    assert outcomes[-1] == REFUSED
    size = (port.folder / "61").stat().st_size
    assert MOST_BYTES - 300 < size <= MOST_BYTES
    assert set(asyncio.run(port.read())) == {
        key for key, outcome in zip(same, outcomes, strict=True) if outcome == DONE
    }
    assert written(port, (same[0], MINUTES, "61 91 8", "60 90 7")) == [DONE]


def test_the_script_reads_files_and_lines_as_long_as_the_port_writes_them() -> None:
    script = (Path(__file__).parents[3] / "deploy" / "slurm" / "job_submit.lua").read_text(encoding="utf-8")
    assert f"local MOST_BYTES, LONGEST = {MOST_BYTES}, 4096 " in script
    longest = f"{10**9} {10**9} 99999 {'時' * MAX_NAME_LENGTH} {'時' * MAX_NAME_LENGTH}"
    assert len(longest.encode()) < 4096
