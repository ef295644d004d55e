"""The page of identities lists every module of fleet, ingest and features that keeps a table by key."""

import re

import pytest

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "decisions" / "identities.md").read_text(encoding="utf-8")
KEEPS_A_TABLE = re.compile(
    r"^ +self\._?[a-z_]+: (?:dict|OrderedDict|defaultdict)\[|^    _?[a-z_]+: (?:dict|OrderedDict)\[.*field\(",
    re.MULTILINE,
)
MODULES = sorted(
    str(path.relative_to(ROOT))
    for folder in ("fleet", "ingest", "features")
    for path in (ROOT / folder).rglob("*.py")
    if KEEPS_A_TABLE.search(path.read_text(encoding="utf-8"))
)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_that_keeps_a_table_says_what_its_key_is(module: str) -> None:
    assert f"`{module}`" in PAGE


def test_every_module_of_the_page_is_there_and_every_row_answers_all_questions() -> None:
    assert [name for name in re.findall(r"`([\w/]+\.py)`", PAGE) if not (ROOT / name).is_file()] == []
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    assert {line.count("|") for line in rows} == {7}
    assert all(cell.strip() for line in rows for cell in line.strip("|").split("|"))
