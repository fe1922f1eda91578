"""Replica of a request: that which has its conversation or pictures in its caches, as long as it has room.

A conversation keeps its first question, so a key made of that question sends every later turn to the same replica,
where the turns before are in the KV cache. Where the question brings media, the key is made of them alone: other
questions about a picture go where its features are. Keys choose among replicas by rendezvous hashing (Thaler and
Ravishankar, 1998), which needs no table, is the same in every process, and moves only the keys of a replica that ends.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

_MEDIA = ("image_url", "video_url")
_PROMPT = 1024
"""Characters or ids of a raw prompt that are compared: later ones may differ."""


def key_of_body(body: bytes) -> str:
    """Return the key of a request; empty where nothing of it could be in a cache, or it is not valid."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(request, dict):
        return ""
    found = _of_messages(request["messages"]) if "messages" in request else _of_prompt(request.get("prompt"))
    return _digest(request.get("model"), found) if found else ""


def _of_messages(messages: Any) -> Any:
    """Media of the first user message; without them, the conversation up to it."""
    if not isinstance(messages, list):
        return None
    for number, message in enumerate(messages):
        if isinstance(message, dict) and message.get("role") == "user":
            return _media(message.get("content")) or messages[: number + 1]
    return None


def _media(content: Any) -> list[Any]:
    """Addresses of a message's images and videos; data: URIs are their content."""
    found = []
    for part in content if isinstance(content, list) else []:
        for kind in _MEDIA:
            given = part.get(kind) if isinstance(part, dict) else None
            if given is not None:
                found.append(given.get("url") if isinstance(given, dict) else given)
    return found


def _of_prompt(prompt: Any) -> Any:
    return prompt[:_PROMPT] if isinstance(prompt, (str, list)) else None


def _digest(*content: Any) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def home_of(key: str, replicas: Sequence[str]) -> str:
    """Return the replica of a key."""
    return max(replicas, key=lambda name: hashlib.blake2b(f"{key}/{name}".encode(), digest_size=8).digest())


def ranked(key: str, loads: Mapping[str, int | None], rows: int) -> list[list[str]]:
    """Return the replicas in groups, the best group first."""
    names = sorted(loads)
    if not key or not names:
        return [names] if names else []
    home = home_of(key, names)
    if (loads[home] or 0) < rows:
        others = [name for name in names if name != home]
        return [[home], others] if others else [[home]]
    return [names]
