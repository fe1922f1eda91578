"""Hooks of mkdocs: pages from the repository's root, and links that lead out of `docs/`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Files of the root that are pages of the site."""
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from the root."""
    from mkdocs.structure.files import File

    for name, place in _PAGES.items():
        text = (_ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Lead links out of `docs/` to pages of the site, or leave their text alone: a site has no other files."""
    folder = (Path(config.docs_dir) / page.file.src_uri).parent

    def link(found: re.Match[str]) -> str:
        text, address = found.groups()
        path, _, heading = address.partition("#")
        if not path or ":" in path:
            return found[0]
        place = (folder / path).resolve()
        if place.is_dir():
            place /= "README.md"
        if place.is_relative_to(config.docs_dir):
            return found[0] if place.is_file() or path in _PAGES.values() else text
        root = _ROOT.resolve()
        inside = str(place.relative_to(root)) if place.is_relative_to(root) else ""
        depth = "../" * page.file.src_uri.count("/")
        if inside == "README.md":
            return f"[{text}]({depth}index.md)"
        return f"[{text}]({depth}{_PAGES[inside]}{'#' * bool(heading)}{heading})" if inside in _PAGES else text

    return _LINK.sub(link, markdown)
