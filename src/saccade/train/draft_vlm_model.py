"""An untrained draft VLM: the target's vision tower in front of a small language model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from saccade.errors import ModelError, TrainingError
from saccade.inputs.processor import InputProcessor
from saccade.loading import check_checkpoint, load_model, name_of, path_of, shared_vocabulary
from saccade.target_model.adapter import Target

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
        small = _fresh(target, lm) if _shape(lm) else _loaded(target, processor, lm)
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
    small.vocab_size = max(small.vocab_size, _rows(target))
    return _with_text(target, small)


def _with_text(target: Target, small: Any) -> Any:
    """Return the target's configuration with another language model's."""
    config = target.model.config.to_dict()
    tied = bool(small.tie_word_embeddings)
    config |= {"text_config": small.to_dict(), "tie_word_embeddings": tied, "dtype": "float32"}
    return type(target.model.config).from_dict(config)


def _joined(target: Target, small: Any) -> Any:
    config = _with_text(target, small.config)
    tied = bool(config.tie_word_embeddings)
    model = type(target.model)(config)
    base = model.model
    base.vision_tower.load_state_dict(target.model.model.vision_tower.state_dict())
    base.language_model.load_state_dict(small.base_model.state_dict())
    if not tied:
        model.lm_head.load_state_dict(small.get_output_embeddings().state_dict())
    model.generation_config = _endings(target.model.generation_config)
    return model


def _endings(given: Any) -> Any:
    """The target's special tokens alone: a checkpoint whose settings for sampling contradict cannot be written."""
    from transformers import GenerationConfig

    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return GenerationConfig(**{name: getattr(given, name) for name in names})


def _shape(lm: str) -> tuple[int, int] | None:
    """Layers and width."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", lm)
    return (int(found[1]), int(found[2])) if found else None


def _rows(target: Target) -> int:
    rows: int = target.model.get_input_embeddings().weight.shape[0]
    return rows


def _fresh(target: Target, lm: str) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM(_fresh_config(target, lm))


def _fresh_config(target: Target, lm: str) -> Any:
    from transformers import LlamaConfig

    layers, width = _shape(lm) or (0, 0)
    heads = max(1, width // _HEAD_DIM)
    if width % (2 * heads):
        raise TrainingError(
            f"A language model cannot be {width} wide; give a multiple of {_HEAD_DIM}, or an even number below that."
        )
    text = target.text_config
    known = {name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return LlamaConfig(
        vocab_size=_rows(target),
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
    shared_vocabulary(processor.tokenizer, InputProcessor.load(path).tokenizer, (name_of(target.model), path))
    small = load_model(path, dtype="float32")
    if small.base_model is small:
        raise ModelError(f"The language model {path} has no decoder of its own; give another one.")
    known = small.get_input_embeddings().weight.shape[0]
    if known < _rows(target):  # placeholders of media, above all, need an embedding that is then replaced
        small.resize_token_embeddings(_rows(target), mean_resizing=False)
        with torch.no_grad():
            for table in (small.get_input_embeddings(), small.get_output_embeddings()):
                table.weight[known:] = table.weight[:known].mean(0)
    return small
