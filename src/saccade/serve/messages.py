"""Conversations of strangers: roles, text, and sources of images and videos, which the guarded reader loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saccade.serve.refusals import invalid

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles of requests -> roles of chat templates."""
MEDIA = {"image": {"image_url", "input_image"}, "video": {"video_url", "input_video"}}
"""Kinds of media -> types of parts."""
TEXTS = {"text", "input_text", "output_text", "refusal"}


def conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages for `InputProcessor.load_media`."""
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def has_media(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a message has parts besides text."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(not isinstance(part, Mapping) or str(part.get("type")) not in TEXTS for part in parts)


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise invalid(f"{where}.role must be one of {', '.join(ROLES)}.", f"{where}.role")
    if message.get("tool_calls") or message.get("function_call"):
        raise invalid(f"{where} calls tools, which are not supported here; leave it out.", where)
    content = message.get("content")
    if content is None:
        raise invalid(f"{where}.content is missing; give text, or a list of parts.", f"{where}.content")
    if isinstance(content, str):
        return {"role": ROLES[role], "content": content}
    if not isinstance(content, list) or not content:
        raise invalid(f"{where}.content must be text or a list of parts.", f"{where}.content")
    parts = [_part(part, f"{where}.content[{number}]") for number, part in enumerate(content)]
    return {"role": ROLES[role], "content": parts}


def _part(part: Any, where: str) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind in TEXTS:
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise invalid(f"{where}.text must be text.", f"{where}.text")
        return {"type": "text", "text": text}
    for medium, kinds in MEDIA.items():
        if isinstance(kind, str) and kind in kinds:
            return {"type": medium, medium: _source(part, medium, where)}
    raise invalid(f"{where}.type must be text, image_url or video_url.", f"{where}.type")


def _source(part: Mapping[str, Any], medium: str, where: str) -> str:
    given = part.get(f"{medium}_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not url:
        raise invalid(f"{where}.{medium}_url.url is missing; give a data: URI.", where)
    return url
