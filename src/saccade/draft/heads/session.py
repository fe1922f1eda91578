"""A trained head as drafter, with any tree policy, and a warning when its drafts are accepted near chance."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.draft.drafter import DraftSession, TreeDrafter
from saccade.draft.heads.block import FusedHead, Placement
from saccade.draft.heads.config import TargetShape, check_fit
from saccade.draft.heads.head import Head, read_at
from saccade.draft.heads.registry import part_of
from saccade.draft.trees.policy import Frontier, Proposer, TreePolicy, grow
from saccade.errors import ModelError, SaccadeWarning
from saccade.inputs.families import visual_mask
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.cache import RowCache
from saccade.target_model.context import Context, PrefillResult
from saccade.target_model.forward import ForwardOutput, MaskPlan
from saccade.target_model.selfcheck import LogitMap, logit_map
from saccade.tree import DraftTree
from saccade.verify.rule import Rows, Verdict

CHUNK = 1024
"""Prompt entries per forward; bounds the attention mask."""
MASKS = MaskPlan(None, ())
"""Heads have no sliding windows."""


class HeadDrafter(TreeDrafter):
    """Drafter of a head and the target that it was trained for."""

    def __init__(self, head: Head, target: Target, policy: TreePolicy, in_training: bool = False) -> None:
        check_fit(head.config, TargetShape.of(target))
        if head.reach is not None and policy.max_depth > head.reach:
            raise ModelError(
                f"This {head.kind} head drafts {head.reach} tokens ahead, but the tree has up to {policy.max_depth} "
                f"levels; choose a tree of at most {head.reach}."
            )
        super().__init__(policy)
        self.head = head.eval()
        self.fused = FusedHead(head)  # what the head's forwards run on while it drafts
        self.target = target  # whose embedding it shares, and whose LM head unless it has its own
        self._trial = None if in_training else Trial(head.kind)
        self._map = LogitMap() if head.has_lm_head else logit_map(target)

    def open(self, rows: int, target: Context) -> DraftSession:
        session: DraftSession = part_of(self.head.kind, "session")(self, rows, target)
        return session

    def watch(self, verdict: Verdict) -> None:
        """Warn if the first drafts are accepted no more often than chance (`saccade.draft.heads.session`)."""
        if self._trial is not None:
            self._trial.observe(verdict)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[B, N, V]`` of the head's states ``[B, N, d]``, on the scale of the target's."""
        weight = self.target.model.get_output_embeddings().weight
        states = hidden if self.head.has_lm_head else hidden.to(weight.device, weight.dtype)
        logits = self.head.logits(states, self.target.lm_head).to(self.target.device)
        return self._map(logits)


class HeadSession(DraftSession):
    """Base of all heads' sessions: the tree policy's state, and the target's states that the head reads."""

    def __init__(self, drafter: HeadDrafter, rows: int, target: Context) -> None:
        self._drafter, self._context, self._head = drafter, target, drafter.head
        self._device = drafter.target.device
        self._shaping = drafter.policy.open(rows, self._device)
        self._prompts = [0] * rows  # length of each row's last prompt
        self._like = next(self._head.parameters())
        target.requirements.add_layers(*self._head.layers)

    def reserve(self, row: int, capacity: int) -> None:
        """Make room for ``capacity`` tokens; by default none is needed."""

    def forget(self, row: int) -> None:
        self._prompts[row] = 0
        self._shaping.restart(row)

    def observe(
        self, rows: Sequence[int], tree: DraftTree, scores: Tensor, verdict: Verdict, output: ForwardOutput
    ) -> None:
        self._shaping.observe(rows, verdict)
        self._drafter.watch(verdict)

    def _continue(self, row: int, prompt: Prompt, start: int) -> None:
        """Take in a row's prompt of which ``start`` tokens are known; the policy begins again but in a later turn."""
        if start < self._prompts[row]:
            self._shaping.restart(row)
        self._prompts[row] = len(prompt)

    def _states(self, output: ForwardOutput) -> Tensor:
        """Return the states ``[A, N, F]`` that the head reads of a target forward."""
        return torch.cat([output.hidden[layer] for layer in self._head.layers], -1).to(self._like)


