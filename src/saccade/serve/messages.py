"""Conversations of strangers: text, images and videos of data URIs, and nothing that names a file or an address."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saccade.inputs.media import load_image, read_source
from saccade.serve.refusals import Refusal, invalid

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Roles of requests -> roles of chat templates."""
IMAGES = {"image_url", "input_image"}
VIDEOS = {"video_url", "input_video"}
TEXTS = {"text", "input_text", "output_text", "refusal"}


def conversation(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages for `InputProcessor.prompt`, images decoded and videos as bytes.

    Raises:
        Refusal: 400; a message has another form, or a medium is not a usable data URI.
        InputError: a medium cannot be decoded.
    """
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


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
    if isinstance(kind, str) and kind in IMAGES:
        return {"type": "image", "image": load_image(_uri(part, "image", where))}
    if isinstance(kind, str) and kind in VIDEOS:
        return {"type": "video", "video": read_source(_uri(part, "video", where), "video")[1]}
    raise invalid(f"{where}.type must be text, image_url or video_url.", f"{where}.type")


def _uri(part: Mapping[str, Any], what: str, where: str) -> str:
    given = part.get(f"{what}_url")
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str) or not url:
        raise invalid(f"{where}.{what}_url.url is missing; give a data: URI.", where)
    if not url.startswith("data:"):
        raise _no_address(what, where)
    return url


def _no_address(what: str, where: str) -> Refusal:
    return invalid(
        f"{where}: this server takes a {what} as a data: URI only (data:{what}/...;base64,...); encode the file.",
        where,
        "invalid_image_url" if what == "image" else "invalid_video_url",
    )
