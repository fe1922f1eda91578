"""A model's KV cache with its contents, row by row, and the prefill of what a prompt does not share with them."""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.inputs.families.family import Medium, Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.cache import RowCache, on_device
from saccade.target_model.executor import Ahead
from saccade.target_model.media_cache import MediaCache, MediaFeatures
from saccade.target_model.stock import AttentionProbe
from saccade.target_model.token_blocks import ForwardOutput, Requirements, TokenBlock

CHUNK = 2048  # prompt tokens per pass of `Context.load`; bounds the attention mask


class Context:
    """A model with its KV cache for up to ``rows`` rows."""

    def __init__(
        self,
        target: Target,
        rows: int,
        media: MediaCache | None = None,
        max_slots: int = sys.maxsize,
        in_levels: bool = False,
    ) -> None:
        self.target, self.rows = target, rows
        self.cache: RowCache = target.new_cache(rows, max_slots, in_levels)
        weakref.finalize(self, target.keep, self.cache).atexit = False
        self.requirements = Requirements()
        self.media = media or MediaCache()  # features of images and videos
        self.media.counted = self.media.counted or target  # the first context of a cache is the target's
        self._contents = [RowContent() for _ in range(rows)]

    @property
    def lengths(self) -> list[int]:
        """Committed entries per row."""
        return self.cache.lengths

    def dropped(self, row: int) -> list[int]:
        """Positions of a row without an entry (pruned visual tokens)."""
        return self._contents[row].dropped

    def shared_prefixes(self, rows: Sequence[int], prompt: Prompt) -> dict[int, int]:
        """Number of leading ids of a prompt that each of some rows holds."""
        spans = self._media_spans(prompt)
        shared = {row: self._contents[row].shared_prefix(prompt.ids, spans) for row in rows}
        states = self.cache.states
        if states is None:
            return shared
        return {row: states.resumable(row, n, self.cache.lengths[row]) for row, n in shared.items()}

    def prefill(self, row: int, prompt: Prompt, dropped: Sequence[int] = ()) -> Prefill:
        """Begin the prefill of a prompt into a row, reusing the common prefix with the row's content."""
        self.target.traits.limits.check(len(prompt))
        content, spans = self._contents[row], self._media_spans(prompt)
        is_long = self.target.traits.limits.is_long(len(prompt))
        start = content.shared_prefix(prompt.ids, spans)
        if is_long != content.is_long:
            start = 0  # the rotary embedding changes in between
        needs = self.requirements
        if needs.attention is not None and spans and not 0 < content.prompt_length <= start:
            # Not a later turn of the same conversation: all querying tokens must run, as in an empty row.
            start = min(start, max(last for _, last, _ in spans)) if needs.queries == "words" else 0
        if self.cache.states is not None:
            has_gaps = bool(dropped or content.dropped)  # where entries and positions differ
            start = 0 if has_gaps else self.cache.states.resumable(row, start, self.cache.lengths[row])
        left = [m for m in spans if m[1] <= start]
        if self.is_opaque(spans, start) or (row in self.cache.carried and left != content.media):
            start = 0  # every token may depend on the pictures
        reused = replace(
            content,
            ids=list(prompt.ids[:start]),
            media=left if start else [],
            dropped=[d for d in content.dropped if d < start],
            is_long=is_long,
            prompt_length=0,
        )
        self._contents[row] = reused
        self.cache.crop(row, num_cached(start, reused.dropped))
        new = [d for d in dropped if d >= start]
        return Prefill(self, row, reused, prompt, spans, [*reused.dropped, *new])

    def load(self, row: int, prompt: Prompt, dropped: Sequence[int] = ()) -> PrefillResult:
        """Prefill a whole prompt into a row; arguments and errors as of `prefill`."""
        prefill = self.prefill(row, prompt, dropped)
        self.cache.reserve(row, prefill.entries)
        while not prefill.done:
            prefill.run(prefill.chunk_end(CHUNK))
        return prefill.result

    def load_together(self, rows: Sequence[int], prompts: Sequence[Prompt]) -> bool:
        """Prefill prompts in one pass; False, and nothing is done, where they are too long or need passes alone."""
        if sum(map(len, prompts)) > CHUNK:
            return False
        prefills = [self.prefill(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]
        if any(prefill.runs_alone for prefill in prefills):
            return False
        for prefill in prefills:
            self.cache.reserve(prefill.row, prefill.entries)
        unread, blocks = [], []
        for prefill in prefills:
            unread += prefill.unread_media(len(prefill.prompt))
        self.media.prepare(self.target, unread)
        for prefill in prefills:
            blocks.append(prefill.block(len(prefill.prompt)))
        for prefill, block, output in zip(prefills, blocks, self.run(blocks), strict=True):
            prefill.record(output)
            self.cache.commit([prefill.row], [range(block.count)])
        return True

    def forget(self, row: int) -> None:
        """Empty a row and free its slots."""
        self.empty(row)
        self.cache.release(row)

    def empty(self, row: int) -> None:
        """Empty a row without freeing its slots."""
        self._contents[row] = RowContent()
        self.cache.crop(row, 0)

    def forward(
        self, rows: Sequence[int], tokens: Tensor, attention_mask: Tensor | None = None, depth: Tensor | None = None
    ) -> ForwardOutput:
        """Run new tokens of some rows; arguments as of `TokenBlock`."""
        (output,) = self.run([self.block(rows, tokens, attention_mask, depth)])
        return output

    def run(self, blocks: Sequence[TokenBlock]) -> list[ForwardOutput]:
        """Run blocks together."""
        return self.target.forward(self.cache, blocks, self.requirements)

    def numbers_of(self, rows: Sequence[int], new: Sequence[int] = ()) -> list[tuple[int, ...]]:
        """Integers that a forward of some rows looks up on the device, once ``new`` more entries are committed."""
        if len(rows) == 1:
            return []
        new = new or [0] * len(rows)
        deltas = tuple(self._contents[row].rope_delta for row in rows)
        ends = [self.cache.lengths[row] + more for row, more in zip(rows, new, strict=True)]
        first = [end + delta for end, delta in zip(ends, deltas, strict=True)]
        needed = [self.cache.ends(rows, new)]
        if min(first) < max(first):
            needed.append(tuple(first))
        return [*needed, deltas] if max(deltas) > 0 else needed

    def block(
        self, rows: Sequence[int], tokens: Tensor, attention_mask: Tensor | None = None, depth: Tensor | None = None
    ) -> TokenBlock:
        """Build a block of tokens after the rows' content."""
        deltas = [self._contents[row].rope_delta for row in rows]
        return TokenBlock(rows, tokens, attention_mask, depth, deltas, self._slot_shifts(rows))

    def run_ahead(self, ahead: Ahead) -> Tensor | None:
        """As of `Executor`, after the rows' entries."""
        first = self.next_positions(ahead.rows)
        return None if first is None else self.target.run_ahead(self.cache, first, ahead)

    def next_positions(self, rows: Sequence[int]) -> list[int] | None:
        """Positions of the rows' next tokens, pending ones counted; None where entries have gaps."""
        if self._slot_shifts(rows) is not None:
            return None
        cache = self.cache
        return [cache.lengths[row] + cache.pending[row] + self._contents[row].rope_delta for row in rows]

    def add_pending(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Take in entries that were written for tokens that were not read then."""
        for row, count in zip(rows, counts, strict=True):
            self.cache.pending[row] += count

    def commit(self, rows: Sequence[int], chosen: Sequence[Sequence[int]], ids: Sequence[Sequence[int]]) -> None:
        """Commit chosen pending entries of some rows, whose token ids are ``ids``; drop their others."""
        self.cache.commit(rows, chosen)
        for row, new in zip(rows, ids, strict=True):
            self._contents[row].ids.extend(new)

    def is_opaque(self, spans: Sequence[MediaSpan], start: int) -> bool:
        """Whether the model itself must take the whole prompt, for its mask or for media of unknown families."""
        if self.target.traits.bidirectional_prompts:
            return True
        return any(last > start for _, last, _ in spans) and not self.target.family.is_known

    def _media_spans(self, prompt: Prompt) -> list[MediaSpan]:
        spans = self.target.family.media_spans(prompt)
        return [(a, b, m.digest) for (a, b), m in zip(spans, prompt.media, strict=True)]

    def _slot_shifts(self, rows: Sequence[int]) -> Tensor | None:
        """``[A, S]`` gaps counted back from the rows' ends; None without gaps."""
        for row in rows:
            if self._contents[row].slot_shifts is not None:
                break
        else:
            return None
        longest = max(self.cache.lengths[row] for row in rows)
        table = []
        for row in rows:
            shifts, length = self._contents[row].slot_shifts or [], self.cache.lengths[row]
            before, after = [0] * (longest - length), [0] * (length - len(shifts))
            table.append([*before, *shifts[:length], *after])
        return on_device(table, self.target.device)


MediaSpan = tuple[int, int, str]
"""First position, position after the last, and digest of a prompt's image or video."""


def retained_positions(start: int, stop: int, dropped: Sequence[int]) -> list[int]:
    """Positions from ``start`` to ``stop`` that are not dropped."""
    gone = set(dropped)
    return [i for i in range(start, stop) if i not in gone]


def num_cached(start: int, dropped: Sequence[int]) -> int:
    """Cache entries of the first ``start`` positions; ``dropped`` is ascending."""
    return start - bisect_left(dropped, start)


def slot_shifts(start: int, dropped: Sequence[int]) -> list[int]:
    """Position minus slot, both counted back from the row's end, of each entry of the first ``start`` positions."""
    retained = retained_positions(0, start, dropped)
    gap = start - len(retained)
    return [position - slot - gap for slot, position in enumerate(retained)]


@dataclass(slots=True)
class RowContent:
    """Prompt and answer whose entries are in a row of the cache."""

    ids: list[int] = field(default_factory=list)  # token ids
    media: list[MediaSpan] = field(default_factory=list)  # spans of images and videos
    dropped: list[int] = field(default_factory=list)  # positions without an entry (pruned visual tokens)
    is_long: bool = False  # whether the entries use a longrope embedding's long factors
    rope_delta: int = 0  # offset from the row's length to its next text position
    slot_shifts: list[int] | None = None  # gaps between entries (`slot_shifts`) if the model has a sliding window
    prompt_length: int = 0  # of the last prefilled prompt; 0 until its prefill is complete

    def shared_prefix(self, ids: Sequence[int], media: Sequence[MediaSpan]) -> int:
        """Length of the common prefix, never inside a medium and always short of the whole prompt."""
        limit = min(len(self.ids), len(ids) - 1)
        shared = next((i for i in range(limit) if self.ids[i] != ids[i]), limit)
        for ours, new in zip(self.media, media, strict=False):  # one prompt may have more
            if ours != new:
                shared = min(shared, ours[0], new[0])
                break
        for first, last, _ in (*media, *self.media):
            if first < shared < last:
                shared = first
        return shared


@dataclass(slots=True)
class PrefillResult:
    """Outputs of a prompt's prefill."""

    prompt: Prompt
    start: int  # leading ids that were cached already
    logits: Tensor | None = None  # `[V]` after the last id
    # layer index -> `[S - start, d]` hidden states of the ids that ran
    hidden: dict[int, Tensor] = field(default_factory=dict)
    embeddings: Tensor | None = None  # `[S - start, d]` decoder inputs of these ids, where required
    columns: Tensor | None = None  # `[S]` float32 attention that each position receives from the querying tokens


class Prefill:
    """A prompt on its way into a row."""

    def __init__(
        self,
        context: Context,
        row: int,
        content: RowContent,
        prompt: Prompt,
        spans: Sequence[MediaSpan],
        dropped: Sequence[int],
    ) -> None:
        self._context, self._target = context, context.target
        self._content = content
        self.row, self.prompt = row, prompt
        self.num_computed = len(content.ids)  # prompt ids whose entries are committed
        self.result = PrefillResult(prompt, self.num_computed)  # outputs so far
        self._spans, self._dropped = spans, dropped
        self._ids = on_device([prompt.ids], self._target.device)
        self._positions, self._rope_delta = self._target.positions(self._ids, prompt)
        self._hidden: list[dict[int, Tensor]] = []
        self._embeddings: list[Tensor] = []
        self._pending: tuple[int, TokenBlock] | None = None
        self._is_opaque = context.is_opaque(spans, self.num_computed)
        # in a single pass: where the longest position selects the factors, or placeholders are unknown
        self._is_indivisible = self._is_opaque or self._target.traits.limits.is_long(len(prompt))
        self._needs_attention = context.requirements.attention is not None and bool(prompt.media)
        self._encoded = 0
        self._looked_up: set[int] = set()

    @property
    def done(self) -> bool:
        """Whether the whole prompt is committed."""
        return self.num_computed >= len(self.prompt)

    @property
    def entries(self) -> int:
        """Cache entries of the whole prompt."""
        return len(self.prompt) - len(self._dropped)

    @property
    def runs_alone(self) -> bool:
        """Whether its chunks need passes of their own, by `run`."""
        return self._is_indivisible or self._needs_attention

    def chunk_end(self, budget: int) -> int:
        """Return where a chunk of about ``budget`` tokens ends: never inside an image, at least one token further."""
        if self._is_indivisible:
            return len(self.prompt)
        stop = min(self.num_computed + max(budget, 1), len(self.prompt))
        for first, last, medium in self._media_before(stop):
            if stop < last and (medium.kind == "image" or self._target.traits.bidirectional_images):
                return last if first <= self.num_computed else first
        return stop

    def num_unencoded(self, stop: int) -> int:
        """Tokens of the media before ``stop`` whose features are not in the media cache."""
        tokens = 0
        for medium, ids in self.unread_media(stop):
            if not self._context.media.has(self._target, medium, ids):
                tokens += len(ids)
        return tokens

    def unread_media(self, stop: int) -> list[tuple[Medium, Sequence[int]]]:
        """Media before ``stop`` that were not encoded ahead, with their ids."""
        if stop <= self._encoded or self._is_opaque:
            return []
        return [(medium, self.prompt.ids[first:last]) for first, last, medium in self._media_before(stop)]

    def encode_media(self, stop: int) -> None:
        """Run the vision tower on the media before ``stop`` ahead of the pass that needs them."""
        self._context.media.prepare(self._target, self.unread_media(stop))
        for first, last, medium in () if self._is_opaque else self._media_before(stop):
            self._features(first, last, medium)
        self._encoded = stop

    def _features(self, first: int, last: int, medium: Medium) -> MediaFeatures:
        again = first in self._looked_up
        self._looked_up.add(first)
        return self._context.media.features(self._target, medium, self.prompt.ids[first:last], again)

    def _media_before(self, stop: int) -> list[tuple[int, int, Medium]]:
        """Media that overlap the ids from ``num_computed`` to ``stop``."""
        return [
            (first, last, medium)
            for (first, last, _), medium in zip(self._spans, self.prompt.media, strict=True)
            if first < stop and last > self.num_computed
        ]

    def block(self, stop: int, final: bool = True) -> TokenBlock:
        """Build the block of tokens up to ``stop``, which runs next."""
        start, device = self.num_computed, self._target.device
        retained = retained_positions(start, stop, self._dropped)
        is_whole = len(retained) == stop - start
        chosen = torch.arange(start, stop, device=device) if is_whole else on_device(retained, device)
        embeddings, deepstack = self._inputs(stop)
        if not is_whole:
            embeddings = None if embeddings is None else embeddings[:, chosen - start]
            deepstack = tuple(layer[chosen - start] for layer in deepstack)
        shifts = None
        if self._target.traits.masks.reach is not None and any(d < start for d in self._dropped):
            table = [slot_shifts(start, self._dropped)]
            shifts = torch.tensor(table, device=device, dtype=torch.long)
        block = TokenBlock(
            rows=[self.row],
            tokens=self._ids[:, chosen],
            attention_mask=self._attention_mask(retained),
            depth=(chosen - start)[None] if self._dropped else None,
            slot_shifts=shifts,
            embeddings=embeddings,
            deepstack=deepstack,
            positions=chosen[None, None] if self._positions is None else self._positions[..., chosen],
            logits_from=len(retained) - 1 if final else len(retained),
            chain=len(retained),
        )
        self._pending = stop, block
        return block

    def record(self, output: ForwardOutput) -> None:
        """Record the output of the block that has run as the row's content."""
        assert self._pending is not None
        stop, block = self._pending
        count, content = block.count, self._content
        if self._context.requirements.layers:
            self._hidden.append({i: s[0, :count] for i, s in output.hidden.items()})
        if self._context.requirements.embeddings:
            inputs = self._target.embed(block.tokens) if block.embeddings is None else block.embeddings
            self._embeddings.append(inputs[0])
        if stop == len(self.prompt):
            self._finish(output.logits[0, 0])
        content.ids.extend(self.prompt.ids[self.num_computed : stop])
        content.media = [m for m in self._spans if m[0] < stop]  # a cut medium equals no whole one
        content.dropped = [d for d in self._dropped if d < stop]
        self.num_computed, self._pending = stop, None

    def run(self, stop: int) -> PrefillResult:
        """Run everything up to ``stop`` in a pass of its own and commit it."""
        cache = self._context.cache
        if self._is_opaque:
            ids = self._ids[:, self.num_computed :]
            output = self._target.forward_prompt(cache, self.row, self.prompt, self._context.requirements)
            block = TokenBlock([self.row], ids, embeddings=output.hidden.get(0), logits_from=ids.shape[1] - 1)
            self._pending = len(self.prompt), block
        else:
            block = self.block(stop, final=stop == len(self.prompt))
            with self._probed(stop) as probe:
                (output,) = self._context.run([block])
            if probe is not None:
                layers = [columns[0].to(self._target.device) for columns in probe.columns.values()]
                columns = torch.stack(layers).mean(0)
                columns = pad(columns, (0, len(self.prompt) - columns.shape[0]))
                known = self.result.columns
                self.result.columns = columns if known is None else known + columns
                if self._target.exact:  # which the probed modules are not
                    cache.drop([self.row])
                    (output,) = self._context.run([block])
        self.record(output)
        cache.commit([self.row], [range(block.count)])
        return self.result

    def _probed(self, stop: int) -> AbstractContextManager[AttentionProbe | None]:
        """Probe the attention of the prompt's querying tokens up to ``stop``; None where there are none."""
        needs, start = self._context.requirements, self.num_computed
        visual = self._target.family.visual_mask(self.prompt.ids).nonzero()[:, 0].tolist()
        first = start
        if visual and needs.queries == "words":
            first = max(start, min(visual[-1] + 1, len(self.prompt) - 1))
        if needs.attention is None or not visual or first >= stop:
            return nullcontext()
        queries = range(first - start, stop - start)
        return AttentionProbe(self._target, queries=queries, layers=needs.attention or None)

    def _finish(self, logits: Tensor) -> None:
        content, length = self._content, len(self.prompt)
        self.result.logits = logits
        content.rope_delta, content.prompt_length = self._rope_delta + len(self._dropped), length
        has_gaps = self._dropped and self._target.traits.masks.reach is not None
        content.slot_shifts = slot_shifts(length, self._dropped) if has_gaps else None
        for layer in self._hidden[0] if self._hidden else ():
            self.result.hidden[layer] = torch.cat([states[layer] for states in self._hidden])
        if self._embeddings:
            self.result.embeddings = torch.cat(self._embeddings)
        self._hidden, self._embeddings = [], []

    def _inputs(self, stop: int) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """Embeddings ``[1, n, d]`` with the media's features in place, and the deepstack features; None for text."""
        start, media = self.num_computed, self._media_before(stop)
        if not media:
            return None, ()
        self._context.media.prepare(self._target, self.unread_media(stop))
        embeddings = self._target.embed(self._ids[:, start:stop]).clone()
        deepstack: list[Tensor] = []
        for first, last, medium in media:
            features = self._features(first, last, medium)
            target = slice(max(first, start) - start, min(last, stop) - start)
            source = slice(max(start - first, 0), stop - first)
            embeddings[0, target] = features.embeddings[source].to(embeddings)
            for layer, part in enumerate(features.deepstack):
                if layer == len(deepstack):
                    deepstack.append(torch.zeros_like(embeddings[0]))
                deepstack[layer][target] = part[source].to(embeddings)
        return embeddings, tuple(deepstack)

    def _attention_mask(self, retained: Sequence[int]) -> Tensor | None:
        """``[1, n, n]`` mask in which image tokens attend both ways; None for plain causal attention."""
        spans = [(a, b) for a, b, _ in self._spans if self.num_computed <= a <= retained[-1]]
        if not spans or not self._target.traits.bidirectional_images:
            return None
        new = len(retained)
        mask = torch.ones(new, new, dtype=torch.bool, device=self._target.device).tril()
        for first, last in spans:
            image = slice(bisect_left(retained, first), bisect_left(retained, last))
            mask[image, image] = True
        return mask[None]
