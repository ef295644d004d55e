"""Count the words that a reader of the documents meets. `python -m tests.docs.words` prints them by page.

README and `docs/` count, with tables, without code blocks and comments. Decision records and the track record are
evidence that few read from end to end, so they are counted apart, as are results and run-books, which are elsewhere.
"""

import re

from tests.docs.pages import DOCS, name_of, prose_of, text_of

EVIDENCE = ("docs/decisions/", "docs/track-record.md")
AMERICAN = {
    **{"analyze": "analyse", "behavior": "behaviour", "catalog": "catalogue", "center": "centre", "color": "colour"},
    **{"canceled": "cancelled", "canceling": "cancelling", "favor": "favour", "fulfill": "fulfil", "gray": "grey"},
    **{"honor": "honour", "initialize": "initialise", "labeled": "labelled", "learned": "learnt", "license": "licence"},
    **{"minimize": "minimise", "modeled": "modelled", "neighbor": "neighbour", "normalize": "normalise"},
    **{"optimize": "optimise", "organize": "organise", "recognize": "recognise", "spelled": "spelt"},
    **{"serialize": "serialise", "summarize": "summarise", "utilization": "utilisation", "vectorize": "vectorise"},
}
_ENDING = r"(?:s|d|r|rs|ed|ing|ation|al|ally|hood|ing)?"
_FOREIGN = re.compile(rf"\b({'|'.join(sorted(AMERICAN))}){_ENDING}\b", re.IGNORECASE)


def count(text: str) -> int:
    """Return the words of a page outside code blocks and comments.

    >>> count("# A title\\n\\nTwo words, `one_code`.\\n\\n```sh\\nls\\n```\\n<!-- not this -->\\n")
    5
    """
    prose = re.sub(r"<!--.*?-->", "", prose_of(text), flags=re.DOTALL)
    return sum(bool(re.search(r"\w", word)) for word in prose.split())


def american(text: str) -> list[str]:
    """Return the American spellings outside code and links.

    >>> american("The color of `color`, [colors](color.md) and neighbours are recognized.")
    ['color', 'colors', 'recognized']
    """
    prose = re.sub(r"`[^`\n]*`|\]\([^)]*\)|<!--.*?-->", "", prose_of(text), flags=re.DOTALL)
    return [match[0] for match in _FOREIGN.finditer(prose)]


def counted() -> dict[str, int]:
    """Return page → words."""
    return {name_of(page): count(text_of(page)) for page in DOCS}


def main() -> None:
    words = counted()
    for name, number in words.items():
        print(f"{number:6} {name}")
    evidence = sum(number for name, number in words.items() if name.startswith(EVIDENCE))
    print(f"{sum(words.values()) - evidence:6} in all, and {evidence} of decision records and the track record")


if __name__ == "__main__":
    main()
