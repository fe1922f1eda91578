"""Loose greedy rules: FLy, LVSpec, and its random control. LOSSY.

LVSpec, Section 3: a draft token is relevant when the target's hidden state that verifies it resembles those of visual
tokens; of K draft tokens the floor(lambda * K) least relevant ones are accepted without a match. A draft token is also
accepted when the target's own token occurs elsewhere in the draft (position-shift tolerance, PST). In a tree both apply
to every branch separately (Appendix E): K counts the draft tokens above and below a node, and the target's token is
searched among those alone. The longest accepted branch wins.

The paper leaves open which state verifies a draft token: Eq. 7 reads as the one at that token, Figure 4 mentions tokens
decoded from it. A last-layer state predicts the next token, so the state that verifies a draft token is its parent's.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from saccade.inputs.families.family import Prompt
from saccade.options import RELEVANCES, FLyOptions, LVSpecOptions, RandomOptions
from saccade.target_model.context import Context, PrefillResult
from saccade.target_model.token_blocks import ForwardOutput
from saccade.tree import DraftTree, Rows
from saccade.verify.rule import LOOSE, SHIFTED, STRICT, StatelessRule, Verdict, draft_nodes, path_to


class TreeComparison:
    """A tree's draft tokens and the target's own; all ``[B, N]``.

    Never loosened are special tokens (end of sequence among them), nodes in whose place the target has one, and tokens
    that a logits processor forbids or that the target's vocabulary lacks.
    """

    def __init__(self, tree: DraftTree, scores: Tensor, special_ids: Sequence[int]) -> None:
        self.tree, self.scores = tree, scores
        self.choice = scores.argmax(-1)  # the target's likeliest token after every node
        parents = tree.parents.expand_as(self.choice)
        self.wanted = self.choice.gather(1, parents)  # in the place of every node
        self.is_draft = draft_nodes(tree)
        self.match = self.is_draft & (tree.tokens == self.wanted)
        ids = _on_device(tuple(special_ids), scores.device)
        rows = torch.arange(len(scores), device=scores.device)[:, None]
        last = scores.shape[-1] - 1
        self._drafted = scores[rows, parents, tree.tokens.clamp(max=last)]  # of every node's token, in its place
        special = torch.isin(tree.tokens, ids) | torch.isin(self.wanted, ids)
        self.may_loosen = self.is_draft & ~(special | self._drafted.isneginf() | (tree.tokens > last))

    def unsure(self, least: float) -> Tensor:
        """Nodes in whose place the target's entropy exceeds a share of the largest possible (FLy)."""
        p = self.scores.float().log_softmax(-1).exp()
        entropy: Tensor = torch.special.entr(p).sum(-1) / math.log(p.shape[-1])  # after each node
        return entropy.gather(1, self.tree.parents.expand_as(entropy)) > least

    def likely(self, least: float) -> Tensor:
        """Nodes that the target finds at least ``least`` times as probable as its own token in their place."""
        best = self.scores.amax(-1).gather(1, self.tree.parents.expand_as(self.choice))
        return self._drafted.float() - best.float() >= math.log(least)

    def lowest_share(self, values: Tensor, share: float) -> Tensor:
        """Nodes among the floor(share * K) lowest of the K draft tokens on their branches."""
        branch = self.same_branch()
        here, there = values[:, :, None], values[:, None, :]
        earlier = torch.ones_like(branch[0]).tril(-1)
        lower = (there < here) | ((there == here) & earlier)
        # The small term keeps 0.7 * 10 from becoming 6.999...
        most = (share * branch.sum(-1) + 1e-6).floor()
        return (branch & lower).sum(-1) < most

    def same_branch(self) -> Tensor:
        """``[B, N, N]`` draft tokens that are a node, above it or below it: in a chain all, in a tree its branches."""
        return (self.tree.ancestors | self.tree.ancestors.mT) & self.is_draft[:, None]

    def longest_path(self, loose: Tensor, shifted: Tensor | None = None, ends: Tensor | None = None) -> Verdict:
        """The longest accepted path to one of the nodes ``ends``; of equals the one with the most matches."""
        tree, accepted = self.tree, self.match | loose
        if shifted is not None:
            accepted = accepted | shifted
        rejected = ~(accepted & self.is_draft)
        rejected[:, 0] = False
        stands = ~(tree.ancestors & rejected[:, None]).any(-1)
        stands = stands if ends is None else stands & ends
        matches = (tree.ancestors & self.match[:, None]).sum(-1)  # at most max_depth
        rank = tree.depth * (tree.max_depth + 1) + matches
        node = torch.where(stands, rank, -1).argmax(1, keepdim=True)
        count = tree.depth.expand_as(self.choice).gather(1, node)[:, 0]
        path = path_to(tree, node[:, 0])
        marks = torch.where(self.match, STRICT, torch.where(loose, LOOSE, SHIFTED))
        token = self.choice.gather(1, node)[:, 0]
        return Verdict(path, count, token, marks.gather(1, path))


