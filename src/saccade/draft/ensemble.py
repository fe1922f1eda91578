"""An ensemble of views of one prompt, read by one draft model in one batch (TABED, Lee et al. 2026, Section 5.1)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from saccade.draft.drafter import TreeDrafter
from saccade.draft.history import TINY
from saccade.draft.labelled import Level, verified
from saccade.draft.model import ModelDrafter, ModelDraftSession, goes_on
from saccade.draft.policy import Frontier, Growth, TreePolicy
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

    Rows of the draft model's batch are the m views of the first prompt, then those of the second, and so on, so that a
    draft step is one forward however many views there are. The mixture q(.; w) = sum_i w_i q_i goes on to the tree
    policy as logits, so policies and proposers work as they do for one model. When children are drawn, the request's
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
    """A draft session of B * m rows that is B rows to the engine.

    Attributes:
        reading_seconds: spent on making the views' prompts at the last `load`; all of it captions, if there are any.
    """

    def __init__(self, drafter: EnsembleDrafter, batch: int, target: Context) -> None:
        device, views = drafter.model.device, len(drafter.views)
        self._drafter = drafter
        self._target = target
        for view in drafter.views:
            view.open(target)
        self._weights = drafter.weighting.open(batch, views, device)
        learns = drafter.weighting.learns and views > 1
        self._mixture = _Mixture(drafter.policy, batch, views, device, learns)
        model = ModelDrafter(drafter.model, self._mixture, drafter.vocab_size)
        self._session = ModelDraftSession(model, batch * views)
        # Where no prompt has a picture all views are one, and a batch of B rows does.
        self._single = ModelDraftSession(model, batch) if views > 1 else self._session
        self._is_single = False
        self._read: dict[int, list[Prompt]] = {}  # of every row that was loaded since the last block
        self._asked: list[Prompt | None] = [None] * batch
        self._capacity = 0
        self._surplus = 0
        self._active = [False] * batch
        self._alike = [False] * batch  # rows whose views have read the same
        self.reading_seconds = 0.0

    @property
    def context(self) -> Context:
        """The draft model's context of prompts with pictures: row ``b * m + i`` is view i of row b."""
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
        if not self._drafter.carry:
            self._weights.forget(row)
        self._weights.load(row, prompt.ids)
        started = time.perf_counter()
        read = [view.read(prompt) for view in self._drafter.views]
        self.reading_seconds = time.perf_counter() - started
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
                view.load(self._session, index * len(prompts) + place, seen, self._target)

    @torch.inference_mode()
    def propose(self, new: Sequence[Sequence[int]], proposer: Proposer) -> DraftTree:
        self._active = [bool(tokens) for tokens in new]
        self._read = {}
        self._mixture.views = 1 if self._is_single else len(self._drafter.views)
        if self._is_single:
            return self._single.propose(new, proposer)
        self._mixture.weights = self._weights.choose()
        return self._session.propose([tokens for tokens in new for _ in self._drafter.views], proposer)

    @torch.inference_mode()
    def learn(self, tree: DraftTree, scores: Tensor, verdict: Verdict) -> None:
        self._session.learn(tree, scores, verdict)
        if self._mixture.levels:
            seen = verified(self._mixture.levels, tree, scores, verdict)
            # Views that read the same differ by rounding alone: no row learns from it, whether it is alone or not.
            telling = [active and not alike for active, alike in zip(self._active, self._alike, strict=True)]
            if not all(telling):
                rows = torch.tensor(telling, device=seen.known.device)
                seen = replace(seen, known=seen.known & rows[:, None])
            self._weights.learn(seen)
        self._mixture.levels = []


class _Mixture:
    """A tree policy of B rows for a draft session of B * m: mixes what comes in, repeats what goes out.

    Attributes:
        views: m; 1 while all views are one.
        weights: ``[B, m]`` of the block.
        levels: what the views said in this block, where the weighting learns from it.
    """

    def __init__(
        self, policy: TreePolicy, batch: int, views: int, device: torch.device, learns: bool
    ) -> None:
        self._policy = policy
        self._shaping = policy.open(batch, device)
        self.views = views
        self._learns = learns
        self.weights = torch.full((batch, views), 1 / views, device=device)
        self.levels: list[Level] = []

    @property
    def max_nodes(self) -> int:
        return self._policy.max_nodes

    @property
    def max_run(self) -> int:
        return self._policy.max_run

    @property
    def max_depth(self) -> int:
        return self._policy.max_depth

    @property
    def max_children(self) -> int:
        return self._policy.max_children

    @property
    def can_sample(self) -> bool:
        return self._policy.can_sample

    def open(self, batch: int, device: torch.device) -> _Mixture:
        return self

    def begin(self, roots: Tensor, proposer: Proposer) -> Growth:
        self.levels = []
        growth = self._shaping.begin(roots[:: self.views], proposer)
        if self.views == 1:
            return growth
        return _MixedGrowth(growth, self.weights, self.levels if self._learns else None)

    def learn(self, verdict: Verdict) -> None:
        self._shaping.learn(verdict)

    def restart(self, row: int) -> None:
        """Left to the ensemble: whether a prompt is new is not for one view of it to say."""

    def forget(self, row: int) -> None:
        """Start a row of B anew."""
        self._shaping.restart(row)


class _MixedGrowth:
    def __init__(self, growth: Growth, weights: Tensor, levels: list[Level] | None) -> None:
        self._growth = growth
        self._weights, self._shares = weights, weights[..., None, None]
        self._levels = levels
        self._frontier: Frontier | None = None

    def expand(self, logits: Tensor) -> Frontier | None:
        """logits: ``[B * m, W, V]``; what is to be run next comes back for all B * m rows."""
        batch, views = self._weights.shape
        q = logits.float().softmax(-1).view(batch, views, *logits.shape[1:])
        if self._levels is not None:
            self._levels.append(Level(self._frontier, q))
        self._frontier = new = self._growth.expand(mixture(q, self._shares))
        if new is None:
            return None
        allow = new.allow if new.allow.shape[0] == 1 else new.allow.repeat_interleave(views, 0)
        return Frontier(_repeated(new.tokens, views), allow, new.depth)

    def tree(self) -> DraftTree:
        return self._growth.tree()


def mixture(q: Tensor, shares: Tensor) -> Tensor:
    """Logarithm ``[B, W, V]`` of sum_i w_i q_i, always finite.

    Args:
        q: ``[B, m, W, V]`` distributions, in float32.
        shares: ``[B, m, 1, 1]`` the weights.
    """
    return (shares * q).sum(1).clamp_(min=TINY).log_()


def _repeated(tokens: Tensor, views: int) -> Tensor:
    """``[B, W]`` to ``[B * m, W]``, every row m times; no copy for one row."""
    if len(tokens) == 1:
        return tokens.expand(views, -1)
    return tokens.repeat_interleave(views, 0)
