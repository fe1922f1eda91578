"""A model's KV cache with its contents, row by row, so that a later prompt prefills only its new tokens."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence

from torch import Tensor

from saccade.inputs.batching import media_spans
from saccade.inputs.families import family_of
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Target
from saccade.target.cache import RowCache, on_device
from saccade.target.forward import ForwardOutput, Requirements, TokenBlock
from saccade.target.media_cache import MediaCache
from saccade.target.positions import check_types
from saccade.target.prefill import MediaSpan, Prefill, PrefillResult, RowContent, num_cached

CHUNK = 2048
"""Prompt tokens per pass of `Context.load`; bounds the attention mask."""


class Context:
    """A model with its KV cache for up to ``rows`` rows."""

    def __init__(
        self, target: Target, rows: int, media: MediaCache | None = None, max_slots: int = sys.maxsize
    ) -> None:
        self.target = target
        self.cache: RowCache = target.new_cache(rows, max_slots)
        if target.graphs is not None:  # the next context finds its graphs
            weakref.finalize(self, target.graphs.give_back, self.cache).atexit = False
        self.requirements = Requirements()
        self.media = media or MediaCache()  # features of images and videos
        self.media.counted = self.media.counted or target  # the first context of a cache is the target's
        self._contents = [RowContent() for _ in range(rows)]

    @property
    def rows(self) -> int:
        """Rows of the cache."""
        return self.cache.rows

    @property
    def lengths(self) -> list[int]:
        """Committed entries per row."""
        return self.cache.lengths

    def dropped(self, row: int) -> list[int]:
        """Positions of a row without an entry (pruned visual tokens)."""
        return self._contents[row].dropped

    def shared_prefix(self, row: int, prompt: Prompt) -> int:
        """Number of leading ids of a prompt that a row holds."""
        return self.shared_prefixes([row], prompt)[row]

    def shared_prefixes(self, rows: Sequence[int], prompt: Prompt) -> dict[int, int]:
        """Number of leading ids of a prompt that each of some rows holds."""
        spans = self._media_spans(prompt)
        contents = {row: self._contents[row] for row in rows}
        return {row: _shared_prefix(content.ids, content.media, prompt.ids, spans) for row, content in contents.items()}

    def prefill(self, row: int, prompt: Prompt, dropped: Sequence[int] = ()) -> Prefill:
        """Begin the prefill of a prompt into a row, reusing the common prefix with the row's content.

        Nothing is reused across the length at which the rotary embedding changes (longrope).
        """
        self.target.check_length(len(prompt))
        if prompt.media:
            check_types(self.target.model)
        content, spans = self._contents[row], self._media_spans(prompt)
        is_long = self.target.traits.limits.is_long(len(prompt))
        start = self.shared_prefix(row, prompt) if is_long == content.is_long else 0
        if prompt.media and not family_of(self.target.config).is_known:
            start = 0  # its placeholders cannot be assigned to media
        needs = self.requirements
        if needs.attention is not None and spans and not 0 < content.prompt_length <= start:
            # Not a later turn of the same conversation: all querying tokens must run, as in an empty row.
            start = min(start, max(last for _, last, _ in spans)) if needs.queries == "words" else 0
        gone = [*(d for d in content.dropped if d < start), *(d for d in dropped if d >= start)]
        self._contents[row] = reused = RowContent(
            ids=list(prompt.ids[:start]),
            media=[m for m in spans if m[1] <= start],
            dropped=[d for d in gone if d < start],
            is_long=is_long,
            rope_delta=content.rope_delta,
            slot_shifts=content.slot_shifts,
        )
        self.cache.crop(row, num_cached(start, gone))
        return Prefill(self, row, reused, prompt, spans, start, gone)

    def load(self, row: int, prompt: Prompt, dropped: Sequence[int] = ()) -> PrefillResult:
        """Prefill a whole prompt into a row; arguments and errors as of `prefill`."""
        prefill = self.prefill(row, prompt, dropped)
        self.cache.reserve(row, prefill.entries)
        while not prefill.done:
            prefill.run(prefill.chunk_end(CHUNK))
        return prefill.result

    def forget(self, row: int) -> None:
        """Empty a row and free its slots."""
        self.empty(row)
        self.cache.release(row)

    def empty(self, row: int) -> None:
        """Empty a row without freeing its slots."""
        self._contents[row] = RowContent()
        self.cache.crop(row, 0)

    def forward(
        self,
        rows: Sequence[int],
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        depth: Tensor | None = None,
    ) -> ForwardOutput:
        """Run new tokens of some rows; arguments as of `TokenBlock`."""
        (output,) = self.run([self.block(rows, tokens, attention_mask, depth)])
        return output

    def run(self, blocks: Sequence[TokenBlock]) -> list[ForwardOutput]:
        """Run blocks together."""
        return self.target.forward(self.cache, blocks, self.requirements)

    def early_exit(
        self, rows: Sequence[int], tokens: Tensor, attention_mask: Tensor | None, depth: Tensor, layer: int
    ) -> Tensor:
        """Return the input of ``layer``, ``[A, n, d]``; see `Target.early_exit`."""
        return self.target.early_exit(self.cache, self.block(rows, tokens, attention_mask, depth), layer)

    def numbers_of(self, rows: Sequence[int], new: Sequence[int] = ()) -> list[tuple[int, ...]]:
        """Return integers that a forward of some rows reads on the device, once ``new`` more entries are committed.

        Where `RowCache.numbers` has sent them ahead, with others, the forward sends none.
        """
        if len(rows) == 1:
            return []
        more = new or [0] * len(rows)
        deltas = tuple(self._contents[row].rope_delta for row in rows)
        first = [self.cache.lengths[row] + n + d for row, n, d in zip(rows, more, deltas, strict=True)]
        needed = [self.cache.ends(rows, more)]
        needed += [tuple(first)] if min(first) < max(first) else []
        return needed + ([deltas] if max(deltas) > 0 else [])

    def block(
        self,
        rows: Sequence[int],
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        depth: Tensor | None = None,
    ) -> TokenBlock:
        """Build a block of tokens behind the rows' content."""
        deltas = [self._contents[row].rope_delta for row in rows]
        return TokenBlock(rows, tokens, attention_mask, depth, deltas, self._slot_shifts(rows))

    def commit(self, rows: Sequence[int], chosen: Sequence[Sequence[int]], ids: Sequence[Sequence[int]]) -> None:
        """Commit chosen pending entries of some rows, whose token ids are ``ids``; drop their others."""
        self.cache.commit(rows, chosen)
        for row, new in zip(rows, ids, strict=True):
            self._contents[row].ids.extend(new)

    def _media_spans(self, prompt: Prompt) -> list[MediaSpan]:
        spans = media_spans(self.target.config, prompt)
        return [(a, b, m.digest) for (a, b), m in zip(spans, prompt.media, strict=True)]

    def _slot_shifts(self, rows: Sequence[int]) -> Tensor | None:
        """``[A, S]`` gaps counted back from the rows' ends; None without gaps."""
        if all(self._contents[row].slot_shifts is None for row in rows):
            return None
        longest = max(self.cache.lengths[row] for row in rows)
        table = []
        for row in rows:
            own, length = self._contents[row].slot_shifts or [], self.cache.lengths[row]
            table.append([*[0] * (longest - length), *own[:length], *[0] * (length - len(own))])
        return on_device(table, self.target.device)


def _shared_prefix(
    cached: Sequence[int], cached_media: Sequence[MediaSpan], ids: Sequence[int], media: Sequence[MediaSpan]
) -> int:
    """Length of the common prefix, never inside a medium and always short of the whole prompt."""
    limit = min(len(cached), len(ids) - 1)
    shared = next((i for i in range(limit) if cached[i] != ids[i]), limit)
    for old, new in zip(cached_media, media, strict=False):  # one prompt may have more
        if old != new:
            shared = min(shared, old[0], new[0])
            break
    for first, last, _ in (*media, *cached_media):
        if first < shared < last:
            shared = first
    return shared
