"""The chat format and its special tokens, and a sample as token ids in that format."""

from typing import Any

from tokenizers import Tokenizer

from saccade.pocket.labels import GRID
from saccade.pocket.sample import Sample

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<image>", "<user>", "<assistant>", "<video>")
PAD, BEGIN, END, IMAGE, USER, ASSISTANT, VIDEO = range(7)

PATCHES = GRID * GRID
FRAME_TOKENS = (GRID // 2) ** 2
NEWLINE = 1

TEMPLATE = (
    "{{ '<s>' }}"
    "{% for message in messages %}"
    "{{ '<' + message['role'] + '>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}"
    "{% elif part['type'] == 'video' %}{{ '<video>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}"
    "{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ '</s>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""Jinja template over Hugging Face messages; contents may be strings or lists of image, video and text parts."""


def image_tokens(tiled: bool) -> int:
    """Tokens of a picture, by the class's rule.

    A lone picture is tiled: seen as a whole and as its one tile, with a newline after every row of that.
    Each of several is seen once, with one newline.
    """
    return 2 * PATCHES + GRID * NEWLINE if tiled else PATCHES + NEWLINE


def video_tokens(frames: int) -> int:
    """Tokens of a video: its frames pooled two by two, and one newline at its end."""
    return frames * FRAME_TOKENS + NEWLINE


def _part(tokenizer: Tokenizer, part: dict[str, Any], sample: Sample, seeing: bool, tiled: bool) -> list[int]:
    if part["type"] == "text":
        return list(tokenizer.encode(part["text"]).ids)
    if not seeing:
        return list(tokenizer.encode("\n").ids)
    if part["type"] == "image":
        return [IMAGE] * image_tokens(tiled and len(sample.images) == 1)
    return [VIDEO] * video_tokens(len(sample.video or ()))


def prompt_ids(
    tokenizer: Tokenizer, sample: Sample, seeing: bool = True, tiled: bool = True
) -> tuple[list[int], list[bool]]:
    """A conversation up to where the answer begins, and which of its tokens are earlier answers.

    Args:
        seeing: give every picture and video its tokens; else a line break stands in its place, as in the
            text-only prompts of drafters.
        tiled: tile lone pictures, as the class does; else see them once, at half the cost.
    """
    ids, answers = [BEGIN], [False]
    for message in sample.messages(media=False):
        told = message["role"] == "assistant"
        ids.append(ASSISTANT if told else USER)
        answers.append(False)
        for part in message["content"]:
            piece = _part(tokenizer, part, sample, seeing, tiled)
            ids += piece
            answers += [told] * len(piece)
        if told:
            ids.append(END)
            answers.append(True)
    return [*ids, ASSISTANT], [*answers, False]
