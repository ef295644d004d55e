"""Each fault of the track record names a test, or an episode of the simulation, that is there."""

import ast
import re
import shlex

import pytest

from tests.docs.pages import ROOT, text_of
from tests.simulation.mutations import MUTATIONS

PAGE = ROOT / "docs" / "track-record.md"
ROWS = [line for line in text_of(PAGE).splitlines() if line.startswith("|") and "`" in line]
REPLAYS = [re.findall(r"`([^`]+)`", row)[-1] for row in ROWS]


def test_each_fault_has_a_commit_and_a_replay() -> None:
    assert len(ROWS) > 30
    for row in ROWS:
        assert re.search(r"\| `[0-9a-f]{7}` \|", row), row


@pytest.mark.parametrize("replay", sorted(set(REPLAYS)))
def test_a_replay_is_there(replay: str) -> None:
    if replay.startswith("tests/"):
        file, _, name = replay.partition("::")
        defined = {
            node.name
            for node in ast.walk(ast.parse(text_of(ROOT / file)))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert not name or name in defined
        return
    words = shlex.split(replay)
    assert words[:3] == ["python", "-m", "tests.simulation"]
    assert words[words.index("--mutation") + 1] in MUTATIONS
    assert words[words.index("--seed") + 1].isdecimal()
