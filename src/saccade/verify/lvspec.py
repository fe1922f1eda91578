"""LVSpec: strict at visually relevant draft tokens, loose elsewhere; and its random control. LOSSY.

LVSpec, Section 3: a draft token is relevant when the target's hidden state that verifies it resembles those of visual
tokens; of K draft tokens the floor(lambda * K) least relevant ones are accepted without a match. A draft token is also
accepted when the target's own token occurs elsewhere in the draft (position-shift tolerance, PST). In a tree both apply
to every branch separately (Appendix E): K counts the draft tokens above and below a node, and the target's token is
searched among those alone. The longest accepted branch wins.

The paper leaves open which state verifies a draft token: Eq. 7 reads as the one at that token, Figure 4 mentions tokens
decoded from it. A last-layer state predicts the next token, so the state that verifies a draft token is its parent's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from saccade.inputs.batching import visual_mask
from saccade.inputs.prompt import Prompt
from saccade.target.context import Context
from saccade.target.forward import ForwardOutput
from saccade.target.prefill import PrefillResult
from saccade.tree import DraftTree
from saccade.verify.loosening import (
    always_strict,
    longest_path,
    lowest_share,
    same_branch,
    target_tokens,
    unsure,
)
from saccade.verify.rule import Rows, StatelessRule, Verdict, draft_nodes


@dataclass(frozen=True)
class LVSpec:
    """The rule and its settings.

    Guards that the paper leaves out: special tokens and tokens that a logits processor forbids are never loosened, and
    a row without visual tokens is strict.
    """

    share: float = 0.7  # lambda, the share of draft tokens that are loose
    nearest: int = 10  # N, how many of the most similar visual tokens are averaged
    shift: bool = True  # position-shift tolerance
    space: Literal["hidden", "embedding"] = "hidden"  # vectors that are compared
    special_ids: tuple[int, ...] = ()  # tokens that are never loosened, neither as draft token nor as the target's own
    position: Literal["verifying", "own"] = "verifying"  # whose hidden state verifies a draft token
    entropy: float = 0.0  # FLy's condition on top, which the paper lacks

    lossless = False
    samples = False

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share (lambda) must be from 0 to 1, not {self.share}.")
        if self.nearest < 1:
            raise ValueError(f"nearest (N) must be at least 1, not {self.nearest}.")
        if self.space not in ("hidden", "embedding"):
            raise ValueError(f"space must be hidden or embedding, not {self.space!r}.")
        if self.position not in ("verifying", "own"):
            raise ValueError(f"position must be verifying or own, not {self.position!r}.")
        if not 0 <= self.entropy <= 1:
            raise ValueError(f"entropy must be a share from 0 to 1, not {self.entropy}.")

    def uniforms(self, max_depth: int, max_children: int) -> tuple[int, int]:
        return 0, 0

    def open(self, context: Context) -> LVSpecJudge:
        return LVSpecJudge(self, context)


class LVSpecJudge:
    """LVSpec's rule with the states of every row's visual tokens."""

    def __init__(self, rule: LVSpec, context: Context) -> None:
        self._rule = rule
        self._config = context.target.config
        self._layer = len(context.target.layers) if rule.space == "hidden" else 0
        context.requirements.add_layers(self._layer)
        # Per row the positions of its visual tokens in the prompt, and their normalised states [n, d].
        self._visual: list[tuple[list[int], Tensor] | None] = [None] * context.rows
        self._gathered: tuple[tuple[int, ...], Tensor, Tensor] | None = None

    def read(self, row: int, prompt: Prompt, prefill: PrefillResult) -> None:
        """Store the states of newly prefilled visual tokens; those of the reused prefix remain, all others go."""
        start, states = prefill.start, prefill.hidden[self._layer]
        mask = visual_mask(self._config, prompt.ids)
        places = mask.nonzero()[:, 0].tolist()
        new = F.normalize(states[mask[start:].to(states.device)].float(), dim=-1)
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
        choice, wanted = target_tokens(tree, scores)
        if tree.size == 1:
            return Verdict.without_draft(choice)
        is_draft = draft_nodes(tree)
        match = is_draft & (tree.tokens == wanted)
        strict = always_strict(tree, scores, wanted, self._rule.special_ids)
        has_visual = self._gather(rows)[1].any(1)[:, None]
        may_loosen = is_draft & ~strict & has_visual
        if self._rule.entropy > 0:
            may_loosen &= unsure(tree, scores, self._rule.entropy)
        branch = same_branch(tree)
        loose = lowest_share(self.relevance(rows, tree, output), branch, self._rule.share) & may_loosen
        shifted = torch.zeros_like(match)
        if self._rule.shift:
            elsewhere = (wanted[:, :, None] == tree.tokens[:, None, :]) & branch
            shifted = elsewhere.any(-1) & may_loosen
        return longest_path(tree, choice, match, loose, shifted)

    def relevance(self, rows: Sequence[int], tree: DraftTree, output: ForwardOutput) -> Tensor:
        """``[A, N]`` mean of the largest cosine similarities of each node with its row's visual tokens (Eq. 7)."""
        visual, real = self._gather(rows)
        nodes = F.normalize(output.hidden[self._layer].float(), dim=-1)
        similarity = (nodes @ visual.transpose(1, 2)).masked_fill(~real[:, None], -torch.inf)  # [A, N, V]
        best = similarity.topk(min(self._rule.nearest, visual.shape[1]), -1).values
        found = torch.isfinite(best)
        relevance = best.masked_fill(~found, 0).sum(-1) / found.sum(-1).clamp(min=1)
        if self._rule.space == "embedding" or self._rule.position == "own":
            return relevance
        return relevance.gather(1, tree.parents.expand_as(relevance))

    def _gather(self, rows: Sequence[int]) -> tuple[Tensor, Tensor]:
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
class RandomLoosening(StatelessRule):
    """Control for LVSpec: the same number of draft tokens of every branch is loose, chosen at random. LOSSY.

    One random number per level of a tree.
    """

    share: float = 0.7  # share of draft tokens that are loose
    special_ids: tuple[int, ...] = ()  # tokens that are never loosened

    lossless = False
    samples = False

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must be from 0 to 1, not {self.share}.")

    def uniforms(self, max_depth: int, max_children: int) -> tuple[int, int]:
        return max_depth, 1

    def judge(
        self, rows: Rows, tree: DraftTree, scores: Tensor, uniforms: Tensor | None, output: ForwardOutput
    ) -> Verdict:
        assert uniforms is not None
        choice, wanted = target_tokens(tree, scores)
        is_draft = draft_nodes(tree)
        match = is_draft & (tree.tokens == wanted)
        drawn = uniforms[:, :, 0].gather(1, (tree.depth - 1).clamp(min=0).expand_as(match))  # one per level
        strict = always_strict(tree, scores, wanted, self.special_ids)
        loose = lowest_share(drawn, same_branch(tree), self.share) & is_draft & ~strict
        return longest_path(tree, choice, match, loose, torch.zeros_like(match))
