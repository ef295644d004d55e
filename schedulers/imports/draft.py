"""A draft of `queues.toml`, made from another scheduler's queues.

Its notes list the settings that have no counterpart in Fleetcast.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from fleetcast.fleet.entities import MAX_NAME_LENGTH
from fleetcast.fleet.errors import ConfigError

ANY = "gpu"  # GPUs of any model, as `queues.toml` calls them
LEAST_WEIGHT = 1e-6  # of a queue that gets nothing beyond its quota elsewhere: a weight must be above 0 here
MOST_WEIGHT = 1e9
LEAST_GPUS = 1e-6  # smaller parts of a GPU are written as 0
MOST_GPUS = 1e9
MOST_PRIORITY = 2**31
MOST_QUEUES = 10_000
DEEPEST = 8
LONGEST_H = 1e6  # a half-life after which past use weighs nothing

Spell = Callable[[str], str]  # a GPU model as the fleet spells it


@dataclass(frozen=True, slots=True)
class SourceLine:
    """The place of a setting: a file and a line, 0 if unknown."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}" if self.line else self.file

    def make_error(self, why: str) -> ConfigError:
        """Return a ConfigError that names this line."""
        return ConfigError(f"{self}: {why}")

    def check_amount(self, what: str, value: float, most: float = MOST_GPUS) -> float:
        """Return `value` if it lies between 0 and `most`. Raises ConfigError otherwise."""
        if not 0 <= value <= most:
            raise self.make_error(f"{what} is {value:g}, must lie in 0..{most:g}")
        return value


@dataclass(slots=True)
class DraftQueue:
    """One queue of the draft. Amounts are GPUs by resource. `says` becomes a comment in the file."""

    line: SourceLine
    weight: float = 1.0
    guaranteed: dict[str, float] = field(default_factory=dict)
    limit: dict[str, float] = field(default_factory=dict)
    lend: dict[str, float] = field(default_factory=dict)
    borrow: dict[str, float] = field(default_factory=dict)
    class_name: str = ""
    per_user: bool = False
    is_closed: bool = False
    credits: tuple[float, float] | None = None  # rate, GPU-hours
    says: str = ""


@dataclass(slots=True)
class DraftClass:
    """A priority class of the draft."""

    priority: int = 0
    preempts: tuple[str, ...] = ()


@dataclass(slots=True)
class Draft:
    """A draft: its queues by path (parents first), its classes and its policy.

    notes: remark → the queues or objects that it is about. A remark may say, for example, that a setting has no
    counterpart in Fleetcast.
    """

    source: str
    policy: dict[str, float | str] = field(default_factory=lambda: {"order": "fifo"})
    classes: dict[str, DraftClass] = field(default_factory=dict)
    queues: dict[str, DraftQueue] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    below: dict[str, list[str]] = field(default_factory=dict)  # path → its children's

    def add_remark(self, what: str, whose: str = "") -> None:
        found = self.notes.setdefault(what, [])
        if whose:
            found.append(whose)

    def add_queue(self, path: str, queue: DraftQueue) -> DraftQueue:
        """Add a queue, and return it. Raises ConfigError for an invalid name, or for too many queues."""
        if not all(map(is_name, path.split("/"))):
            raise queue.line.make_error(
                f"{path[:60]!r} is no name of a queue: its parts must be printable, and not empty"
            )
        if path.count("/") >= DEEPEST:
            raise queue.line.make_error(f"queue {path!r} is {path.count('/') + 1} levels deep, at most {DEEPEST}")
        if path in self.queues:
            raise queue.line.make_error(f"queue {path!r} is there twice, first in {self.queues[path].line}")
        if len(self.queues) >= MOST_QUEUES:
            raise queue.line.make_error(f"there are more than {MOST_QUEUES:,} queues")
        self.queues[path] = queue
        self.below.setdefault(path.rpartition("/")[0], []).append(path)
        return queue

    def list_children(self, path: str) -> list[str]:
        return self.below.get(path, [])

    def list_descendants(self, path: str) -> Iterator[str]:
        for child in self.list_children(path):
            yield child
            yield from self.list_descendants(child)


def is_name(text: str) -> bool:
    """Return whether `queues.toml` accepts a text as the name of a queue, a class or a GPU model."""
    return 0 < len(text) <= MAX_NAME_LENGTH and text.isprintable()


def make_path_part(name: str) -> str:
    """Return a name in a form that can be one level of a path.

    >>> make_path_part("team/nlp")
    'team|nlp'
    """
    return name.replace("/", "|")


def make_queue_paths(parents: Mapping[str, str], lines: Mapping[str, SourceLine]) -> dict[str, str]:
    """Return name → path, parents first. parents: name → its parent's name, "" for none.

    Raises ConfigError for a cycle.

    >>> make_queue_paths({"nlp": "research", "research": ""}, {})
    {'research': 'research', 'nlp': 'research/nlp'}
    """
    found: dict[str, str] = {}
    for name in parents:
        chain = [name]
        while (above := parents[chain[-1]]) and above not in found:
            if above in chain:
                raise lines[above].make_error(f"is a cycle: {' → '.join([*chain[chain.index(above) :], above])}")
            chain.append(above)
        for one in reversed(chain):
            above = parents[one]
            found[one] = f"{found[above]}/{make_path_part(one)}" if above else make_path_part(one)
    return dict(sorted(found.items(), key=lambda item: item[1].count("/")))


def parse_number(text: str) -> float:
    """Parse a plain number. Returns NaN for any other text.

    >>> parse_number("1.5"), parse_number("1_0")
    (1.5, nan)
    """
    return float(text) if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", text, re.ASCII) else math.nan
