"""Digest of questions: their messages, media content and reference answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from saccade.bench.turns import Question
from saccade.inputs.media import Video, load_image, read_source

_MEDIA = ("image", "video")


def digest(questions: Sequence[Question]) -> str:
    """Hash of ids, messages, the content of images and videos, and references (16 hex digits).

    Files count by content, not by path; every file is read once.
    """
    files: dict[str, str] = {}
    content = [
        [q.id, [[t.text, [_message(m, files) for m in t.messages], _plain(t.reference)] for t in q.turns]]
        for q in questions
    ]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _message(message: Mapping[str, Any], files: dict[str, str]) -> Any:
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return _plain(message)
    return [_plain({**message, "content": None}), [_part(part, files) for part in content]]


def _part(part: Any, files: dict[str, str]) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _MEDIA or kind not in part:
        return _plain(part)
    return [_plain({**part, kind: None}), _content(part[kind], kind, files)]


def _content(source: Any, kind: str, files: dict[str, str]) -> Any:
    """Hash of a source's content; one hash per frame of a list of frames."""
    if isinstance(source, (list, tuple)):
        return [_content(frame, "image", files) for frame in source]
    if isinstance(source, Video):
        return [_array(source.frames), list(source.indices), source.total, source.fps]
    if isinstance(source, Image.Image):
        return _array(np.asarray(load_image(source)))
    if isinstance(source, np.ndarray):
        return _array(source)
    if not isinstance(source, str):
        return _hash(read_source(source, kind)[1])
    if source not in files:
        files[source] = _hash(read_source(source, kind)[1])
    return files[source]


def _array(array: np.ndarray[Any, Any]) -> str:
    return _hash(f"{array.dtype}|{array.shape}|".encode(), np.ascontiguousarray(array).tobytes())


def _hash(*parts: bytes) -> str:
    hasher = hashlib.blake2b(digest_size=16)
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def _plain(value: Any) -> Any:
    """Content of a message or reference ready for JSON, in an order that is equal between runs."""
    if isinstance(value, Mapping):
        return {str(name): _plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, (set, frozenset)):
        return sorted(repr(entry) for entry in value)
    return value if value is None or isinstance(value, (str, int, float)) else repr(value)
