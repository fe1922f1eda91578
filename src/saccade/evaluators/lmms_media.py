"""Conversations from what lmms-eval's tasks pass: messages, or a text with its pictures and videos."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
from PIL import Image

from saccade.errors import InputError
from saccade.inputs.requests import Messages

IMAGE_ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp"}
SOUND_ENDINGS = {".wav", ".mp3", ".m4a", ".aac", ".flac", ".ogg", ".opus"}
_PLACE = re.compile(r"<image(?: (\d+))?>")

Part = Mapping[str, Any]


def part_of(visual: Any) -> Part:
    """Message part of one picture or video."""
    if isinstance(visual, Mapping):
        return _of_table(visual)
    if isinstance(visual, (str, PurePath)):
        ending = PurePath(visual).suffix.lower()
        if ending in SOUND_ENDINGS:
            raise InputError(f"{visual} is audio, which Saccade's models do not accept; choose another task.")
        is_image = ending in IMAGE_ENDINGS or str(visual).startswith("data:image/")
        return _part("image" if is_image else "video", visual)
    if isinstance(visual, Image.Image):
        return _part("image", visual)
    if isinstance(visual, np.ndarray):
        return _part("video" if visual.ndim == 4 else "image", visual)
    if isinstance(visual, (list, tuple)) and visual:
        return _part("video", list(visual))
    raise InputError(
        f"A task's visual of type {type(visual).__name__} is not usable; expected a PIL image, an array, a list of "
        "frames, or a path."
    )


def _part(kind: str, source: Any) -> Part:
    return {"type": kind, kind: source}


def _of_table(visual: Mapping[str, Any]) -> Part:
    if visual.get("type") == "audio" or "sampling_rate" in visual:
        raise InputError("The task passes audio, which Saccade's models do not accept; choose another task.")
    for name in ("video_start", "video_end", "start_time", "end_time"):
        if visual.get(name) is not None:
            raise InputError(
                f"The task asks for part of a video ({name}={visual[name]}), which is not supported; cut it first."
            )
    source = next((visual[name] for name in ("url", "path", "image", "video") if visual.get(name) is not None), None)
    if source is None:
        raise InputError(f"A task's visual with the keys {', '.join(map(str, visual))} has neither url nor path.")
    kind = visual.get("type")
    if isinstance(source, (str, PurePath)) and PurePath(source).suffix.lower() in SOUND_ENDINGS:
        return part_of(source)
    return _part(kind, source) if kind in ("image", "video") else part_of(source)


def with_visuals(text: str, visuals: Sequence[Any]) -> tuple[Messages, bool]:
    """One user message of a text and its visuals.

    Pictures go where the text has ``<image>``, once for each, or ``<image 1>``, ``<image 2>`` and so on, at their first
    mention; all others come first.
    """
    parts = [part_of(visual) for visual in visuals]
    pictures = [part for part in parts if part["type"] == "image"]
    found = list(_PLACE.finditer(text))
    bare = [place for place in found if place[1] is None]
    removes = bool(bare) and len(bare) != len(pictures)
    if removes:
        text = text.replace("<image>", "")
        found, bare = list(_PLACE.finditer(text)), []
    places: list[tuple[re.Match[str], Part]] = []
    used: set[int] = set()
    for place in found:
        index = bare.index(place) if bare and place[1] is None else int(place[1] or 0) - 1
        if (bare and place[1] is not None) or not 0 <= index < len(pictures) or index in used:
            continue
        used.add(index)
        places.append((place, pictures[index]))
    placed = [part for _, part in places]
    content = [part for part in parts if not any(part is other for other in placed)]
    content += _interleaved(text, places)
    return [{"role": "user", "content": content}], removes


def _interleaved(text: str, places: Sequence[tuple[re.Match[str], Part]]) -> Iterator[Part]:
    start = 0
    for place, part in places:
        if before := text[start : place.start()]:
            yield {"type": "text", "text": before}
        yield part
        start = place.end()
    if rest := text[start:]:
        yield {"type": "text", "text": rest}


def conversation(messages: Any) -> Messages:
    """A conversation from the messages of a task, in lmms-eval's form."""
    if not isinstance(messages, (list, tuple)) or not all(isinstance(m, Mapping) for m in messages):
        raise InputError(
            f"The task's messages are of type {type(messages).__name__}; expected a list of tables with role and "
            "content."
        )
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, (list, tuple)):
            content = [_part_of_message(item) for item in content]
        found.append({"role": message.get("role"), "content": content})
    return found


def _part_of_message(item: Any) -> Part:
    if isinstance(item, str):
        return {"type": "text", "text": item}
    if isinstance(item, Mapping) and item.get("type") == "text":
        return {"type": "text", "text": str(item.get("text", ""))}
    if not isinstance(item, Mapping):
        return part_of(item)
    url = item.get("url")
    # Instead of the path a task may give a table with the bounds of the clip.
    rest = {name: value for name, value in item.items() if name != "url"}
    return _of_table({**rest, **url}) if isinstance(url, Mapping) else _of_table(item)
