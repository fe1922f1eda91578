"""The documentation as a site: strict links, no other host, and a look at it in a browser, opened as a file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
MINUTE = 60_000


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with strict links."""
    for module in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(module, reason="the site needs the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_no_page_of_the_site_asks_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 50
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"<(?:script|img|iframe)[^>]* src=\"?(?:https?:)?//", text), page
        assert not re.search(r"<link[^>]* rel=\"?(?:stylesheet|preconnect|icon)[^>]* href=\"?(?:https?:)?//", text), (
            page
        )


@pytest.mark.slow
def test_the_interface_is_described_by_its_docstrings(site: Path) -> None:
    text = (site / "reference" / "api.html").read_text(encoding="utf-8")
    for name in ("saccade.vlm.load", "saccade.vlm.VLM.generate", "saccade.output.Stats", "saccade.errors.InputError"):
        assert f'id="{name}"' in text


@pytest.mark.browser
def test_search_works_on_pages_that_are_opened_as_files(site: Path, chromium: Any) -> None:
    page = chromium.new_page()
    asked, problems = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda problem: problems.append(str(problem)))
    page.goto((site / "methods" / "sage.html").as_uri(), timeout=MINUTE)
    page.locator("input.md-search__input").fill("dynamic tree")
    page.wait_for_selector(".md-search-result__item", timeout=MINUTE)
    assert "Dynamic tree" in page.locator(".md-search-result__list").inner_text()
    assert not problems
    assert not [url for url in asked if url.startswith("http")]


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["index", "walk-through", "methods/lvspec", "reference/command-line", "measurements"])
def test_pages_fit_a_phone_and_show_their_pictures(site: Path, chromium: Any, name: str, scheme: str) -> None:
    page = chromium.new_page(viewport={"width": 390, "height": 844}, color_scheme=scheme)
    page.goto((site / f"{name}.html").as_uri(), timeout=MINUTE)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("[...document.images].every((image) => image.complete && image.naturalWidth > 0)")
