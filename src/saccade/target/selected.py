"""Prefill of chosen prompt positions: the stock model merges text and images, its decoder sees the rest alone.

Pruned visual tokens (SpecVLM, SAGE, DREAM) are cut out where the model hands its embeddings to its decoder. All
others keep their position ids, so that the decoder computes what it would if attention to the cut ones were masked.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from saccade.errors import ModelError
from saccade.inputs.prompt import Prompt

Mask = Tensor | dict[str, Tensor]

_ALONG = {"inputs_embeds": 1, "input_ids": 1, "position_ids": -1, "visual_pos_masks": 1}
"""Arguments of a decoder that have one entry per position, and the dimension that counts positions."""


_MERGED = ("inputs_embeds", "visual_pos_masks", "deepstack_visual_embeds")


@dataclass(slots=True)
class Merged:
    """What a model made of a prompt before its decoder: a second context on the same weights need not look again.

    Attributes:
        prompt: of the last prefill.
        start: first position that it ran.
        arguments: of its decoder, from there on: embeddings with the visual features in place; none for text.
    """

    prompt: Prompt | None = None
    start: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)

    def of(
        self,
        prompt: Prompt,
        start: int,
        spans: Sequence[tuple[int, int]] = (),
        words: Callable[[Tensor], Tensor] | None = None,
    ) -> dict[str, Any]:
        """The arguments if they are of this prompt from this position on, else none.

        Args:
            spans: where the prompt's media stand.
            words: embeds ids; with it, the arguments may also begin further on, if none but words stand before them.
        """
        given = self.arguments.get("inputs_embeds")
        if self.prompt == prompt and self.start == start:
            return self.arguments
        if self.prompt != prompt or self.start < start or given is None or words is None:
            return {}
        if any(start <= first < self.start for first, _ in spans):
            return {}
        before = words(torch.tensor([prompt.ids[start : self.start]], device=given.device)).to(given)
        arguments = {**self.arguments, "inputs_embeds": torch.cat([before, given], 1)}
        if (visual := arguments.get("visual_pos_masks")) is not None:
            arguments["visual_pos_masks"] = pad(visual, (self.start - start, 0))
        return arguments

    def forget(self) -> None:
        """Free the embeddings."""
        self.prompt, self.arguments = None, {}

    @contextmanager
    def reading(self, decoder: nn.Module, prompt: Prompt, start: int) -> Iterator[None]:
        """Keep what the decoder gets in the prefill of ``prompt`` from ``start`` on that happens meanwhile."""
        self.forget()

        def keep(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.arguments = {n: kwargs[n] for n in _MERGED if kwargs.get(n) is not None}

        handle = decoder.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()
        self.prompt, self.start = prompt, start


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
def only(
    decoder: nn.Module, kept: Sequence[int], mask: Mask, instead: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Forwards of the model run its decoder on chosen positions while this is open.

    Args:
        kept: ascending indices into the positions that the model is given.
        mask: what the decoder gets as attention mask, over the kept positions.
        instead: arguments over all positions that take the place of the model's own (`Merged`).

    Raises:
        ModelError: the decoder is called in a way in which positions cannot be chosen.
    """
    chosen = torch.tensor(list(kept))
    calls = []

    def choose(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        calls.append(module)
        kwargs = _chosen(module, args, {**kwargs, **(instead or {})}, chosen)
        return args, {**kwargs, "attention_mask": mask}

    handle = decoder.register_forward_pre_hook(choose, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
    if len(calls) != 1:
        raise ModelError(
            f"{type(decoder).__name__} was called {len(calls)} times in one forward, where once was expected; its "
            "visual tokens cannot be pruned."
        )


def _chosen(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], chosen: Tensor
) -> dict[str, Any]:
    tokens = next((t for n in ("inputs_embeds", "input_ids") if (t := kwargs.get(n)) is not None), None)
    if args or tokens is None or kwargs.get("position_ids") is None:
        raise ModelError(
            f"{type(module).__name__} is not called with tokens and positions by name; its visual tokens cannot be "
            "pruned."
        )
    count = tokens.shape[1]
    out: dict[str, Any] = {}
    for name, value in kwargs.items():
        if name in _ALONG and isinstance(value, Tensor):
            out[name] = value.index_select(_ALONG[name], chosen.to(value.device))
        elif name == "deepstack_visual_embeds" and value is not None:
            out[name] = _features(value, kwargs["visual_pos_masks"], chosen)
        elif name != "attention_mask" and isinstance(value, Tensor) and count in value.shape:
            raise ModelError(
                f"{type(module).__name__} takes {name} of shape {tuple(value.shape)}, which is not known to be one "
                "entry per position or not; its visual tokens cannot be pruned."
            )
        else:
            out[name] = value
    return out


def _features(features: Sequence[Tensor], visual: Tensor, chosen: Tensor) -> list[Tensor]:
    """Rows of the features ``[n_visual, d]`` of every deepstack layer that belong to chosen positions."""
    flags = visual[0].cpu()
    rows = (flags.long().cumsum(0) - 1)[chosen][flags[chosen]]
    return [f.index_select(0, rows.to(f.device)) for f in features]
