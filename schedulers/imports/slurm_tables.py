"""Parsing of Slurm's tables and settings: rows of `sacctmgr … -nP`, TRES, times, and `slurm.conf`.

Formats: sacctmgr(1) and slurm.conf(5).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from fleetcast.schedulers.imports.draft import ANY, SourceLine, Spell, is_name, parse_number

ASSOCIATIONS = ("cluster", "account", "parentname", "user", "share", "grptres", "grptresmins", "maxtres", "qos")
QOS = ("name", "priority", "preempt", "gracetime", "grptres", "maxtrespu", "usagefactor", "flags")
HEADINGS = {"par name": "parentname", "fairshare": "share"}  # as sacctmgr writes them above its columns
EXPORTS = (
    f"sacctmgr show assoc -nP format={','.join(ASSOCIATIONS)}\nsacctmgr show qos -nP format={','.join(QOS)}\n"
    "and slurm.conf"
)
_GPU = re.compile(r"gres/gpu(?::(.+))?")


@dataclass(slots=True)
class SlurmFiles:
    """The contents of the files: rows of associations, rows of QOS, and settings by lower-case name."""

    associations: list[tuple[SourceLine, dict[str, str]]] = field(default_factory=list)
    qos: list[tuple[SourceLine, dict[str, str]]] = field(default_factory=list)
    settings: dict[str, tuple[SourceLine, str]] = field(default_factory=dict)
    has_settings: bool = False

    def add_file(self, file: str, text: str) -> None:
        """Add one file. Its headings or the number of its columns identify it. Raises ConfigError."""
        rows = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        if not rows:
            raise SourceLine(file).make_error(f"is empty; expected what one of these prints:\n{EXPORTS}")
        if "|" not in rows[0][1]:
            self._read_settings(file, rows)
            return
        names = [HEADINGS.get(name, name) for name in rows[0][1].strip().lower().split("|")]
        if set(names) <= {*ASSOCIATIONS, *QOS}:
            columns, rows = tuple(names), rows[1:]
        else:
            columns = {len(ASSOCIATIONS): ASSOCIATIONS, len(QOS): QOS}.get(len(names), ())
        if not set(ASSOCIATIONS) <= set(columns) and not set(QOS) <= set(columns):
            why = f"has {len(names)} columns, none of the tables that are read; they are what these print"
            raise SourceLine(file, rows[0][0] if rows else 1).make_error(f"{why}:\n{EXPORTS}")
        table = self.associations if "account" in columns else self.qos
        table += _parse_rows(file, rows, columns)

    def _read_settings(self, file: str, rows: list[tuple[int, str]]) -> None:
        self.has_settings = True
        for line, text in _join_continued_lines(file, rows):
            key, equals, value = text.partition("=")
            if not equals and key.split()[0].lower() != "include":
                raise line.make_error(
                    f"{text[:60]!r} is neither Key=value nor a table of sacctmgr; there are\n{EXPORTS}"
                )
            self.settings[key.strip().lower() if equals else "include"] = (line, value.strip())


def _parse_rows(
    file: str, rows: list[tuple[int, str]], columns: tuple[str, ...]
) -> Iterator[tuple[SourceLine, dict[str, str]]]:
    for number, text in rows:
        values = [value.strip() for value in text.split("|")]
        if len(values) != len(columns):
            why = f"has {len(values)} columns, the others have {len(columns)}: {','.join(columns)}"
            raise SourceLine(file, number).make_error(why)
        yield SourceLine(file, number), dict(zip(columns, values, strict=True))


def _join_continued_lines(file: str, rows: list[tuple[int, str]]) -> Iterator[tuple[SourceLine, str]]:
    """Yield the lines of slurm.conf without comments. A backslash at the end joins a line with the next."""
    before, begun = "", 0
    for number, text in rows:
        bare = text.split("#", 1)[0].rstrip()
        begun = begun or number
        if bare.endswith("\\"):
            before += bare[:-1] + " "
            continue
        if whole := (before + bare).strip():
            yield SourceLine(file, begun), whole
        before, begun = "", 0
    if before.strip():
        yield SourceLine(file, begun), before.strip()


def parse_tres_gpus(line: SourceLine, text: str, spell: Spell) -> tuple[dict[str, float], str]:
    """Return the GPUs by resource in a list of TRES, and the rest of the list as text.

    >>> parse_tres_gpus(SourceLine("a"), "cpu=10,gres/gpu=8,gres/gpu:h100=4", str.upper)
    ({'gpu': 8.0, 'H100': 4.0}, 'cpu=10')
    """
    found: dict[str, float] = {}
    rest = []
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        gpu = _GPU.fullmatch(name.strip().lower())
        if gpu is None:
            rest.append(part)
            continue
        if gpu[1] and not is_name(gpu[1]):
            raise line.make_error(f"GPU model {gpu[1][:60]!r} is no name")
        amount = parse_number(value.strip())
        found[spell(gpu[1]) if gpu[1] else ANY] = line.check_amount(f"{name.strip()} ({value.strip()})", amount, 1e15)
    return found, ",".join(rest)


def parse_seconds(line: SourceLine, text: str) -> float:
    """Parse a time of slurm.conf into seconds: min, min:s, h:min:s, days-h, days-h:min, days-h:min:s.

    >>> [parse_seconds(SourceLine("a"), text) for text in ("7-0", "30", "12:30:00")]
    [604800.0, 1800.0, 45000.0]
    """
    found = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", text.strip(), re.ASCII)
    if found is None:
        raise line.make_error(f"{text[:40]!r} is no time such as 30, 12:30:00 or 7-0")
    days, *parts = found.groups()
    values = [float(part) for part in parts if part]
    scale = (60.0, 1.0, 0.0) if days is None and len(values) < 3 else (3600.0, 60.0, 1.0)
    return 86400.0 * float(days or 0) + sum(a * b for a, b in zip(values, scale, strict=False))
