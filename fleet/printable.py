r"""The escape for text from untrusted senders that a terminal, a log or another system's line shows.

A line break in such text would forge a second line. A control sequence would move the cursor, change the
colours or write into the clipboard of an operator's terminal. A mark of direction would show words in
another order.
"""

import json


def printable(text: str, keep: str = "") -> str:
    r"""Replace every character that no screen shows by its JSON escape. Characters of `keep` stay.

    The result of a JSON document is the same document, since only its strings can hold such characters.

    >>> printable("two\nlines \x1b[31mred \x9b1m \u202etxt")
    'two\\nlines \\u001b[31mred \\u009b1m \\u202etxt'
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else _escape_character(one) for one in text)


def _escape_character(one: str) -> str:
    return "\\u007f" if one == "\x7f" else json.dumps(one)[1:-1]
