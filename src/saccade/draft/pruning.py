"""Which visual tokens a drafter keeps (SpecVLM, Ji et al. 2025; SAGE, Section 5.1).

Every medium keeps a share of its own tokens. ``attention`` and ``specvlm`` go by what the target's words looked at
during its prefill; ``uniform`` needs nothing.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from saccade.draft.model import ModelDrafter, ModelDraftSession
from saccade.draft.trees.policy import TreePolicy
from saccade.errors import SaccadeWarning
from saccade.inputs.families import family_of, visual_ids
from saccade.inputs.families.family import Grid
from saccade.inputs.padded import media_spans
from saccade.inputs.prompt import Medium, Prompt
from saccade.target.adapter import Target
from saccade.target.context import Context, PrefillResult


@dataclass(frozen=True)
class Pruning:
    """How many visual tokens stay, and which.

    Attributes:
        select: ``uniform``: evenly spread over every frame; ``attention``: those with the highest attention from the
            target's words; ``specvlm``: the fewest that get ``mass`` of that attention, and the rest of the share
            evenly spread over the others.
        keep_images: share of an image's tokens that stays.
        keep_videos: share of a video's tokens that stays; also where the family takes its frames as images.
        mass: of the attention, for the first stage of ``specvlm`` (0.4 in its authors' released code).
        layers: of the target whose attention counts, None for all (as there); ``(-1,)`` is the last one.
    """

    select: Literal["uniform", "attention", "specvlm"] = "specvlm"
    keep_images: float = 0.2
    keep_videos: float = 0.1
    mass: float = 0.4
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.select not in ("uniform", "attention", "specvlm"):
            raise ValueError(f"select must be one of uniform, attention, specvlm, not {self.select!r}.")
        for name in ("keep_images", "keep_videos"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be a share above 0 and up to 1, not {getattr(self, name)}.")
        if not 0 <= self.mass <= 1:
            raise ValueError(f"mass must lie between 0 and 1, not {self.mass}.")

    @property
    def prunes(self) -> bool:
        """Whether any visual token goes."""
        return min(self.keep_images, self.keep_videos) < 1

    @property
    def needs_attention(self) -> bool:
        """Whether the target's attention is read."""
        return self.select != "uniform" and self.prunes

    def kept(self, config: Any, medium: Medium, scores: Tensor | None) -> list[int]:
        """Ascending indices of the tokens of one medium that stay.

        Args:
            config: of the model whose tokens they are.
            scores: ``[n_tokens]`` attention that each gets; None spreads evenly.
        """
        share = self.keep_videos if medium.is_of_video else self.keep_images
        budget = min(medium.n_tokens, max(1, math.floor(share * medium.n_tokens + 0.5)))
        if self.select == "uniform" or scores is None:
            return spread(frames_of(config, medium), budget)
        return two_stages(scores.tolist(), budget, self.mass if self.select == "specvlm" else 1.0)

    def dropped(
        self,
        config: Any,
        prompt: Prompt,
        seen: Prompt | None = None,
        columns: Tensor | None = None,
        target: Any = None,
    ) -> list[int]:
        """Ascending positions of the visual tokens of a drafter's prompt that go.

        Args:
            config: of the drafter.
            seen: the prompt as the target has it.
            columns: ``[S]`` attention that each of its positions gets; None spreads evenly.
            target: configuration of the target.
        """
        if not prompt.media:
            return []
        attention: list[Tensor | None] = [None] * len(prompt.media)
        if self.select != "uniform" and seen is not None and columns is not None:
            attention = _carried(config, prompt, target, seen, columns.cpu())
        out: list[int] = []
        for places, medium, scores in zip(places_of(config, prompt), prompt.media, attention, strict=True):
            if len(places) == medium.n_tokens:  # else of a family whose placeholders are unknown
                kept = set(self.kept(config, medium, scores))
                out += [place for i, place in enumerate(places) if i not in kept]
        return sorted(out)


def spread(frames: Sequence[int], budget: int) -> list[int]:
    """``budget`` indices evenly spread over frames of these sizes: each has its part, in the middle of equal steps."""
    kept, first = [], 0
    for number, size in enumerate(frames):
        part = min(size, budget * (number + 1) // len(frames) - budget * number // len(frames))
        kept += [first + (2 * i + 1) * size // (2 * part) for i in range(part)]
        first += size
    return kept


def two_stages(scores: Sequence[float], budget: int, mass: float) -> list[int]:
    """SpecVLM's two stages: the highest scores until they hold ``mass`` of all, then an even spread over the others.

    With ``mass`` 1 the first stage takes the whole budget.
    """
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    total, held, first = sum(scores), 0.0, []
    for index in order[:budget]:
        if held >= mass * total and mass < 1:
            break
        held += scores[index]
        first.append(index)
    others = sorted(set(order) - set(first))
    rest = spread([len(others)], budget - len(first)) if others else []
    return sorted([*first, *(others[i] for i in rest)])


def places_of(config: Any, prompt: Prompt) -> list[list[int]]:
    """Positions of every medium's placeholders."""
    tokens = visual_ids(config)
    return [
        [i for i in range(first, last) if prompt.ids[i] == tokens.get(medium.kind)]
        for (first, last), medium in zip(media_spans(config, prompt), prompt.media, strict=True)
    ]


def frames_of(config: Any, medium: Medium) -> list[int]:
    """Tokens of each frame or tile; what belongs to no grid counts with the last one."""
    grid = family_of(config).grid(medium)
    if grid is None:
        return [medium.n_tokens]
    frames, rows, columns = grid
    sizes = [rows * columns] * frames
    sizes[-1] += medium.n_tokens - sum(sizes)
    return sizes


def transferred(scores: Tensor, here: Grid, there: Grid) -> Tensor:
    """Scores ``[t * h * w]`` on one grid, read at the relative places of another grid's tokens."""
    values = scores[: math.prod(here)].view(here)
    for dim, (old, new) in enumerate(zip(here, there, strict=True)):
        values = values.index_select(dim, (2 * torch.arange(new) + 1) * old // (2 * new))
    return values.flatten()


def _carried(config: Any, prompt: Prompt, target: Any, seen: Prompt, columns: Tensor) -> list[Tensor | None]:
    """Every medium's scores over the drafter's tokens; None where the target's tokens cannot be found in them."""
    if [m.kind for m in seen.media] != [m.kind for m in prompt.media]:
        _note("the drafter's prompt has other images or videos than the target's")
        return [None] * len(prompt.media)
    found: list[Tensor | None] = []
    for places, theirs, ours in zip(places_of(target, seen), seen.media, prompt.media, strict=True):
        scores = columns[places]
        here, there = family_of(target).grid(theirs), family_of(config).grid(ours)
        if theirs.n_tokens == ours.n_tokens:
            found.append(scores)
        elif here is None or there is None:
            _note(
                f"its {ours.kind} has {ours.n_tokens} tokens and the target's {theirs.n_tokens}, not on a known grid"
            )
            found.append(None)
        else:
            moved = transferred(scores, here, there)
            found.append(torch.nn.functional.pad(moved, (0, ours.n_tokens - len(moved))))
    return found


def _note(why: str) -> None:
    warnings.warn(
        f"The target's attention says nothing about the drafter's visual tokens: {why}. They are pruned evenly "
        "instead.",
        SaccadeWarning,
        stacklevel=2,
    )


class PrunedDrafter(ModelDrafter):
    """A draft VLM behind pruned visual tokens (SpecVLM, Ji et al. 2025).

    Args:
        model: the adapter of the draft model. The target's own makes it self-speculation: the weights are shared, and
            a second, pruned context is what makes drafting cheaper. The vision tower runs once for both.
        policy: which guesses are worth verifying.
        vocab_size: as in `ModelDrafter`.
        pruning: which visual tokens stay.
    """

    def __init__(
        self,
        model: Target,
        policy: TreePolicy,
        vocab_size: int | None = None,
        pruning: Pruning | None = None,
    ) -> None:
        super().__init__(model, policy, vocab_size)
        self.pruning = pruning or Pruning()
        self.early = not self.pruning.needs_attention

    def open(self, rows: int, target: Context) -> PrunedDraftSession:
        return PrunedDraftSession(self, rows, target)


class PrunedDraftSession(ModelDraftSession):
    """A draft model's KV cache without the pruned tokens, at the original positions."""

    def __init__(self, drafter: PrunedDrafter, rows: int, target: Context) -> None:
        super().__init__(drafter, rows, target)
        self._pruning = drafter.pruning
        self._target = target
        self._room = [0] * rows
        ask_attention(self._pruning, target)

    def reserve(self, row: int, capacity: int) -> None:
        """Room is made when a prompt is loaded and its gaps are known: most of it would never be written."""
        self._room[row] = capacity

    def load(self, row: int, prompt: Prompt, prefill: PrefillResult | None) -> None:
        dropped = dropped_of(self, row, prompt, self._pruning, self._target, prefill)
        super().reserve(row, self._room[row] - len(dropped))
        self.read(row, prompt, dropped)


def ask_attention(pruning: Pruning, target: Context) -> None:
    """Let the target tell what its words look at, where that decides what stays.

    Raises:
        ModelError: another asks for other layers or tokens.
    """
    if pruning.needs_attention:
        target.requirements.add_attention(pruning.layers, "words")


def dropped_of(
    session: ModelDraftSession,
    row: int,
    prompt: Prompt,
    pruning: Pruning,
    target: Context,
    prefill: PrefillResult | None,
) -> list[int]:
    """Positions of a prompt that a row of a draft session is not to see.

    What the row holds of an earlier prompt was chosen by what that prompt's words looked at. A later turn of the
    conversation goes on from it; for any other prompt the row is emptied, so that its guesses are those of a fresh row.
    """
    if pruning.needs_attention and prompt.media and not session.goes_on(row, prompt):
        session.context.empty(row)
    config = session.context.target.config
    if prefill is None:
        return pruning.dropped(config, prompt)
    return pruning.dropped(config, prompt, prefill.prompt, prefill.columns, target.target.config)
