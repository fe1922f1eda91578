"""The forwards of a step, run again without the engine around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from clock import Clock
from saccade.target.adapter import Target
from saccade.target.cache import SlotCache
from saccade.target.lean import LeanDecoder


@dataclass
class Call:
    """One forward with the tensors that the engine prepared for it."""

    decoder: LeanDecoder
    tokens: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor
    lengths: list[int]
    pending: int
    capacity: int


class Replay:
    """Writes down the forwards of a step and runs them again without the engine.

    Args:
        models: whose forwards; each must run on its lean decoder.
        clock: what to time them with.
    """

    def __init__(self, models: Sequence[Target], clock: Clock) -> None:
        if not all(model.is_lean for model in models):
            raise SystemExit(
                "The engine's cost is measured on models that run on a lean decoder, as the pocket's do."
            )
        self.calls: list[Call] = []
        self._clock = clock
        self._models = {id(model._lean): model for model in models}
        self._shadows: dict[tuple[int, int], SlotCache] = {}
        self._original = LeanDecoder.__call__

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Write down the forwards while this is open."""
        self.calls.clear()
        original, calls = self._original, self.calls

        def noted(
            decoder: LeanDecoder, tokens: Any, mask: Any, positions: Any, cache: SlotCache, *more: Any
        ) -> Any:
            before = cache.pending - tokens.shape[1]
            calls.append(Call(decoder, tokens, mask, positions, list(cache.lengths), before, cache.capacity))
            return original(decoder, tokens, mask, positions, cache, *more)

        LeanDecoder.__call__ = noted  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            LeanDecoder.__call__ = original  # type: ignore[method-assign]

    @torch.inference_mode()
    def seconds(self, stock: bool) -> float:
        """Time of the noted forwards alone, on a cache of their own that is as full as the engine's was."""
        return sum(self._one(call, stock) for call in self.calls)

    def _one(self, call: Call, stock: bool) -> float:
        model = self._models[id(call.decoder)]
        key = id(model), call.capacity
        if key not in self._shadows:
            self._shadows[key] = model.new_cache(len(call.lengths), call.capacity)
        cache = self._shadows[key]
        cache.lengths, cache.pending = list(call.lengths), call.pending
        cache.writing_nodes(call.tokens.shape[1])
        started = self._clock()
        if stock:
            model.model(
                input_ids=call.tokens,
                attention_mask=call.mask,
                position_ids=call.positions,
                past_key_values=cache,
                use_cache=True,
            )
        else:
            call.decoder(call.tokens, call.mask, call.positions, cache)
        return self._clock() - started
