"""A writer of tables of measurements in a Markdown file.

Each table is between `<!-- begin NAME -->` and `<!-- end NAME -->`.
"""

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_table(path: Path, name: str, command: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> None:
    """Replace the table `name`, or add it at the end of the file.

    rows: the first one is the header.
    """
    date = time.strftime("%Y-%m-%d", time.gmtime())
    lines = [f"<!-- begin {name} -->", f"`{shlex.join(command)}` · {date}{f' · {note}' if note else ''}", ""]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (rows[0], ["---"] * len(rows[0]), *rows[1:])]
    lines += [f"| {' | '.join(row)} |" for row in cells]
    table = "\n".join([*lines, f"<!-- end {name} -->"])
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    old = re.compile(rf"<!-- begin {re.escape(name)} -->.*?<!-- end {re.escape(name)} -->", re.DOTALL)
    new = old.sub(lambda _: table, text) if old.search(text) else f"{text}\n## {name}\n\n{table}\n".lstrip()
    part = path.with_suffix(".part")
    part.write_text(new, encoding="utf-8")
    part.replace(path)


def make_bench_rows(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the rows of a table of benchmark results, with the header first.

    There is a row for each case. The value of the alternative library is bold if it is better.
    """
    rows = [["case", "size", "Fleetcast", "alternative"]]
    for line in lines:
        peer = "–"
        if line["peer"]:
            wins = (line["peer"]["value"] > line["value"]) == line["unit"].endswith("/s")
            peer = f"{line['peer']['name']} {'**' * wins}{format_short(line['peer']['value'])}{'**' * wins}"
        size = ", ".join(f"{value:,} {key}" for key, value in line["size"].items())
        rows.append([line["case"], size, f"{format_short(line['value'])} {line['unit']}", peer])
    return rows


def describe_machine(line: Mapping[str, Any]) -> str:
    """Describe the machine of a line of `fleetcast bench`: processor, cores, memory and Python."""
    about = line["machine"]
    return f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, Python {about['python']}"


def format_short(value: float) -> str:
    """Format a value with three digits, or as a whole number from a thousand on."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
