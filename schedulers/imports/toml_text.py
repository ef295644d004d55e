"""Formatting of a draft as `queues.toml`, with comments about everything that has no counterpart here."""

import re
import textwrap
from collections.abc import Iterator, Mapping

from fleetcast.schedulers.imports.draft import Draft, DraftClass, DraftQueue

WIDTH = 110
MOST_NAMED = 1000  # of one note: the file must not grow beyond what is read


def format_draft(draft: Draft, files: list[str]) -> str:
    """Return the text of the file. The same draft gives the same text."""
    lines = [
        *_format_comment(f"Queues of {draft.source}, from {', '.join(files)}: written by `fleetcast queues import`.")
    ]
    if draft.notes:
        lines += ["#", "# What has no counterpart, or differs, here:"]
    for what, whose in draft.notes.items():
        more = [f"and {len(whose) - MOST_NAMED:,} more"] if len(whose) > MOST_NAMED else []
        lines += _format_comment(f"{what}: {', '.join([*whose[:MOST_NAMED], *more])}" if whose else what, "- ")
    lines += ["", "[policy]", *(f"{key} = {_format_value(value)}" for key, value in draft.policy.items())]
    for name, found in draft.classes.items():
        lines += ["", f"[class.{_format_key(name)}]", *_format_class(found)]
    for path in draft.list_descendants(""):
        queue = draft.queues[path]
        lines += [
            "",
            *(_format_comment(queue.says) if queue.says else []),
            f"[queue.{_format_key(path)}]",
            *_format_queue(queue),
        ]
    return "\n".join(lines) + "\n"


def _format_class(found: DraftClass) -> Iterator[str]:
    yield f"priority = {found.priority}"
    if found.preempts:
        yield f"preempts = [{', '.join(_quote(name) for name in found.preempts)}]"


def _format_queue(queue: DraftQueue) -> Iterator[str]:
    yield f"weight = {_format_value(queue.weight)}"
    for key in ("guaranteed", "limit", "lend", "borrow"):
        if amounts := getattr(queue, key):
            yield f"{key} = {_format_amounts(amounts)}"
    if queue.class_name:
        yield f"class = {_quote(queue.class_name)}"
    if queue.per_user:
        yield "per_user = true"
    if queue.is_closed:
        yield "max_waiting = 0"
    if queue.credits:
        yield f"credits = {{rate = {_format_value(queue.credits[0])}, cap_gpu_h = {_format_value(queue.credits[1])}}}"


def _format_amounts(amounts: Mapping[str, float]) -> str:
    return "{" + ", ".join(f"{_format_key(name)} = {_format_value(gpus)}" for name, gpus in amounts.items()) + "}"


def _format_key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _quote(name)


def _quote(text: str) -> str:
    r"""Quote a text as a TOML string.

    >>> print(_quote('a"b\x07'))
    "a\"b\U00000007"
    """
    known = text.encode("utf-8", "replace").decode("utf-8").replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(one if one.isprintable() else f"\\U{ord(one):08X}" for one in known) + '"'


def _format_value(value: float | str) -> str:
    """Format a value as TOML.

    >>> _format_value(64.0), _format_value(0.5), _format_value("fifo")
    ('64', '0.5', '"fifo"')
    """
    if isinstance(value, str):
        return _quote(value)
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _format_comment(text: str, begin: str = "") -> list[str]:
    """Return the lines of a TOML comment.

    Line breaks in the text cannot end the comment, even if the text comes from another file.
    """
    plain = "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)
    later = "#" + " " * (1 + len(begin))
    return textwrap.wrap(plain, WIDTH, initial_indent=f"# {begin}", subsequent_indent=later)
