"""Learner protocol of the training loop, and the learner for heads."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from saccade.draft.heads.eagle import Eagle3
from saccade.draft.heads.head import MARK
from saccade.draft.heads.registry import part_of
from saccade.draft.heads.store import save_head
from saccade.errors import TrainingError
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.train.checkpoint import identity
from saccade.train.data import Source
from saccade.train.feature_cache import FeatureCache
from saccade.train.features import Features
from saccade.train.objectives.entries import Entries, Feeder, lm_head_of
from saccade.train.objectives.losses import Tally, terms_of
from saccade.train.recipe import Recipe, Stage
from saccade.train.validate import EngineMeasure, Measure
from saccade.train.warm_start import choose_vocabulary, new_head, weights_digest


class Learner(Protocol):
    """A drafter in training: its batches, loss, measure and files; stages are counted from 1."""

    word: str  # its name in plans
    folder: str  # name of its folder
    about: Mapping[str, Any]  # what must be the same on resume (JSON values)

    @property
    def module(self) -> nn.Module: ...
    @property
    def terms(self) -> Sequence[str]: ...
    def weights(self, number: int) -> list[nn.Parameter]: ...  # that are trained in a stage
    def describe(self, number: int, stage: Stage) -> str: ...  # in a few words
    def prepare(self, indices: Sequence[int], step: int) -> Any | None:
        """Prepare samples for `batch`, independently of the drafter's weights; None if none is usable.

        It may run in another thread during an earlier step.
        """

    def batch(self, prepared: Any) -> Any: ...  # argument of `loss`
    def loss(self, batch: Any, stage: Stage) -> Tally: ...  # with gradients
    def tensors(self, batch: Any) -> dict[str, Tensor]: ...  # by name, to inspect a failure
    def cache_bytes(self, indices: Sequence[int]) -> float: ...  # mean of a sample in a feature cache; 0 without one
    def state(self) -> dict[str, Tensor]: ...  # weights for a checkpoint
    def load_state(self, state: Mapping[str, Tensor]) -> None: ...
    def close(self) -> None: ...  # end the run
    def save(self, folder: Path) -> None: ...  # as a loadable folder
    def measure(self, prompts: Sequence[Prompt]) -> Measure | None: ...  # None if no prompt has room for an answer


class HeadLearner:
    """Learner of a head of the recipe's kind, on the target's states."""

    word = folder = "head"

    def __init__(
        self,
        target: Target,
        recipe: Recipe,
        source: Source,
        out: Path,
        *,
        begin: str | Path | None = None,
        features: Path | None = None,
        count: int = 1,
        say: Callable[[str], None] = print,
    ) -> None:
        self._target, self._say = target, say
        self.module = new_head(target, recipe, begin)
        if begin is None and isinstance(self.module, Eagle3) and self.module.has_lm_head:
            say(choose_vocabulary(self.module, target, source))
        self._objective, self._lm_head = recipe.objective, lm_head_of(target)
        if getattr(self._objective, "k", 1) > target.vocab_size:
            raise TrainingError(
                f"loss.k is larger than the target's vocabulary; it must be at most {target.vocab_size}."
            )
        self.terms = terms_of(self._objective)
        self.about: Mapping[str, Any] = {
            **json.loads(self.module.config.to_json()),
            "from": None if begin is None else weights_digest(self.module),
        }
        self.feeder: Feeder = part_of(recipe.kind, "feeder")(target, self.module, source, objective=self._objective)
        read = [self.about[name] for name in (MARK, "layers", "options")] + [self.feeder.layer]
        if features is not None:
            read = self.feeder.reading(self.module.config, self._objective)
        self._needed = self.feeder.needed if features is None else None
        if recipe.feature_cache != "none":
            on_disk = recipe.feature_cache == "disk"
            self.feeder.cache = FeatureCache(
                target,
                recipe.cache_gb * 1e9 * (count if on_disk else 1),
                (features or out / "features") if on_disk else None,
                json.dumps([identity(target), source.fingerprint, dict(source.inputs), recipe.max_tokens, *read]),
                say,
                self._needed,
                shared=features is not None,
            )

    def weights(self, number: int) -> list[nn.Parameter]:
        return list(self.module.parameters())

    def describe(self, number: int, stage: Stage) -> str:
        return "one draft step" if stage.draft_steps == 1 else f"{stage.draft_steps} draft steps"

    def prepare(self, indices: Sequence[int], step: int) -> list[Features] | None:
        return self.feeder.features(indices) or None

    def batch(self, prepared: list[Features]) -> Entries:
        return self.feeder.entries_of(prepared)

    def loss(self, batch: Entries, stage: Stage) -> Tally:
        return self._objective(self.module, batch, self._lm_head, stage.draft_steps)

    def tensors(self, batch: Entries) -> dict[str, Tensor]:
        return {name: getattr(batch, name) for name in batch.names}

    def cache_bytes(self, indices: Sequence[int]) -> float:
        cache = FeatureCache(self._target, math.inf, needed=self._needed)
        found = [cache.bytes_of(features) for features in self.feeder.features(indices)]
        return sum(found) / max(len(found), 1)

    def state(self) -> dict[str, Tensor]:
        return dict(self.module.state_dict())

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.module.load_state_dict(state)

    def close(self) -> None:
        if self.feeder.cache is not None:
            self.feeder.cache.flush()
            self._say(f"features kept: {self.feeder.cache}")

    def save(self, folder: Path) -> None:
        save_head(self.module, folder)

    def measure(self, prompts: Sequence[Prompt]) -> Measure | None:
        measure = EngineMeasure(self._target, prompts, say=self._say)
        return measure if measure.prompts else None
