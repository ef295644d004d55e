"""The committed dashboards and alerts as data, and Grafana's substitution of variables."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "dashboards"
DASHBOARDS = sorted((FOLDER / "grafana").glob("*.json"))
SELECTOR = re.compile(r"\bfleetcast_\w+(?:\{[^}]*\})?|\bup\b(?:\{[^}]*\})?")
VARIABLE = re.compile(r"\$\{?(\w+)\}?")
LEGEND = re.compile(r"\{\{\s*(\w+)\s*\}\}")


@dataclass(frozen=True, slots=True)
class Query:
    """One target of one panel."""

    dashboard: str
    panel: Mapping[str, Any]
    target: Mapping[str, Any]

    @property
    def expr(self) -> str:
        return str(self.target["expr"])

    @property
    def instant(self) -> bool:
        return bool(self.target.get("instant"))

    def __str__(self) -> str:
        return f"{self.dashboard} / {self.panel['title']} / {self.target['refId']}: {self.expr}"


def load(path: Path) -> dict[str, Any]:
    board: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return board


def queries(board: Mapping[str, Any]) -> Iterator[Query]:
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield Query(board["title"], panel, target)


def variables(board: Mapping[str, Any]) -> dict[str, str]:
    """Name -> query, in the order in which Grafana fills them."""
    return {row["name"]: row["query"]["query"] for row in board["templating"]["list"]}


def substituted(expr: str, values: Mapping[str, str]) -> str:
    """The expression with the values of its variables; KeyError names one that has none."""
    return VARIABLE.sub(lambda found: values[found[1]], expr)


def grouped_by(expr: str) -> set[str]:
    """Labels that the aggregations of an expression keep.

    >>> sorted(grouped_by("max by (node, job_id) (x) and on (rack) y"))
    ['job_id', 'node']
    """
    return {word.strip() for part in expr.split(" by (")[1:] for word in part.split(")")[0].split(",")}


def rules() -> list[dict[str, Any]]:
    """Every alert, with its group's name as `group`."""
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return [rule | {"group": group["name"]} for group in groups for rule in group["rules"]]
