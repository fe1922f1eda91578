"""Prompts for families outside the table, through their own Hugging Face processor as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from saccade.errors import InputError, ModelError
from saccade.inputs.batch import visual_mask
from saccade.inputs.chat import Slot
from saccade.inputs.families import kind_of
from saccade.inputs.loading import Parts
from saccade.inputs.media import digest, load_image
from saccade.inputs.prompt import Medium, Prompt
from saccade.inputs.video import load_video

_TEXT_KEYS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}


def composite_prompt(
    parts: Parts,
    messages: Sequence[Mapping[str, Any]],
    slots: Sequence[Slot],
    add_generation_prompt: bool,
    template_options: Mapping[str, Any],
) -> Prompt:
    """One row through the composite processor.

    All images and videos of the row become one medium, because nothing is known about where one ends; its
    tensors are what the processor returns besides ids and masks.

    Raises:
        ModelError: the family is unknown and was not loaded from a checkpoint.
        InputError: the processor refuses the row.
    """
    if parts.composite is None:
        raise ModelError(f"The family {kind_of(parts.config)} is not built in; load it from its checkpoint.")
    images = [load_image(s.source) for s in slots if s.kind == "image"]
    videos = [load_video(s.source).frames for s in slots if s.kind == "video"]
    try:
        text = parts.composite.apply_chat_template(
            list(messages), add_generation_prompt=add_generation_prompt, **template_options
        )
        made = parts.composite(text=[text], images=images or None, videos=videos or None, return_tensors="pt")
    except (ValueError, TypeError, KeyError, ImportError) as error:
        raise InputError(
            f"The processor of {kind_of(parts.config)} refuses the prompt ({error}); check its messages and images."
        ) from error
    ids = tuple(made["input_ids"][0].tolist())
    tensors = {k: v for k, v in made.items() if k not in _TEXT_KEYS and hasattr(v, "shape")}
    if not tensors:
        return Prompt(ids)
    placed = int(visual_mask(parts.config, ids).sum())
    return Prompt(ids, (Medium("image", tensors, placed, digest(tensors)),))
