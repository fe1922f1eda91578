"""Training of a draft VLM."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from saccade.draft.model import ModelDrafter
from saccade.draft.trees.policy import Chain
from saccade.errors import ModelError, TrainingError
from saccade.inputs.families.family import Prompt
from saccade.inputs.processor import InputProcessor
from saccade.loading import check_checkpoint, load_model, load_processor, name_of, path_of, save_processor
from saccade.resolution import shared_vocabulary
from saccade.target_model.adapter import Target
from saccade.train.checkpoint import identity, trained
from saccade.train.data import Source, TrainingSample
from saccade.train.features import answer_mask, extract_features, forward_passes
from saccade.train.learner import EngineMeasure, Measure
from saccade.train.objectives.entries import lm_head_of
from saccade.train.objectives.heads import DraftVlmObjective
from saccade.train.objectives.losses import Tally, recompute_layers, terms_of
from saccade.train.optimiser import largest_of
from saccade.train.recipe import Recipe, Stage
from saccade.wording import differences

_GAMMA = 5  # draft tokens of a chain in measurements
_PROBED = 16  # samples that are checked against the language model's context before training


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Samples whose media fit into one forward pass."""

    samples: Sequence[TrainingSample]  # inputs of the target
    inputs: dict[str, Any]  # of the drafter, without media in text-only batches; `input_ids` is `[B, S]`
    supervised: Tensor  # `[B, S]` bool; tokens whose next token is part of the answer


