"""A trained head as drafter, with any tree policy, and a warning when its drafts are accepted near chance."""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.draft.captured import POLICIES, Capture, CapturedDraft, Drafted, DraftGraphs, capturing
from saccade.draft.drafter import WHOLE, Begun, Drafter, DrafterFacts, DraftSession, Loaded
from saccade.draft.heads.head import FusedHead, Head, Placement, TargetShape, check_fit, read_at
from saccade.draft.heads.registry import HEAD_KINDS, part_of
from saccade.draft.trees.policy import ConfidentGrowth, Frontier, Growth, Proposer, TopProposer, TreePolicy, grow
from saccade.errors import ModelError, SaccadeWarning
from saccade.inputs.families.family import Prompt
from saccade.target_model import fusing
from saccade.target_model.adapter import Target
from saccade.target_model.cache import RowCache, on_device
from saccade.target_model.context import Context, PrefillResult
from saccade.target_model.executor import Unread
from saccade.target_model.selfcheck import LogitMap, logit_map
from saccade.target_model.token_blocks import ForwardOutput, MaskPlan
from saccade.tree import DraftTree, Emitted, Rows, at_nodes
from saccade.verify.rule import Verdict

CHUNK = 1024  # prompt entries per forward; bounds the attention mask
TRIAL = 32  # drafts that are judged
LEAST = 0.1
"""Accepted tokens per draft below which a head is reported. Heads that work have one and more (EAGLE, Table 1)."""


class HeadDrafter(Drafter):
    """Drafter of a head and the target that it was trained for.

    A head for another target, with norms, layers or positions read wrongly, or with another prompt format, drafts
    nonsense, and nothing but the speed shows it. In place of a slow check at load, accepted tokens of the first drafts
    are counted, which costs one transfer.
    """

    def __init__(self, head: Head, target: Target, policy: TreePolicy, in_training: bool = False) -> None:
        check_fit(head.config, TargetShape.of(target))
        if head.reach is not None and policy.max_depth > head.reach:
            raise ModelError(
                f"This {head.kind} head drafts {head.reach} tokens ahead, but the tree has up to {policy.max_depth} "
                f"levels; choose a tree of at most {head.reach}."
            )
        numbers = head.cached_numbers + head.config.hidden_size
        held = numbers * next(head.parameters()).element_size()
        self.facts = DrafterFacts.of(policy, is_early=False, entry_bytes=held)
        self.policy = policy  # form of its trees
        self.head = head.eval()
        self.fused = FusedHead(head)  # what the head's forwards run on while it drafts
        self.target = target  # whose embedding it shares, and whose LM head unless it has its own
        self._drafts = TRIAL if in_training else 0  # that were counted
        self._accepted: Tensor | int = 0  # tokens of those
        scaling = LogitMap() if head.has_lm_head else logit_map(target)
        self._map = None if scaling == LogitMap() else scaling
        kind = HEAD_KINDS.get(head.kind)
        self.entries: type[HeadEntries] = HeadEntries if kind is None else part_of(head.kind, "entries")
        self.draft: type[Draft] = LevelDraft if kind is None else part_of(head.kind, "draft")
        is_plain = all(type(p) in fusing.WEIGHTS and p.device == target.device for p in head.parameters())
        self.is_captured = False
        if kind is not None and kind.captured and is_plain and type(policy) in POLICIES:
            self.is_captured = target.executor.reserve_drafts()
        self.spare: list[RowCache] = []  # caches of the last session, where their graphs are found again

    def open(self, rows: int, target: Context) -> DraftSession:
        return HeadDraftSession(self, rows, target)

    def count_accepted(self, verdict: Verdict) -> None:
        """Count the accepted tokens of the first drafts, and warn once if they are too few."""
        if self._drafts >= TRIAL:
            return
        self._drafts += len(verdict.count)
        self._accepted = self._accepted + verdict.count.sum()
        if self._drafts >= TRIAL and int(self._accepted) < LEAST * self._drafts:
            reason = (
                "it belongs to another target or prompt format, or is read wrongly. Answers are right, but slow; "
                "`saccade inspect HEAD -t TARGET` compares the two."
            )
            if self.head.kind == "mtp":
                reason = "it does not suit these prompts, or is read wrongly. Answers are right, but slow."
            warnings.warn(
                f"Of the first {self._drafts} drafts of this {self.head.kind} head {int(self._accepted) or 'no'} "
                f"tokens were accepted, which is near chance: {reason}",
                SaccadeWarning,
                stacklevel=2,
            )

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Return logits ``[B, N, V]`` of the head's outputs ``[B, N, d]`` of a draft step, on the target's scale."""
        weight = self.target.output_embeddings.weight
        states = hidden if self.head.has_lm_head else hidden.to(weight.device, weight.dtype)
        logits = self.head.logits(states, self.target.lm_head, step).to(self.target.device)
        return logits if self._map is None else self._map(logits)


class TargetFeatures:
    """The target's states, fused for a head, at every token of every row, and how many tokens the head has read.

    They are retained for all tokens: a later turn resumes where the target does, and its first entry needs the state
    before it, which the target does not compute again.
    """

    def __init__(self, head: Head, rows: int) -> None:
        self._head = head
        self.like = next(head.parameters())  # of their dtype and device
        self.at = [self.like.new_zeros(0, head.config.hidden_size) for _ in range(rows)]  # [S, d] of every row
        self.known = [0] * rows  # tokens whose entries have run (visual ones without entries included)

    def reserve(self, row: int, count: int) -> None:
        short = count - self.at[row].shape[0]
        if short > 0:
            self.at[row] = pad(self.at[row], (0, 0, 0, short))

    def forget(self, row: int) -> None:
        self.known[row] = 0
        self.at[row] = self.at[row][:0].clone()

    def fused(self, output: ForwardOutput | PrefillResult, path: Tensor | None = None) -> Tensor:
        """Return features ``[A, N, d]`` of a target forward, or ``[N, d]`` of a prompt; of a path's nodes alone."""
        states = torch.cat([output.hidden[layer] for layer in self._head.layers], -1).to(self.like)
        return self._head.fuse(states if path is None else at_nodes(states, path))

    def store(self, row: int, first: int, features: Tensor) -> None:
        """Store features ``[N, d]`` of tokens from ``first`` on."""
        self.at[row][first : first + len(features)] = features

    def latest(self, rows: Rows, width: int) -> list[Tensor]:
        """Features ``[width, d]`` for the next entries of every row, as far as there is memory."""
        firsts = [max(self.known[row] - self._head.lag, 0) for row in rows]
        return [self.at[row][first : first + width] for row, first in zip(rows, firsts, strict=True)]


