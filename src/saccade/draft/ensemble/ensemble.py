"""An ensemble of views of one prompt, drafted by one model in one batch (TABED, Lee et al. 2026, Section 5.1).

A view is a form in which the draft model gets the prompt: unchanged, without pictures, pruned, or one of `views`. The
mixture of the views' distributions is a tree policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from saccade.draft.drafter import Drafter, DrafterFacts, DraftSession, Loaded
from saccade.draft.ensemble.weights import TINY, VerifiedBlock, Weighting, blocks_of, make_weighting, verified_positions
from saccade.draft.model import ModelDrafter, ModelDraftSession, is_later_turn
from saccade.draft.pruning import Pruning
from saccade.draft.trees.policy import Frontier, Growth, Proposer, Signals, TreePolicy, signals_of
from saccade.inputs.families import family_of
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.target_model.cache import on_device
from saccade.target_model.context import Context, PrefillResult
from saccade.target_model.token_blocks import ForwardOutput
from saccade.tree import DraftTree, Emitted, Rows
from saccade.verify.rule import Verdict


class View:
    """One form of a prompt; by default the prompt itself, prefilled as any other."""

    seconds = 0.0  # time spent on captions so far
    early = True  # whether it can be loaded before the target's prefill

    def open(self, target: Context) -> None:
        """Start a session; a view that needs the target's attention requests it here."""

    def rewrite(self, prompt: Prompt) -> Prompt:
        """Return the draft model's form of the prompt."""
        return prompt

    def load(
        self, session: ModelDraftSession, row: int, prompt: Prompt, capacity: int, prefill: PrefillResult | None
    ) -> None:
        """Prefill a row of the draft session with the prompt that `read` returned, for ``capacity`` tokens in all."""
        session.begin(row, capacity)
        session.load(row, prompt, prefill)


class Multimodal(View):
    """M: the prompt unchanged."""


class TextOnly(View):
    """T: one newline in place of every image or video (Gagrani et al. 2024)."""

    def __init__(self, config: Any, tokenizer: Any) -> None:
        self._family, self._tokenizer = family_of(config), tokenizer

    def rewrite(self, prompt: Prompt) -> Prompt:
        return self._family.without_media(self._tokenizer, prompt) if prompt.media else prompt


class Pruned(View):
    """R: visual tokens pruned by the target's attention, at their original positions (SpecVLM, Ji et al. 2025)."""

    def __init__(self, pruning: Pruning) -> None:
        self._pruning = pruning
        self.early = not pruning.needs_attention

    def open(self, target: Context) -> None:
        self._target = target.target.family
        if self._pruning.needs_attention:
            target.requirements.add_attention(self._pruning.layers, "words")

    def load(
        self, session: ModelDraftSession, row: int, prompt: Prompt, capacity: int, prefill: PrefillResult | None
    ) -> None:
        # Entries from an earlier prompt were chosen by that prompt's attention. A later turn of the conversation reuses
        # them; for any other prompt the row is emptied, so that it drafts as a fresh row would.
        if self._pruning.needs_attention and prompt.media and not session.continues(row, prompt):
            session.context.empty(row)
        reading = () if prefill is None else (prefill.prompt, prefill.columns, self._target)
        dropped = self._pruning.dropped(session.context.target.family, prompt, *reading)
        session.begin(row, capacity - len(dropped))
        session.load_pruned(row, prompt, dropped)


class EnsembleDrafter(Drafter):
    """One draft model with m views of every prompt, drafting from the weighted mean of their distributions.

    Views of a row are rows of the draft model's batch, so that a draft step is one forward for any number of views.
    Emitted tokens run through every view; draft tokens only through active views, those with a weight in their row.
    The mixture q(.; w) = sum_i w_i q_i enters the tree policy as logits, so policies and proposers work as they do for
    one model. When children are drawn, the request's warpers act on the mixture, and a child is verified with the
    distribution that it was drawn from.

    A row whose views have equal prompts (text alone) has one active view.
    """

    def __init__(
        self,
        model: Target,
        policy: TreePolicy,
        views: Sequence[View],
        weighting: Weighting | None = None,
        vocab_size: int | None = None,
        keep_history: bool = True,
    ) -> None:
        if not views:
            raise ValueError("An ensemble needs at least one view.")
        is_early = all(view.early for view in views)
        self.facts = DrafterFacts.of(policy, model, len(views), is_early=is_early, splices=True)
        self.model, self.policy = model, policy  # the adapter of the draft model, and the form of its trees
        self.views = tuple(views)  # forms of the prompt
        self.weighting = weighting or make_weighting("auto", len(views))
        self.vocab_size = vocab_size  # as for `ModelDrafter`
        self.keep_history = keep_history  # retain the views' history from one turn of a conversation to the next

    def open(self, rows: int, target: Context) -> EnsembleSession:
        return EnsembleSession(self, rows, target)


