"""An ensemble of views of one prompt, read by one draft model in one batch (TABED, Lee et al. 2026, Section 5.1)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from saccade.draft.history import TINY, Verified
from saccade.draft.model import ModelDrafter, ModelDraftSession
from saccade.draft.policy import Frontier, Growth, TreePolicy
from saccade.draft.sampling import Proposer
from saccade.draft.tree import DraftTree
from saccade.draft.view import View
from saccade.draft.weights import Weighting, by_name
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Target
from saccade.target.context import Context
from saccade.verify.rule import Verdict


class EnsembleDrafter:
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
        self.model = model
        self.policy = policy
        self.views = tuple(views)
        self.weighting = weighting or by_name("auto", len(views))
        self.vocab_size = min(vocab_size or model.vocab_size, model.vocab_size)
        self.carry = carry

    @property
    def max_nodes(self) -> int:
        return self.policy.max_nodes

    @property
    def max_depth(self) -> int:
        return self.policy.max_depth

    @property
    def max_children(self) -> int:
        return self.policy.max_children

    @property
    def draws(self) -> bool:
        return self.policy.can_sample

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
        wide = ModelDrafter(drafter.model, self._mixture, drafter.vocab_size)
        self._session = ModelDraftSession(wide, batch * views)
        self._capacity = 0
        self._surplus = 0
        self._active = [False] * batch
        self.reading_seconds = 0.0

    @property
    def context(self) -> Context:
        """The draft model's context: row ``b * m + i`` is view i of row b."""
        return self._session.context

    @property
    def weights(self) -> Tensor:
        """``[B, m]`` of the last block."""
        return self._mixture.weights

    def grow(self, capacity: int) -> None:
        self._capacity = max(capacity, self._capacity)
        self._session.grow(self._capacity + self._surplus)

    @torch.inference_mode()
    def load(self, row: int, prompt: Prompt) -> None:
        if not self._drafter.carry:
            self._weights.forget(row)
        self._weights.load(row, prompt.ids)
        views = self._drafter.views
        started = time.perf_counter()
        read = [view.read(prompt) for view in views]
        self.reading_seconds = time.perf_counter() - started
        for place, (view, seen) in enumerate(zip(views, read, strict=True)):
            longer = len(seen) - len(prompt)  # a caption may be longer than its image
            self._surplus = max(self._surplus, longer)
            self.grow(self._capacity)
            view.load(self._session, row * len(views) + place, seen, self._target)

    @torch.inference_mode()
    def propose(self, new: Sequence[Sequence[int]], proposer: Proposer) -> DraftTree:
        self._active = [bool(tokens) for tokens in new]
        self._mixture.weights = self._weights.choose()
        return self._session.propose([tokens for tokens in new for _ in self._drafter.views], proposer)

    @torch.inference_mode()
    def learn(self, tree: DraftTree, scores: Tensor, verdict: Verdict) -> None:
        self._session.learn(tree, scores, verdict)
        if self._mixture.levels:
            seen = verified(self._mixture.levels, tree, scores, verdict)
            if not all(self._active):
                active = torch.tensor(self._active, device=seen.known.device)
                seen = replace(seen, known=seen.known & active[:, None])
            self._weights.learn(seen)
        self._mixture.levels = []


@dataclass(frozen=True, slots=True)
class Level:
    """Nodes whose distributions one draft forward gave.

    Attributes:
        frontier: the W nodes; None for the root.
        logits: ``[B, m, W, V]`` of every view.
    """

    frontier: Frontier | None
    logits: Tensor