class HeadEntries:
    """A head's entries: the features that they get, their KV caches and positions.

    Entries of prompts and of emitted tokens get the target's states and stay. Those of draft tokens get the head's
    outputs and are dropped; accepted tokens run again.
    """

    def __init__(self, drafter: HeadDrafter, rows: int, context: Context) -> None:
        self.drafter, self.head, self.context = drafter, drafter.head, context
        self.target, policy = drafter.target, drafter.policy
        self.device = self.target.device
        self.features = TargetFeatures(self.head, rows)
        self.like = self.features.like
        # Most pending entries of a row: of a draft's levels or block, and of the tokens emitted last with padding.
        self.slack = policy.max_nodes + max(policy.max_run, policy.max_depth, self.head.reach or 0)
        self._order = torch.arange(self.slack + 1, device=self.device)
        self.caches, drafter.spare = drafter.spare, []  # those with an entry per token run
        if self.caches and self.caches[0].rows == rows:
            for cache in self.caches:
                cache.reset()
        else:
            self.caches = self.head.new_caches(rows)
        if drafter.is_captured:
            weakref.finalize(self, setattr, drafter, "spare", self.caches).atexit = False
        self.cache: RowCache = self.caches[0]  # of the head; one entry per visible token but the first
        self.memory: RowCache | None = self.caches[1] if len(self.caches) > 1 else None
        self.fixed: CapturedDraft | None = None  # that is being captured
        self._masks = MaskPlan(self.head.window, ())
        self._depths: list[int] = []  # of the pending entries, where a window needs them
        if not self.head.blocks:  # a cache without layers has no device
            self.cache.numbers = context.cache.numbers
        self.numbers = self.cache.share_numbers(context.cache)
        self._room = [0] * rows
        self.prompts = [0] * rows  # length of each row's last prompt
        self._ahead = [0] * rows  # offset from the number of entries to the next one's position
        context.requirements.add_layers(*self.head.layers)
        context.requirements.embeddings |= self.head.is_shown_visual

    def begin(self, row: int, capacity: int) -> None:
        """Make room for a row of ``capacity`` tokens."""
        self._room[row] = capacity
        policy = self.drafter.policy
        self.features.reserve(row, capacity + policy.max_nodes + policy.max_depth)
        for cache in self.caches[1:]:  # the first one in `load`, which knows its entries
            cache.reserve(row, capacity + self.slack)

    def forget(self, row: int) -> None:
        for cache in self.caches:
            cache.release(row)
        self.prompts[row] = self._ahead[row] = 0
        self.features.forget(row)

    def drop(self, rows: Rows) -> None:
        """Drop the entries of draft tokens."""
        for cache in self.caches:
            cache.drop(rows)

    # -- prompts -----------------------------------------------------------------------------------------------

    def resume(self, row: int, prompt: Prompt, prefill: PrefillResult) -> tuple[Tensor, Tensor]:
        """Store a prompt's features, keep the entries of its cached prefix, and return all of them as `choose` does."""
        self.features.store(row, prefill.start, self.features.fused(prefill))
        tokens, sources = self.choose(row, prompt, prefill)
        self.cache.crop(row, int((tokens < prefill.start).sum()))
        self.prompts[row] = len(prompt)
        return tokens, sources

    def load(self, row: int, prompt: Prompt, prefill: PrefillResult) -> None:
        """Run the entries of a prompt that are not cached."""
        tokens, sources = self.resume(row, prompt, prefill)
        positions = self._positions(row, prompt, tokens.to(self.device))
        count, held = len(prompt), self.cache.lengths[row]
        self.cache.reserve(row, self._room[row] - (count - 1 - len(tokens)) + self.slack)
        inputs = self.prompt_inputs(row, prompt, prefill, tokens[held:]) if self.head.reads_words else None
        for at in range(held, len(tokens), CHUNK) if self.head.reads_prompt else ():
            part = slice(at, at + CHUNK)
            chunk = None if inputs is None else inputs[:, at - held : at - held + CHUNK]
            self.read(row, tokens[part], sources[part], chunk, positions[..., part])
        self.features.known[row] = count
        # The first answer token's feature is the one that `Head.entries` chooses.
        (source,) = self.head.entries(pad(self.visual(prompt), (0, 1)))[1][-1:].tolist() or [count - 1]
        if source < count:
            self.features.at[row][count - 1] = self.features.at[row][source]

    def visual(self, prompt: Prompt) -> Tensor:
        return self.target.family.visual_mask(prompt.ids)

    def stops(self, prompt: Prompt) -> list[int]:
        """The tokens after the media: a later turn may start between two adjacent ones."""
        return [stop for _, stop in self.target.family.media_spans(prompt)]

    def choose(self, row: int, prompt: Prompt, prefill: PrefillResult) -> tuple[Tensor, Tensor]:
        """As `Head.entries`, for a prompt that the target has read."""
        return self.head.entries(self.visual(prompt), self.stops(prompt))

    def _positions(self, row: int, prompt: Prompt, tokens: Tensor) -> Tensor:
        """Positions ``[1, E]``, or ``[3, 1, E]`` with M-RoPE, of a prompt's entries; prepares those after it."""
        if self.head.positions == "entries":
            return torch.arange(len(tokens), device=self.device)[None]
        ids = torch.tensor([prompt.ids], device=self.device)
        if self.head.positions == "target":
            positions, self._ahead[row] = self.target.positions(ids, prompt)
            if positions is not None:
                return positions[..., tokens - self.head.lag]
        self._ahead[row] = len(prompt) - self.head.lag - len(tokens)
        return (tokens - self.head.lag)[None]

    def prompt_inputs(self, row: int, prompt: Prompt, prefill: PrefillResult, tokens: Tensor) -> Tensor:
        """Return the target decoder's inputs ``[1, E, d]`` for these tokens, visual features included."""
        places = tokens.tolist()
        ids = [prompt.ids[place] for place in places]
        inputs = self.words(on_device([ids], self.device))
        new = [place - prefill.start for place in places if place >= prefill.start]
        if not self.head.is_shown_visual or not prompt.media or not new:
            return inputs
        decoded = self.decoder_inputs(prefill)
        inputs[0, len(places) - len(new) :] = decoded[on_device(new, decoded.device)].to(inputs)
        return inputs

    def decoder_inputs(self, prefill: PrefillResult) -> Tensor:
        """Return the target decoder's inputs ``[S - start, d]``."""
        if prefill.embeddings is None:
            raise ModelError(
                f"{type(self.target.decoder).__name__} gets no embeddings in a known way, which a head "
                "that sees visual tokens needs; use a head that hides them."
            )
        return prefill.embeddings

    def read(self, row: int, tokens: Tensor, sources: Tensor, inputs: Tensor | None, positions: Tensor) -> None:
        """Run and commit the next entries of a row's prompt, with inputs ``[1, N, d]`` where the head reads words."""
        features = read_at(self.features.at[row], sources.to(self.device))[None]
        self.lay(self.cache, [row], len(tokens), None)
        self.head(features, inputs, Placement(positions, cache=self.cache))
        self.cache.commit([row], [range(len(tokens))])

    # -- emitted and draft tokens ------------------------------------------------------------------------------

    def send_numbers(self, rows: Rows, new: Emitted) -> None:
        """Send the integers that drafting and verification need on the device in one transfer."""
        parts = [_padded(new), tuple(tokens[-1] for tokens in new), *self.context.numbers_of(rows)]
        if len(rows) > 1:
            counts = [len(tokens) for tokens in new]
            parts.append(tuple(counts))
            firsts = self.next_positions(rows)
            parts += [tuple(firsts), tuple(first + count for first, count in zip(firsts, counts, strict=True))]
            for cache in self.caches:
                lengths = [cache.lengths[row] for row in rows]
                parts += [cache.ends(rows), cache.ends(rows, counts), tuple(lengths)]
                parts.append(tuple(held + more for held, more in zip(lengths, counts, strict=True)))
        self.numbers.send(parts)

    def read_late(self, row: int, tokens: Sequence[int]) -> Sequence[int]:
        """Read what a row emitted while it was not drafted for, but for the last token; return what is left."""
        if len(tokens) <= self.drafter.policy.max_depth + 1:
            return tokens
        for at in range(0, len(tokens) - 1, CHUNK):
            part = tokens[at : min(at + CHUNK, len(tokens) - 1)]
            if self.head.reads_prompt:
                self._run_emitted([row], [part])
            self.commit([row], [len(part)])
        return tokens[-1:]

    def catch_up(self, rows: Rows, new: Emitted) -> Tensor:
        """Run and commit the tokens that every row emitted last; return the roots' outputs ``[A, 1, d]``."""
        hidden, counts = self._run_emitted(rows, new), [len(tokens) for tokens in new]
        self.commit(rows, counts)
        if min(counts) == max(counts):
            return hidden[:, -1:]
        last = self.numbers.get(counts) - 1
        return at_nodes(hidden, last[:, None])

    def _run_emitted(self, rows: Rows, new: Emitted) -> Tensor:
        """Run tokens with the target's states; their outputs ``[A, N, d]``, padded."""
        tokens = self.emitted(new)
        features = torch.stack(self.features.latest(rows, tokens.shape[1]))
        return self.run(rows, features, tokens, None, None, 0)

    def emitted(self, new: Emitted) -> Tensor:
        """Tokens ``[A, N]`` that every row emitted last, padded."""
        return self.numbers.get(_padded(new)).view(len(new), -1)

    def roots(self, new: Emitted) -> Tensor:
        """``[A, 1]`` tokens below which trees grow."""
        return self.numbers.get([tokens[-1] for tokens in new])[:, None]

    def commit(self, rows: Rows, counts: Sequence[int]) -> None:
        """Commit the entries of the tokens that every row emitted last."""
        for cache in self.caches:
            cache.commit(rows, [range(count) for count in counts])
        for row, count in zip(rows, counts, strict=True):
            self.features.known[row] += count

    def run_level(self, rows: Rows, frontier: Frontier, ran: Sequence[Tensor]) -> Tensor:
        """Return the states ``[A, W, d]`` of a frontier; each node gets its parent's state of those in ``ran``."""
        features, depth = parents_of(frontier, ran), frontier.depth
        return self.run(rows, features, frontier.tokens, frontier.attention_mask, depth - 1, depth)

    def run(
        self, rows: Rows, features: Tensor, tokens: Tensor, mask: Tensor | None, gap: int | None, step: int
    ) -> Tensor:
        """Run pending entries of some rows; mask as of `Frontier`, ``gap`` as of `place`."""
        at = self.place(rows, tokens.shape[1], mask, gap)
        return self.head(features, self.inputs(rows, tokens), at, step)

    def place(self, rows: Rows, count: int, mask: Tensor | None, gap: int | None) -> Placement:
        """Lay out ``count`` pending entries a row, each ``gap`` positions after committed ones; None: in sequence."""
        if self.fixed is not None:
            positions = self.fixed.place(self.caches, count, mask, gap, self.like.dtype)
            return Placement(positions, cache=self.cache, memory=self.memory, last=self.fixed.shape.last)
        for cache in self.caches:
            self.lay(cache, rows, count, mask, gap)
        return self.placed(rows, count, gap)

    def lay(self, cache: RowCache, rows: Rows, count: int, mask: Tensor | None, gap: int | None = None) -> None:
        """Lay out the next forward's entries in a cache, with their masks; arguments as of `place`."""
        lengths, pending = [cache.lengths[row] for row in rows], cache.pending[rows[0]]
        depth = None
        if self._masks.window is not None and gap is not None:
            self._depths = [*self._depths[:pending], *[gap] * count]
            depth = torch.tensor([self._depths], device=self.device)
        like = self.like.dtype
        masks = self._masks.build(
            lengths, count, dtype=like, device=self.device, pending=pending, attention_mask=mask, depth=depth
        )
        cache.plan_layout([(rows, count, masks)])

    def next_positions(self, rows: Rows) -> list[int]:
        """Position of every row's next entry."""
        return [self.cache.lengths[row] + self._ahead[row] for row in rows]

    def placed(self, rows: Rows, count: int, gap: int | None) -> Placement:
        """Return the placement of ``count`` pending entries per row; ``gap`` as of `place`."""
        firsts = self.next_positions(rows)
        far = range(count) if gap is None else range(gap, gap + 1)
        last = max(firsts) + far[-1]
        if last >= len(self._order):
            self._order = torch.arange(2 * last, device=self.device)
        if min(firsts) < max(firsts):
            positions = self.numbers.get(firsts)[:, None] + self._order[far.start : far.stop]
        else:
            positions = self._order[firsts[0] + far.start : firsts[0] + far.stop][None]
        return Placement(positions.expand(len(rows), count), cache=self.cache, memory=self.memory, last=last)

    def inputs(self, rows: Rows, tokens: Tensor) -> Tensor | None:
        """Return the inputs of emitted and draft tokens for the head, ``[A, N, w]``, if it reads any."""
        return self.head.words(tokens, self.target, self.like.dtype) if self.head.reads_words else None

    def words(self, tokens: Tensor) -> Tensor:
        return self.head.words(tokens, self.target, self.like.dtype)


