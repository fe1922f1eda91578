"""Code blocks of README and docs run as they are, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from processes import exit_code_of, run_anew

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
HOW_TO = sorted((ROOT / "docs" / "how-to").glob("*.md"))


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page, re.DOTALL)


def test_the_first_example_runs_offline(capsys: pytest.CaptureFixture[str]) -> None:
    code = blocks((ROOT / "README.md").read_text(encoding="utf-8").partition("## Use it")[2])[0]
    assert 'saccade.load("pocket")' in code
    exec(code, {})
    answer, last = capsys.readouterr().out.splitlines()
    assert float(answer.rpartition(" ")[2]) > 2, "the draft model's block efficiency"
    assert float(last) > 2, "the head's"


@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_how_to_pages_run_from_top_to_bottom(page: Path) -> None:
    """In a process of their own, because they register what they add."""
    code = "\n".join(blocks(page.read_text(encoding="utf-8")))
    assert exit_code_of(lambda: run_anew(code)) == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith(("http://", "https://", "data:")):
            continue
        path, _, heading = link.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles}, link