@lru_cache(maxsize=8)
def _on_device(ids: tuple[int, ...], device: torch.device) -> Tensor:
    """Copy ids to a device once for all steps."""
    return torch.tensor(ids, dtype=torch.long, device=device)


@dataclass(frozen=True)
class FLy(FLyOptions, StatelessRule):
    """Training-free loosely speculative decoding (Li et al. 2025, FLy), as LVSpec's baseline describes it.

    A mismatch within the last W positions of its chain lacks a full window and is rejected. In a tree every branch is
    judged as a chain, and the longest accepted one wins.
    """

    special_ids: tuple[int, ...] = ()  # tokens that are never loosened

    lossless = False
    samples = False

    def judge(
        self, rows: Rows, tree: DraftTree, scores: Tensor, uniforms: Tensor | None, output: ForwardOutput
    ) -> Verdict:
        compared = TreeComparison(tree, scores, self.special_ids)
        loose = compared.may_loosen & ~compared.match & compared.unsure(self.entropy)
        return compared.longest_path(loose, ends=_window_complete(tree, compared.match, loose, self.deferred))


def _window_complete(tree: DraftTree, match: Tensor, loose: Tensor, deferred: int) -> Tensor:
    """``[B, N]`` nodes at which a branch may end: every mismatch above has been followed by ``deferred`` matches."""
    parents = tree.parents.expand_as(match)
    never = tree.max_depth + deferred + 1  # more matches than any branch has
    missing = torch.zeros_like(parents)  # matches that a window still lacks
    for _ in range(tree.max_depth):
        above = missing.gather(1, parents)
        after_mismatch = torch.where(loose & (above == 0), deferred, never)
        after = torch.where(match, (above - 1).clamp(min=0), after_mismatch)
        missing = torch.where(tree.depth > 0, after.clamp(max=never), 0)
    return missing == 0


@dataclass(frozen=True)
class LVSpec(LVSpecOptions):
    """The rule and its settings.

    Guards that the paper leaves out: special tokens and tokens that a logits processor forbids are never loosened, and
    a row without visual tokens is strict.
    """

    special_ids: tuple[int, ...] = ()  # tokens that are never loosened, neither as draft token nor as the target's own

    lossless = False
    samples = False

    def uniforms(self, max_depth: int, max_children: int) -> tuple[int, int]:
        return 0, 0

    def open(self, context: Context) -> LVSpecJudge:
        return LVSpecJudge(self, context)