class HeadDraftSession(HeadSession):
    """KV cache of a head, and the target's states for its entries.

    A step starts with one forward over the tokens emitted last, with the target's own states: entries of draft tokens,
    computed from the head's states, are dropped, and accepted tokens run again. Below the root every node gets its
    parent's output.

    The target's states are retained for every token of a row: a later turn resumes where the target does, and its
    first entry needs the state before it, which the target does not compute again.
    """

    lag: ClassVar[int] = 1
    """Distance in tokens from an entry back to the target's state that it gets."""

    def __init__(self, drafter: HeadDrafter, rows: int, target: Context) -> None:
        super().__init__(drafter, rows, target)
        self._slack = drafter.policy.max_run + drafter.policy.max_nodes
        self._order = torch.arange(self._slack + 1, device=self._device)
        self.cache: RowCache = self._head.new_cache(rows)  # of the head; one entry per visible token but the first
        self._numbers = self.cache.share_numbers(target.cache)
        self._room = [0] * rows
        # Per row: tokens whose entries have run (hidden ones included), and tokens whose states are stored,
        # among them those of the last verification.
        self._known, self._fed = [0] * rows, [0] * rows
        # Per row: states of steps that were not drafted, and the token of the first; stored once they are needed.
        self._behind: list[tuple[int, list[Tensor]]] = [(0, []) for _ in range(rows)]
        # Per row: offset from the number of entries to the next one's position, and [3, S] M-RoPE positions, if used.
        self._ahead, self._axes = [0] * rows, [torch.empty(0)] * rows
        # Per row [S, d], of the target's states at every token.
        self._features = [self._like.new_zeros(0, self._head.config.hidden_size) for _ in range(rows)]
        target.requirements.embeddings |= self._head.is_shown_visual

    def reserve(self, row: int, capacity: int) -> None:
        self._room[row] = capacity
        features = self._features[row]
        short = capacity + self._drafter.max_nodes + self._drafter.max_depth - features.shape[0]
        if short > 0:
            self._features[row] = pad(features, (0, 0, 0, short))

    def forget(self, row: int) -> None:
        super().forget(row)
        self.cache.release(row)
        self._known[row] = self._fed[row] = self._ahead[row] = 0
        self._behind[row] = 0, []
        self._features[row] = self._features[row][:0]

    def _store(self, row: int, prompt: Prompt, prefill: PrefillResult) -> None:
        """Store the target's states of a prompt."""
        self._catch_features(row)
        start, count = prefill.start, len(prompt)
        states = torch.cat([prefill.hidden[layer] for layer in self._head.layers], -1).to(self._like)
        if states.shape[0] != count - start or start > self._fed[row]:
            raise ModelError(
                "The head lacks states of tokens that the target has read; give both the same prompt, in one session."
            )
        self._features[row][start:count] = self._head.fuse(states)

    @torch.inference_mode()
    def keep(self, row: int, prompt: Prompt, prefill: PrefillResult) -> None:
        self._store(row, prompt, prefill)
        tokens, _ = self._entries(row, prompt, prefill)
        self.cache.crop(row, min(self.cache.lengths[row], int((tokens < prefill.start).sum())))
        self._fed[row] = self._prompts[row] = len(prompt)

    @torch.inference_mode()
    def follow(self, rows: Sequence[int], output: ForwardOutput) -> None:
        states = self._states(output)  # [A, 1, F]
        for place, row in enumerate(rows):
            first, behind = self._behind[row]
            at = self._context.cache.lengths[row]
            if behind and at != first + len(behind):
                behind = []
            self._behind[row] = (first if behind else at), [*behind, states[place]]

    def _catch_features(self, row: int) -> None:
        """Store the states of steps that were not drafted."""
        first, behind = self._behind[row]
        if behind:
            stop = first + len(behind)
            self._features[row][first:stop] = self._head.fuse(torch.cat(behind))
            self._fed[row] = stop
            self._behind[row] = 0, []

    @torch.inference_mode()
    def load(self, row: int, prompt: Prompt, prefill: PrefillResult | None) -> None:
        assert prefill is not None
        self._drafter.fused.refresh()
        self._store(row, prompt, prefill)
        start, count = prefill.start, len(prompt)
        tokens, sources = self._entries(row, prompt, prefill)
        self._place(row, prompt, tokens)
        self.cache.reserve(row, self._room[row] - (count - 1 - len(tokens)) + self._slack)
        held = min(self.cache.lengths[row], int((tokens < start).sum()))
        self.cache.crop(row, held)
        embedded = self._embedded(row, prompt, prefill, tokens[held:])
        for at in range(held, len(tokens), CHUNK):
            part = slice(at, at + CHUNK)
            self._read(row, tokens[part], sources[part], embedded[:, at - held : at - held + CHUNK])
        self._continue(row, prompt, start)
        self._known[row] = self._fed[row] = count
        self._feed_answer(row, prompt)

    def _feed_answer(self, row: int, prompt: Prompt) -> None:
        """Store the first answer token's feature, as `Head.entries` chooses it, at the prompt's last token."""
        visual = self._visual(prompt)
        (source,) = self._head.entries(pad(visual, (0, 1)))[1][-1:].tolist() or [len(prompt) - 1]
        self._features[row][len(prompt) - 1] = self._features[row][source]

    @torch.inference_mode()
    def propose(self, rows: Sequence[int], new: Sequence[Sequence[int]], proposer: Proposer, limit: int) -> DraftTree:
        self._drafter.fused.refresh()
        new = [self._read_late(row, tokens) for row, tokens in zip(rows, new, strict=True)]
        counts = [len(tokens) for tokens in new]
        self._send_numbers(rows, new, counts)
        hidden = self._catch_up(rows, new, max(counts))
        if min(counts) < max(counts):
            last = self._numbers.get(counts) - 1
            hidden = hidden.gather(1, last[:, None, None].expand(-1, -1, hidden.shape[2]))
        ran = [hidden[:, -1:]]  # [A, 1, d] of the root, then [A, W, d] of every level

        def run(frontier: Frontier) -> Tensor:
            ran.append(self._run(rows, frontier, ran))
            return self._drafter.logits(ran[-1])

        roots = self._numbers.get([tokens[-1] for tokens in new])
        growth = self._shaping.begin(rows, roots, proposer)
        tree = grow(self._drafter.policy, growth, self._drafter.logits(ran[0]), run, limit)
        self.cache.drop(rows)
        return tree

    @torch.inference_mode()
    def observe(
        self, rows: Sequence[int], tree: DraftTree, scores: Tensor, verdict: Verdict, output: ForwardOutput
    ) -> None:
        states = self._states(output)  # [A, N, F]
        along = states.gather(1, verdict.path[..., None].expand(-1, -1, states.shape[2]))  # [A, D + 1, F]
        along = self._head.fuse(along)  # [A, D + 1, d]
        # States beyond the accepted tokens are overwritten before they are read.
        for place, row in enumerate(rows):
            first = self._known[row] - 1
            self._features[row][first : first + along.shape[1]] = along[place]
            self._fed[row] = first + along.shape[1]
        super().observe(rows, tree, scores, verdict, output)

    def _visual(self, prompt: Prompt) -> Tensor:
        return visual_mask(self._drafter.target.config, prompt.ids)

    def _entries(self, row: int, prompt: Prompt, prefill: PrefillResult) -> tuple[Tensor, Tensor]:
        """As `Head.entries`, for a prompt that the target has read."""
        return self._head.entries(self._visual(prompt))

    def _place(self, row: int, prompt: Prompt, tokens: Tensor) -> None:
        """Prepare the positions of a prompt's entries (tokens ``[E]``), and of those behind it."""
        if self._head.has_target_positions:
            ids = torch.tensor([prompt.ids], device=self._device)
            positions, self._ahead[row] = self._drafter.target.positions(ids, prompt)
            if positions is not None:
                self._axes[row] = positions[:, 0]

    def _places(self, row: int, tokens: Tensor) -> Tensor:
        """Positions ``[1, N]``, or ``[3, 1, N]`` with M-RoPE, of the next entries of a row's prompt."""
        if self._head.has_target_positions:
            return self._axes[row][:, None, tokens.to(self._device) - self.lag]
        at = self.cache.lengths[row]
        return torch.arange(at, at + len(tokens), device=self._device)[None]

    def _read(self, row: int, tokens: Tensor, sources: Tensor, embedded: Tensor) -> None:
        """Run and commit the next entries of a row's prompt, embedded as ``[1, N, d]``."""
        count, positions = len(tokens), self._places(row, tokens)
        features = read_at(self._features[row], sources.to(self._device))[None]
        self._lay(self.cache, [row], count, None)
        self._head(features, embedded, Placement(positions, cache=self.cache))
        self.cache.commit([row], [range(count)])

    def _lay(self, cache: RowCache, rows: Sequence[int], count: int, attention_mask: Tensor | None) -> None:
        """Lay out the next forward's entries in a cache, with their masks (`MaskPlan.build`)."""
        lengths, pending = [cache.lengths[row] for row in rows], cache.pending[rows[0]]
        dtype = self._like.dtype
        masks = MASKS.build(attention_mask, lengths, count, pending, None, dtype, self._device)
        cache.plan_layout([(rows, count, masks)])

    @property
    def _caches(self) -> list[RowCache]:
        """Caches with an entry per token run."""
        return [self.cache]

    def _send_numbers(self, rows: Sequence[int], new: Sequence[Sequence[int]], counts: list[int]) -> None:
        """Send the integers that drafting and verification need on the device in one transfer."""
        parts = [_padded(new), tuple(tokens[-1] for tokens in new), *self._context.numbers_of(rows)]
        if len(rows) > 1:
            parts.append(tuple(counts))
            for cache in self._caches:
                lengths = [cache.lengths[row] for row in rows]
                parts += [cache.ends(rows), cache.ends(rows, counts), tuple(lengths)]
                parts.append(tuple(held + more for held, more in zip(lengths, counts, strict=True)))
            if any(self._ahead[row] for row in rows):
                firsts = [self.cache.lengths[row] + self._ahead[row] for row in rows]
                parts += [tuple(firsts), tuple(at + more for at, more in zip(firsts, counts, strict=True))]
        self._numbers.send(parts)

    def _read_late(self, row: int, tokens: Sequence[int]) -> Sequence[int]:
        """Read what a row emitted while it was not drafted for, but for the last token; return what is left."""
        self._catch_features(row)
        if len(tokens) <= self._drafter.max_depth + 1:
            return tokens
        self._read_emitted(row, tokens[:-1])
        return tokens[-1:]

    def _read_emitted(self, row: int, tokens: Sequence[int]) -> None:
        for at in range(0, len(tokens), CHUNK):
            part = tokens[at : at + CHUNK]
            self._catch_up([row], [part], len(part))

    def _catch_up(self, rows: Sequence[int], new: Sequence[Sequence[int]], width: int) -> Tensor:
        """Run the tokens that every row emitted last, with the target's states; ``[A, width, d]``."""
        tokens = self._numbers.get(_padded(new)).view(-1, width)
        firsts = [max(self._known[row] - self.lag, 0) for row in rows]
        parts = [self._features[row][first : first + width] for row, first in zip(rows, firsts, strict=True)]
        hidden = self._forward(rows, torch.stack(parts), tokens, None, None, 0)
        self.cache.commit(rows, [range(len(t)) for t in new])
        for row, emitted in zip(rows, new, strict=True):
            self._known[row] += len(emitted)
        return hidden

    def _run(self, rows: Sequence[int], frontier: Frontier, ran: list[Tensor]) -> Tensor:
        """Return the states ``[A, W, d]`` of a frontier; each node gets its parent's state of those in ``ran``."""
        if frontier.attention_mask is None:
            features = ran[-1][:, -1:]
        elif len(ran) == 1:
            features = ran[0].expand(-1, frontier.tokens.shape[1], -1)
        else:
            # Entries are in order of their levels: the last one visible to a node before its own level is its parent.
            earlier = torch.cat(ran[1:], 1)
            order = self._order[: earlier.shape[1]]
            parent = (frontier.attention_mask[..., : len(order)] * order).amax(-1)  # [A or 1, W]
            parent = parent[..., None].expand(earlier.shape[0], -1, earlier.shape[2])
            features = earlier.gather(1, parent)
        return self._forward(
            rows, features, frontier.tokens, frontier.attention_mask, frontier.depth - 1, frontier.depth
        )

    def _forward(
        self, rows: Rows, features: Tensor, tokens: Tensor, mask: Tensor | None, gap: int | None, step: int
    ) -> Tensor:
        """Run pending entries of some rows, ``gap`` positions after their committed ones; None: one behind another."""
        at = self._placed(self.cache, rows, tokens.shape[1], gap)
        self._lay(self.cache, rows, tokens.shape[1], mask)
        out: Tensor = self._head(features, self._embed(rows, tokens), at, step)
        return out

    def _placed(self, cache: RowCache, rows: Sequence[int], count: int, gap: int | None) -> Placement:
        """Return the placement of ``count`` entries per row, whose positions count the committed ones of ``cache``."""
        firsts = [cache.lengths[row] + self._ahead[row] for row in rows]
        far = range(count) if gap is None else range(gap, gap + 1)
        last = max(firsts) + far[-1]
        if last >= len(self._order):
            self._order = torch.arange(2 * last, device=self._device)
        if min(firsts) < max(firsts):
            positions = self._numbers.get(firsts)[:, None] + self._order[far.start : far.stop]
        else:
            positions = self._order[firsts[0] + far.start : firsts[0] + far.stop][None]
        return Placement(positions.expand(len(rows), count), cache=self.cache, last=last)

    def _embed(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
        return self._words(tokens)

    def _words(self, tokens: Tensor) -> Tensor:
        """The target's embeddings of tokens, in the head's dtype."""
        return self._drafter.target.embed(tokens).to(self._like.dtype)

    def _embedded(self, row: int, prompt: Prompt, prefill: PrefillResult, tokens: Tensor) -> Tensor:
        """Return the target decoder's inputs ``[1, E, d]`` for these tokens, visual features included."""
        ids = torch.tensor([prompt.ids], device=self._device)[:, tokens.to(self._device)]
        embedded = self._words(ids)
        if not self._head.is_shown_visual or not prompt.media:
            return embedded
        new = (tokens >= prefill.start).to(self._device)
        inputs = self._inputs(prefill)
        embedded[0, new] = inputs[tokens[tokens >= prefill.start].to(inputs.device) - prefill.start].to(embedded)
        return embedded

    def _inputs(self, prefill: PrefillResult) -> Tensor:
        """Return the target decoder's inputs ``[S - start, d]``."""
        if prefill.embeddings is None:
            raise ModelError(
                f"{type(self._drafter.target.decoder).__name__} gets no embeddings in a known way, which a head "
                "that sees visual tokens needs; use a head that hides them."
            )
        return prefill.embeddings


def _padded(new: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the rows' tokens one after the other, each row padded to the longest."""
    width = max(map(len, new))
    return tuple(token for tokens in new for token in (*tokens, *[0] * (width - len(tokens))))


STEPS = 32
"""Drafts that are judged."""
LEAST = 0.1
"""Accepted tokens per draft below which a head is reported. Heads that work have one and more (EAGLE, Table 1)."""


class Trial:
    """Acceptance of a head's first drafts, over all rows.

    A head for another target, with norms, layers or positions read wrongly, or with another prompt format, drafts
    nonsense, and nothing but the speed shows it. Loading stays cheap: the check reads the verdicts of the first drafts
    that are verified anyway, and costs one transfer.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._drafts = 0
        self._accepted: Tensor | None = None

    def observe(self, verdict: Verdict) -> None:
        """Count a step's accepted tokens, and warn once if too few of the first drafts' were accepted."""
        if self._drafts >= STEPS:
            return
        self._drafts += len(verdict.count)
        count = verdict.count.sum()
        self._accepted = count if self._accepted is None else self._accepted + count
        if self._drafts < STEPS:
            return
        accepted = int(self._accepted)
        if accepted < LEAST * self._drafts:
            warnings.warn(
                f"Of the first {self._drafts} drafts of this {self._kind} head {accepted or 'no'} tokens were "
                "accepted, which is near chance: it belongs to another target or prompt format, or is read wrongly. "
                "Answers are right, but slow; `saccade inspect HEAD -t TARGET` compares the two.",
                SaccadeWarning,
                stacklevel=2,
            )
