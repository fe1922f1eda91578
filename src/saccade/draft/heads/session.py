"""A trained head as drafter, with any tree policy, and a warning when its drafts are accepted near chance."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from saccade.draft.captured import Capture, CapturedDraft, Drafted, DraftGraphs, capturing, reserve
from saccade.draft.drafter import WHOLE, Begun, Drafter, DrafterFacts, DraftSession, Loaded
from saccade.draft.heads.head import FusedHead, Head, Placement, TargetShape, check_fit, read_at
from saccade.draft.heads.registry import HEAD_KINDS, part_of
from saccade.draft.trees.policy import Frontier, Growth, Proposer, TopProposer, TreePolicy, grow
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
    nonsense, and nothing but the speed shows it. Loading stays cheap: the first drafts' verdicts are counted, which
    costs one transfer.
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
        self._drafts = TRIAL if in_training else 0  # that were judged
        self._accepted: Tensor | int = 0  # tokens of those
        scaling = LogitMap() if head.has_lm_head else logit_map(target)
        self._map = None if scaling == LogitMap() else scaling
        kind = HEAD_KINDS.get(head.kind)
        self._session: Any = HeadDraftSession if kind is None else part_of(head.kind, "session")
        is_plain = all(type(p) in fusing.WEIGHTS and p.device == target.device for p in head.parameters())
        self.is_captured = kind is not None and kind.captured and is_plain and reserve(target, policy)
        self.spare: list[RowCache] = []  # caches of the last session, where their graphs are found again

    def open(self, rows: int, target: Context) -> DraftSession:
        session: DraftSession = self._session(self, rows, target)
        return session

    def judge(self, verdict: Verdict) -> None:
        """Count a step's accepted tokens, and warn once if too few of the first drafts' were accepted."""
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
        self.known = [0] * rows  # tokens whose entries have run (hidden ones included)

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


class HeadDraftSession(DraftSession):
    """KV cache of a head, and the target's states for its entries.

    A step starts with one forward over the tokens emitted last, with the target's own states: entries of draft tokens,
    computed from the head's states, are dropped, and accepted tokens run again. Below the root every node gets its
    parent's output.
    """

    def __init__(self, drafter: HeadDrafter, rows: int, target: Context) -> None:
        self._drafter, self._context, self._head = drafter, target, drafter.head
        self._device = drafter.target.device
        self._shaping = drafter.policy.open(rows, self._device)
        self._features = TargetFeatures(self._head, rows)
        self._like = self._features.like
        self._slack = drafter.policy.max_run + drafter.policy.max_nodes
        self._order = torch.arange(self._slack + 1, device=self._device)
        self._caches, drafter.spare = drafter.spare, []  # those with an entry per token run
        if self._caches and self._caches[0].rows == rows:
            for cache in self._caches:
                cache.reset()
        else:
            self._caches = self._head.new_caches(rows)
        if drafter.is_captured:
            weakref.finalize(self, setattr, drafter, "spare", self._caches).atexit = False
        self.cache: RowCache = self._caches[0]  # of the head; one entry per visible token but the first
        self._fixed: CapturedDraft | None = None  # that is being captured
        self._limit = 0  # of the last draft that a graph made
        self._next = Begun()
        self._masks = MaskPlan(self._head.window, ())
        self._depths: list[int] = []  # of the pending entries, where a window needs them
        if not self._head.blocks:  # a cache without layers has no device
            self.cache.numbers = target.cache.numbers
        self._numbers = self.cache.share_numbers(target.cache)
        self._room = [0] * rows
        self._prompts = [0] * rows  # length of each row's last prompt
        self._ahead = [0] * rows  # offset from the number of entries to the next one's position
        target.requirements.add_layers(*self._head.layers)
        target.requirements.embeddings |= self._head.is_shown_visual

    def begin(self, row: int, capacity: int, key: str | None = None) -> None:
        self._room[row] = capacity
        policy = self._drafter.policy
        self._features.reserve(row, capacity + policy.max_nodes + policy.max_depth)
        for cache in self._caches[1:]:  # the first one when its entries are known
            cache.reserve(row, capacity + self._slack)

    def forget(self, row: int) -> None:
        self._next.abandon(row)
        for cache in self._caches:
            cache.release(row)
        self._prompts[row] = self._ahead[row] = 0
        self._features.forget(row)
        self._shaping.restart(row)

    @torch.inference_mode()
    def skip(self, row: int, prompt: Prompt, prefill: PrefillResult) -> None:
        self._next.abandon(row)
        self._features.store(row, prefill.start, self._features.fused(prefill))
        tokens, _ = self._entries(row, prompt, prefill)
        self.cache.crop(row, min(self.cache.lengths[row], int((tokens < prefill.start).sum())))
        self._prompts[row] = len(prompt)

    @torch.inference_mode()
    def load(self, row: int, prompt: Prompt, prefill: PrefillResult | None, budget: int | None = None) -> Loaded:
        assert prefill is not None
        self._next.abandon(row)
        self._drafter.fused.refresh()
        self._features.store(row, prefill.start, self._features.fused(prefill))
        count = len(prompt)
        tokens, sources = self._entries(row, prompt, prefill)
        positions = self._positions(row, prompt, tokens.to(self._device))
        self.cache.reserve(row, self._room[row] - (count - 1 - len(tokens)) + self._slack)
        held = min(self.cache.lengths[row], int((tokens < prefill.start).sum()))
        self.cache.crop(row, held)
        embedded = self._embedded(row, prompt, prefill, tokens[held:]) if self._head.reads_words else None
        for at in range(held, len(tokens), CHUNK) if self._head.reads_prompt else ():
            part = slice(at, at + CHUNK)
            inputs = None if embedded is None else embedded[:, at - held : at - held + CHUNK]
            self._read(row, tokens[part], sources[part], inputs, positions[..., part])
        if prefill.start < self._prompts[row]:  # not a later turn
            self._shaping.restart(row)
        self._prompts[row] = self._features.known[row] = count
        # The first answer token's feature is the one that `Head.entries` chooses.
        (source,) = self._head.entries(pad(self._visual(prompt), (0, 1)))[1][-1:].tolist() or [count - 1]
        if source < count:
            self._features.at[row][count - 1] = self._features.at[row][source]
        return WHOLE

    @torch.inference_mode()
    def propose(self, rows: Sequence[int], new: Sequence[Sequence[int]], proposer: Proposer, limit: int) -> DraftTree:
        self._drafter.fused.refresh()
        new = [self._read_late(row, tokens) for row, tokens in zip(rows, new, strict=True)]
        begun, self._next = self._next, Begun()
        capture = self._capture(rows, proposer, limit)
        captured = None if capture is None else capture.draft(new, begun)
        self.can_begin = isinstance(captured, DraftTree)
        if isinstance(captured, DraftTree):
            self._limit = limit
            self._pass(rows, [len(tokens) for tokens in new])
            return captured
        self._send_numbers(rows, new)
        root = self._catch_up(rows, new)  # [A, 1, d]
        first = self._numbers.get([tokens[-1] for tokens in new])
        if capture is not None and captured is not None and self._agrees(rows, root, first, capture, captured):
            tree = captured.tree()
        else:
            tree = self._grown(rows, root, first, proposer, limit).tree
        for cache in self._caches:
            cache.drop(rows)
        return tree

    def _grown(self, rows: Rows, root: Tensor, first: Tensor, proposer: Proposer, limit: int) -> Drafted:
        """Grow trees from the roots' states ``[A, 1, d]`` and tokens ``[A]``."""
        ran, frontiers = [root], list[Frontier]()

        def run(frontier: Frontier) -> Tensor:
            ran.append(self._run(rows, frontier, ran))
            frontiers.append(frontier)
            return self._scores(ran[-1], frontier).expand(-1, frontier.tokens.shape[1], -1)

        growth = self._begun(self._shaping.begin(rows, first, proposer))
        tree = grow(self._drafter.policy, growth, self._scores(root, None), run, limit, rows, proposer.guide)
        return Drafted(tree, growth, ran, frontiers)

    def _capture(self, rows: Rows, proposer: Proposer, limit: int) -> Capture | None:
        """Return how drafts of these rows are captured; None where they are not."""
        drafter = self._drafter
        executor = capturing(drafter.target, proposer) if drafter.is_captured else None
        moves = drafter.fused.moves() if executor is not None else None
        if executor is None or moves is None:
            return None
        graphs = self.cache.graphs
        if graphs is None or graphs.pool is not executor:
            graphs = self.cache.graphs = DraftGraphs(executor, drafter.policy)
        return Capture(
            graphs,
            self._caches,
            rows,
            [self.cache.lengths[row] + self._ahead[row] for row in rows],
            limit,
            self._numbers,
            self._context.numbers_of(rows),
            min(self._like.dtype, drafter.target.dtype, key=lambda each: each.itemsize),
            partial(self._fix, rows, limit),
            self._features.latest(rows, graphs.width),
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
        self._fixed = inputs
        try:
            states = self._forward(rows, inputs.features, inputs.tokens, None, None, 0)
            root, first = at_nodes(states, inputs.last), inputs.tokens.gather(1, inputs.last)[:, 0]
            return self._grown(rows, root, first, TopProposer(), limit)
        finally:
            self._fixed = None

    def _agrees(self, rows: Rows, root: Tensor, first: Tensor, capture: Capture, captured: CapturedDraft) -> bool:
        """Whether ordinary operations after the roots' states ``[A, 1, d]`` give a captured draft."""

        def pair(ran: list[Tensor], frontier: Frontier | None) -> tuple[Tensor, Tensor]:
            states = root if frontier is None else self._run(rows, frontier, ran[:-1])
            return self._scores(ran[-1], frontier), self._scores(states, frontier)

        return capture.agrees(self._shaping.begin(rows, first, TopProposer()), captured, pair)

    def _begun(self, growth: Growth) -> Growth:
        """Inform a step's trees of what the head knows beside its logits."""
        return growth

    def _scores(self, states: Tensor, frontier: Frontier | None) -> Tensor:
        """Return the logits ``[A, W or 1, V]`` of a frontier's states, or of the root's."""
        return self._drafter.logits(states, 0 if frontier is None else frontier.depth)

    @torch.inference_mode()
    def observe(
        self, rows: Rows, tree: DraftTree, scores: Tensor, verdict: Verdict, output: ForwardOutput, drafted: bool
    ) -> None:
        # Features beyond the accepted tokens are overwritten before they are read.
        for row, along in zip(rows, self._features.fused(output, verdict.path), strict=True):
            self._features.store(row, self._context.cache.lengths[row], along)
        if not drafted:
            self._next = Begun()
            return
        self._shaping.observe(rows, verdict.on_proposed(tree))
        self._drafter.judge(verdict)

    def _visual(self, prompt: Prompt) -> Tensor:
        return self._drafter.target.family.visual_mask(prompt.ids)

    def _entries(self, row: int, prompt: Prompt, prefill: PrefillResult) -> tuple[Tensor, Tensor]:
        """As `Head.entries`, for a prompt that the target has read."""
        return self._head.entries(self._visual(prompt))

    def _positions(self, row: int, prompt: Prompt, tokens: Tensor) -> Tensor:
        """Positions ``[1, E]``, or ``[3, 1, E]`` with M-RoPE, of a prompt's entries; prepares those after it."""
        if self._head.positions == "entries":
            return torch.arange(len(tokens), device=self._device)[None]
        ids = torch.tensor([prompt.ids], device=self._device)
        if self._head.positions == "target":
            positions, self._ahead[row] = self._drafter.target.positions(ids, prompt)
            if positions is not None:
                return positions[..., tokens - self._head.lag]
        self._ahead[row] = len(prompt) - self._head.lag - len(tokens)
        return (tokens - self._head.lag)[None]

    def _read(self, row: int, tokens: Tensor, sources: Tensor, embedded: Tensor | None, positions: Tensor) -> None:
        """Run and commit the next entries of a row's prompt, embedded as ``[1, N, d]`` where the head reads words."""
        features = read_at(self._features.at[row], sources.to(self._device))[None]
        self._lay(self.cache, [row], len(tokens), None)
        self._head(features, embedded, Placement(positions, cache=self.cache))
        self.cache.commit([row], [range(len(tokens))])

    def _lay(
        self, cache: RowCache, rows: Sequence[int], count: int, attention_mask: Tensor | None, gap: int | None = None
    ) -> None:
        """Lay out the next forward's entries in a cache, with their masks; ``gap`` as of `_forward`."""
        lengths, pending = [cache.lengths[row] for row in rows], cache.pending[rows[0]]
        depth = None
        if self._masks.window is not None and gap is not None:
            self._depths = [*self._depths[:pending], *[gap] * count]
            depth = torch.tensor([self._depths], device=self._device)
        like = self._like.dtype
        masks = self._masks.build(
            lengths, count, dtype=like, device=self._device, pending=pending, attention_mask=attention_mask, depth=depth
        )
        cache.plan_layout([(rows, count, masks)])

    def _send_numbers(self, rows: Sequence[int], new: Sequence[Sequence[int]]) -> None:
        """Send the integers that drafting and verification need on the device in one transfer."""
        parts = [_padded(new), tuple(tokens[-1] for tokens in new), *self._context.numbers_of(rows)]
        if len(rows) > 1:
            counts = [len(tokens) for tokens in new]
            parts.append(tuple(counts))
            firsts = [self.cache.lengths[row] + self._ahead[row] for row in rows]
            parts += [tuple(firsts), tuple(first + count for first, count in zip(firsts, counts, strict=True))]
            for cache in self._caches:
                lengths = [cache.lengths[row] for row in rows]
                parts += [cache.ends(rows), cache.ends(rows, counts), tuple(lengths)]
                parts.append(tuple(held + more for held, more in zip(lengths, counts, strict=True)))
        self._numbers.send(parts)

    def _read_late(self, row: int, tokens: Sequence[int]) -> Sequence[int]:
        """Read what a row emitted while it was not drafted for, but for the last token; return what is left."""
        if len(tokens) <= self._drafter.policy.max_depth + 1:
            return tokens
        for at in range(0, len(tokens) - 1, CHUNK):
            self._run_emitted([row], [tokens[at : min(at + CHUNK, len(tokens) - 1)]])
        return tokens[-1:]

    def _run_emitted(self, rows: Rows, new: Emitted) -> Tensor:
        """Run the tokens that every row emitted last, with the target's states; their outputs ``[A, N, d]``, padded."""
        counts = [len(tokens) for tokens in new]
        width = max(counts)
        tokens = self._numbers.get(_padded(new)).view(-1, width)
        hidden = self._forward(rows, torch.stack(self._features.latest(rows, width)), tokens, None, None, 0)
        self._pass(rows, counts)
        return hidden

    def _catch_up(self, rows: Rows, new: Emitted) -> Tensor:
        """Run the tokens that every row emitted last; return the roots' outputs ``[A, 1, d]``."""
        hidden, counts = self._run_emitted(rows, new), [len(tokens) for tokens in new]
        width = max(counts)
        if min(counts) == width:
            return hidden[:, -1:]
        last = self._numbers.get(counts) - 1
        return at_nodes(hidden, last[:, None])

    def _pass(self, rows: Rows, counts: Sequence[int]) -> None:
        """Commit the entries of the tokens that every row emitted last."""
        for cache in self._caches:
            cache.commit(rows, [range(count) for count in counts])
        for row, count in zip(rows, counts, strict=True):
            self._features.known[row] += count

    def _run(self, rows: Sequence[int], frontier: Frontier, ran: list[Tensor]) -> Tensor:
        """Return the states ``[A, W, d]`` of a frontier; each node gets its parent's state of those in ``ran``."""
        return self._forward(
            rows,
            parents_of(frontier, ran),
            frontier.tokens,
            frontier.attention_mask,
            frontier.depth - 1,
            frontier.depth,
        )

    def _forward(
        self, rows: Rows, features: Tensor, tokens: Tensor, mask: Tensor | None, gap: int | None, step: int
    ) -> Tensor:
        """Run pending entries of some rows, ``gap`` positions after their committed ones; None: one behind another."""
        if self._fixed is not None:
            positions = self._fixed.place(self._caches, tokens.shape[1], mask, gap, self._like.dtype)
            at = Placement(positions, cache=self.cache, last=self._fixed.shape.last)
        else:
            at = self._placed(rows, tokens.shape[1], gap)
            for cache in self._caches:
                self._lay(cache, rows, tokens.shape[1], mask, gap)
        return self._outputs(features, self._embed(rows, tokens), at, step)

    def _outputs(self, features: Tensor, embedded: Tensor | None, at: Placement, step: int) -> Tensor:
        """Return the states ``[A, N, d]`` of laid out entries."""
        return self._head(features, embedded, at, step)

    def _placed(self, rows: Sequence[int], count: int, gap: int | None) -> Placement:
        """Return the placement of ``count`` pending entries per row; ``gap`` as of `_forward`."""
        firsts = [self.cache.lengths[row] + self._ahead[row] for row in rows]
        far = range(count) if gap is None else range(gap, gap + 1)
        last = max(firsts) + far[-1]
        if last >= len(self._order):
            self._order = torch.arange(2 * last, device=self._device)
        if min(firsts) < max(firsts):
            positions = self._numbers.get(firsts)[:, None] + self._order[far.start : far.stop]
        else:
            positions = self._order[firsts[0] + far.start : firsts[0] + far.stop][None]
        return Placement(positions.expand(len(rows), count), cache=self.cache, last=last)

    def _embed(self, rows: Sequence[int], tokens: Tensor) -> Tensor | None:
        """Return the inputs of emitted and draft tokens for the head, ``[A, N, w]``, if it reads any."""
        return self._words(tokens) if self._head.reads_words else None

    def _words(self, tokens: Tensor) -> Tensor:
        return self._head.words(tokens, self._drafter.target, self._like.dtype)

    def _embedded(self, row: int, prompt: Prompt, prefill: PrefillResult, tokens: Tensor) -> Tensor:
        """Return the target decoder's inputs ``[1, E, d]`` for these tokens, visual features included."""
        places = tokens.tolist()
        ids = [prompt.ids[place] for place in places]
        embedded = self._words(on_device([ids], self._device))
        new = [place - prefill.start for place in places if place >= prefill.start]
        if not self._head.is_shown_visual or not prompt.media or not new:
            return embedded
        inputs = self._inputs(prefill)
        embedded[0, len(places) - len(new) :] = inputs[on_device(new, inputs.device)].to(embedded)
        return embedded

    def _inputs(self, prefill: PrefillResult) -> Tensor:
        """Return the target decoder's inputs ``[S - start, d]``."""
        if prefill.embeddings is None:
            raise ModelError(
                f"{type(self._drafter.target.decoder).__name__} gets no embeddings in a known way, which a head "
                "that sees visual tokens needs; use a head that hides them."
            )
        return prefill.embeddings


def parents_of(frontier: Frontier, ran: Sequence[Tensor]) -> Tensor:
    """Return the outputs ``[A, W, d]`` at the parents of a frontier's nodes, of those of the root and every level."""
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


def _padded(new: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the rows' tokens one after the other, each row padded to the longest."""
    width = max(map(len, new))
    return tuple(token for tokens in new for token in (*tokens, *[0] * (width - len(tokens))))
