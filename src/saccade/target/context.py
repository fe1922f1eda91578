"""Contents of a model's KV cache, row by row, so that a later prompt prefills only what is new."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from saccade.inputs.families import family_of
from saccade.inputs.padded import media_spans
from saccade.inputs.prompt import Medium, Prompt
from saccade.target.adapter import Target
from saccade.target.cache import RowCache, on_device
from saccade.target.forward import (
    ForwardOutput,
    Requirements,
    TokenBlock,
    num_cached,
    retained_positions,
    slot_shifts,
)
from saccade.target.media_cache import MediaCache
from saccade.target.positions import check_types
from saccade.target.probe import reading_attention

CHUNK = 2048
"""Prompt tokens that run at once where nobody waits; bounds the attention mask."""


@dataclass(slots=True)
class _Held:
    """Content of a row.

    Attributes:
        ids: token ids in the row's cache.
        media: where its media stand (first, last, digest).
        dropped: positions that were left out.
        is_long: whether they were read with a longrope embedding's long factors.
        delta: what to add to the row's length to get its next text position.
        shift: gaps between entries (`slot_shifts`), where windows ask for them; None without gaps.
        asked: length of the prompt that was read last; 0 until all of it has been.
    """

    ids: list[int] = field(default_factory=list)
    media: list[tuple[int, int, str]] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    is_long: bool = False
    delta: int = 0
    shift: list[int] | None = None
    asked: int = 0


@dataclass(slots=True)
class PrefillResult:
    """What reading a prompt gave.

    Attributes:
        prompt: that was read.
        start: leading ids that the row held already.
        logits: ``[V]`` after the last id.
        hidden: index of the layer -> ``[S - start, d]`` states of the ids that ran.
        embeddings: ``[S - start, d]`` what the decoder was given for them, where asked for.
        columns: ``[S]`` float32 attention that each position gets from the asking tokens, summed over those that
            ran, mean over heads and layers; None where nobody asked or the prompt has no visual tokens.
    """

    prompt: Prompt
    start: int
    logits: Tensor | None = None
    hidden: dict[int, Tensor] = field(default_factory=dict)
    embeddings: Tensor | None = None
    columns: Tensor | None = None


class Context:
    """A model with its KV cache for up to ``rows`` rows.

    Attributes:
        requirements: what every forward is to return besides logits; drafters and rules add to it when they open.
        media: features of images and videos.
    """

    def __init__(self, target: Target, rows: int, media: MediaCache | None = None) -> None:
        self.target = target
        self.cache: RowCache = target.new_cache(rows)
        self.requirements = Requirements()
        self.media = media or MediaCache()
        self._held = [_Held() for _ in range(rows)]

    @property
    def rows(self) -> int:
        """Rows that there is room for."""
        return self.cache.rows

    @property
    def lengths(self) -> list[int]:
        """Committed entries per row."""
        return self.cache.lengths

    def deltas(self, rows: Sequence[int]) -> list[int]:
        """Per row what to add to its length to get its next text position."""
        return [self._held[row].delta for row in rows]

    def shared(self, row: int, prompt: Prompt) -> int:
        """How many leading ids of a prompt a row holds."""
        return _shared(self._held[row].ids, self._held[row].media, prompt.ids, self._marks(prompt))

    def read(self, row: int, prompt: Prompt, dropped: Sequence[int] = ()) -> Prefill:
        """Begin to read a prompt into a row: what it shares with the row's content is reused.

        Nothing is, once the prompt has become so long that its rotary embedding is another one.

        Args:
            dropped: ascending positions of visual tokens that the decoder never sees. In the part that is reused,
                what was left out then stays left out.

        Raises:
            InputError: the prompt is empty or longer than the model's context.
            ModelError: it has images that nothing here can tell the model to read.
        """
        self.target.check_length(len(prompt))
        if prompt.media:
            check_types(self.target.model)
        held, marks = self._held[row], self._marks(prompt)
        is_long = self.target.family.limits.is_long(len(prompt))
        start = _shared(held.ids, held.media, prompt.ids, marks) if is_long == held.is_long else 0
        if prompt.media and not family_of(self.target.config).is_known:
            start = 0  # nobody knows which of its placeholders are whose
        if self.requirements.attention is not None and marks and not 0 < held.asked <= start:
            # No later turn of the same conversation: all that ask of this prompt are to run, as in a fresh row.
            start = (
                min(start, max(last for _, last, _ in marks)) if self.requirements.queries == "words" else 0
            )
        gone = [*(d for d in held.dropped if d < start), *(d for d in dropped if d >= start)]
        self._held[row] = _Held(
            ids=list(prompt.ids[:start]),
            media=[m for m in marks if m[1] <= start],
            dropped=[d for d in gone if d < start],
            is_long=is_long,
            delta=held.delta,
            shift=held.shift,
        )
        self.cache.crop(row, num_cached(start, gone))
        return Prefill(self, row, prompt, marks, start, gone)

    def load(self, row: int, prompt: Prompt, dropped: Sequence[int] = ()) -> PrefillResult:
        """Make a row hold a prompt, at once."""
        reader = self.read(row, prompt, dropped)
        self.cache.reserve(row, reader.entries)
        while not reader.done:
            reader.run(reader.stop(CHUNK))
        return reader.result

    def forget(self, row: int) -> None:
        """Empty a row and free its room."""
        self.empty(row)
        self.cache.release(row)

    def empty(self, row: int) -> None:
        """Empty a row, which keeps its room."""
        self._held[row] = _Held()
        self.cache.crop(row, 0)

    def forward(
        self, rows: Sequence[int], tokens: Tensor, allow: Tensor | None = None, depth: Tensor | None = None
    ) -> ForwardOutput:
        """Run new tokens of some rows; arguments as of `TokenBlock`."""
        (reading,) = self.run([self.piece(rows, tokens, allow, depth)])
        return reading

    def run(self, pieces: Sequence[TokenBlock]) -> list[ForwardOutput]:
        """Run pieces together."""
        return self.target.forward(self.cache, pieces, self.requirements)

    def early_exit(
        self, rows: Sequence[int], tokens: Tensor, allow: Tensor | None, depth: Tensor, layer: int
    ) -> Tensor:
        """What enters ``layer``, ``[A, n, d]``; see `Target.early_exit`."""
        return self.target.early_exit(self.cache, self.piece(rows, tokens, allow, depth), layer)

    def piece(
        self, rows: Sequence[int], tokens: Tensor, allow: Tensor | None = None, depth: Tensor | None = None
    ) -> TokenBlock:
        """Tokens behind what the rows hold."""
        return TokenBlock(rows, tokens, allow, depth, self.deltas(rows), self._shift(rows))

    def commit(
        self, rows: Sequence[int], chosen: Sequence[Sequence[int]], ids: Sequence[Sequence[int]]
    ) -> None:
        """Commit chosen pending entries of some rows, whose token ids are ``ids``; drop their others."""
        self.cache.commit(rows, chosen)
        for row, new in zip(rows, ids, strict=True):
            self._held[row].ids.extend(new)

    def _marks(self, prompt: Prompt) -> list[tuple[int, int, str]]:
        spans = media_spans(self.target.config, prompt)
        return [(a, b, m.digest) for (a, b), m in zip(spans, prompt.media, strict=True)]

    def _shift(self, rows: Sequence[int]) -> Tensor | None:
        """``[A, S]`` gaps counted back from the rows' ends; None without."""
        if all(self._held[row].shift is None for row in rows):
            return None
        longest = max(self.cache.lengths[row] for row in rows)
        table = []
        for row in rows:
            own, length = self._held[row].shift or [], self.cache.lengths[row]
            table.append([*[0] * (longest - length), *own[:length], *[0] * (length - len(own))])
        return on_device(table, self.target.device)


