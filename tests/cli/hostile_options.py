"""Command lines in which one option has a value that its author did not expect, each run in a forked child.

The modules are loaded once, and a child that hangs or dies harms no other. Long work is replaced by its beginning: a
command that gets there has accepted the value.
"""

import importlib
import io
import os
import sys
import tempfile
import traceback
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer

from fleetcast.cli.kit import logs
from fleetcast.cli.main import app
from fleetcast.fleet.errors import ConfigError, FleetcastError
from tests.forked import wait_for_child

LIMIT_S = 120.0  # wall, on a machine with much else to do
SHOWN = 30  # characters of a value in a failure's text
BUG = 99
LONG = "x" * 5000
INTEGERS = ("", "x", "-1", "0", "-99999999999999999999", "99999999999999999999", "99999", "1.5")
NUMBERS = ("", "x", "-1", "0", "nan", "inf", "-inf", "1e308", "1e-320")
TEXTS = ("", " ", "missing/nowhere", "folder", "empty", "binary", "a\nb", "a\0b", "\u202eé\U0001f600", LONG, "-1")
TEXTS += ("99999999999999999999", "nan", "file:", "http://[", "127.0.0.1:99999", "--", "2020-13-45", "\udcff")
FLAGS = ("junk",)
REQUIRED = {  # what a command needs beside the option under test
    "*": {"--from": "2026-01-01", "--out": "out", "--keep-days": "3", "--faults": "empty", "--at": "2026-01-01"},
    "run": {"--state": "state"},
    "demo": {"--folder": "demo"},
    "backfill": {"--timeout": "0.2", "URL": "http://127.0.0.1:1"},
    "train history": {"--nodes": "empty"},
    "play": {"--capacity": "8"},
    "simulate starts": {"--nodes": "2"},  # the usual fleet has weeks of jobs, which take seconds to draw
    "models promote": {"KIND": "risk"},
    "models shadow": {"KIND": "risk"},
    "state backup": {"TO": "copy"},
}
BEGINNINGS = (  # module, and what it calls once everything is accepted
    ("fleetcast.service.supervise", "Supervisor.run"),
    ("fleetcast.cli.demo.demo", "spawn_process"),
    ("fleetcast.cli.lab.train", "simulate_rows"),
    ("fleetcast.cli.lab.simulate", "measure_day_worth"),
    ("fleetcast.cli.lab.waiting_fleet", "WaitingFleet.run_for"),
    ("fleetcast.simulator.run", "run_simulation"),
    ("fleetcast.simulator.instrument", "simulate_faults"),
    ("fleetcast.simulator.hardware.rendered_steps", "render_steps"),
    ("fleetcast.simulator.hardware.realism", "compare_with_recordings"),
    ("fleetcast.cli.lab.bench", "_run_benchmark"),
)

IMPORTED_LATE = (  # by commands or by their libraries when they run; an import costs a child as much as all the rest
    *(
        "fleetcast.service.start_checks",
        "fleetcast.service.pipeline.role",
        "fleetcast.service.api.role",
        "fleetcast.ingest.kafka.output",
        "fleetcast.training.sites.histories",
        "fleetcast.training.fits.fit",
        "fleetcast.schedulers.slurm",
    ),
    *("pydantic.json_schema", "pydantic.type_adapter", "lz4.frame", "zstandard", "fsspec.core"),
)


class Begun(BaseException):
    """The work begins."""


@dataclass(frozen=True, slots=True)
class HostileCase:
    """A command line with `value` for `option`. The option is empty for the line without a hostile value."""

    command: str
    option: str
    value: str
    line: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.command} {self.option} {self.value[:SHOWN]!r}"


@dataclass(frozen=True, slots=True)
class CliEnd:
    """How a child ended; `code` is None for one that had to be killed."""

    code: int | None
    output: str


@cache
def command_tree() -> Any:
    """Return the whole command line, built once for all children."""
    return typer.main.get_command(app)


@cache
def commands() -> dict[str, Any]:
    """Return the commands by their command line, such as `queues import slurm`."""
    found: dict[str, Any] = {}

    def walk(command: Any, words: tuple[str, ...]) -> None:
        for name, child in getattr(command, "commands", {}).items():
            walk(child, (*words, name))
        if not hasattr(command, "commands"):
            found[" ".join(words)] = command

    walk(command_tree(), ())
    return found


