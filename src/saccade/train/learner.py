"""Learner protocol of the training loop, the learner for heads, and what the engine measures of a drafter."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from saccade.draft.drafter import Drafter
from saccade.draft.heads.eagle import Eagle3
from saccade.draft.heads.head import MARK
from saccade.draft.heads.registry import part_of
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.heads.store import save_head
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine, Request
from saccade.errors import TrainingError
from saccade.inputs.families.family import Prompt
from saccade.loading import fastest_dtype
from saccade.target_model.adapter import Target
from saccade.train.checkpoint import identity
from saccade.train.data import Source
from saccade.train.feature_cache import FeatureCache
from saccade.train.features import Features
from saccade.train.objectives.entries import Entries, Feeder, lm_head_of
from saccade.train.objectives.losses import Tally, terms_of
from saccade.train.recipe import Recipe, Stage
from saccade.train.warm_start import choose_vocabulary, new_head, weights_digest

Measure = Callable[[Any], float]
"""A drafter's module -> its block efficiency; the best of a run is the one with the largest."""


class EngineMeasure:
    """Block efficiency over greedy answers to held-out prompts."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int = 128,
        rows: int = 4,  # answered at once
        drafter: Callable[[Any], Drafter] | None = None,  # of a module; by default that of a head
        draft: Target | None = None,  # a model in whose context prompts and answers must fit, too
        ahead: int = 0,  # tokens beyond an answer that it may draft
        say: Callable[[str], None] = print,
    ) -> None:
        self._target, self._length, self._rows = target, max_new_tokens, rows
        self._drafter = drafter or self._of_head
        contexts = [m.traits.limits.context for m in (target, draft) if m is not None]
        self.prompts = fitting(prompts, max_new_tokens + ahead, [c for c in contexts if c is not None], say)

    def __call__(self, module: Any) -> float:
        """Return tokens per target forward over all prompts; the module does not change."""
        mirror = deepcopy(module).to(self._target.device, self._target.dtype).requires_grad_(False)
        mirror = mirror.to(fastest_dtype(mirror)).eval()  # as `saccade.load` has it
        engine = Engine(self._target, self._drafter(mirror))
        emitted, passes = 0, 0
        for start in range(0, len(self.prompts), self._rows):
            requests = [Request(p) for p in self.prompts[start : start + self._rows]]
            for out in engine.generate(requests, max_new_tokens=self._length, do_sample=False):
                emitted += out.stats.decoded_tokens
                passes += out.stats.target_passes
        return emitted / passes if passes else 0.0

    def _of_head(self, head: Any) -> Drafter:
        return HeadDrafter(head, self._target, Chain(min(5, head.reach or 5)), in_training=True)


def fitting(prompts: Sequence[Prompt], room: int, contexts: Sequence[int], say: Callable[[str], None]) -> list[Prompt]:
    """Return prompts that leave ``room`` tokens in all contexts, and report the others."""
    fit = [p for p in prompts if all(len(p) + room <= context for context in contexts)]
    if left := len(prompts) - len(fit):
        say(
            f"{left} of {len(prompts)} held-out prompts are not measured: they leave no {room} tokens for an "
            f"answer in a context of {min(contexts)}" + ("." if fit else ", so no drafter is found to be the best.")
        )
    return fit


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
        self.terms = tuple(terms_of(self._objective))
        self.about: Mapping[str, Any] = {
            **json.loads(self.module.config.to_json()),
            "from": None if begin is None else weights_digest(self.module),
        }
        self.feeder: Feeder = part_of(recipe.kind, "feeder")(target, self.module, source, objective=self._objective)
        made_of = [self.about[name] for name in (MARK, "layers", "options")] + [self.feeder.layer]
        if features is not None:
            made_of = self.feeder.dependencies(self.module.config, self._objective)
        self._needed = self.feeder.needed if features is None else None
        if recipe.feature_cache != "none":
            on_disk = recipe.feature_cache == "disk"
            self.feeder.cache = FeatureCache(
                target,
                recipe.cache_gb * 1e9 * (count if on_disk else 1),
                (features or out / "features") if on_disk else None,
                json.dumps([identity(target), source.fingerprint, dict(source.inputs), recipe.max_tokens, *made_of]),
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
