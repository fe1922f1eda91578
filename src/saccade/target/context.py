"""What each row of a model's KV cache holds, so that a later turn prefills only what is new."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.inputs.batch import media_spans
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Prefill, Target
from saccade.target.attention import PromptAttention
from saccade.target.cache import SlotCache
from saccade.target.features import Hidden
from saccade.target.selected import Merged, held_of, shift_of


@dataclass(slots=True)
class _Held:
    """Ids in a row's cache, where its media stand (first, last, digest), and which ids it has left out.

    Attributes:
        is_long: whether they were read with a longrope embedding's long factors.
    """

    ids: list[int] = field(default_factory=list)
    media: list[tuple[int, int, str]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    is_long: bool = False


class Context:
    """A model with its KV cache for B rows.

    Attributes:
        deltas: ``[B, 1]`` rope deltas on the model's device.
        reused: prompt tokens that the last `load` found in the cache, per row.
        hidden: hidden states that every prefill and forward is to leave there; None for none.
        attention: what every prefill is to leave there of the attention of the prompt's words; None for nothing.
        merged: likewise what the decoder was given.
    """

    def __init__(self, target: Target, batch: int, capacity: int) -> None:
        self.target = target
        self.cache: SlotCache = target.new_cache(batch, capacity)
        self.deltas = torch.zeros(batch, 1, dtype=torch.long, device=target.device)
        self.reused = [0] * batch
        self.hidden: Hidden | None = None
        self.attention: PromptAttention | None = None
        self.merged: Merged | None = None
        self._shift: Tensor | None = None
        self._held = [_Held() for _ in range(batch)]

    @property
    def lengths(self) -> list[int]:
        """Committed entries per row."""
        return self.cache.lengths

    def want_hidden(self, layer: int) -> Hidden:
        """Have every prefill and forward leave this layer's states (see `Hidden`, after the final norm)."""
        layers = () if self.hidden is None else self.hidden.layers
        if self.hidden is None:
            self.hidden = Hidden(())
        self.hidden.layers = tuple(sorted({*layers, layer}))
        return self.hidden

    def load(
        self, row: int, prompt: Prompt, dropped: Sequence[int] = (), merged: Merged | None = None
    ) -> Prefill:
        """Make the row hold ``prompt``: what it shares with the row's content is reused, the rest prefilled.

        Everything is, once the prompt has become so long that its rotary embedding is another one.

        Args:
            dropped: ascending positions of visual tokens that the decoder never sees. In the part that is reused,
                what was left out then stays left out.
            merged: what another context of the same model was given for this prompt.
        """
        held = self._held[row]
        spans = media_spans(self.target.config, prompt)
        marks = [(a, b, m.digest) for (a, b), m in zip(spans, prompt.media, strict=True)]
        is_long = self.target.family.limits.is_long(len(prompt))
        start = _shared(held, prompt.ids, marks) if is_long == held.is_long else 0
        held.ids, held.media = list(prompt.ids[:start]), [m for m in marks if m[1] <= start]
        held.dropped = [d for d in held.dropped if d < start]
        gone = [*held.dropped, *(d for d in dropped if d >= start)]
        self.cache.crop(row, held_of(start, gone))
        self.reused[row] = start
        with ExitStack() as readers:
            if self.attention is not None:
                readers.enter_context(self.attention.reading(self.target, prompt, start))
            if self.merged is not None:
                readers.enter_context(self.merged.reading(self.target.decoder, prompt, start))
            result = self.target.prefill(self.cache, row, prompt, start, self.hidden, gone, merged)
        held.ids, held.media, held.dropped, held.is_long = list(prompt.ids), marks, gone, is_long
        self.deltas[row] = result.rope_delta
        self._note_gaps(row, len(prompt), gone)
        return result

    def _note_gaps(self, row: int, length: int, dropped: Sequence[int]) -> None:
        """Keep how far the row's entries stand before their slots, where windows ask for it."""
        if self.target.family.masks.window is None or not (dropped or self._shift is not None):
            return
        shift = torch.tensor(shift_of(length, dropped), device=self.target.device, dtype=torch.long)
        old = self._shift if self._shift is not None else self.deltas[:, :0]
        self._shift = pad(old, (0, max(len(shift) - old.shape[1], 0)))
        self._shift[row] = pad(shift, (0, self._shift.shape[1] - len(shift)))

    def forward(self, tokens: Tensor, allow: Tensor, depth: Tensor) -> Tensor:
        """Logits ``[B, Q, V]`` of new tokens; see `Target.forward`."""
        return self.target.forward(self.cache, tokens, allow, depth, self.deltas, self.hidden, self._shift)

    def forward_rows(self, rows: slice, tokens: Tensor, allow: Tensor, depth: Tensor) -> Tensor:
        """The same for some neighbouring rows alone, of which everything pending is to be dropped."""
        shift = None if self._shift is None else self._shift[rows]
        part, deltas = self.cache.part(rows), self.deltas[rows]
        return self.target.forward(part, tokens, allow, depth, deltas, self.hidden, shift)

    def early(self, tokens: Tensor, allow: Tensor, depth: Tensor, layer: int) -> Tensor:
        """What enters ``layer``, ``[B, Q, d]``; see `Target.early`. `hidden` is left as it is."""
        return self.target.early(self.cache, tokens, allow, depth, self.deltas, layer, self._shift)

    def keep(self, chosen: Sequence[Sequence[int]], ids: Sequence[Sequence[int]]) -> None:
        """Commit chosen pending entries of every row, whose token ids are ``ids``; drop the others."""
        self.cache.keep(chosen)
        for held, new in zip(self._held, ids, strict=True):
            held.ids.extend(new)


def _shared(held: _Held, ids: Sequence[int], marks: Sequence[tuple[int, int, str]]) -> int:
    """Length of the common prefix, never inside a medium and always short of the whole prompt."""
    limit = min(len(held.ids), len(ids) - 1)
    same = next((i for i in range(limit) if held.ids[i] != ids[i]), limit)
    for ours, theirs in zip(held.media, marks, strict=False):  # one prompt may have more
        if ours != theirs:
            same = min(same, ours[0], theirs[0])
            break
    for first, last, _ in (*marks, *held.media):
        if first < same < last:
            same = first
    return same
