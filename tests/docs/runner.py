"""Runs the commands of a document in order, as a reader types them, in a folder that looks like a fresh checkout."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.docs.commands import Command, PageBlock, blocks
from tests.docs.pages import ROOT, name_of
from tests.ports import free_port

ALONE = ("var", ".git", "build", "dist")
LIMIT_S = 600.0
READY_S = 300.0
STOP_S = 60.0
ENDLESS = (  # commands that run until Ctrl-C, and what they print once they do their work
    (re.compile(r"\bfleetcast run\b"), "console at"),
    (re.compile(r"\bfleetcast demo\b(?!.*--seconds)|^make demo"), r"[1-9]\d* placed"),
    (re.compile(r"\bfleetcast produce telemetry\b"), r"[1-9][\d,]* samples"),
    (re.compile(r"\bfleetcast produce events\b"), r"[1-9][\d,]* events"),
    (re.compile(r"\bfleetcast_client\.ray_resources\b"), r"asked for [1-9]\d* bundles"),
    (re.compile(r"^tail -F [^|]*\| while\b"), r'"(?:accepted|duplicates)": ?[1-9]'),
)
LOOP = re.compile(r"\bdone$")  # a loop of the shell ends by the signal of Ctrl-C
TABLE = ROOT / "var" / "docs-run.txt"


@dataclass(frozen=True, slots=True)
class Done:
    """A command that was run. `code` is 0 where an endless command worked until Ctrl-C and then ended well."""

    place: str
    command: str
    code: int
    seconds: float
    output: str


@dataclass(slots=True)
class Reader:
    """A person at a terminal of the site: a folder, a home, variables, and real addresses for those of the page."""

    folder: Path
    places: Mapping[str, str] = field(default_factory=dict)  # text of a page -> what it is here
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in ROOT.iterdir():
            if path.name not in ALONE and not (self.folder / path.name).exists():
                (self.folder / path.name).symlink_to(path)
        bins = (self.folder / "bin", Path(sys.executable).parent)
        self.variables = {
            "HOME": str(self.folder),
            "PATH": os.pathsep.join([*map(str, bins), os.environ["PATH"], "/usr/sbin"]),
            "PYTHONPATH": str(ROOT / "sdk"),
            **self.variables,
        }

    def run_page(
        self, page: Path, *tags: str, files: bool = True, before: Mapping[str, Callable[[], object]] | None = None
    ) -> list[Done]:
        """Run all blocks of a page with one of these tags. Raises AssertionError for the first command that fails.

        files: whether to write the files that the page prints.
        before: beginning of a command -> prepares what the page expects by then. Each beginning must occur.
        """
        prepare = dict(before or {})
        seen = set()
        done: list[Done] = []
        for block in blocks(page, *tags):
            if block.tag.startswith("file: "):
                if not files:
                    continue
                path = self.folder / block.tag.removeprefix("file: ")
                path.unlink(missing_ok=True)  # it may be a link
                path.write_text(block.code, encoding="utf-8")
            else:
                for command in block.commands:
                    for start in filter(command.text.startswith, prepare):
                        prepare[start]()
                        seen.add(start)
                    done.append(self._run(block, command))
        assert done, f"{name_of(page)} has no block for {tags}"
        assert seen == prepare.keys(), f"{name_of(page)} has no command {prepare.keys() - seen}"
        return done

    def run_example(self, command: str, example: str) -> Done:
        """Run an example of a command's help text."""
        return self._run(PageBlock(f"{command} --help", 0, "sh", "run", example), Command(example))

    def _run(self, block: PageBlock, command: Command) -> Done:
        text = self._here(command.text)
        if export := re.fullmatch(r"export (\w+)=(\S+)", text):
            self.variables[export[1]] = os.pathsep.join([export[2], str(ROOT / "sdk")])
        log = self.folder / f"{len(list(self.folder.glob('*.out')))}.out"
        began = time.monotonic()
        ready = next((said for what, said in ENDLESS if what.search(command.text)), "")
        with log.open("wb") as file:
            process = subprocess.Popen(
                ["bash", *(() if ready else ("-o", "pipefail")), "-c", text],
                cwd=ROOT if text.startswith("make") else self.folder,
                env={**os.environ, **self.variables},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            code = self._until_ctrl_c(process, log, ready) if ready else _wait(process, LIMIT_S)
            if ready and LOOP.search(command.text) and code in (-signal.SIGINT, 128 + signal.SIGINT):
                code = 0
        output = log.read_text(encoding="utf-8", errors="replace")
        done = Done(f"{block.page}:{block.line}", command.text, code, time.monotonic() - began, output)
        record(done)
        assert code == 0, f"{done.place}: {command.text}\nwas run as: {text}\nand ended with {code}:\n{output[-3000:]}"
        assert "Traceback (most recent call last)" not in output, f"{done.place}: {command.text}\n{output[-3000:]}"
        if command.shows:
            assert matches(command.shows, output), f"{done.place} shows\n{command.shows}\nand printed\n{output[-3000:]}"
        if "curl" in text and "fleetcast_" not in text:
            check_answers(done)
        return done

    def _here(self, text: str) -> str:
        """Return the command with the addresses of this site, free ports and folders, and a demo that ends at once."""
        for said in sorted(self.places, key=len, reverse=True):
            text = text.replace(said, self.places[said])
        more = ""
        if re.search(r"\bfleetcast (?:run|demo)\b", text):
            more = f" --port {free_port()}"
        if re.search(r"\bfleetcast demo\b", text):
            more += " --no-worth"  # after Ctrl-C it would simulate a day beside a risk-blind engine
        if re.search(r"\bfleetcast run\b", text):
            more += f" --state {shlex.quote(str(self.folder / 'own'))}"
        if text.startswith("make demo"):
            return f'make demo ARGS="--port {free_port()} --no-worth --folder {self.folder / "demo"}"'
        at = re.search(r"\s+#", text) if more else None
        return text[: at.start()] + more + text[at.start() :] if at else text + more

    def _until_ctrl_c(self, process: "subprocess.Popen[bytes]", log: Path, ready: str) -> int:
        """Wait until the command works, press Ctrl-C, and return its exit code."""
        deadline = time.monotonic() + READY_S
        try:
            while not (said := re.search(ready, text := log.read_text(errors="replace"))):
                assert process.poll() is None, f"ended with {process.returncode}:\n{text[-3000:]}"
                assert time.monotonic() < deadline, f"not ready within {READY_S:.0f} s:\n{text[-3000:]}"
                time.sleep(0.2)
            if ready == "console at":
                url = re.findall(r"console at (\S+)", said.string)[-1]
                while not _knows_nodes(url):
                    assert time.monotonic() < deadline, f"no node is known at {url}:\n{said.string[-3000:]}"
                    time.sleep(0.5)
        except BaseException:
            _kill(process)
            raise
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        return _wait(process, STOP_S)


def _wait(process: "subprocess.Popen[bytes]", limit_s: float) -> int:
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        _kill(process)
        return 124


def _kill(process: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _knows_nodes(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/v1/fleet", timeout=5) as answer:
            return bool(json.loads(answer.read())["nodes"])
    except (OSError, ValueError):
        return False


def check_answers(done: Done) -> None:
    """Raise AssertionError where an answer of the service is a problem document, or empty."""
    assert "urn:fleetcast:problem" not in done.output, f"{done.place}: {done.command}\n{done.output[-2000:]}"
    text = done.output.strip()
    document = json.JSONDecoder().raw_decode(text)[0] if text.startswith("{") else None  # of several, the first
    empty = document is not None and any(document.get(key) == [] for key in ("rows", "series"))
    assert text, f"{done.place}: {done.command}\nprinted nothing"
    assert not empty or "served-models" in done.command, f"{done.place}: {done.command}\n{done.output[:2000]}"


def matches(shown: str, printed: str) -> bool:
    """Whether a program printed what a page shows: numbers may differ, `…` stands for anything, blanks do not count.

    >>> matches("2 nodes, 16 GPUs\\n  …\\nn001   8 H100", "3 nodes, 24 GPUs\\nn000 8 H100\\nn001 8 H100")
    True
    >>> matches("2 nodes", "2 racks")
    False
    """
    parts = [re.escape(part) for part in re.split(r"(\d[\d.,]*|…|\s+)", shown) if part]
    shape = "".join(
        r"\d[\d.,]*" if re.match(r"\d", part) else ".*" if part == "…" else r"\s*" if re.match(r"\\?\s", part) else part
        for part in parts
    )
    return re.search(shape, printed, re.DOTALL) is not None


def record(done: Done) -> None:
    """Add a line to the table that `make docs-run` prints."""
    TABLE.parent.mkdir(exist_ok=True)
    command = " ".join(done.command.split())
    with TABLE.open("a", encoding="utf-8") as file:
        file.write(f"{done.code:>4} {done.seconds:>7.1f} s  {done.place:<42} {command}\n")
