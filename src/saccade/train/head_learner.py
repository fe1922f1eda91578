"""A head on the target's states as what a run trains."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from saccade.draft.heads.store import save_head
from saccade.errors import TrainingError
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Target
from saccade.train.beginning import new_head
from saccade.train.dream_feeding import new_feeder
from saccade.train.entries import Entries
from saccade.train.feeding import lm_head_of, new_cache
from saccade.train.identity import identity
from saccade.train.losses import Tally
from saccade.train.recipe import Recipe, Stage
from saccade.train.samples import Source
from saccade.train.validate import EngineMeasure, Measure

_TERMS = ("states", "middle", "distribution", "top", "tokens")


class HeadLearner:
    """A fresh head of the recipe's kind, fed the target's states; see `saccade.train.learner.Learner`.

    Args:
        out: of the run; features and a calibration are kept there.
        rank: number of this process.
        say: takes lines of progress.

    Attributes:
        feeder: makes entries of samples.

    Raises:
        TrainingError: an option of the head is of the wrong type, or loss.k is larger than the vocabulary.
        ModelError: the kind of head has no such option.
    """

    word = folder = "head"

    def __init__(
        self,
        target: Target,
        recipe: Recipe,
        source: Source,
        out: Path,
        *,
        rank: int = 0,
        say: Callable[[str], None] = print,
    ) -> None:
        self._target, self._recipe, self._say = target, recipe, say
        self.module = new_head(target, recipe)
        self._objective, self._lm_head = recipe.objective, lm_head_of(target)
        if getattr(self._objective, "k", 1) > target.vocab_size:
            raise TrainingError(
                f"loss.k is larger than the target's vocabulary; it must be at most {target.vocab_size}."
            )
        self.terms = [name for name in _TERMS if getattr(self._objective, name, 0)]
        self.about: Mapping[str, Any] = json.loads(self.module.config.to_json())
        layers = [list(self.module.layers), recipe.max_tokens, *self._wanted()]
        cache = new_cache(
            recipe.feature_cache,
            target,
            recipe.cache_gb * 1e9,
            out / "features" / str(rank),
            json.dumps([identity(target), source.fingerprint, dict(source.inputs), *layers]),
            say,
        )
        self.feeder = new_feeder(
            target, self.module, source, cache, self._objective, out / "calibration", rank
        )

    def weights(self, number: int) -> list[nn.Parameter]:
        """All that the head has, in every stage."""
        return list(self.module.parameters())

    def describe(self, number: int, stage: Stage) -> str:
        return "one draft step" if stage.draft_steps == 1 else f"{stage.draft_steps} draft steps"

    def batch(self, indices: Sequence[int], step: int) -> Entries | None:
        return self.feeder.entries(indices)

    def judge(self, batch: Entries, stage: Stage) -> Tally:
        return self._objective(self.module, batch, self._lm_head, stage.draft_steps)

    def tensors(self, batch: Entries) -> dict[str, Tensor]:
        return {name: getattr(batch, name) for name in batch.names}

    def batch_bytes(self, indices: Sequence[int]) -> int:
        """Entries, and the logits of target and head with their gradients, which weigh most."""
        entries = self.feeder.entries(indices)
        if entries is None:
            return 0
        held = sum(t.nbytes for t in (entries.features, entries.embeddings, entries.states))
        logits = int(entries.learnt.sum()) * self._target.vocab_size * 4
        return held + 6 * self._recipe.deepest * logits

    def state(self) -> dict[str, Tensor]:
        return dict(self.module.state_dict())

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.module.load_state_dict(state)

    def keep(self) -> None:
        self.feeder.save()

    def close(self) -> None:
        if self.feeder.cache is not None:
            self.feeder.cache.flush()
            self._say(f"features kept: {self.feeder.cache}")

    def save(self, folder: Path) -> None:
        save_head(self.module, folder)

    def measure(self, prompts: Sequence[Prompt]) -> Measure | None:
        measure = EngineMeasure(self._target, prompts, say=self._say)
        return measure if measure.prompts else None

    def _wanted(self) -> list[Any]:
        """What decides, besides the head's layers, which features are read: DREAM's compression and inner state."""
        layer = getattr(self._objective, "layer", None)
        return [] if layer is None else [dict(self.module.config.options), layer]
