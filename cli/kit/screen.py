"""Output of commands for people and scripts.

Text from outside, such as a name or a file, cannot forge a line or control the terminal.
"""

import typer

from fleetcast.fleet.printable import escape_unprintable


def echo(line: str = "", *, err: bool = False) -> None:
    """Print one line to stdout, or to stderr if `err`.

    Line breaks and control characters in the line are shown as escapes.
    """
    typer.echo(escape_unprintable(line), err=err)  # noqa: TID251


def echo_text(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a text of several lines to stdout, or to stderr if `err`.

    Line breaks and tabs stay. Other control characters are escaped.
    """
    typer.echo(escape_unprintable(text, keep="\n\t"), err=err, nl=nl)  # noqa: TID251