class EnsembleSession(DraftSession):
    """A draft session of m * R slots that has R rows for the engine: slot ``i * R + r`` is view i of row r."""

    def __init__(self, drafter: EnsembleDrafter, rows: int, target: Context) -> None:
        device, views = drafter.model.device, len(drafter.views)
        self._drafter, self._target, self._count = drafter, target, rows
        for view in drafter.views:
            view.open(target)
        self._weights = drafter.weighting.open(rows, views, device) if views > 1 else None  # of several views
        self._learns = drafter.weighting.needs_history and views > 1
        self._pending: dict[int, VerifiedBlock] = {}  # by row
        self._passed = set[int]()  # rows that have emitted tokens without it since
        self._mixture = Mixture(drafter.policy, rows, views, device)
        model = ModelDrafter(drafter.model, self._mixture, drafter.vocab_size)
        self._session = ModelDraftSession(model, rows * views, target)
        self._prompts: list[Prompt | None] = [None] * rows
        self._capacity = [0] * rows
        self._length = [0] * rows  # tokens, the prompt's included
        self._room = [0] * rows  # tokens that could still be emitted when the row drafted last
        self._has_one_view = [False] * rows  # rows whose views have equal prompts
        self._shown: dict[int, Tensor] = {}  # `[m]` weights of every row's last draft
        self._roots: dict[int, Tensor] = {}  # `[m, 1, V]` the views' distributions at the root, by row

    @property
    def context(self) -> Context:
        """The draft model's context, of m * R slots."""
        return self._session.context

    @property
    def weights(self) -> Tensor:
        """``[A, m]`` of the rows that drafted last."""
        return self._mixture.weights

    def begin(self, row: int, capacity: int, key: str | None = None) -> None:
        self._capacity[row] = capacity  # `load` reserves what the row's views need

    def restart(self, row: int) -> None:
        self._prompts[row] = None
        for view in range(len(self._drafter.views)):
            self._session.restart(self._slot(view, row))

    def forget(self, row: int) -> None:
        for view in range(len(self._drafter.views)):
            self._session.forget(self._slot(view, row))
        self._mixture.forget(row)
        if self._weights is not None:
            self._weights.forget(row)
        self._pending.pop(row, None)
        self._prompts[row], self._has_one_view[row] = None, False

    @torch.inference_mode()
    def load(self, row: int, prompt: Prompt, prefill: PrefillResult | None, budget: int | None = None) -> Loaded:
        earlier, self._prompts[row] = self._prompts[row], prompt
        continues = earlier is not None and is_later_turn(earlier, prompt)
        if not continues:
            self._mixture.forget(row)
        block = self._pending.pop(row, None)
        if self._weights is not None:
            if not (continues and self._drafter.keep_history):
                self._weights.forget(row)
            elif block is not None:
                self._observe_last_block(row, block)
            self._weights.load(row, prompt.ids)
        self._length[row] = len(prompt)
        views = self._drafter.views
        before = sum(view.seconds for view in views)
        prompts = [view.rewrite(prompt) for view in views]
        captioning = sum(view.seconds for view in views) - before
        is_text = not any(p.media for p in prompts)
        self._has_one_view[row] = len(prompts) > 1 and is_text and len({p.ids for p in prompts}) == 1
        for view in self._views_of(row):
            # A view's prompt may be longer than the original: captions replace placeholders.
            own = prompts[view]
            capacity = self._capacity[row] + len(own) - len(prompt)
            views[view].load(self._session, self._slot(view, row), own, capacity, prefill)
        return Loaded(captioning=captioning)

    def _slot(self, view: int, row: int) -> int:
        return view * self._count + row

    def _views_of(self, row: int) -> range:
        return range(1 if self._has_one_view[row] else len(self._drafter.views))

    @torch.inference_mode()
    def propose(self, rows: Rows, new: Emitted, proposer: Proposer, limit: int) -> DraftTree:
        views = range(len(self._drafter.views))
        every = product(views, range(len(rows)))  # (view, place), view by view
        pairs = [(view, place) for view, place in every if view in self._views_of(rows[place])]
        slots = [self._slot(view, rows[place]) for view, place in pairs]
        emitted = [new[place] for _, place in pairs]
        for row, tokens in zip(rows, new, strict=True):
            self._length[row] += len(tokens)
            self._room[row] = self._capacity[row] - self._length[row]
        blocks = {place: self._pending.pop(row) for place, row in enumerate(rows) if row in self._pending}
        logits = self._session.run(slots, emitted, self._target.numbers_of(rows), every=bool(blocks))
        if self._weights is not None and blocks:
            logits_of = dict(zip(pairs, logits, strict=True))
            by_view = [[logits_of[view, place] for view in views] for place in blocks]
            labels = [new[place] for place in blocks]
            if self._passed.intersection(rows):  # which have emitted more tokens since, in steps without their views
                counts = torch.stack([block.count for block in blocks.values()]).tolist()
                labels = [own[: count + 1] for own, count in zip(labels, counts, strict=True)]
            verified = verified_positions([*blocks.values()], labels, by_view)
            self._weights.observe([rows[place] for place in blocks], verified)
        self._passed.difference_update(rows)
        if self._weights is not None:
            self._mixture.weights = self._of_views(rows, self._weights.choose(rows))
            self._shown |= zip(rows, self._mixture.weights, strict=True)
        tree = self._session.draft(slots, emitted, logits, proposer, limit)
        if self._learns and proposer.guide is None:  # views are compared where the target is free
            self._roots |= zip(rows, self._mixture.roots.unbind(1), strict=True)
        return tree

    def _of_views(self, rows: Rows, weights: Tensor) -> Tensor:
        """``[A, m]`` weights; where a row has one view, the first has all of it."""
        has_one_view = [self._has_one_view[row] for row in rows]
        if not any(has_one_view):
            return weights
        first = torch.zeros_like(weights)
        first[:, 0] = 1
        return torch.where(on_device(has_one_view, weights.device)[:, None], first, weights)

    @torch.inference_mode()
    def observe(
        self, rows: Rows, tree: DraftTree, scores: Tensor, verdict: Verdict, output: ForwardOutput, drafted: bool
    ) -> None:
        if not drafted:
            self._passed.update(rows)
            return
        self._mixture.observe(rows, verdict.on_proposed(tree))
        if rows[0] in self._roots:  # and all others: one proposal's rows may be verified in several groups
            blocks = blocks_of(rows, list(map(self._roots.pop, rows)), tree, scores, verdict)
            # Views with equal prompts differ by rounding alone: they have no history.
            self._pending |= {row: block for row, block in blocks.items() if not self._has_one_view[row]}

    def signals(self, rows: Rows) -> list[Signals]:
        """The weights of several views, in their order; else the policy's."""
        if len(self._drafter.views) == 1:
            return self._session.signals(rows)
        return [{"weights": tuple(self._shown[row].tolist())} for row in rows]

    def _observe_last_block(self, row: int, block: VerifiedBlock) -> None:
        """Add a row's last block of the last turn to the history; the draft model has not run it."""
        emitted = block.accepted()[: self._room[row]]
        logits = [root[:0] for root in block.roots]
        if len(emitted) > 1:
            slots = [self._slot(view, row) for view in range(len(self._drafter.views))]
            logits = self._session.run(slots, [emitted[:-1]] * len(slots), every=True, commits=False)
            self._session.context.cache.drop(slots)
        assert self._weights is not None
        self._weights.observe([row], verified_positions([block], [emitted], [logits]))


