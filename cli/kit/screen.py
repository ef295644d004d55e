"""Output of commands for people and scripts.

No name, reason or file can forge a line or control the terminal.
"""

import typer

from fleetcast.fleet.printable import printable


def echo(line: str = "", *, err: bool = False) -> None:
    """Print one line, to stderr if `err`. Line breaks and control characters inside are shown as escapes."""
    typer.echo(printable(line), err=err)  # noqa: TID251


def echo_text(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print a document of several lines.

    Its line breaks and tabs stay. Other control characters are escaped.
    """
    typer.echo(printable(text, keep="\n\t"), err=err, nl=nl)  # noqa: TID251
