"""Prompt positions that a decoder sees, and embeddings that it is given in place of the model's own."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from saccade.errors import ModelError

Mask = Tensor | dict[str, Tensor]


def kept_of(start: int, stop: int, dropped: Sequence[int]) -> list[int]:
    """The positions from ``start`` to ``stop`` that are not among the dropped ones."""
    gone = set(dropped)
    return [i for i in range(start, stop) if i not in gone]


def held_of(start: int, dropped: Sequence[int]) -> int:
    """Cache entries of the first ``start`` positions, ``dropped`` being ascending."""
    return start - bisect_left(dropped, start)


def shift_of(start: int, dropped: Sequence[int]) -> list[int]:
    """How far each cache entry of the first ``start`` positions stands before its slot (0 or less).

    Slots are counted back from the row's end, where slot and position agree: attention windows are measured in
    positions, and entries before a gap are further away than their slots tell.
    """
    kept = kept_of(0, start, dropped)
    gap = start - len(kept)
    return [position - slot - gap for slot, position in enumerate(kept)]


@contextmanager
def given_instead(
    decoder: nn.Module, embeddings: Tensor, mask: Mask, added: Sequence[Tensor] = ()
) -> Iterator[None]:
    """The model's decoder is given other embeddings while this is open.

    Args:
        embeddings: ``[1, n, d]``.
        mask: what it gets as attention mask.
        added: per first layers ``[n, d]`` what is added to the stream behind each (Qwen3-VL's deepstack).

    Raises:
        ModelError: the decoder is not called once, by name, with as many positions.
    """
    calls = []

    def replace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        calls.append(module)
        if args or kwargs.get("position_ids") is None:
            raise ModelError(
                f"{type(module).__name__} is not called with positions by name, so that its embeddings cannot be "
                "replaced; use another model or plain text."
            )
        kwargs = {**kwargs, "inputs_embeds": embeddings, "attention_mask": mask}
        if "input_ids" in kwargs:
            kwargs["input_ids"] = None
        if added:
            seen = torch.ones(embeddings.shape[:2], dtype=torch.bool, device=embeddings.device)
            kwargs.update(visual_pos_masks=seen, deepstack_visual_embeds=list(added))
        return args, kwargs

    handle = decoder.register_forward_pre_hook(replace, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    if len(calls) != 1:
        raise ModelError(
            f"{type(decoder).__name__} was called {len(calls)} times in one forward, where once was expected."
        )
