r"""An escape for untrusted text that a terminal, a log or another system shows.

A line break in such text would forge a second line. A control sequence would move the cursor,
change the colours or write into the clipboard of an operator's terminal. A direction mark would
show words in another order.
"""

import json


def escape_unprintable(text: str, keep: str = "") -> str:
    r"""Replace every unprintable character by its JSON escape, except the characters of `keep`.

    An escaped JSON document is still the same document, since only its strings can hold such
    characters.

    >>> escape_unprintable("two\nlines \x1b[31mred \x9b1m \u202etxt")
    'two\\nlines \\u001b[31mred \\u009b1m \\u202etxt'
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one in keep else _escape_character(one) for one in text)


def _escape_character(one: str) -> str:
    return "\\u007f" if one == "\x7f" else json.dumps(one)[1:-1]
