"""The documentation site opened from a folder in a real browser: search works, and nothing else is asked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.integration.console.page import browser

__all__ = ["browser"]
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.integration


def test_search_works_from_a_folder_and_asks_no_other_host(browser: Browser, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((tmp_path / "sources" / "kafka.html").as_uri())
    page.focus(".md-search__input")
    page.keyboard.type("remote write", delay=50)
    first = page.locator(".md-search-result__item a").first
    first.wait_for(state="attached")
    assert "matching documents" in page.locator(".md-search-result__meta").inner_text()
    assert asked
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    page.close()
