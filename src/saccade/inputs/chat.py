"""Chat messages rendered to text with one placeholder per image or video."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jinja2 import TemplateError

from saccade.errors import InputError

Message = Mapping[str, Any]

_IMAGE_TYPES = ("image", "image_url", "input_image")
_VIDEO_TYPES = ("video", "video_url", "input_video")
_TEXT_TYPES = ("text", "input_text", "output_text")
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles that every template may get; others must occur in the template itself."""

_SOURCES = ("url", "path", "base64", "data")


@dataclass(frozen=True, slots=True)
class Slot:
    """A place for an image or a video in a conversation."""

    kind: Literal["image", "video"]  # image or video
    source: Any  # from the message itself; None when it comes from the list of images or videos


def normalise(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[Slot]]:
    """Convert messages to the form of Hugging Face chat templates, with the media taken out.

    Understands content as a string or a list of ``{"type": "text"}``, ``{"type": "image"}`` with ``image``,
    ``url``, ``path`` or ``base64``, ``{"type": "image_url", "image_url": {"url": ...}}``, the same for videos, and
    ``input_text``, ``input_image``.
    """
    if not messages:
        raise InputError("The list of messages is empty; give at least one message with role and content.")
    out: list[dict[str, Any]] = []
    slots: list[Slot] = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InputError('Every message must be a dict with "role" and "content", such as {"role": "user", ...}.')
        content = message.get("content")
        clean = {k: v for k, v in message.items() if v is not None}
        if isinstance(content, (list, tuple)):
            clean["content"] = [_item(item, slots) for item in content]
        elif content is not None and not isinstance(content, str):
            raise InputError(
                f"A message's content is of type {type(content).__name__}; expected a string or a list of parts."
            )
        out.append(clean)
    return out, slots


def with_sources(messages: Sequence[Message], slots: Sequence[Slot]) -> list[dict[str, Any]]:
    """Put the sources of images and videos back into messages from `normalise`."""
    media = iter(slots)

    def part(given: Mapping[str, Any]) -> dict[str, Any]:
        if given["type"] == "text":
            return {**given}
        slot = next(media)
        return {"type": slot.kind, slot.kind: slot.source}

    return [
        {**m, "content": [part(given) for given in m["content"]]} if isinstance(m.get("content"), list) else {**m}
        for m in messages
    ]


def as_text(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Join lists of text parts into strings, for the templates of language models."""
    return [
        {**m, "content": "".join(part["text"] for part in m["content"])}
        if isinstance(m.get("content"), list)
        else {**m}
        for m in messages
    ]


def render(
    tokenizer: Any,
    template: str,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    options: Mapping[str, Any],
) -> str:
    """Render messages through a chat template.

    Some templates drop content that is a plain string; it is then passed as a list. (Thoughts in earlier answers are
    for the template to drop.)
    """
    for role in (m["role"] for m in messages):
        if role not in ROLES and role not in template:
            raise InputError(f"The chat template knows no role {role!r}; give system, user or assistant messages.")
    texts = [m["content"].split("</think>")[-1].strip() for m in messages if isinstance(m.get("content"), str)]

    def attempt(messages: Sequence[Message]) -> str:
        text: str = tokenizer.apply_chat_template(
            list(messages),
            chat_template=template,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **options,
        )
        return text

    failure: Exception | None = None
    try:
        text = attempt(messages)
        if all(words in text for words in texts):
            return text
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        failure = error
    listed = [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if isinstance(m.get("content"), str) else m
        for m in messages
    ]
    try:
        if texts:
            again = attempt(listed)
            if failure is not None or all(words in again for words in texts):
                return again
    except (TemplateError, TypeError, KeyError, ValueError) as error:
        failure = failure or error
    if failure is not None:
        reason = str(failure).strip().rstrip(".").splitlines()[:1]
        raise InputError(
            f"The chat template refuses the messages ({''.join(reason)}); check roles and their order."
        ) from failure
    return text


def _item(item: Any, slots: list[Slot]) -> dict[str, Any]:
    kind = item.get("type") if isinstance(item, Mapping) else None
    if isinstance(item, str):
        return {"type": "text", "text": item}
    if kind in _TEXT_TYPES and isinstance(item.get("text"), str):
        return {"type": "text", "text": item["text"]}
    if kind in _IMAGE_TYPES:
        slots.append(Slot("image", _source(item, "image")))
        return {"type": "image"}
    if kind in _VIDEO_TYPES:
        slots.append(Slot("video", _source(item, "video")))
        return {"type": "video"}
    raise InputError(f"A message part of type {kind!r} is not usable; expected text, image, image_url or video.")


def _source(item: Mapping[str, Any], name: str) -> Any:
    for key in (name, f"{name}_url", *_SOURCES):
        value = item.get(key)
        if isinstance(value, Mapping):
            value = value.get("url")
        if value is not None:
            bare = key in ("base64", "data") and isinstance(value, str) and not value.startswith("data:")
            return f"data:{name}/*;base64,{value}" if bare else value
    return None