class Draft(ABC):
    """One step's draft: the logits of a head for every level of trees that grow."""

    forecast: Tensor | None = None  # `[A, W]` probabilities that the next tokens are accepted, of heads that know some

    @classmethod
    @abstractmethod
    def begin(cls, entries: HeadEntries, rows: Rows, new: Emitted, limit: int) -> Self:
        """Begin after the tokens that every row emitted last; no level deeper than ``limit`` can be emitted."""

    @abstractmethod
    def logits(self, frontier: Frontier | None) -> Tensor:
        """Return the logits ``[A, W, V]`` after a frontier's nodes, or ``[A, 1, V]`` after the roots."""


class LevelDraft(Draft):
    """A forward per level, in which every node gets its parent's output."""

    def __init__(self, entries: HeadEntries, rows: Rows, root: Tensor) -> None:
        self._entries, self._rows = entries, rows
        self.ran, self.frontiers = [root], list[Frontier]()

    @classmethod
    def begin(cls, entries: HeadEntries, rows: Rows, new: Emitted, limit: int) -> Self:
        return cls(entries, rows, entries.catch_up(rows, new))

    def logits(self, frontier: Frontier | None) -> Tensor:
        if frontier is None:
            return self._entries.drafter.logits(self.ran[0])
        self.ran.append(self._entries.run_level(self._rows, frontier, self.ran))
        self.frontiers.append(frontier)
        return self._entries.drafter.logits(self.ran[-1], frontier.depth)

    def pair(self, ran: list[Tensor], frontier: Frontier | None) -> tuple[Tensor, Tensor]:
        """Logits of the last captured states, and of what ordinary operations make of those before them."""
        logits, depth = self._entries.drafter.logits, 0 if frontier is None else frontier.depth
        states = self.ran[0] if frontier is None else self._entries.run_level(self._rows, frontier, ran[:-1])
        return logits(ran[-1], depth), logits(states, depth)