def cases_of(command: str) -> Iterator[HostileCase]:
    """The line without a hostile value, then every option and argument with every value for its type."""
    found = commands()[command]
    yield HostileCase(command, "", "", _line(found, command, None, ""))
    for param in found.params:
        name = param.opts[-1] if param.param_type_name == "option" else param.metavar or str(param.name).upper()
        for value in _values(param):
            yield HostileCase(command, name, value, _line(found, command, param, value))


def _values(param: Any) -> Sequence[str]:
    kind = param.type_descriptor.annotation
    while inner := [each for each in typing.get_args(kind) if each is not type(None)]:
        kind = inner[0]
    return {int: INTEGERS, float: NUMBERS, bool: FLAGS}.get(kind, TEXTS)


def _line(command: Any, words: str, tested: Any, value: str) -> tuple[str, ...]:
    given = {**REQUIRED["*"], **REQUIRED.get(words, {})}
    options: list[str] = []
    arguments: list[str] = []
    for param in command.params:
        name = param.opts[-1]
        if param.param_type_name == "argument":
            if param is tested or param.required:
                arguments.append(value if param is tested else given.get(str(param.name).upper(), "empty"))
        elif param is tested:
            options.append(f"{name}={value}")
        elif param.required or name in REQUIRED.get(words, {}):
            options += [name, given[name]]
    return (*words.split(), *options, "--", *arguments)


def load_everything() -> None:
    """Import what the commands import when they run, once for all children."""
    for name in (*(module for module, _ in BEGINNINGS), *IMPORTED_LATE):
        importlib.import_module(name)


def run_case(case: HostileCase, folder: Path) -> CliEnd:
    """Run one line in a child, in `folder`."""
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if not child:
            _be_child(case, folder, file.fileno())
        code = wait_for_child(child, LIMIT_S)
        file.seek(0)
        return CliEnd(code, file.read().decode(errors="replace"))


def _be_child(case: HostileCase, folder: Path, out: int) -> typing.NoReturn:
    code = BUG
    try:
        os.chdir(folder)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout = sys.stderr = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), "utf-8", "backslashreplace")
        logs.configure_logging()
        _stop_at_beginnings()
        code = _main(case.line)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
    finally:
        os._exit(code)


def _main(line: Sequence[str]) -> int:
    try:
        command_tree()(list(line), prog_name="fleetcast")
    except Begun:
        return 0
    except FleetcastError as error:
        logs.report_error(error)
        return 2 if isinstance(error, ConfigError) else 1
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    return 0


def _stop_at_beginnings() -> None:
    def begin(*_: Any, **__: Any) -> None:
        raise Begun

    for module, path in BEGINNINGS:
        *owners, name = path.split(".")
        owner: Any = importlib.import_module(module)
        for each in owners:
            owner = getattr(owner, each)
        assert callable(getattr(owner, name)), f"{module} has no {path}"
        setattr(owner, name, begin)


def complaint(case: HostileCase, end: CliEnd, usual: str) -> str:
    """Return what is wrong with how a command met a value, or an empty string. usual: its output without the value."""
    said = f"{case}: {end.output[-600:]}"
    if end.code is None:
        return f"hangs: {said}"
    if end.code == BUG or end.code < 0 or "Traceback" in end.output:
        return f"a traceback: {said}"
    if end.code == 0 or not case.option or end.output.splitlines()[-1:] == usual.splitlines()[-1:]:
        return ""
    names = (case.option, case.option.lstrip("-"), f"for '{case.option.lower()}'")  # the last is an argument's
    is_named = any(name in end.output for name in names)
    return "" if is_named else f"does not name the option: {said}"


def hostile_files(folder: Path) -> Mapping[str, Path]:
    """The files that the values name."""
    (folder / "folder").mkdir()
    (folder / "empty").write_bytes(b"")
    (folder / "binary").write_bytes(bytes(range(256)) * 40)
    return {name: folder / name for name in ("folder", "empty", "binary")}
