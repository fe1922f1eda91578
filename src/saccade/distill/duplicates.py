"""Finding the same question with the same media asked before, without reading media that cannot be the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from saccade.distill.conversations import files_of, parts_with_media
from saccade.distill.media import located


class Seen:
    """The questions so far.

    Two questions are the same when their messages are and their media have the same bytes. Bytes are read only where
    the texts and the sizes of all files agree.

    Args:
        root: folder of the media.
        digest: hash of what lies in a file.
    """

    def __init__(self, root: Path, digest: Callable[[str], str] | None = None) -> None:
        self._root = root
        self._digest = lru_cache(maxsize=4096)(digest or _file_digest)
        self._alike: dict[bytes, tuple[str, list[str]] | None] = {}
        self._same: dict[bytes, str] = {}

    def first(self, name: str, messages: Sequence[dict[str, Any]]) -> str:
        """The name under which this question came first; its own when it is new."""
        sources = [located(s, self._root) for part in parts_with_media(messages) for s in files_of(part)]
        rough = _hash(_bare(messages), [_size(s) for s in sources])
        if rough not in self._alike:
            self._alike[rough] = (name, sources)
            return name
        earlier = self._alike[rough]
        if earlier is not None:  # the second of its kind: now the first one's media are read, too
            self._same[self._exact(rough, earlier[1])] = earlier[0]
            self._alike[rough] = None
        return self._same.setdefault(self._exact(rough, sources), name)

    def _exact(self, rough: bytes, sources: Sequence[str]) -> bytes:
        return _hash(rough.hex(), [self._digest(source) for source in sources])


def _bare(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the number of files in the place of every medium."""
    return [
        {
            **message,
            "content": [
                p if p["type"] == "text" else {"type": p["type"], "files": len(files_of(p))}
                for p in message["content"]
            ],
        }
        for message in messages
    ]


def _hash(*content: Any) -> bytes:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).digest()


def _size(source: str) -> int:
    return len(source) if source.startswith("data:") else Path(source).stat().st_size


def _file_digest(source: str) -> str:
    if source.startswith("data:"):
        return hashlib.blake2b(source.encode(), digest_size=16).hexdigest()
    with open(source, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
