"""A campaign of requests to the whole service in this process: `python -m tests.fuzz.campaign`, or `make fuzz`.

A campaign goes on in epochs. Each is a new service in a folder of its own and `EPOCH` requests, all made from the seed
and the epoch's number: so it can be stopped at any time, goes on where it was, and any request can be asked again as
SEED:EPOCH:INDEX, with what came before it in its epoch. The law is in `tests/fuzz/law.py`; besides, no exception
leaves an application or a task, and the memory of the process stays within `MOST_GROWTH_BYTES` of the first epoch's.
"""

import asyncio
import gc
import json
import logging
import re
import resource
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

from fleetcast.service.process_memory import use_one_heap
from tests.fuzz.asgi import Answered, Asked, Unlawful, ask
from tests.fuzz.asked import bombs, one, routes
from tests.fuzz.bounds import CPU_S, Hangs
from tests.fuzz.house import House, house
from tests.fuzz.law import check

EPOCH = 10_000  # requests
TICK_EVERY, THINK_EVERY = 500, 5000  # requests
MOST_GROWTH_BYTES = 256 * 2**20
KNOWN = routes()


@dataclass(frozen=True, slots=True)
class Finding:
    """`place`: SEED:EPOCH:INDEX of the first request that showed it; `kind` is the same for all that do."""

    kind: str
    place: str
    asked: str
    what: str


@dataclass(slots=True)
class Progress:
    """What a campaign has done so far, as it is kept in its file."""

    seed: int
    epochs: int = 0
    requests: int = 0
    statuses: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    base_bytes: int = 0  # of memory, after the first epoch of this process

    def note(self, kind: str, place: str, asked: object, what: str) -> None:
        if all(found.kind != kind for found in self.findings):
            self.findings.append(Finding(kind, place, repr(asked)[:4000], what[-4000:]))

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        new.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        new.replace(path)

    @classmethod
    def load(cls, path: Path, seed: int) -> "Progress":
        """Of the same seed; what was found counts as found, and is looked for anew."""
        if not path.exists():
            return cls(seed)
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["seed"] != seed:
            return cls(seed)
        found = [Finding(**row) for row in kept.pop("findings")]
        return cls(**kept | {"findings": found, "base_bytes": 0})


def requests_of(seed: int, epoch: int) -> Iterator[Asked]:
    """The requests of an epoch, always the same."""
    for index in range(EPOCH):
        yield one(Random(f"{seed}:{epoch}:{index}"), KNOWN)[1]


class _Bugs(logging.Handler):
    """What the service logs with a traceback: it has answered 500, or a task of it has died."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0] is not None:
            self.told.append("".join(traceback.format_exception(*record.exc_info)))


@contextmanager
def _listening() -> Iterator[_Bugs]:
    """Collects the tracebacks that are logged; nothing else of the log is shown."""
    bugs, root = _Bugs(), logging.getLogger()
    before, root.handlers = root.handlers, [bugs]
    try:
        yield bugs
    finally:
        root.handlers = before


@contextmanager
def _ended_when_it_hangs() -> Iterator[None]:
    """A request that takes more than `CPU_S` of processor time is ended by Hangs, wherever it is."""

    def end(number: int, frame: object) -> None:
        raise Hangs(f"more than {CPU_S} s of processor time")

    before = signal.signal(signal.SIGPROF, end)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


async def run_epoch(progress: Progress, epoch: int, upto: int = EPOCH, until_s: float = float("inf")) -> int:
    """Ask the first `upto` requests of an epoch, while `until_s` of the monotonic clock lies ahead; how many were."""
    folder = Path(tempfile.mkdtemp(prefix="fleetcast-fuzz-"))
    loop, died = asyncio.get_running_loop(), list[str]()
    loop.set_exception_handler(lambda _, context: died.append(_told(context)))
    try:
        with _listening() as bugs, _ended_when_it_hangs():
            async with house(folder) as service:
                return await _ask_all(progress, epoch, upto, until_s, service, bugs.told, died)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _ask_all(
    progress: Progress, epoch: int, upto: int, until_s: float, service: House, bugs: list[str], died: list[str]
) -> int:
    index = -1
    for index, asked in enumerate(requests_of(progress.seed, epoch)):
        if index >= upto or time.monotonic() > until_s:
            return index
        place = f"{progress.seed}:{epoch}:{index}"
        await ask_one(progress, place, service, asked)
        if index % TICK_EVERY == TICK_EVERY - 1:
            await _tick(progress, place, service, index % THINK_EVERY == THINK_EVERY - 1)
        for kind, told in (("logged", bugs), ("task", died)):
            for text in told:
                progress.note(f"{kind} {text.strip().splitlines()[-1][:120]}", place, asked, text)
            told.clear()
    return index + 1


async def ask_one(progress: Progress, place: str, service: House, asked: Asked) -> Answered | None:
    """Ask, and note whatever is unlawful. The application follows from the path: the placer's have no /v1."""
    path = asked.target.partition("?")[0]
    app = service.placer if is_placers(path) else service.api
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        answered = await ask(app, asked)
        check(asked, answered)
    except (Exception, Hangs) as error:
        what = "".join(traceback.format_exception(error))
        progress.note(f"{_kind_of(error)} {asked.method} {path[:12]}", place, asked, what)
        return None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    key = str(answered.status)
    progress.statuses[key] = progress.statuses.get(key, 0) + 1
    return answered