class DraftVlmLearner:
    """A draft VLM of the recipe's language model; see `saccade.train.learner.Learner`."""

    word, folder = "drafter", "draft"

    def __init__(
        self,
        target: Target,
        processor: InputProcessor | None,
        recipe: Recipe,
        source: Source,
        *,
        begin: str | Path | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        check_recipe(recipe)
        if processor is None:
            raise TrainingError("A draft VLM needs the target's InputProcessor; give it with processor=....")
        self._target, self._processor, self._recipe, self._source = target, processor, recipe, source
        self._parts = new_draft_vlm(target, processor, str(recipe.head["lm"]), recipe.seed)
        self.module = self._parts.model
        self._own = Target(self.module, executor="stock")
        if recipe.recompute:
            recompute_layers(self._own.layers)
        self._objective, self._lm_head = DraftVlmObjective(**recipe.loss), lm_head_of(target)
        self.terms = tuple(terms_of(self._objective))
        self.about: Mapping[str, Any] = {"kind": recipe.kind, **identity(self._own)}
        self._say, self._context = say, self._own.traits.limits.context
        self._long: set[int] = set()
        self._check_lengths()
        if begin is not None:
            self._begin(begin)

    def _begin(self, begin: str | Path) -> None:
        """Take the weights of another run's checkpoint."""
        known = trained(begin)
        if known is None:
            raise TrainingError("A draft VLM does not begin with a head; give its language model with --lm.")
        about, weights = known
        for key, ours, theirs in differences(self.about, about):
            raise TrainingError(f"The drafter in {begin} has {key} {theirs!r}, but this run's has {ours!r}.")
        self.load_state(weights)
        self.about = {**self.about, "from": str(begin)}

    def weights(self, number: int) -> list[nn.Parameter]:
        """Parameters of a stage: the projector in the first one, and the language model in all later ones."""
        return self._parts.projector + (self._parts.language if number > 1 else [])

    def describe(self, number: int, stage: Stage) -> str:
        return "the projector alone" if number == 1 else "projector and language model"

    def prepare(self, indices: Sequence[int], step: int) -> list[DraftBatch] | None:
        found = [s for s in map(self._sample, indices) if s is not None]
        # A batch without media has no gradients for the projector.
        blind = self._recipe.at(step)[0] > 1 and self._objective.is_blind(step)
        return self._batches(found, blind) if found else None

    def batch(self, prepared: list[DraftBatch]) -> list[DraftBatch]:
        return prepared

    def loss(self, batch: Sequence[DraftBatch], stage: Stage) -> Tally:
        first, *others = (self._loss(part) for part in batch)
        return sum(others, first)

    def tensors(self, batch: Sequence[DraftBatch]) -> dict[str, Tensor]:
        return {
            f"{number}.{name}": value
            for number, part in enumerate(batch)
            for name, value in {**part.inputs, "supervised": part.supervised}.items()
        }

    def cache_bytes(self, indices: Sequence[int]) -> float:
        return 0.0

    def state(self) -> dict[str, Tensor]:
        """Return all weights but the tower's, which are the target's."""
        weights = self.module.state_dict()
        return {name: weights[name] for name in self._parts.trained}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        wanted = set(self._parts.trained)
        for name in sorted(wanted ^ state.keys()):
            raise TrainingError(
                f"The checkpoint {'lacks' if name in wanted else 'has'} the weight {name}; expected all weights of the "
                "drafter but its vision tower's, so give a checkpoint of this run, or start again in another folder."
            )
        self.module.load_state_dict(state, strict=False)  # without the frozen tower

    def close(self) -> None:
        """Report how many samples were left out."""
        if self._long:
            self._say(
                f"{len(self._long)} samples were left out: they are longer than {self._context} tokens, the draft "
                "language model's context."
            )

    def save(self, folder: Path) -> None:
        """Write a checkpoint of the target's class and precision, with the target's tokenizer and image settings."""
        narrow = deepcopy(self.module).to(self._target.dtype)
        if not math.isfinite(largest_of(list(narrow.parameters()))):
            raise TrainingError(f"Weights of the drafter are too large for the target's format, {self._target.dtype}.")
        narrow.save_pretrained(folder)
        save_processor(self._processor, folder)

    def measure(self, prompts: Sequence[Prompt]) -> Measure | None:
        known = len(self._processor.tokenizer.get_vocab())

        def drafter(model: Any) -> ModelDrafter:
            return ModelDrafter(Target(model), Chain(_GAMMA), known)

        measure = EngineMeasure(self._target, prompts, drafter=drafter, draft=self._own, ahead=_GAMMA, say=self._say)
        return measure if measure.prompts else None

    def _sample(self, index: int) -> TrainingSample | None:
        """Return a sample; None if it is unusable or longer than the language model's context."""
        sample = self._source.sample(index)
        if sample is None or self._context is None or len(sample.ids) <= self._context:
            return sample
        if not self._long:
            self._say(
                f"Sample {sample.name} has {len(sample.ids)} tokens, more than {self._context}, the draft language "
                "model's context; such samples are left out."
            )
        self._long.add(index)
        return None

    def _check_lengths(self) -> None:
        """Refuse data without a sample that fits the context, before a run that could not train on them."""
        if self._context is None:
            return
        count = len(self._source.lengths)
        lengths = []
        for index in range(0, count, max(count // _PROBED, 1)):
            sample = self._source.sample(index)
            lengths.append(0 if sample is None else len(sample.ids))
            if 0 < lengths[-1] <= self._context:
                return
        if any(lengths):
            shortest = min(n for n in lengths if n)
            raise TrainingError(
                f"The samples are longer than the draft language model's context of {self._context} tokens (of "
                f"{len(lengths)} probed the shortest has {shortest}); give a language model with a longer context, "
                f"or cut them with max_tokens={self._context}."
            )

    def _batches(self, samples: Sequence[TrainingSample], blind: bool) -> list[DraftBatch]:
        prompts = [self._processor.text_only(s.prompt) if blind else s.prompt for s in samples]
        wholes = []
        for prompt, sample in zip(prompts, samples, strict=True):
            wholes.append(Prompt((*prompt.ids, *sample.answer), prompt.media))
        batches = []
        for part, inputs in forward_passes(self._own, wholes):
            supervised = torch.zeros(inputs["input_ids"].shape, dtype=torch.bool)
            for row, (prompt, whole) in enumerate(zip(prompts[part], wholes[part], strict=True)):
                supervised[row, : len(whole)] = answer_mask(len(prompt), len(whole))
            batches.append(DraftBatch(samples[part], inputs, supervised.to(self._own.device)))
        return batches

    def _loss(self, batch: DraftBatch) -> Tally:
        states = self.module.model(**batch.inputs, use_cache=False).last_hidden_state
        answer = batch.inputs["input_ids"].roll(-1, 1)[batch.supervised]
        logits = self.module.lm_head(states[batch.supervised])
        return self._objective(logits, answer, self._teacher(batch) if self._objective.kl else None)

    @torch.no_grad()
    def _teacher(self, batch: DraftBatch) -> Tensor:
        last = len(self._target.layers)
        features = extract_features(self._target, batch.samples, ())
        return self._lm_head(torch.cat([f.states[last][f.answer] for f in features]))


def check_recipe(recipe: Recipe) -> None:
    """Raise `TrainingError` unless a recipe is one of a draft VLM."""
    if set(recipe.head) != {"lm"}:
        raise TrainingError(
            "A draft VLM is made of a language model: name it with --lm (head.lm), a folder, a hub id or a shape such "
            "as 2x128; it has no other option."
        )
    if recipe.deepest != 1 or recipe.feature_cache != "none" or not recipe.residuals:
        raise TrainingError(
            "A draft VLM drafts from its own tokens and keeps no features, so draft_steps must be 1, feature_cache "
            "none and residuals true."
        )


CLASSES = tuple(f"{name}ForConditionalGeneration" for name in ("Llava", "LlavaNext", "LlavaOnevision"))
"""Targets whose draft VLM can be made."""

_HEAD_DIM = 64


@dataclass(frozen=True, slots=True)
class DraftParts:
    """A draft VLM with its groups of weights."""

    model: Any  # of the target's class, float32, on its device; the tower without gradients
    projector: list[nn.Parameter]  # between tower and language model
    language: list[nn.Parameter]  # embeddings, layers and LM head

    @property
    def trained(self) -> list[str]:
        """Names of the weights outside the tower."""
        return [name for name in self.model.state_dict() if "vision_tower." not in name]


def new_draft_vlm(target: Target, processor: InputProcessor, lm: str, seed: int) -> DraftParts:
    """Put the target's vision tower and a new projector in front of a language model.

    Source: TABED, Appendix H.1, and LLaVA-1.5, Section 3: the projector has two layers, as wide as the language model.
    """
    _check_class(target)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        small = LlamaForCausalLM(_fresh_config(target, lm)) if _shape(lm) else _loaded(target, processor, lm)
        model = _joined(target, small)
    model.float().eval().requires_grad_(True)
    base = model.model
    base.vision_tower.requires_grad_(False)
    before = {id(w) for w in (*base.vision_tower.parameters(), *base.language_model.parameters())}
    before |= {id(w) for w in model.lm_head.parameters()}
    projector = [w for w in model.parameters() if id(w) not in before]
    seen = {id(w) for w in (*base.vision_tower.parameters(), *projector)}
    language = [w for w in model.parameters() if id(w) not in seen]
    return DraftParts(model.to(target.device), projector, language)


def _check_class(target: Target) -> None:
    kind = type(target.model).__name__
    if kind not in CLASSES:
        raise TrainingError(
            f"A draft VLM cannot be made for a {kind}; give a target of the class {' or '.join(CLASSES)}."
        )


def joined_config(target: Target, lm: str) -> Any:
    """Return the configuration of a draft VLM by that of its language model, whose weights are not read."""
    _check_class(target)
    small = _fresh_config(target, lm) if _shape(lm) else check_checkpoint(path_of(lm), weights=False)
    small.vocab_size = max(small.vocab_size, target.vocab_size)
    return _with_text(target, small)


def _with_text(target: Target, small: Any) -> Any:
    """Return the target's configuration with another language model's."""
    config = target.model.config.to_dict()
    tied = bool(small.tie_word_embeddings)
    config |= {"text_config": small.to_dict(), "tie_word_embeddings": tied, "dtype": "float32"}
    return type(target.model.config).from_dict(config)


def _joined(target: Target, small: Any) -> Any:
    config = _with_text(target, small.config)
    model = type(target.model)(config)
    base = model.model
    base.vision_tower.load_state_dict(target.model.model.vision_tower.state_dict())
    base.language_model.load_state_dict(small.base_model.state_dict())
    if not config.tie_word_embeddings:
        model.lm_head.load_state_dict(small.get_output_embeddings().state_dict())
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    endings = {name: getattr(target.model.generation_config, name) for name in names}
    model.generation_config = GenerationConfig(**endings)  # settings for sampling that contradict cannot be written
    return model


def _shape(lm: str) -> tuple[int, int] | None:
    """Layers and width."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", lm)
    return (int(found[1]), int(found[2])) if found else None


def _fresh_config(target: Target, lm: str) -> Any:
    layers, width = _shape(lm) or (0, 0)
    heads = max(1, width // _HEAD_DIM)
    if width % (2 * heads):
        raise TrainingError(
            f"A language model cannot be {width} wide; give a multiple of {_HEAD_DIM}, or an even number below that."
        )
    text = target.text_config
    known = {name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=text.max_position_embeddings,
        tie_word_embeddings=False,
        **known,
    )


def _loaded(target: Target, processor: InputProcessor, lm: str) -> Any:
    path = path_of(lm)
    config = check_checkpoint(path)
    if config.model_type != config.get_text_config(decoder=True).model_type:
        raise ModelError(f"{path} is a {config.model_type} model with its own vision tower; give a language model.")
    shared_vocabulary(processor.tokenizer, load_processor(path).tokenizer, (name_of(target.model), path))
    small = load_model(path, dtype="float32")
    if small.base_model is small:
        raise ModelError(f"The language model {path} has no decoder of its own; give another one.")
    known = small.get_input_embeddings().weight.shape[0]
    if known < target.vocab_size:  # placeholders of media, above all, need an embedding that is then replaced
        small.resize_token_embeddings(target.vocab_size, mean_resizing=False)
        with torch.no_grad():
            for table in (small.get_input_embeddings(), small.get_output_embeddings()):
                table.weight[known:] = table.weight[:known].mean(0)
    return small
