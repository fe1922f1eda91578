"""A head on the target's states as what a run trains."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from saccade.draft.heads.config import MARK
from saccade.draft.heads.store import save_head
from saccade.errors import TrainingError
from saccade.inputs.prompt import Prompt
from saccade.target.adapter import Target
from saccade.train.beginning import digest_of, new_head
from saccade.train.cache import FeatureCache
from saccade.train.dream_feeding import new_feeder
from saccade.train.entries import Entries
from saccade.train.features import Features
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
        begin: folder or hub id of the head to begin with; fresh weights when None.
        rank: number of this process.
        say: takes lines of progress.

    Attributes:
        feeder: makes entries of samples.

    Raises:
        TrainingError: an option of the head is of the wrong type, or loss.k is larger than the vocabulary.
        ModelError: the kind of head has no such option, or there is no head to begin with or it is of another target.
    """

    word = folder = "head"

    def __init__(
        self,
        target: Target,
        recipe: Recipe,
        source: Source,
        out: Path,
        *,
        begin: str | Path | None = None,
        rank: int = 0,
        say: Callable[[str], None] = print,
    ) -> None:
        self._target, self._recipe, self._say = target, recipe, say
        self.module = new_head(target, recipe, begin)
        self._objective, self._lm_head = recipe.objective, lm_head_of(target)
        if getattr(self._objective, "k", 1) > target.vocab_size:
            raise TrainingError(
                f"loss.k is larger than the target's vocabulary; it must be at most {target.vocab_size}."
            )
        self.terms = [name for name in _TERMS if getattr(self._objective, name, 0)]
        self.about: Mapping[str, Any] = {
            **json.loads(self.module.config.to_json()),
            "from": None if begin is None else digest_of(self.module),
        }
        read = [self.about[name] for name in (MARK, "layers", "options")]
        read += [recipe.max_tokens, getattr(self._objective, "layer", None)]
        self.feeder = new_feeder(target, self.module, source, self._objective, out / "calibration", rank)
        self.feeder.cache = new_cache(
            recipe.feature_cache,
            target,
            recipe.cache_gb * 1e9,
            out / "features" / str(rank),
            json.dumps([identity(target), source.fingerprint, dict(source.inputs), *read]),
            say,
            self.feeder.needed,
        )

    def weights(self, number: int) -> list[nn.Parameter]:
        """All that the head has, in every stage."""
        return list(self.module.parameters())

    def describe(self, number: int, stage: Stage) -> str:
        return "one draft step" if stage.draft_steps == 1 else f"{stage.draft_steps} draft steps"

    def prepare(self, indices: Sequence[int], step: int) -> list[Features] | None:
        return self.feeder.features(indices) or None

    def batch(self, prepared: list[Features]) -> Entries:
        return self.feeder.entries_of(prepared)

    def judge(self, batch: Entries, stage: Stage) -> Tally:
        return self._objective(self.module, batch, self._lm_head, stage.draft_steps)

    def tensors(self, batch: Entries) -> dict[str, Tensor]:
        return {name: getattr(batch, name) for name in batch.names}

    def cache_bytes(self, indices: Sequence[int]) -> float:
        """Bytes that a sample takes in a cache of features, mean over these."""
        cache = FeatureCache(self._target, math.inf, needed=self.feeder.needed)
        found = [cache.bytes_of(features) for features in self.feeder.features(indices)]
        return sum(found) / max(len(found), 1)

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
