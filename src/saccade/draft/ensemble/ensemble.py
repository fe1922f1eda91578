"""An ensemble of views of one prompt, read by one draft model in one batch (TABED, Lee et al. 2026, Section 5.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.draft.drafter import TreeDrafter
from saccade.draft.ensemble.history import Labelled, Notes, heard
from saccade.draft.ensemble.mixing import Mixture
from saccade.draft.ensemble.view import View
from saccade.draft.ensemble.weights import Weighting, by_name
from saccade.draft.model import ModelDrafter, ModelDraftSession, goes_on
from saccade.draft.trees.policy import Proposer, TreePolicy
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Target
from saccade.target.cache import on_device
from saccade.target.context import Context, PrefillResult
from saccade.target.forward import ForwardOutput
from saccade.tree import DraftTree
from saccade.verify.rule import Verdict


class EnsembleDrafter(TreeDrafter):
    """One draft model that reads every prompt in m ways and guesses with the weighted mean of what they say.

    Views of a row are rows of the draft model's batch, so that a draft step is one forward however many views there
    are. What was emitted is read through every view; guesses are run through those alone that have a weight in their
    row. The mixture q(.; w) = sum_i w_i q_i goes on to the tree policy as logits, so policies and proposers work as
    they do for one model. When children are drawn, the request's warpers act on the mixture, and the distribution that
    a child was drawn from is the one that it is verified with.

    A row whose views have read the same (words alone) has one view only.

    Args:
        model: the adapter of the draft model.
        policy: which guesses are worth verifying.
        views: the ways to read a prompt.
        weighting: how they are weighed; by default a grid for two views and inverse errors for more.
        vocab_size: as for `ModelDrafter`.
        carry: keep what was learned of the views from one turn of a conversation to the next.

    Raises:
        ValueError: there is no view.
    """

    def __init__(
        self,
        model: Target,
        policy: TreePolicy,
        views: Sequence[View],
        weighting: Weighting | None = None,
        vocab_size: int | None = None,
        carry: bool = True,
    ) -> None:
        if not views:
            raise ValueError("An ensemble needs at least one view.")
        super().__init__(policy)
        self.model = model
        self.views = tuple(views)
        self.weighting = weighting or by_name("auto", len(views))
        self.vocab_size = min(vocab_size or model.vocab_size, model.vocab_size)
        self.carry = carry
        self.early = all(view.early for view in views)

    def open(self, rows: int, target: Context) -> EnsembleSession:
        return EnsembleSession(self, rows, target)


class EnsembleSession:
    """A draft session of m * R rows that is R rows to the engine.

    Attributes:
        reading_seconds: spent on captions at the last `load`.
    """

    def __init__(self, drafter: EnsembleDrafter, rows: int, target: Context) -> None:
        device, views = drafter.model.device, len(drafter.views)
        self._drafter = drafter
        self._target = target
        for view in drafter.views:
            view.open(target)
        self._weights = drafter.weighting.open(rows, views, device)
        self._notes = Notes() if drafter.weighting.learns and views > 1 else None
        self._mixture = Mixture(drafter.policy, rows, views, device)
        model = ModelDrafter(drafter.model, self._mixture, drafter.vocab_size)
        self._session = ModelDraftSession(model, rows * views, target)
        self._count = rows
        self._asked: list[Prompt | None] = [None] * rows
        self._room = [0] * rows
        self._shown = [0] * rows  # tokens, the prompt's included
        self._left = [0] * rows  # tokens that could still be emitted when the row guessed last
        self._alike = [False] * rows  # rows whose views have read the same
        self._roots: dict[
            int, Tensor
        ] = {}  # what the views said, by the first row of those that guess together
        self.reading_seconds = 0.0

    @property
    def context(self) -> Context:
        """The draft model's context: row ``i * R + r`` is view i of row r."""
        return self._session.context

    @property
    def weights(self) -> Tensor:
        """``[A, m]`` of the rows that guessed last."""
        return self._mixture.weights

    def reserve(self, row: int, capacity: int) -> None:
        """Room is made when a prompt is loaded, and it is known which views there are and how long they are."""
        self._room[row] = capacity

    def forget(self, row: int) -> None:
        for view in range(len(self._drafter.views)):
            self._session.forget(view * self._count + row)
        self._mixture.forget(row)
        self._drop(row)
        self._asked[row], self._alike[row] = None, False

    def _drop(self, row: int) -> None:
        """Forget what was learned of a row's views."""
        self._weights.forget(row)
        if self._notes is not None:
            self._notes.forget(row)

    @torch.inference_mode()
    def load(self, row: int, prompt: Prompt, prefill: PrefillResult | None) -> None:
        asked, self._asked[row] = self._asked[row], prompt
        going_on = asked is not None and goes_on(asked, prompt)
        if not going_on:
            self._mixture.forget(row)
        if going_on and self._drafter.carry:
            self._learn_rest(row)
        else:
            self._drop(row)
        self._shown[row] = len(prompt)
        self._weights.load(row, prompt.ids)
        views = self._drafter.views
        spent = sum(view.seconds for view in views)
        given = [view.read(prompt) for view in views]
        self.reading_seconds = sum(view.seconds for view in views) - spent
        self._alike[row] = (
            len(given) > 1 and not any(p.media for p in given) and len({p.ids for p in given}) == 1
        )
        for view in self._views_of(row):
            slot, seen = view * self._count + row, given[view]
            # A caption may be longer than what it stands for.
            self._session.reserve(slot, self._room[row] + len(seen) - len(prompt))
            views[view].load(self._session, slot, seen, self._target, prefill)

    def _views_of(self, row: int) -> range:
        return range(1 if self._alike[row] else len(self._drafter.views))

    def _slots(self, rows: Sequence[int]) -> list[tuple[int, int]]:
        """(view, place) of all views of some rows, view by view."""
        views = range(len(self._drafter.views))
        return [(v, place) for v in views for place, row in enumerate(rows) if v in self._views_of(row)]

    @torch.inference_mode()
    def propose(
        self, rows: Sequence[int], new: Sequence[Sequence[int]], proposer: Proposer, limit: int
    ) -> DraftTree:
        pairs = self._slots(rows)
        slots = [view * self._count + rows[place] for view, place in pairs]
        every = [new[place] for _, place in pairs]
        labelled = {}
        for place, row in enumerate(rows):
            self._shown[row] += len(new[place])
            self._left[row] = self._room[row] - self._shown[row]
            block = self._notes.emitted(row, new[place]) if self._notes is not None else None
            if block is not None:
                labelled[place] = block
        said = self._session.take(slots, every, whole=bool(labelled))
        self._learn(rows, labelled, dict(zip(pairs, said, strict=True)))
        self._mixture.weights = self._chosen(rows)
        tree = self._session.draft(slots, every, said, proposer, limit)
        self._roots[rows[0]] = self._mixture.roots
        return tree

    def _learn(
        self, rows: Sequence[int], labelled: dict[int, Labelled], said: dict[tuple[int, int], Tensor]
    ) -> None:
        """Learn from blocks, by place.

        Args:
            said: by view and place what a view said after every emitted token ``[n, V]``.
        """
        if not labelled:
            return
        views = range(len(self._drafter.views))
        seen = heard([*labelled.values()], [[said[view, place] for view in views] for place in labelled])
        self._weights.learn([rows[place] for place in labelled], seen)

    def _chosen(self, rows: Sequence[int]) -> Tensor:
        """``[A, m]`` weights; all of it is the first view's where there is one view only."""
        weights = self._weights.choose(rows)
        alike = [self._alike[row] for row in rows]
        if not any(alike):
            return weights
        first = torch.zeros_like(weights)
        first[:, 0] = 1
        return torch.where(on_device(alike, weights.device)[:, None], first, weights)

    @torch.inference_mode()
    def observe(
        self, rows: Sequence[int], tree: DraftTree, scores: Tensor, verdict: Verdict, output: ForwardOutput
    ) -> None:
        self._mixture.observe(rows, verdict)
        roots = self._roots.pop(rows[0])
        # Views that read the same differ by rounding alone: no row learns from it.
        telling = [place for place, row in enumerate(rows) if not self._alike[row]]
        if self._notes is not None and telling:
            self._notes.note([rows[place] for place in telling], telling, roots, tree, scores, verdict)

    def _learn_rest(self, row: int) -> None:
        """Learn from what a row emitted last in its last turn, which the draft model has not run."""
        left = self._notes.left(row, self._left[row]) if self._notes is not None else None
        if left is None:
            return
        views = range(len(self._drafter.views))
        slots = [view * self._count + row for view in views]
        said: dict[tuple[int, int], Tensor] = {(view, 0): left.scores[:0] for view in views}
        if len(left.emitted) > 1:
            logits = self._session.run(slots, [left.emitted[:-1]] * len(slots), whole=True)
            said = {(view, 0): logits[view] for view in views}
            self._session.context.cache.drop(slots)
        self._learn([row], {0: left}, said)
