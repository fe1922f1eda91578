"""LVSpec: strict where the answer speaks of what is seen, loose elsewhere. LOSSY.

LVSpec, Section 3: a guess is relevant when the target's hidden state that verifies it resembles those of visual tokens;
of K guesses the floor(lambda * K) least relevant ones are accepted whatever the target would have said. A guess also
passes when the target's own token occurs elsewhere in the draft (position-shift tolerance, PST). In a tree both are
said of every branch by itself (Appendix E): K counts the guesses above and below a guess, and only among them is the
target's token looked for. The longest accepted branch wins.

The paper leaves open which state verifies a guess: Eq. 7 reads as the one at the guess, Figure 4 speaks of tokens
decoded from it. A last-layer state stands for the next token, so the state that verifies a guess is its parent's.
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

from saccade.inputs.padded import visual_mask
from saccade.inputs.prompt import Prompt
from saccade.target.context import Context, PrefillResult
from saccade.target.forward import ForwardOutput
from saccade.tree import DraftTree
from saccade.verify.loosening import drafted, guarded, in_line, least, target_tokens, walk
from saccade.verify.rule import Verdict


@dataclass(frozen=True)
class LVSpec:
    """The rule and its settings.

    Attributes:
        share: lambda, the share of guesses that are loose; 0 without ``shift`` is the greedy rule exactly.
        nearest: N, how many of the most similar visual tokens are averaged.
        shift: position-shift tolerance.
        space: what is compared: the target's last ``hidden`` states, or its input ``embedding``s (Table 6).
        position: whose hidden state judges a guess: its parent's, from which the target predicts what stands in the
            guess's place (``verifying``), or its ``own`` (Eq. 7 to the letter). Embeddings always stand for their own
            token.
        special_ids: tokens that are never forgiven, neither as guess nor as the target's own.

    Guards that the paper leaves out: special tokens and tokens that a logits processor forbids are never loosened, and
    a row without visual tokens is strict.
    """

    share: float = 0.7
    nearest: int = 10
    shift: bool = True
    space: Literal["hidden", "embedding"] = "hidden"
    special_ids: tuple[int, ...] = ()
    position: Literal["verifying", "own"] = "verifying"

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

    def uniforms(self, max_depth: int, max_children: int) -> tuple[int, int]:
        return 0, 0

    def open(self, context: Context) -> LVSpecJudge:
        return LVSpecJudge(self, context)


class LVSpecJudge:
    """The visual tokens of every row, and the rule."""

    def __init__(self, rule: LVSpec, context: Context) -> None:
        self._rule = rule
        self._config = context.target.config
        self._layer = len(context.target.layers) if rule.space == "hidden" else 0
        context.requirements.add_layers(self._layer)
        # Per row the places of its visual tokens in the prompt and their normalised states [n, d].
        self._seen: list[tuple[list[int], Tensor] | None] = [None] * context.rows
        self._gathered: tuple[tuple[int, ...], Tensor, Tensor] | None = None

    def read(self, row: int, prompt: Prompt, prefill: PrefillResult) -> None:
        """Keep the states of the visual tokens that were just read; those of reused ids stay, all others go."""
        start, states = prefill.start, prefill.hidden[self._layer]
        mask = visual_mask(self._config, prompt.ids)
        places = mask.nonzero()[:, 0].tolist()
        new = F.normalize(states[mask[start:].to(states.device)].float(), dim=-1)
        held, earlier = self._seen[row] or ([], new[:0])
        kept = bisect_left(held, start)
        self._seen[row] = (
            [*held[:kept], *places[bisect_left(places, start) :]],
            torch.cat([earlier[:kept], new]),
        )
        self._gathered = None

    def judge(
        self,
        rows: Sequence[int],
        tree: DraftTree,
        scores: Tensor,
        uniforms: Tensor | None,
        output: ForwardOutput,
    ) -> Verdict:
        choice, wanted = target_tokens(tree, scores)
        if tree.size == 1:
            zeros = torch.zeros_like(choice)
            return Verdict(zeros, zeros[:, 0], choice[:, 0])
        guesses = drafted(tree)
        match = guesses & (tree.tokens == wanted)
        barred = guarded(tree, scores, wanted, self._rule.special_ids)
        sees = self._gather(rows)[1].any(1)[:, None]
        forgivable = guesses & ~barred & sees
        line = in_line(tree)
        loose = least(self.relevance(rows, tree, output), line, self._rule.share) & forgivable
        shifted = torch.zeros_like(match)
        if self._rule.shift:
            elsewhere = (wanted[:, :, None] == tree.tokens[:, None, :]) & line
            shifted = elsewhere.any(-1) & forgivable
        return walk(tree, choice, match, loose, shifted)

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
        """``[A, V, d]`` normalised states of these rows' visual tokens, and ``[A, V]`` which are real."""
        key = tuple(rows)
        if self._gathered is None or self._gathered[0] != key:
            states = [seen[1] for row in rows if (seen := self._seen[row]) is not None]
            padded = pad_sequence(states, batch_first=True)
            if not padded.shape[1]:
                padded = padded.new_zeros(padded.shape[0], 1, padded.shape[2])
            counts = torch.tensor([len(own) for own in states], device=padded.device)
            real = torch.arange(padded.shape[1], device=padded.device) < counts[:, None]
            self._gathered = key, padded, real
        return self._gathered[1:]


@dataclass(frozen=True)
class RandomLoosening:
    """Control for LVSpec: as many guesses of every branch are loose, chosen at random. LOSSY.

    There is one random number per level of a tree.

    Attributes:
        share: share of guesses that are loose.
        special_ids: tokens that are never forgiven.
    """

    share: float = 0.7
    special_ids: tuple[int, ...] = ()

    lossless = False
    samples = False

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must be from 0 to 1, not {self.share}.")

    def uniforms(self, max_depth: int, max_children: int) -> tuple[int, int]:
        return max_depth, 1

    def open(self, context: Context) -> RandomLoosening:
        return self

    def read(self, row: int, prompt: Prompt, prefill: PrefillResult) -> None:
        """Nothing to remember of a prompt."""

    def judge(
        self,
        rows: Sequence[int],
        tree: DraftTree,
        scores: Tensor,
        uniforms: Tensor | None,
        output: ForwardOutput,
    ) -> Verdict:
        assert uniforms is not None
        choice, wanted = target_tokens(tree, scores)
        guesses = drafted(tree)
        match = guesses & (tree.tokens == wanted)
        drawn = uniforms[:, :, 0].gather(1, (tree.depth - 1).clamp(min=0).expand_as(match))  # one per level
        barred = guarded(tree, scores, wanted, self.special_ids)
        loose = least(drawn, in_line(tree), self.share) & guesses & ~barred
        return walk(tree, choice, match, loose, torch.zeros_like(match))