class Prefill:
    """A prompt on its way into a row, in one pass or in chunks between other rows' steps.

    Attributes:
        at: first id that has not run.
        result: what has been read so far.
    """

    def __init__(
        self,
        context: Context,
        row: int,
        prompt: Prompt,
        marks: Sequence[tuple[int, int, str]],
        start: int,
        dropped: Sequence[int],
    ) -> None:
        self._context, self._target = context, context.target
        self.row, self.prompt = row, prompt
        self.at = start
        self.result = PrefillResult(prompt, start)
        self._marks, self._dropped = marks, list(dropped)
        ids = torch.tensor([prompt.ids], device=self._target.device)
        self._ids = ids
        self._positions, self._delta = self._target.positions(ids, prompt)
        self._hidden: list[dict[int, Tensor]] = []
        self._embeddings: list[Tensor] = []
        self._pending: tuple[int, TokenBlock] | None = None
        self._seen = 0

    @property
    def done(self) -> bool:
        """Whether everything has run."""
        return self.at >= len(self.prompt)

    @property
    def delta(self) -> int:
        """What to add to the row's length, once the prompt is in it, to get its next text position."""
        return self._delta + len(self._dropped)

    @property
    def entries(self) -> int:
        """Cache entries that the whole prompt takes."""
        return len(self.prompt) - len(self._dropped)

    @property
    def is_whole(self) -> bool:
        """Whether it must run in one pass: where the longest position decides for all (longrope), or where nobody
        knows which placeholders are whose."""
        limits = self._target.family.limits
        return limits.is_long(len(self.prompt)) or self._is_opaque

    @property
    def needs_attention(self) -> bool:
        """Whether attention has to be read while it runs, which takes a pass of its own."""
        return self._context.requirements.attention is not None and bool(self.prompt.media)

    @property
    def _is_opaque(self) -> bool:
        """Whether the family is unknown, so that its images reach the model as they are."""
        return bool(self.prompt.media) and not family_of(self._target.config).is_known

    def stop(self, budget: int) -> int:
        """Where a chunk of about ``budget`` tokens ends: never inside an image, at least one token on."""
        count = len(self.prompt)
        if self.is_whole:
            return count
        stop = min(self.at + max(budget, 1), count)
        for (first, last, _), medium in zip(self._marks, self.prompt.media, strict=True):
            if medium.kind == "image" and first < stop < last:
                stop = last if first <= self.at else first
        return min(stop, count)

    def unseen(self, stop: int) -> int:
        """Tokens of the media before ``stop`` whose features the tower has yet to make."""
        media = self._context.media
        if stop <= self._seen:
            return 0
        return sum(
            last - first
            for first, last, medium in self._inside(stop)
            if not media.has(self._target, medium, self.prompt.ids[first:last])
        )

    def see(self, stop: int) -> None:
        """Have the tower read the media before ``stop`` ahead of the pass that needs them."""
        for first, last, medium in self._inside(stop):
            self._context.media.features(self._target, medium, self.prompt.ids[first:last])
        self._seen = stop

    def _inside(self, stop: int) -> list[tuple[int, int, Medium]]:
        """Media that stand, wholly or in part, between what has run and ``stop``."""
        return [
            (first, last, medium)
            for (first, last, _), medium in zip(self._marks, self.prompt.media, strict=True)
            if first < stop and last > self.at
        ]

    def piece(self, stop: int, final: bool = True) -> TokenBlock:
        """The tokens up to ``stop``, to be run now.

        Args:
            final: whether the logits after its last token are wanted.
        """
        kept = retained_positions(self.at, stop, self._dropped)
        chosen = None if len(kept) == stop - self.at else torch.tensor(kept, device=self._target.device)
        embeddings, added = self._given(stop)
        tokens = self._ids[:, self.at : stop]
        if chosen is not None:
            tokens = self._ids[:, chosen]
            local = chosen - self.at
            embeddings = None if embeddings is None else embeddings[:, local]
            added = tuple(a[local] for a in added)
        row = self.row
        self._pending = (
            stop,
            TokenBlock(
                rows=[row],
                tokens=tokens,
                allow=self._allowed(kept),
                depth=self._depth(kept),
                shift=self._shift(kept),
                embeddings=embeddings,
                added=added,
                positions=self._places(kept, chosen),
                logits_from=len(kept) - 1 if final else len(kept),
            ),
        )
        return self._pending[1]

    def took(self, reading: ForwardOutput) -> None:
        """Commit the piece that has run.

        Args:
            reading: of that piece; more tokens may have run behind it, which stay pending.
        """
        assert self._pending is not None
        stop, piece = self._pending
        count, held = piece.count, self._context._held[self.row]
        if self._context.requirements.layers:
            self._hidden.append({i: s[0, :count] for i, s in reading.hidden.items()})
        if self._context.requirements.embeddings:
            given = piece.embeddings
            self._embeddings.append(self._target.embed(piece.tokens)[0] if given is None else given[0])
        if stop == len(self.prompt):
            self.result.logits = reading.logits[0, 0]
            self._finish(held)
        held.ids.extend(self.prompt.ids[self.at : stop])
        held.media = [m for m in self._marks if m[0] < stop]  # one that is cut counts as another one's, too
        held.dropped = [d for d in self._dropped if d < stop]
        self.at, self._pending = stop, None

    def run(self, stop: int) -> PrefillResult:
        """Run everything up to ``stop`` alone and commit it."""
        context = self._context
        if self._is_opaque:
            reading, piece = self._whole()
        elif self.needs_attention:
            with reading_attention(context, self, stop):
                piece = self.piece(stop, final=stop == len(self.prompt))
                (reading,) = context.run([piece])
        else:
            piece = self.piece(stop, final=stop == len(self.prompt))
            (reading,) = context.run([piece])
        count = piece.count
        self.took(reading)
        context.cache.commit([self.row], [range(count)])
        return self.result

    def _finish(self, held: _Held) -> None:
        held.delta, held.asked = self.delta, len(self.prompt)
        gaps = self._dropped and self._target.family.masks.window is not None
        held.shift = slot_shifts(len(self.prompt), self._dropped) if gaps else None
        if self._hidden:
            self.result.hidden = {i: torch.cat([h[i] for h in self._hidden]) for i in self._hidden[0]}
        if self._embeddings:
            self.result.embeddings = torch.cat(self._embeddings)
        self._hidden, self._embeddings = [], []

    def _given(self, stop: int) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """Embeddings ``[1, n, d]`` with the media's features in place, and what is added behind the first layers."""
        at = self.at
        inside = self._inside(stop)
        if not inside:
            return None, ()
        embeddings = self._target.embed(self._ids[:, at:stop]).clone()
        added: list[Tensor] = []
        for first, last, medium in inside:
            features = self._context.media.features(self._target, medium, self.prompt.ids[first:last])
            here, there = (
                slice(max(first, at) - at, min(last, stop) - at),
                slice(max(at - first, 0), stop - first),
            )
            embeddings[0, here] = features.embeddings[there].to(embeddings)
            for layer, part in enumerate(features.added):
                if layer == len(added):
                    added.append(torch.zeros_like(embeddings[0]))
                added[layer][here] = part[there].to(embeddings)
        return embeddings, tuple(added)

    def _allowed(self, kept: Sequence[int]) -> Tensor | None:
        """Which of the kept positions see each other where images are read both ways; None for plain causal."""
        if not self._target.family.bidirectional_images:
            return None
        blocks = [(a, b) for a, b, _ in self._marks if a >= self.at and a < kept[-1] + 1]
        if not blocks:
            return None
        new = len(kept)
        allow = torch.ones(new, new, dtype=torch.bool, device=self._target.device).tril()
        for first, last in blocks:
            block = slice(bisect_left(kept, first), bisect_left(kept, last))
            allow[block, block] = True
        return allow[None]

    def _depth(self, kept: Sequence[int]) -> Tensor | None:
        """Positions behind what the row holds, where some are left out."""
        if not self._dropped:
            return None
        return torch.tensor([[place - self.at for place in kept]], device=self._target.device)

    def _shift(self, kept: Sequence[int]) -> Tensor | None:
        """Gaps before this piece, which windows have to know of."""
        if self._target.family.masks.window is None or not any(d < self.at for d in self._dropped):
            return None
        gaps = slot_shifts(self.at, self._dropped)
        return torch.tensor([gaps], device=self._target.device, dtype=torch.long)

    def _places(self, kept: Sequence[int], chosen: Tensor | None) -> Tensor:
        """``[3 or 1, 1, n]``."""
        if self._positions is None:
            if chosen is not None:
                return chosen[None, None]
            return torch.arange(kept[0], kept[-1] + 1, device=self._target.device)[None, None]
        if chosen is not None:
            return self._positions[..., chosen]
        return self._positions[..., kept[0] : kept[-1] + 1]

    def _whole(self) -> tuple[ForwardOutput, TokenBlock]:
        """The whole prompt through the stock model, media and all, for families outside the table."""
        piece = TokenBlock([self.row], self._ids[:, self.at :], logits_from=len(self.prompt) - self.at - 1)
        self._pending = len(self.prompt), piece
        reading = self._target.whole(self._context.cache, self.row, self.prompt, self._context.requirements)
        return reading, piece


def _shared(
    held: Sequence[int],
    media: Sequence[tuple[int, int, str]],
    ids: Sequence[int],
    marks: Sequence[tuple[int, int, str]],
) -> int:
    """Length of the common prefix, never inside a medium and always short of the whole prompt."""
    limit = min(len(held), len(ids) - 1)
    same = next((i for i in range(limit) if held[i] != ids[i]), limit)
    for ours, theirs in zip(media, marks, strict=False):  # one prompt may have more
        if ours != theirs:
            same = min(same, ours[0], theirs[0])
            break
    for first, last, _ in (*marks, *media):
        if first < same < last:
            same = first
    return same
