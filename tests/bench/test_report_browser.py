"""The report in a real browser: no console errors, tables and token view there, nothing wider than a phone."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fake_runs import make_run, picture

from saccade.bench.report.page import render
from saccade.bench.report.tables import contents

pytest.importorskip("matplotlib", reason="reports need the extra `report`")

BROWSER = next(
    filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"])),
    None,
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on this machine (Debian: apt-get install chromium)"
)

QUIET = """--headless --no-sandbox --disable-gpu --disable-quic --disable-dev-shm-usage --no-first-run
--disable-background-networking --disable-component-update --disable-sync --disable-extensions"""
CSP = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')


def opened(page: str, folder: Path) -> tuple[str, list[str]]:
    """The document after its scripts have run, and what they wrote to the console."""
    file = folder / "page.html"
    file.write_text(page, encoding="utf-8")
    assert BROWSER is not None
    ran = subprocess.run(
        [
            BROWSER,
            *QUIET.split(),
            f"--user-data-dir={folder / 'profile'}",
            "--enable-logging=stderr",
            "--v=0",
            "--virtual-time-budget=3000",
            "--dump-dom",
            file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return ran.stdout, [line for line in ran.stderr.splitlines() if ":CONSOLE" in line]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    run = make_run(tmp_path_factory.mktemp("run"), prompts=4, repeats=1, traced=2, hostile=True)
    (run.folder / "media").mkdir()
    for name in {name for record in run.records for name in record.media}:
        picture(name).save(run.folder / "media" / name)
    return render(contents([run]))


def test_the_page_opens_without_console_errors_with_tables_figures_and_token_view(page: str, tmp_path: Path) -> None:
    document, console = opened(page, tmp_path)
    assert console == []
    assert re.search(r'<p id="trouble" role="alert" hidden="">\s*</p>', document)
    assert document.count("<table") == page.count("<table")
    assert document.count('<figure class="plot">') == 3
    assert 'src="data:image/png;base64,' in document
    shown = re.findall(r'<section class="answer[^>]*data-method="([^"]+)">', document)
    assert shown[0] == "chain"  # one prompt and one method are shown, the rest wait
    assert document.count('class="answer" data-method="plain" hidden') == 2
    drawn = re.search(
        r'<div class="tree.*?<svg.*?aria-label="(Step 1 of \d+: 5 drafted[^"]*)".*?</svg>', document, re.S
    )
    assert drawn is not None
    assert drawn[0].count('class="node ') == 7  # root, five drafted, the target's own
    assert 'class="token target now"' in document


def test_a_page_that_fails_says_so_on_itself(page: str, tmp_path: Path) -> None:
    broken = CSP.sub("", page).replace("</body>", "<script>absent();</script></body>")
    document, console = opened(broken, tmp_path)
    assert "Something on this page failed: Uncaught ReferenceError" in document
    assert console


def test_scripts_that_text_smuggles_in_would_not_run(page: str, tmp_path: Path) -> None:
    smuggled = page.replace("</body>", "<script>document.title = 'taken'</script></body>")
    document, _ = opened(smuggled, tmp_path)
    assert "<title>taken" not in document
    assert "the page tried to use script-src" in document


def test_nothing_is_wider_than_a_phone(page: str, tmp_path: Path) -> None:
    around = f"""<!doctype html><iframe style="width:360px;height:700px;border:0" srcdoc="{html.escape(page)}"></iframe>
    <script>addEventListener("load", () => {{
      const inner = document.querySelector("iframe").contentDocument.documentElement;
      document.title = inner.scrollWidth + " of " + inner.clientWidth;
    }})</script>"""
    document, _ = opened(around, tmp_path)
    widths = re.search(r"<title>(\d+) of (\d+)", document)
    assert widths is not None
    assert int(widths[1]) <= int(widths[2]) <= 360
