"""Lines of prompt sets, and what a run has left."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def asks(words: str, *images: str, name: str | None = None) -> dict[str, Any]:
    """A question in OpenAI's form."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": image}} for image in images]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": words}]}
    return {"messages": [message], **({} if name is None else {"id": name})}


def talks(name: str, *turns: tuple[str, str], first: Sequence[dict[str, str]] = (), **media: Any) -> dict[str, Any]:
    """A conversation in LLaVA's form."""
    parts = [{"from": who, "value": v} for q, a in turns for who, v in (("human", q), ("gpt", a))]
    return {"id": name, "conversations": [*first, *parts], **media}


def rows(out: Path) -> list[dict[str, Any]]:
    """Every answer of a run, by the slow way."""
    return [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]


def shaped(out: Path) -> dict[str, dict[str, Any]]:
    """The same by id."""
    return {row["id"]: row for row in rows(out)}