class _Mixture:
    """A tree policy of B rows for a draft session of B * m: mixes what comes in, repeats what goes out.

    Attributes:
        weights: ``[B, m]`` of the block.
        levels: what the views said in this block, where the weighting learns from it.
    """

    def __init__(
        self, policy: TreePolicy, batch: int, views: int, device: torch.device, learns: bool
    ) -> None:
        self._policy = policy
        self._shaping = policy.open(batch, device)
        self._views = views
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
        growth = self._shaping.begin(roots[:: self._views], proposer)
        if self._views == 1:
            return growth
        return _MixedGrowth(growth, self.weights, self.levels if self._learns else None)

    def learn(self, verdict: Verdict) -> None:
        self._shaping.learn(verdict)

    def restart(self, row: int) -> None:
        self._shaping.restart(row // self._views)


class _MixedGrowth:
    def __init__(self, growth: Growth, weights: Tensor, levels: list[Level] | None) -> None:
        self._growth = growth
        self._weights = weights
        self._levels = levels
        self._frontier: Frontier | None = None

    def expand(self, logits: Tensor) -> Frontier | None:
        """logits: ``[B * m, W, V]``; what is to be run next comes back for all B * m rows."""
        views = self._weights.shape[1]
        logits = logits.unflatten(0, (-1, views))
        if self._levels is not None:
            self._levels.append(Level(self._frontier, logits))
        self._frontier = new = self._growth.expand(mixture(logits, self._weights))
        if new is None:
            return None
        allow = new.allow if new.allow.shape[0] == 1 else new.allow.repeat_interleave(views, 0)
        return Frontier(new.tokens.repeat_interleave(views, 0), allow, new.depth)

    def tree(self) -> DraftTree:
        return self._growth.tree()


def mixture(logits: Tensor, weights: Tensor) -> Tensor:
    """Logarithm ``[B, W, V]`` of sum_i w_i softmax(logits_i), in float32 and always finite.

    Args:
        logits: ``[B, m, W, V]``.
        weights: ``[B, m]``.
    """
    q = torch.einsum("bm,bmwv->bwv", weights, logits.float().softmax(-1))
    return q.clamp_(min=TINY).log_()


def verified(levels: Sequence[Level], tree: DraftTree, scores: Tensor, verdict: Verdict) -> Verified:
    """The positions that verification has reached and that the draft model was run on.

    These are the ones after the root and after every accepted node, of which the last is where the first guess was
    rejected; a node that had no children in the tree was not run, and its position is left out. Nodes of the draft
    forwards are told by their tokens on the way from the root.

    Args:
        levels: of the draft forwards, the root's first.
        tree: as proposed.
        scores: ``[B, N, V]`` the target's processed logits.
        verdict: of every row.

    Returns:
        T positions for as many levels; tokens that one of the models does not have are cut away.
    """
    device, rows = levels[0].logits.device, torch.arange(len(verdict.count), device=levels[0].logits.device)
    steps = min(len(levels), verdict.path.shape[1])
    wanted = verdict.path[:, :steps, None].expand(-1, -1, scores.shape[2])
    p = scores.gather(1, wanted).to(device).float().softmax(-1)
    path = tree.tokens.gather(1, verdict.path).to(device)  # [B, D + 1]
    count, token = verdict.count.to(device)[:, None], verdict.token.to(device)[:, None]
    labels = torch.cat([path[:, 1:], token], 1).scatter(1, count, token)[:, :steps]
    logits, known = [levels[0].logits[:, :, 0]], [torch.ones_like(count[:, 0], dtype=torch.bool)]
    on_path = known[0].new_zeros(len(rows), 0)  # [B, F] entries so far
    for depth, level in enumerate(levels[1:steps], start=1):
        assert level.frontier is not None
        above = level.frontier.allow[..., : on_path.shape[1]]
        here = (on_path[:, None] | ~above).all(-1) & (depth <= count)
        here &= level.frontier.tokens == path[:, depth, None]
        at = here.int().argmax(1)
        logits.append(level.logits[rows, :, at])
        known.append(here.any(1))
        on_path = torch.cat([on_path, here], 1)
    q = torch.stack(logits, 2).float().softmax(-1)  # [B, m, T, V]
    vocab = min(p.shape[2], q.shape[3])
    return Verified(p[..., :vocab], q[..., :vocab], labels, torch.stack(known, 1))
