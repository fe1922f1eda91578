"""The patch of `GenerationMixin` that hands pixels to a `custom_generate` callable, and the checks of its inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.utils.generic import TransformersKwargs

from saccade.errors import InputError, SaccadeError
from saccade.inputs.families import check, family_of
from saccade.target_model.adapter import TYPES, check_types

_PATCHED = "_extract_generation_mode_kwargs"
_stock: Callable[..., dict[str, Any]] | None = None
"""The replaced method; None while nothing is patched."""


class TakesPixels:
    """Base of `custom_generate` callables that take ``visuals``, ``assistant_inputs``, ``tokenizer`` and ``streamer``.

    `generate` itself drops the streamer and the tokenizer for callables, runs the vision tower and drops the pixels,
    which the drafter needs.
    """

    __signature__ = inspect.Signature()  # unpatched, `generate` then hands over nothing, which is refused


def patch() -> None:
    """Let `generate` hand pixels and streamers to a `Speculation`; other calls of `generate` are unchanged.

    `speculate` does this on first use; further calls have no effect.
    """
    global _stock
    if _stock is None:
        _stock = getattr(GenerationMixin, _PATCHED)
        setattr(GenerationMixin, _PATCHED, _hand_over)


def unpatch() -> None:
    """Restore `GenerationMixin`; a `Speculation` is then refused until `patch` is called.

    Raises:
        SaccadeError: another library has patched the same method since.
    """
    global _stock
    if _stock is None:
        return
    if getattr(GenerationMixin, _PATCHED) is not _hand_over:
        raise SaccadeError(
            f"GenerationMixin.{_PATCHED} was patched again by another library; undo that patch before this one."
        )
    setattr(GenerationMixin, _PATCHED, _stock)
    _stock = None


@contextmanager
def patched() -> Iterator[None]:
    """Patch `GenerationMixin` within a block, then restore its state before the block."""
    was_patched = _stock is not None
    patch()
    try:
        yield
    finally:
        if not was_patched:
            unpatch()


def _hand_over(
    model: Any, custom_generate: Any, kwargs: dict[str, Any], synced_gpus: Any, assistant_model: Any, streamer: Any
) -> dict[str, Any]:
    """`GenerationMixin._extract_generation_mode_kwargs`, the one place that selects the arguments of a callable."""
    if not isinstance(custom_generate, TakesPixels):
        assert _stock is not None
        return _stock(model, custom_generate, kwargs, synced_gpus, assistant_model, streamer)
    if assistant_model is not None:
        raise InputError("assistant_model does not go with speculate(); give it the drafter: speculate(drafter).")
    if any(kwargs.get(name) is not None for name in ("inputs_embeds", "mm_encoder_outputs")):
        raise InputError(
            "Embeddings as inputs are not supported, since drafters cannot read them; pass ids and pixels."
        )
    past = kwargs.get("past_key_values")
    if past is not None and past.get_seq_length():
        raise InputError("past_key_values must be empty, since the whole prompt is prefilled; leave the cache out.")
    _check_inputs(model, kwargs)
    takes = inspect.signature(model.forward).parameters
    taken = {
        "assistant_inputs": kwargs.pop("assistant_inputs", None),
        "tokenizer": kwargs.pop("tokenizer", None),
        "streamer": streamer,
    }
    keys = family_of(model.config).visual_keys
    visuals = {name: kwargs.pop(name) for name in keys if name in kwargs and name in takes}
    return {"visuals": visuals, **{name: value for name, value in taken.items() if value is not None}}


_READ = ("input_ids", "attention_mask", "past_key_values", "logits_to_keep", "assistant_inputs", "tokenizer")
"""Inputs besides images and videos that are read, or that change nothing."""


def _check_inputs(model: Any, given: Mapping[str, Any]) -> None:
    """Raise `InputError` for inputs of the model that would be ignored; `generate` reports those that none takes."""
    check(model.config, given)
    present = {name for name, value in given.items() if value is not None} - vars(GenerationConfig()).keys()
    family = family_of(model.config)
    if present.intersection(family.visual_keys):
        check_types(model)
    read = {*_READ, *family.visual_keys, family.types}
    takes = {*inspect.signature(model.forward).parameters, *TransformersKwargs.__optional_keys__}
    present.discard("labels")  # for a loss, which `generate` ignores
    if "position_ids" in present and _are_default(model, given["position_ids"], given):
        present.remove("position_ids")
    for name in sorted(present & takes - read):
        if name not in TYPES or bool(torch.as_tensor(given[name]).any()):  # all zeros: text
            raise InputError(
                f"The input {name} does not reach the model in speculative decoding, which prepares the model's "
                "inputs itself; leave it out, or leave out custom_generate."
            )


def _are_default(model: Any, positions: Tensor, given: Mapping[str, Any]) -> bool:
    """Whether positions equal those that `generate` derives from ids, mask and media.

    They are ``[B, S]``; of models with M-RoPE also ``[3, B, S]``, or ``[4, B, S]`` with those of the text first.
    """
    ids, mask = given.get("input_ids"), given.get("attention_mask")
    if ids is None:
        return False
    mask = torch.ones_like(ids) if mask is None else mask
    default = (mask.long().cumsum(-1) - 1).masked_fill(mask == 0, 0)  # [B, S]
    if positions.dim() == 3:
        rope_index = getattr(getattr(model, "model", None), "get_rope_index", None)
        if rope_index is None:
            return False
        wanted = inspect.signature(rope_index).parameters
        present = {name: given[name] for name in wanted if given.get(name) is not None}
        rotary, _ = rope_index(**{**present, "attention_mask": mask})  # [3, B, S]
        default = torch.cat([default[None].to(rotary.device), rotary])[-positions.shape[0] :]
    if positions.shape != default.shape:
        return False
    equal = positions.to(default.device) == default
    return bool(equal.logical_or((mask == 0).to(default.device)).all())
