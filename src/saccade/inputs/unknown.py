"""Prompts for families outside the table, through their own Hugging Face processor as it is."""

from __future__ import annotations

from collections.abc import Sequence

from saccade.errors import InputError, ModelError
from saccade.inputs.chat import Slot
from saccade.inputs.families import kind_of
from saccade.inputs.media import load_image
from saccade.inputs.padded import whole_medium
from saccade.inputs.parts import Parts
from saccade.inputs.prompt import Prompt
from saccade.inputs.video import load_video

_TEXT_KEYS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}


def composite_prompt(parts: Parts, text: str, slots: Sequence[Slot], add_special_tokens: bool) -> Prompt:
    """One row through the composite processor.

    All images and videos of the row become one medium, because nothing is known about where one ends; its
    tensors are what the processor returns besides ids and masks.

    Args:
        parts: of a checkpoint with a composite processor.
        text: the rendered prompt, one placeholder per image or video.
        slots: what the placeholders stand for.
        add_special_tokens: whether the tokenizer adds its own.

    Raises:
        ModelError: the family is unknown and was not loaded from a checkpoint.
        InputError: the processor refuses the row.
    """
    name = kind_of(parts.config)
    if parts.composite is None:
        raise ModelError(f"The family {name} is not built in; load its processor from a checkpoint.")
    media = {
        "images": [load_image(s.source) for s in slots if s.kind == "image"],
        "videos": [load_video(s.source).frames for s in slots if s.kind == "video"],
    }
    try:
        made = parts.composite(
            text=[text],
            return_tensors="pt",
            add_special_tokens=add_special_tokens,
            **{kind: given for kind, given in media.items() if given},
        )
    except (ValueError, TypeError, KeyError, ImportError) as error:
        reason = "".join(str(error).strip().rstrip(".").splitlines()[:1])
        raise InputError(
            f"The processor of {name} refuses the prompt ({reason}); check its images."
        ) from error
    ids = tuple(made["input_ids"][0].tolist())
    tensors = {k: v for k, v in made.items() if k not in _TEXT_KEYS and hasattr(v, "shape")}
    if not tensors:
        return Prompt(ids)
    return Prompt(ids, (whole_medium(parts.config, ids, tensors),))
