"""Every command that the documents and the command line's help print can be read, and a tag decides where it runs."""

import doctest
import importlib.util
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from tests.docs import commands
from tests.docs.commands import OTHERS, PAGES, SHELLS, SUITES, PageBlock, blocks_of, command_tree, help_examples
from tests.docs.pages import ROOT, codes_of, name_of, prose_of, text_of

BLOCKS = [block for page in PAGES for block in blocks_of(page)]
SHELL_BLOCKS = [block for block in BLOCKS if block.is_shell]
PARSED = [(f"{block.page}:{block.line}", one.text) for block in SHELL_BLOCKS for one in block.commands]
OPERATORS = {"|", "||", "&", "&&", ";", ">", ">>", "<", "(", ")", "then", "do"}
PROGRAMS = ("curl", "docker", "fleetcast", "helm", "kubectl", "make", "mv", "pip", "python3?", "scontrol", "tail")
LACKS = ("MissingParameter", "NoArgsIsHelpError")  # a sentence may name a command without its arguments
SERVED = sorted({"tests/integration/test_documents.py", *SUITES.values()})


def where(block: PageBlock) -> str:
    return f"{block.page}:{block.line}"


@pytest.mark.parametrize("block", BLOCKS, ids=where)
def test_every_block_names_its_language(block: PageBlock) -> None:
    assert block.language in (*SHELLS, *OTHERS), f"{where(block)}: name one of {(*SHELLS, *OTHERS)}"


@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=where)
def test_a_tag_decides_where_each_block_of_commands_runs(block: PageBlock) -> None:
    suite = re.fullmatch(r"run in (\w+)", block.tag)
    assert block.commands, f"{where(block)}: no commands; is its language `text`?"
    others = re.match(r"not run: \w+ \w+|file: [\w.-]+$", block.tag)
    assert block.tag in ("run", "slow") or (suite and suite[1] in SUITES) or others, (
        f"{where(block)}: begin it with a tag of tests/docs/commands.py, found {block.tag!r}"
    )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_command_is_outside_a_block(page: Path) -> None:
    """Indented code has no tag, so nothing would run it."""
    assert re.findall(rf"^ {{4,}}(?:\$ )?(?:{'|'.join(PROGRAMS)}) .*$", prose_of(text_of(page)), re.MULTILINE) == []


@pytest.mark.parametrize("suite", SERVED)
def test_every_suite_that_a_tag_names_runs_its_blocks(suite: str) -> None:
    assert "run_page(" in (ROOT / suite).read_text(encoding="utf-8")


@pytest.mark.parametrize(("place", "text"), PARSED, ids=[f"{place} {text[:40]}" for place, text in PARSED])
def test_every_command_can_be_read(place: str, text: str) -> None:
    for words in programs(text):
        read(words, whole=True)


def programs(text: str) -> Iterator[list[str]]:
    """Yield the words of each program that a command runs, less variables before it and the path of ours."""
    words: list[str] = []
    reader = shlex.shlex(text, posix=True, punctuation_chars="|&;<>()")
    reader.whitespace_split = True
    for word in [*reader, ";"]:
        if word in OPERATORS or set(word) <= set("|&;<>()"):
            if words:
                yield words
            words = []
        elif words or not re.match(r"[A-Z_]+=", word):
            words.append(word.removeprefix(".venv/bin/"))


def read(words: list[str], whole: bool) -> None:
    """Let the real parser read a `fleetcast` command; find targets of make and modules of Python."""
    if "--" in words[:-1]:  # kubectl exec … -- fleetcast …
        words = words[words.index("--") + 1 :]
    if words[0] == "fleetcast":
        parse(words[1:], whole)
    elif words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        done = subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    elif words[:2] == ["python", "-m"] and words[2] != "build":
        sdk = ROOT / "sdk" / f"{words[2].replace('.', '/')}.py"
        assert sdk.exists() or importlib.util.find_spec(words[2]), words[2]


def parse(words: list[str], whole: bool) -> None:
    """Parse the words of a command of ours without running it. `whole`: arguments that are required must be there."""
    command: Any = command_tree()
    context: Any = None
    name = "fleetcast"
    try:
        while True:
            context = command.make_context(name, list(words), parent=context)
            rest = [*getattr(context, "_protected_args", ()), *context.args]
            if not isinstance(command, click.Group) and not hasattr(command, "resolve_command"):
                assert not rest, f"{shlex.join(words)}: too many arguments: {rest}"
                return
            name, command, words = command.resolve_command(context, rest)
    except Exception as error:  # --help and --version end with Exit
        if type(error).__name__ == "Exit" or (not whole and type(error).__name__ in LACKS):
            return
        said = error.format_message() if isinstance(error, click.ClickException) else repr(error)
        raise AssertionError(f"{shlex.join(words)}: {said}") from error


INLINE = [(name_of(page), code) for page in PAGES for code in codes_of(page)]
MENTIONS = sorted(
    {(page, code) for page, code in INLINE if re.match(r"(\.venv/bin/)?(fleetcast [a-z]|make [a-z]|python -m )", code)}
)


@pytest.mark.parametrize(("page", "code"), MENTIONS, ids=[f"{page} {code}" for page, code in MENTIONS])
def test_every_command_within_a_sentence_can_be_read(page: str, code: str) -> None:
    alternatives = re.search(r"\S+(?:\|\S+)+", code)
    for choice in alternatives[0].split("|") if alternatives else [""]:
        text = code.replace(alternatives[0], choice) if alternatives else code
        words = shlex.split(re.sub(r"\bN\b", "1", text.replace("…", "")))
        read([words[0].removeprefix(".venv/bin/"), *words[1:]], whole=False)


EXAMPLES = list(help_examples())


@pytest.mark.parametrize(("command", "example"), EXAMPLES, ids=[example for _, example in EXAMPLES])
def test_every_example_of_a_help_text_can_be_read(command: str, example: str) -> None:
    assert example.startswith(command) or command in ("fleetcast", "fleetcast evaluate", "fleetcast simulate cluster")
    for words in programs(example):
        read(words, whole=True)


def test_the_help_texts_have_examples() -> None:
    assert len(EXAMPLES) > 60


def test_a_command_that_is_wrong_is_found() -> None:
    for wrong in ("fleetcast runn", "fleetcast run --nothing", "fleetcast models show", "fleetcast bench --size many"):
        with pytest.raises(AssertionError):
            read(wrong.split(), whole=True)
    with pytest.raises(AssertionError):
        read(["make", "nothing"], whole=True)


def test_the_examples_hold() -> None:
    done = doctest.testmod(commands)
    assert done.attempted
    assert not done.failed
