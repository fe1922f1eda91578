"""Code blocks and commands of README and docs, found and made runnable with the models that come with the package."""

from __future__ import annotations

import json
import re
import shlex
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import saccade
from saccade.pocket import draw, head_paths

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_MADE = re.compile(r"<!-- generated: .*?<!-- end -->|^```text\n.*?^```", re.DOTALL | re.MULTILINE)
"""Parts of pages that `python -m tools.docs` writes, or that a command printed."""
PROGRAMS = ("saccade", "python", "make", "pip", "torchrun", "docker", "sudo")
"""First words of lines that are commands."""


def blocks(page: str, language: str) -> list[str]:
    """Code blocks of a page in a language; empty for blocks without one."""
    return [
        code for name, code in re.findall(r"^```(\w*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if name == language
    ]


def word_count(page: Path, by_hand: bool = False) -> int:
    """Words of a page as `wc -w` counts them; ``by_hand``: without those that a program wrote."""
    text = page.read_text(encoding="utf-8")
    if by_hand and {page.parent.name, page.name} & {"results", "reference"}:
        return 0
    if by_hand and page.name == "architectures.md":
        text = re.sub(r"^\|.*$", "", text, flags=re.MULTILINE)
    return len((_MADE.sub("", text) if by_hand else text).split())


def commands(page: Path) -> list[list[str]]:
    """Commands of a page as words: lines of blocks without a language, comments left out."""
    text = "".join(blocks(page.read_text(encoding="utf-8"), "")).replace("\\\n", " ")
    lines = (shlex.split(line, comments=True) for line in text.splitlines() if line.split()[:1] and _is_command(line))
    return [words for line in lines for words in _single(line)]


def _is_command(line: str) -> bool:
    return line.split()[0] in PROGRAMS


def _single(words: list[str]) -> Iterator[list[str]]:
    """The commands of a line: those that ``&&`` joins."""
    command: list[str] = []
    for word in [*words, "&&"]:
        if word == "&&":
            yield command
            command = []
        else:
            command.append(word)


def media(folder: Path) -> None:
    """Draw the files that examples name."""
    from tools.pocket.files import write_video

    for number, name in enumerate(("photo.jpg", "receipt.png", "a.png", "b.png", "picture.png", "cat.png")):
        draw(number, "receipt" if name == "receipt.png" else "scene").image.save(folder / name)
    draw(5, "chart").image.save(folder / "saccade-demo.png")
    (folder / "photos").mkdir()
    for number in range(2):
        draw(number, "scene").image.save(folder / "photos" / f"{number}.png")
    write_video(folder / "clip.mp4", draw(1, "video").video, 4.0)
    (folder / "images").mkdir()
    (folder / "images" / "a.png").write_bytes((folder / "a.png").read_bytes())
    asked = (f"<image>\nHow many of shape {number} are there?" for number in range(8))
    turns = [[{"from": "human", "value": text}, {"from": "gpt", "value": "Two."}] for text in asked]
    rows = [{"id": str(number), "image": "a.png", "conversations": turn} for number, turn in enumerate(turns)]
    for name in ("llava.jsonl", "question.jsonl", "questions.jsonl"):
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "page.png").write_bytes((folder / "receipt.png").read_bytes())
    (folder / "page.txt").write_text(draw(1, "receipt").answer)
    (folder / "shards").mkdir()
    with tarfile.open(folder / "shards" / "0.tar", "w") as shard:
        for number in range(32):
            shard.add(folder / "a.png", f"{number}.png")
            (folder / "caption.txt").write_text("A scene.")
            shard.add(folder / "caption.txt", f"{number}.txt")
    (folder / "prompts.jsonl").write_text(
        '{"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}, '
        '{"type": "text", "text": "Describe the picture in detail."}]}]}\n'
    )


def load(target: Any, drafter: Any = None, method: str | None = None, **options: Any) -> saccade.VLM:
    """Stand-in for `saccade.load`: the built-in pair, with heads under the names that were asked for."""
    kinds = head_paths()
    heads = {name: kinds.get(name, kinds["eagle2"]) for name in options.get("heads", {})}
    loaded = _pair(tuple(heads.items()))
    return loaded if method is None else loaded.using(method)


@cache
def _pair(heads: tuple[tuple[str, Path], ...]) -> saccade.VLM:
    return saccade.vlm.load("pocket", dtype="float32", **({"heads": dict(heads)} if heads else {}))
