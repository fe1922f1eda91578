"""What a recipe trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from saccade.errors import TrainingError
from saccade.inputs.processor import InputProcessor
from saccade.target.adapter import Target
from saccade.train.draft_vlm_learner import DraftVlmLearner
from saccade.train.head_learner import HeadLearner
from saccade.train.learner import Learner
from saccade.train.recipe import Recipe
from saccade.train.samples import Source


def new_learner(
    target: Target,
    recipe: Recipe,
    source: Source,
    out: Path,
    *,
    processor: InputProcessor | None = None,
    begin: str | Path | None = None,
    rank: int = 0,
    say: Callable[[str], None] = print,
) -> Learner:
    """A draft VLM, or a head with fresh weights or another's; arguments as in `DraftVlmLearner` and `HeadLearner`.

    Raises:
        TrainingError: a draft VLM is wanted, and there is no processor, or it cannot be made or is to begin with a
            head; or the head to begin with is another than the recipe's.
        ModelError: the kind of head has no such option, or there is no head to begin with.
    """
    if recipe.kind != "draft-vlm":
        return HeadLearner(target, recipe, source, out, begin=begin, rank=rank, say=say)
    if begin is not None:
        raise TrainingError("A draft VLM does not begin with a head; give its language model with --lm.")
    if processor is None:
        raise TrainingError("A draft VLM needs the target's InputProcessor; give it with processor=....")
    return DraftVlmLearner(target, processor, recipe, source, say=say)