class Mixture:
    """A tree policy of R rows for a draft session of m * R slots: mixes the views' logits, repeats frontiers for them.

    Slot ``i * R + r`` of the draft session is view i of row r. Of a row whose views have equal prompts, view 0 alone
    takes part.
    Shapes: weights ``[A, m]``; roots ``[m, A, 1, V]``.
    """

    def __init__(self, policy: TreePolicy, rows: int, views: int, device: torch.device) -> None:
        self.max_nodes, self.max_run = policy.max_nodes, policy.max_run
        self.max_depth, self.max_children = policy.max_depth, policy.max_children
        self.can_sample = policy.can_sample
        self._shaping = policy.open(rows, device)
        self._rows, self._views = rows, views
        self.weights = torch.full((rows, views), 1 / views, device=device)
        self.roots = torch.zeros(views, rows, 1, 0, device=device)

    def open(self, batch: int, device: torch.device) -> Mixture:
        return self

    def begin(self, rows: Rows, roots: Tensor, proposer: Proposer) -> Growth:
        """Start trees for slots of the draft session: all that take part, view 0 of every row first."""
        own = [slot for slot in rows if slot < self._rows]
        growth = self._shaping.begin(own, roots[: len(own)], proposer)
        return growth if self._views == 1 else MixedGrowth(growth, self, rows, self._rows)

    def observe(self, rows: Rows, verdict: Verdict) -> None:
        self._shaping.observe(rows, verdict)

    def restart(self, row: int) -> None:
        """Left to the ensemble, which compares whole prompts rather than one view of them."""

    def forget(self, row: int) -> None:
        self._shaping.restart(row)

    def signals(self, rows: Rows) -> list[Signals]:
        return signals_of(self._shaping, rows)


