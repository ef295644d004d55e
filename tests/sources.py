"""The product's sources as syntax trees, each parsed once in a process.

The test files that read them share one worker: `tests/conftest.py` groups them.
"""

import ast
import gc
from functools import cache
from pathlib import Path

Nodes = tuple[ast.AST, ...]


@cache
def list_nodes(path: Path) -> Nodes:
    """Return all nodes of a file's syntax tree. The first one is the module, and parents come before children.

    The trees live as long as the process. They are frozen, otherwise each full run of the garbage collector visits a
    million nodes.
    """
    nodes = parse_nodes(path.read_text(encoding="utf-8"))
    gc.freeze()
    return nodes


def parse_nodes(source: str) -> Nodes:
    """Return all nodes of the syntax tree of a source, the module first."""
    return tuple(ast.walk(ast.parse(source)))


def get_module(path: Path) -> ast.Module:
    """Return the root of a file's syntax tree."""
    (module, *_) = list_nodes(path)
    assert isinstance(module, ast.Module)
    return module
