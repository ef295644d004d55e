"""A reader of YAML from people and other programs. Nesting is limited, and aliases are refused."""

from typing import Any

import msgspec

DEEPEST = 32
MOST_CHARACTERS = 4_194_304


def read_yaml(text: str | bytes) -> Any:
    """Parse a YAML text that JSON could express. Raises ValueError with the reason for any other text."""
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"{len(text):,} characters, at most {MOST_CHARACTERS:,} are read")
    import yaml  # imported late: the service rarely reads YAML

    class Plain(yaml.SafeLoader):  # the one in C ends the process where brackets are nested deep enough
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.depth += 1
            if self.depth > DEEPEST or self.check_event(yaml.AliasEvent):  # a few aliases are a billion values
                raise yaml.YAMLError("aliases and such nesting are refused")
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

    try:
        document = yaml.load(text, Loader=Plain)
        msgspec.json.encode(document)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError, OverflowError) as error:
        raise ValueError(" ".join(str(error)[:200].split())) from None
    return document