class MixedGrowth:
    """One step's trees of A rows."""

    def __init__(self, growth: Growth, mixing: Mixture, slots: Rows, count: int) -> None:
        places = {row: place for place, row in enumerate(slot for slot in slots if slot < count)}
        self._growth, self._mixing = growth, mixing
        self._shares = mixing.weights.t()[:, :, None, None]  # [m, A, 1, 1]
        self._is_first = True
        self._activate(list(slots), [(slot // count, places[slot % count]) for slot in slots])

    def expand(self, logits: Tensor) -> Frontier | None:
        """Expand the mixture of ``[P, W, V]`` logits: at first of all slots that take part, then of active ones."""
        q = logits.softmax(-1, torch.float32)
        every = q if self._index is None else q[self._index]
        every = every.view(*self._shares.shape[:2], *q.shape[1:])
        if self._is_first:
            self._mixing.roots = every
            self._is_first = False
            self._drop_inactive()
        new = self._growth.expand(mixture(every, self._shares))
        if new is None:
            return None
        mask = new.attention_mask
        if mask is not None and len(mask) > 1:
            mask = mask[self._places]
        valid = None if new.valid is None else new.valid[self._places]
        return Frontier(new.tokens[self._places], mask, new.depth, self._active, valid)

    def tree(self) -> DraftTree:
        return self._growth.tree()

    def _drop_inactive(self) -> None:
        """Run only active views from here on; on an accelerator all continue, which saves a synchronisation."""
        if self._shares.device.type == "cpu":
            shares = self._mixing.weights.tolist()
            chosen = [i for i, (view, place) in enumerate(self._pairs) if shares[place][view] > 0]
            if len(chosen) < len(self._pairs):
                self._activate([self._active[i] for i in chosen], [self._pairs[i] for i in chosen])

    def _activate(self, slots: Rows, pairs: Sequence[tuple[int, int]]) -> None:
        """Run slots from here on, each one a view of the row at a place."""
        self._active, self._pairs = slots, pairs
        self._places = on_device([place for _, place in pairs], self._shares.device)
        # Of every view of every row, the pair that represents it; an inactive one has no weight, so any of the row can.
        numbers = {pair: i for i, pair in enumerate(pairs)}
        substitute = {place: i for i, (_, place) in reversed(list(enumerate(pairs)))}
        views, rows = self._shares.shape[:2]
        every = product(range(views), range(rows))
        index = [numbers.get((view, place), substitute[place]) for view, place in every]
        in_order = index == list(range(len(pairs)))
        self._index = None if in_order else on_device(index, self._shares.device)


def mixture(q: Tensor, shares: Tensor) -> Tensor:
    """Logarithm ``[A, W, V]`` of sum_i w_i q_i, always finite, of q ``[m, A, W, V]`` and shares ``[m, A, 1, 1]``."""
    return (shares * q).sum(0).clamp_min_(TINY).log_()