def _kind_of(error: BaseException) -> str:
    """Of Unlawful what it says, numbers aside, else where it came from."""
    if isinstance(error, Unlawful):
        return re.sub(r"\d{2,}", "N", str(error))[:60]
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} {Path(last.filename).name}:{last.lineno}"


def is_placers(path: str) -> bool:
    """Whether a path is asked of the placer."""
    return path.split("/")[1:2] in (["placements"], ["queue"], ["audit"], ["estimate"])


async def _tick(progress: Progress, place: str, service: House, thinks: bool) -> None:
    """What was taken in must not end the pipeline."""
    try:
        if thinks:
            await service.think()
        await service.tick()
    except Exception as error:
        progress.note(f"tick {type(error).__name__} {error}"[:120], place, "tick", traceback.format_exc())


def _told(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return "".join(traceback.format_exception(error)) if error else str(context.get("message"))


def resident_bytes() -> int:
    """Of this process, now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def peak_bytes() -> int:
    """The most that was resident of this process at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def watch_memory(progress: Progress) -> None:
    """Note what grew since the first epoch of this process, at rest or at its peak."""
    gc.collect()
    now_bytes = max(resident_bytes(), peak_bytes())
    progress.base_bytes = progress.base_bytes or now_bytes
    if now_bytes - progress.base_bytes > MOST_GROWTH_BYTES:
        what = f"{now_bytes / 2**20:.0f} MiB, after the first epoch {progress.base_bytes / 2**20:.0f}"
        progress.note("memory", f"{progress.seed}:{progress.epochs}:0", "the epoch", what)


def campaign(progress: Progress, requests: int, seconds: float, kept: Path | None) -> None:
    """Epoch after epoch, until that many requests were asked in all, or the time is over."""
    until_s, began, before = time.monotonic() + seconds, time.monotonic(), progress.requests
    bombs()  # made once, and no growth
    while progress.requests < requests and time.monotonic() < until_s:
        asked = asyncio.run(run_epoch(progress, progress.epochs, requests - progress.requests, until_s))
        progress.requests += asked
        progress.epochs += 1
        watch_memory(progress)
        if kept is not None:
            progress.save(kept)
        rate = (progress.requests - before) / max(time.monotonic() - began, 1e-9)
        left = f"{resident_bytes() / 2**20:.0f} MiB, {len(progress.findings)} findings"
        typer.echo(f"{progress.requests:,} requests, {rate:,.0f} a second, {left}", err=True)


def replay(place: str) -> None:
    """Ask one request again, after all that came before it in its epoch, and show both sides."""
    seed, epoch, index = map(int, place.split(":"))
    progress = Progress(seed)
    asyncio.run(run_epoch(progress, epoch, index + 1))
    asked = next(row for number, row in enumerate(requests_of(seed, epoch)) if number == index)
    typer.echo(repr(asked))
    for found in progress.findings:
        typer.echo(f"{found.place} {found.kind}\n{found.what}")


def main(
    requests: Annotated[int, typer.Option(help="How many to ask in all, earlier runs included.")] = 10_000_000,
    seconds: Annotated[float, typer.Option(help="Stop after this time.")] = float("inf"),
    seed: Annotated[int | None, typer.Option(help="Goes on with this one.  [default: a fresh one]")] = None,
    keep: Annotated[Path | None, typer.Option(help="File of the progress, to go on from.")] = None,
    again: Annotated[str, typer.Option(metavar="SEED:EPOCH:INDEX", help="Ask one request again.")] = "",
) -> None:
    """Ask the service in this process wrong and right requests; exit 1 when an answer was unlawful."""
    use_one_heap()  # as its processes do: else the heaps of passing threads look like growth
    if again:
        replay(again)
        return
    number = secrets.randbelow(2**31) if seed is None else seed
    typer.echo(f"seed {number}: --seed {number} goes on with it, --again {number}:EPOCH:INDEX asks one request again")
    progress = Progress.load(keep, number) if keep else Progress(number)
    campaign(progress, requests, seconds, keep)
    for found in progress.findings:
        typer.echo(f"\n{found.kind}\n  again: --again {found.place}\n  {found.asked}\n{found.what}", err=True)
    statuses = ", ".join(f"{count:,} x {status}" for status, count in sorted(progress.statuses.items()))
    typer.echo(f"{progress.requests:,} requests asked ({statuses}): {len(progress.findings)} findings")
    sys.exit(1 if progress.findings else 0)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(main)
    app()