class BlockDraft(Draft):
    """One forward for all levels: the logits ``[A, D, V]`` of a block's slots."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def logits(self, frontier: Frontier | None) -> Tensor:
        if frontier is None:
            return self._logits[:, :1]
        return self._logits[:, frontier.depth, None].expand(-1, frontier.tokens.shape[1], -1)


class HeadDraftSession(DraftSession):
    """Drafts of a head, as CUDA graphs where those of its kind are captured."""

    def __init__(self, drafter: HeadDrafter, rows: int, target: Context) -> None:
        self._drafter = drafter
        self._shaping = drafter.policy.open(rows, drafter.target.device)
        self.entries = drafter.entries(drafter, rows, target)
        self._limit = 0  # of the last draft that a graph made
        self._next = Begun()

    def begin(self, row: int, capacity: int, key: str | None = None) -> None:
        self.entries.begin(row, capacity)

    def restart(self, row: int) -> None:
        self._shaping.restart(row)

    def forget(self, row: int) -> None:
        self._next.abandon(row)
        self.entries.forget(row)
        self._shaping.restart(row)

    @torch.inference_mode()
    def skip(self, row: int, prompt: Prompt, prefill: PrefillResult) -> None:
        self._next.abandon(row)
        self.entries.resume(row, prompt, prefill)

    @torch.inference_mode()
    def load(self, row: int, prompt: Prompt, prefill: PrefillResult | None, budget: int | None = None) -> Loaded:
        assert prefill is not None
        self._next.abandon(row)
        self._drafter.fused.refresh()
        if prefill.start < self.entries.prompts[row]:  # not a later turn
            self._shaping.restart(row)
        self.entries.load(row, prompt, prefill)
        return WHOLE

    @torch.inference_mode()
    def propose(self, rows: Rows, new: Emitted, proposer: Proposer, limit: int) -> DraftTree:
        entries = self.entries
        self._drafter.fused.refresh()
        new = [entries.read_late(row, tokens) for row, tokens in zip(rows, new, strict=True)]
        begun, self._next = self._next, Begun()
        capture = self._capture(rows, proposer, limit)
        captured = None if capture is None else capture.draft(new, begun)
        self.can_begin = isinstance(captured, DraftTree)
        if isinstance(captured, DraftTree):
            self._limit = limit
            entries.commit(rows, [len(tokens) for tokens in new])
            return captured
        entries.send_numbers(rows, new)
        draft, roots = self._drafter.draft.begin(entries, rows, new, limit), entries.roots(new)[:, 0]
        tree = None
        if capture is not None and captured is not None:  # to be compared with ordinary operations
            assert isinstance(draft, LevelDraft)
            if capture.agrees(self._shaping.begin(rows, roots, TopProposer()), captured, draft.pair):
                tree = captured.tree()
        if tree is None:
            tree, _ = self._grown(draft, rows, roots, proposer, limit)
        entries.drop(rows)
        return tree

    def _grown(
        self, draft: Draft, rows: Rows, roots: Tensor, proposer: Proposer, limit: int
    ) -> tuple[DraftTree, Growth]:
        """Grow trees below their roots ``[A]``."""
        growth = self._shaping.begin(rows, roots, proposer)
        if isinstance(growth, ConfidentGrowth):
            growth.forecast = lambda: draft.forecast
        policy = self._drafter.policy
        return grow(policy, growth, draft.logits(None), draft.logits, limit, rows, proposer.guide), growth

    def _capture(self, rows: Rows, proposer: Proposer, limit: int) -> Capture | None:
        """Return how drafts of these rows are captured; None where they are not."""
        drafter, entries = self._drafter, self.entries
        executor = capturing(drafter.target, proposer) if drafter.is_captured else None
        moves = drafter.fused.moves() if executor is not None else None
        if executor is None or moves is None:
            return None
        graphs = entries.cache.graphs
        if graphs is None or graphs.pool is not executor:
            graphs = entries.cache.graphs = DraftGraphs(executor, drafter.policy)
        return Capture(
            graphs,
            entries.caches,
            rows,
            entries.next_positions(rows),
            limit,
            entries.numbers,
            entries.context.numbers_of(rows),
            min(entries.like.dtype, drafter.target.dtype, key=lambda each: each.itemsize),
            partial(self._fix, rows, limit),
            entries.features.latest(rows, graphs.width),
            moves,
        )

    @torch.inference_mode()
    def begin_next(self, rows: Rows, tree: DraftTree, verdict: Verdict) -> None:
        unread = Unread(*verdict.emitted(tree.tokens))
        capture = self._capture(rows, TopProposer(), self._limit)
        if capture is not None:
            self._next = capture.begin(unread)

    def _fix(self, rows: Rows, limit: int, inputs: CapturedDraft) -> Drafted:
        """Draft with all numbers in fixed memory."""
        assert inputs.features is not None
        self.entries.fixed = inputs
        try:
            states = self.entries.run(rows, inputs.features, inputs.tokens, None, None, 0)
            draft = LevelDraft(self.entries, rows, at_nodes(states, inputs.last))
            roots = inputs.tokens.gather(1, inputs.last)[:, 0]
            tree, growth = self._grown(draft, rows, roots, TopProposer(), limit)
            return Drafted(tree, growth, draft.ran, draft.frontiers)
        finally:
            self.entries.fixed = None

    @torch.inference_mode()
    def observe(
        self, rows: Rows, tree: DraftTree, scores: Tensor, verdict: Verdict, output: ForwardOutput, drafted: bool
    ) -> None:
        features, lengths = self.entries.features, self.entries.context.cache.lengths
        # Features beyond the accepted tokens are overwritten before they are read.
        for row, along in zip(rows, features.fused(output, verdict.path), strict=True):
            features.store(row, lengths[row], along)
        if not drafted:
            self._next = Begun()
            return
        self._shaping.observe(rows, verdict.on_proposed(tree))
        self._drafter.count_accepted(verdict)


def parents_of(frontier: Frontier, ran: Sequence[Tensor]) -> Tensor:
    """Pick the outputs ``[A, W, d]`` of a frontier's parents from those of the root and of every level so far."""
    if frontier.attention_mask is None:
        return ran[-1][:, -1:]
    if len(ran) == 1:
        return ran[0].expand(-1, frontier.tokens.shape[1], -1)
    # Entries are in order of their levels: the last one visible to a node before its own level is its parent.
    earlier = torch.cat([*ran[1:]], 1)
    order = torch.arange(earlier.shape[1], device=earlier.device)
    parent = (frontier.attention_mask[..., : len(order)] * order).amax(-1)  # [A or 1, W]
    parent = parent[..., None].expand(earlier.shape[0], -1, earlier.shape[2])
    return earlier.gather(1, parent)


def _padded(new: Emitted) -> tuple[int, ...]:
    """Return the rows' tokens one after the other, each row padded to the longest."""
    width, padded = max(map(len, new)), list[int]()
    for tokens in new:
        padded += tokens
        padded += [0] * (width - len(tokens))
    return tuple(padded)
