"""The forwards of a step, run again without the engine around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.clock import Clock
from saccade.target.adapter import Target
from saccade.target.cache import RowCache
from saccade.target.forward import TokenBlock
from saccade.target.layout import Layout, Span


@dataclass
class Call:
    """One forward of a single row with the tensors that the engine prepared for it."""

    model: Target
    tokens: Tensor  # `[1, n]`
    positions: Tensor  # `[3 or 1, n]`
    wanted: Tensor | None  # which tokens' logits the engine asked for; None for all
    layout: Layout
    slots: int  # of the arena


class Replay:
    """Writes down the forwards of a step and runs them again without the engine."""

    def __init__(self, models: Sequence[Target], clock: Clock) -> None:
        if not all(model.is_lean for model in models):
            raise SystemExit("The engine's cost is measured on models that run on a lean decoder, as the pocket's do.")
        self.calls: list[Call] = []
        self._clock = clock
        self._shadows: dict[tuple[int, int], RowCache] = {}
        self._original = Target._plan

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Write down the forwards while this is open."""
        self.calls.clear()
        original, calls = self._original, self.calls

        def noted(model: Target, cache: RowCache, blocks: Sequence[TokenBlock]) -> Any:
            (block,) = blocks
            layout, positions, wanted = original(model, cache, blocks)
            calls.append(Call(model, block.tokens, positions, wanted, layout, cache.slots))
            return layout, positions, wanted

        Target._plan = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            Target._plan = original  # type: ignore[method-assign]

    @torch.inference_mode()
    def seconds(self, stock: bool) -> float:
        """Time of the noted forwards alone, from ids to logits, on a cache of their own: as large as the engine's,
        with each forward's entries where the engine had them."""
        return sum(self._stock(call) if stock else self._bare(call) for call in self.calls)

    def _bare(self, call: Call) -> float:
        decoder, cache = call.model._lean, self._shadow(call)
        assert decoder is not None
        started = self._clock()
        x = call.model.embed(call.tokens).flatten(0, 1)
        normed = decoder(x, call.positions, cache, call.layout).normed
        decoder.logits(normed if call.wanted is None else normed[call.wanted])
        return self._clock() - started

    def _stock(self, call: Call) -> float:
        (span,) = call.layout.spans
        mask = _mask(call.model, span)
        inputs = call.model._stock_inputs(call.tokens, mask, call.positions, self._shadow(call))
        inputs["logits_to_keep"] = 0 if call.wanted is None else len(call.wanted)
        started = self._clock()
        call.model.model(**inputs)
        return self._clock() - started

    def _shadow(self, call: Call) -> RowCache:
        """A cache that is not the engine's, laid out for the call."""
        key = id(call.model), call.slots
        if key not in self._shadows:
            self._shadows[key] = call.model.new_cache(1)
            self._shadows[key].preallocate(call.slots)
        self._shadows[key].layout = call.layout
        return self._shadows[key]


def _mask(model: Target, span: Span) -> Tensor:
    """``[1, 1, n, K]`` additive; the models here have layers of one kind."""
    (kind,) = span.masks
    mask = span.mask(kind)
    return model._unmasked(span) if mask is None else mask
