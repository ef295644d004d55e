"""Build the API reference: signatures and docstrings for users of plugins and clients. Nothing is imported."""

import ast
from collections.abc import Iterator
from pathlib import Path

PUBLIC = {  # file → for whom
    "fleetcast/checks.py": "Contract suites of plugins",
    "fleetcast/ingest/source.py": "Sources",
    "fleetcast/models/forecast.py": "Forecasters",
    "fleetcast/placement/machines/options.py": "Filters and scorers",
    "fleetcast/placement/machines/view.py": "What filters and scorers see",
    "fleetcast/fleet/requests.py": "Requests for placement",
    "fleetcast/schedulers/adapter.py": "Adapters",
    "sdk/fleetcast_client/client.py": "Client: questions",
    "sdk/fleetcast_client/reporter.py": "Client: training loops",
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def build_reference(root: Path) -> str:
    """Return the page as Markdown."""
    parts = ["# API reference", "", "Made of the docstrings. [What is stable](stability.md) says what a change needs."]
    for name, title in PUBLIC.items():
        module = name.removeprefix("sdk/").removesuffix(".py").replace("/", ".")
        tree = ast.parse((root / name).read_text(encoding="utf-8"))
        parts += ["", f"## {title}", "", f"`{module}`", "", *_format_docstring(tree)]
        for node in tree.body:
            if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
                parts += _format_entry(node)
    return "\n".join(parts) + "\n"


def _format_entry(node: ast.ClassDef | Function) -> Iterator[str]:
    """Yield the lines of a class with its public methods, or of a function."""
    yield from ("", f"### {node.name}", "", "```python", _format_signature(node), "```", "", *_format_docstring(node))
    if isinstance(node, ast.ClassDef):
        for inner in node.body:
            if isinstance(inner, Function) and not inner.name.startswith("_"):
                yield from ("", "```python", _format_signature(inner), "```", "", *_format_docstring(inner))


def _format_signature(node: ast.ClassDef | Function) -> str:
    """Return the decorators and the head of a definition, with the public fields and members of a class."""
    decorators = [f"@{ast.unparse(item)}" for item in node.decorator_list]
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        head = f"class {node.name}({bases}):" if bases else f"class {node.name}:"
        return "\n".join([*decorators, head, *(f"    {ast.unparse(item)}" for item in node.body if _is_public(item))])
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return "\n".join([*decorators, f"{word} {node.name}({ast.unparse(node.args)}){returns}"])


def _is_public(item: ast.stmt) -> bool:
    """Return whether a statement of a class assigns a public field or member."""
    targets = item.targets if isinstance(item, ast.Assign) else [item.target] if isinstance(item, ast.AnnAssign) else []
    return bool(targets) and not ast.unparse(targets[0]).startswith("_")


def _format_docstring(node: ast.Module | ast.ClassDef | Function) -> list[str]:
    """Return a docstring as a block of text that keeps its lines."""
    text = ast.get_docstring(node)
    return ["```text", text.replace("```", "'''"), "```"] if text else []
