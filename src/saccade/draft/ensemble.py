"""An ensemble of views of one prompt, read by one draft model in one batch (TABED, Lee et al. 2026, Section 5.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.draft.drafter import TreeDrafter
from saccade.draft.labelled import Notes
from saccade.draft.mixing import Mixture
from saccade.draft.model import ModelDrafter, ModelDraftSession, goes_on
from saccade.draft.policy import TreePolicy
from saccade.draft.sampling import Proposer
from saccade.draft.tree import DraftTree
from saccade.draft.view import View
from saccade.draft.weights import Weighting, by_name
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Target
from saccade.target.context import Context
from saccade.verify.rule import Verdict


class EnsembleDrafter(TreeDrafter):
    """One draft model that reads every prompt in m ways and guesses with the weighted mean of what they say.

    Rows of the draft model's batch are all prompts in the first view, then all in the second, and so on, so that a
    draft step is one forward however many views there are. What was emitted is read through every view; guesses are
    run through those alone that have a weight. The mixture q(.; w) = sum_i w_i q_i goes on to the tree policy as
    logits, so policies and proposers work as they do for one model. When children are drawn, the request's
    warpers act on the mixture, and the distribution that a child was drawn from is the one that it is verified with.

    Args:
        model: the adapter of the draft model.
        policy: which guesses are worth verifying.
        views: the ways to read a prompt.
        weighting: how they are weighed; by default a grid for two views and inverse errors for more.
        vocab_size: as for `ModelDrafter`.
        carry: keep what was learned of the views from one turn to the next.

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

    def open(self, batch: int, target: Context) -> EnsembleSession:
        return EnsembleSession(self, batch, target)


class EnsembleSession:
    """A draft session of m * B rows that is B rows to the engine.

    Attributes:
        reading_seconds: spent on captions at the last `load`.
    """

    def __init__(self, drafter: EnsembleDrafter, batch: int, target: Context) -> None:
        device, views = drafter.model.device, len(drafter.views)
        self._drafter = drafter
        self._target = target
        for view in drafter.views:
            view.open(target)
        self._weights = drafter.weighting.open(batch, views, device)
        self._notes = Notes(batch) if drafter.weighting.learns and views > 1 else None
        self._mixture = Mixture(drafter.policy, batch, views, device)
        model = ModelDrafter(drafter.model, self._mixture, drafter.vocab_size)
        self._session = ModelDraftSession(model, batch * views)
        # Where no prompt has a picture all views are one, and a batch of B rows does.
        self._single = ModelDraftSession(model, batch) if views > 1 else self._session
        self._is_single = False
        self._read: dict[int, list[Prompt]] = {}  # of every row that was loaded since the last block
        self._asked: list[Prompt | None] = [None] * batch
        self._capacity = 0
        self._surplus = 0
        self._alike = [False] * batch  # rows whose views have read the same
        self._telling: list[int] = []  # rows of the block that teach something of the views
        self.reading_seconds = 0.0

    @property
    def context(self) -> Context:
        """The draft model's context of prompts with pictures: row ``i * B + b`` is view i of row b."""
        return self._session.context

    @property
    def weights(self) -> Tensor:
        """``[B, m]`` of the last block."""
        return self._mixture.weights

    def grow(self, capacity: int) -> None:
        self._capacity = max(capacity, self._capacity)
        self._session.grow(self._capacity + self._surplus)
        self._single.grow(self._capacity + self._surplus)

    @torch.inference_mode()
    def load(self, row: int, prompt: Prompt) -> None:
        self._learn_rest()
        if not self._drafter.carry:
            self._weights.forget(row)
        self._weights.load(row, prompt.ids)
        views = self._drafter.views
        spent = sum(view.seconds for view in views)
        read = [view.read(prompt) for view in views]
        self.reading_seconds = sum(view.seconds for view in views) - spent
        self._surplus = max(
            self._surplus, *(len(seen) - len(prompt) for seen in read)
        )  # captions may be longer
        self.grow(self._capacity)
        asked = self._asked[row]
        if asked is not None and not goes_on(asked, prompt):
            self._mixture.forget(row)
        self._asked[row] = prompt
        self._hold(row, read)

    def _hold(self, row: int, read: list[Prompt]) -> None:
        """Prefill what the views have read of a row: once if it is the same, and so is every row's of this block."""
        self._alike[row] = same = (
            len(read) > 1 and not any(p.media for p in read) and len({p.ids for p in read}) == 1
        )
        earlier = self._read if self._read and self._is_single and not same else {}
        self._is_single = same and (self._is_single or not self._read)
        self._read[row] = read
        if self._is_single:
            self._single.load(row, read[0])
            return
        for index, prompts in {**earlier, row: read}.items():
            for place, (view, seen) in enumerate(zip(self._drafter.views, prompts, strict=True)):
                view.load(self._session, place * len(self._asked) + index, seen, self._target)

    @torch.inference_mode()
    def propose(self, new: Sequence[Sequence[int]], proposer: Proposer) -> DraftTree:
        self._read = {}
        views = self._mixture.views = 1 if self._is_single else len(self._drafter.views)
        if views == 1:
            return (self._single if self._is_single else self._session).propose(new, proposer)
        every = [*new] * views
        said = self._session.take(every)
        self._mixture.weights = self._weigh(new, said)
        # Views that read the same differ by rounding alone: no row learns from it, whether it is alone or not.
        self._telling = [row for row, tokens in enumerate(new) if tokens and not self._alike[row]]
        return self._session.draft(every, said, proposer)

    def _weigh(self, new: Sequence[Sequence[int]], said: Tensor) -> Tensor:
        """``[B, m]`` for a block that begins with ``new`` tokens, after which the views have ``said`` their logits."""
        labelled = self._notes.emitted(new) if self._notes is not None else None
        if labelled is not None:
            self._weights.learn(labelled.heard(said))
        return self._weights.choose()

    def learn(self, tree: DraftTree, scores: Tensor, verdict: Verdict) -> None:
        self._session.learn(tree, scores, verdict)
        if self._notes is not None and not self._is_single:
            self._notes.note(self._telling, self._mixture.roots, tree, scores, verdict)

    def _learn_rest(self) -> None:
        """Learn from what the rows emitted last in their last turn, which the draft model has not run."""
        left = self._notes.left() if self._notes is not None else None
        if left is None or not self._drafter.carry:
            return
        said = None
        if max(map(len, left.emitted)) > 1:
            said = self._session.run([t[:-1] for t in left.emitted] * len(self._drafter.views))
            self._session.context.cache.drop_pending()
        self._weights.learn(left.heard(said))