class LVSpecJudge:
    """LVSpec's rule with the states of every row's visual tokens."""

    def __init__(self, rule: LVSpec, context: Context) -> None:
        self._rule = rule
        self._family = context.target.family
        self._layer = len(context.target.layers) if rule.space == "hidden" else 0
        context.requirements.add_layers(self._layer)
        # Per row the positions of its visual tokens in the prompt, and their normalised states [n, d].
        self._visual: list[tuple[list[int], Tensor] | None] = [None] * context.rows
        self._gathered: tuple[tuple[int, ...], Tensor, Tensor] | None = None

    def load(self, row: int, prompt: Prompt, prefill: PrefillResult) -> None:
        """Store the states of newly prefilled visual tokens; those of the reused prefix remain, all others go."""
        start, states = prefill.start, prefill.hidden[self._layer]
        mask = self._family.visual_mask(prompt.ids)
        places = mask.nonzero()[:, 0].tolist()
        visual = states[mask[start:].to(states.device)]
        new = F.normalize(visual.float(), dim=-1)
        old_places, old = self._visual[row] or ([], new[:0])
        reused = bisect_left(old_places, start)
        self._visual[row] = (
            [*old_places[:reused], *places[bisect_left(places, start) :]],
            torch.cat([old[:reused], new]),
        )
        self._gathered = None

    def judge(
        self, rows: Rows, tree: DraftTree, scores: Tensor, uniforms: Tensor | None, output: ForwardOutput
    ) -> Verdict:
        compared = TreeComparison(tree, scores, self._rule.special_ids)
        if tree.size == 1:
            return Verdict.without_draft(compared.choice)
        has_visual = self._gather(rows)[1].any(1)[:, None]
        may_loosen = compared.may_loosen & has_visual
        if self._rule.entropy > 0:
            may_loosen &= compared.unsure(self._rule.entropy)
        if self._rule.min_probability_ratio > 0:
            may_loosen &= compared.likely(self._rule.min_probability_ratio)
        loose = compared.lowest_share(self.relevance(rows, tree, output), self._rule.loose_share)
        if self._rule.loose_probability_ratio > 0:
            loose |= compared.likely(self._rule.loose_probability_ratio)
        loose &= may_loosen
        if not self._rule.shift:
            return compared.longest_path(loose)
        same = compared.wanted[:, :, None] == tree.tokens[:, None, :]
        elsewhere = (same & compared.same_branch()).any(-1)
        return compared.longest_path(loose, elsewhere & may_loosen)

    def relevance(self, rows: Rows, tree: DraftTree, output: ForwardOutput) -> Tensor:
        """``[A, N]`` mean of the largest cosine similarities of each node with its row's visual tokens (Eq. 7)."""
        if self._rule.relevance in RELEVANCES:
            own: Tensor = RELEVANCES[self._rule.relevance](tree)
            return own
        visual, real = self._gather(rows)
        nodes = F.normalize(output.hidden[self._layer].float(), dim=-1)
        similarity = nodes @ visual.transpose(1, 2)  # [A, N, V]
        similarity = similarity.masked_fill(~real[:, None], -torch.inf)
        best = similarity.topk(min(self._rule.nearest, visual.shape[1]), -1).values
        finite = torch.isfinite(best)
        total = best.masked_fill(~finite, 0).sum(-1)
        relevance = total / finite.sum(-1).clamp(min=1)
        if self._rule.space == "embedding" or self._rule.position == "own":
            return relevance
        return relevance.gather(1, tree.parents.expand_as(relevance))

    def _gather(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """``[A, V, d]`` normalised states of these rows' visual tokens, and ``[A, V]`` which are no padding."""
        key = tuple(rows)
        if self._gathered is None or self._gathered[0] != key:
            states = [visual[1] for row in rows if (visual := self._visual[row]) is not None]
            padded = pad_sequence(states, batch_first=True)
            if not padded.shape[1]:
                padded = padded.new_zeros(padded.shape[0], 1, padded.shape[2])
            counts = torch.tensor([len(own) for own in states], device=padded.device)
            real = torch.arange(padded.shape[1], device=padded.device) < counts[:, None]
            self._gathered = key, padded, real
        return self._gathered[1:]


@dataclass(frozen=True)
class RandomLoosening(RandomOptions, StatelessRule):
    """Control for LVSpec: the same number of draft tokens of every branch is loose, chosen at random. LOSSY.

    One random number per level of a tree.
    """

    special_ids: tuple[int, ...] = ()  # tokens that are never loosened

    lossless = False
    samples = False

    def uniforms(self, max_depth: int, max_children: int) -> tuple[int, int]:
        return max_depth, 1

    def judge(
        self, rows: Rows, tree: DraftTree, scores: Tensor, uniforms: Tensor | None, output: ForwardOutput
    ) -> Verdict:
        assert uniforms is not None
        compared = TreeComparison(tree, scores, self.special_ids)
        level = (tree.depth - 1).clamp(min=0).expand_as(compared.choice)
        drawn = uniforms[:, :, 0].gather(1, level)  # one per level
        return compared.longest_path(compared.lowest_share(drawn, self.loose_share) & compared.may_loosen)
