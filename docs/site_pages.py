"""A MkDocs hook that adds documents from outside `docs/` to the site, and adapts relative links.

A link to a document of the site leads to its page. A link to any other file of the project becomes plain text.
If a reader opens a page from a folder, the theme would load a script for its search from another host. The
site has its own copy of this script.
"""

import re
import runpy
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
ADDED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "RELEASE.md": "release.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "sdk/README.md": "client.md",
    "benchmarks/RESULTS.md": "results-speed.md",
    "training/RESULTS.md": "results-forecasts.md",
    "dashboards/runbooks.md": "runbooks.md",
    "dashboards/console.png": "console.png",
    "training/curves/straggler-magnitude.svg": "straggler-magnitude.svg",
    "training/curves/straggler-interval.svg": "straggler-interval.svg",
}
REMOTE_WORKER = "https://unpkg.com/iframe-worker/shim"
LOCAL_WORKER = "assets/offline_worker.js"
_SOURCES = {page: source for source, page in ADDED.items()}
_LINK = re.compile(r"(?<!`)(!?)\[([^\]\n]+)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    for source, page in ADDED.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    build_reference = runpy.run_path(str(ROOT / "docs/reference.py"))["build_reference"]
    files.append(File.generated(config, "reference.md", content=build_reference(ROOT)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return rewrite_links(markdown, page.file.src_uri)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    return output.replace(REMOTE_WORKER, relpath(LOCAL_WORKER, page.url.rpartition("/")[0] or "."))


def on_post_template(output_content: str, **_: Any) -> str:
    return output_content.replace(REMOTE_WORKER, LOCAL_WORKER)


def rewrite_links(markdown: str, page: str) -> str:
    """Return the text of a page with its links changed for the site.

    >>> rewrite_links("[Guide](docs/api.md#jobs), [code](cli/main.py), [site](https://a.example)", "index.md")
    '[Guide](api.md#jobs), code, [site](https://a.example)'
    >>> rewrite_links("[Results](../../training/RESULTS.md)", "sources/kafka.md")
    '[Results](../results-forecasts.md)'
    """
    source = _SOURCES.get(page, f"docs/{page}")

    def rewrite_link(match: re.Match[str]) -> str:
        mark, text, link = match.groups()
        path, hash_, anchor = link.partition("#")
        if "://" in link or not path:
            return match[0]
        target = normpath(f"{source.rpartition('/')[0] or '.'}/{path}")
        placed = ADDED.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else "")
        if not placed:
            return text
        return f"{mark}[{text}]({relpath(placed, page.rpartition('/')[0] or '.')}{hash_}{anchor})"

    return _LINK.sub(rewrite_link, markdown)
