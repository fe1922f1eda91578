"""Traits of a loaded model: masks, lengths in its configuration, and whether it is of the conformance suite."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import Parameter, signature
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import nn

from saccade.errors import ModelError
from saccade.inputs.families import FAMILIES, family_of
from saccade.target_model.recurrent import UNMASKED_TYPES
from saccade.target_model.token_blocks import MaskPlan, ModelLimits

TESTED = {name: title for family in FAMILIES.values() if family.is_tested for name, title in family.names.items()}
"""``model_type`` -> name, for every family in the conformance suite; others are checked at load."""

DECODERS = {decoder for family in FAMILIES.values() if family.is_tested for decoder in family.decoders}
"""``model_type`` of the language models in that suite, alone or inside a VLM: a VLM of a tested family around any other
one is checked at load like an unknown architecture."""

LAYER_TYPES = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    *UNMASKED_TYPES,
}  # kinds of layers that run on trees


def layer_types(text_config: Any) -> list[str]:
    """Kinds of a decoder's layers; empty where they are alike."""
    return list(getattr(text_config, "layer_types", None) or getattr(text_config, "layers_block_type", None) or ())


def of_layer(text_config: Any, name: str, layer: int = 0) -> Any:
    """Return an option of one layer, whether all layers share it (Llama), each has its own configuration (Gemma 4), or
    it is a list (Gemma 3n); None where it is not declared."""
    value = getattr(text_config.per_layer_config[layer], name, None)
    return value[layer] if isinstance(value, list | tuple) else value


def sharing_modes(text_config: Any) -> list[str | None]:
    """How layers share entries: ``store`` or ``reuse``; empty where none does."""
    modes = getattr(text_config, "kv_sharing_modes", None)
    shared = getattr(text_config, "num_kv_shared_layers", None) or 0  # all that transformers 5.17 tells
    if modes is None and shared:
        modes = ["store"] * (text_config.num_hidden_layers - shared) + ["reuse"] * shared
    return list(modes or ())


def crossing_layers(text_config: Any) -> list[int]:
    """Indices of layers that attend to pictures alone, and write nothing for a token."""
    return list(getattr(text_config, "cross_attention_layers", None) or ())


def entry_shapes(text_config: Any, layers: int, crossing: bool = False) -> list[tuple[int, int, int] | None]:
    """Heads of an entry and sizes of a key and a value by layer; None for layers without entries of their own.

    ``crossing``: of an entry per token of a picture, in the layers that attend to pictures alone.
    """
    types, modes = layer_types(text_config), sharing_modes(text_config)
    shapes: list[tuple[int, int, int] | None] = []
    pictures = crossing_layers(text_config)
    rows = zip_longest(types, modes, text_config.per_layer_config, range(layers))
    for kind, mode, config, index in islice(rows, layers):
        if kind in UNMASKED_TYPES or mode == "reuse" or (index in pictures) != crossing:
            shapes.append(None)
            continue
        own = config or text_config
        heads = getattr(own, "num_key_value_heads", None) or own.num_attention_heads
        size = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
        latent = getattr(own, "kv_lora_rank", None)
        if latent:  # what keys and values are made of, and the rotated part of all heads' keys
            shapes.append((1, latent, own.qk_rope_head_dim))
        else:
            shapes.append((heads, size, size))
    return shapes


@dataclass(frozen=True, slots=True)
class ModelTraits:
    """Masks, limits and names of one loaded model."""

    model_type: str  # of the top-level configuration
    text_type: str  # `model_type` of its language model
    tested: bool  # whether the conformance suite covers both
    masks: MaskPlan  # the masks that its decoder takes
    bidirectional_images: bool  # whether image tokens attend to later tokens of the same image
    bidirectional_prompts: bool  # whether all tokens of a prompt do, as those of PaliGemma
    limits: ModelLimits  # on the length of its sequences

    @classmethod
    def of(cls, config: Any) -> ModelTraits:
        """Read a Hugging Face configuration."""
        text = config.get_text_config(decoder=True)
        types = set(layer_types(text))
        window = getattr(text, "sliding_window", None)
        if types and "sliding_attention" not in types:
            window = None
        chunk = text.attention_chunk_size if "chunked_attention" in types else None
        kinds = tuple(sorted(types)) if len(types) > 1 else ()
        family = family_of(config)
        # Options that a class does not declare are kept by transformers, but not read by the model.
        read = [name for name, value in (("layer_types", types), ("sliding_window", window)) if value]
        known = types <= LAYER_TYPES and all(_declares(type(text), name) for name in read)
        return cls(
            model_type=config.model_type,
            text_type=text.model_type,
            tested=family.name in TESTED and text.model_type in DECODERS and known,
            masks=MaskPlan(window, kinds, family.full_is_causal, chunk),
            bidirectional_images=family.bidirectional_images,
            bidirectional_prompts=getattr(text, "use_bidirectional_attention", None) is True,
            limits=ModelLimits.of(text),
        )


def _declares(config_class: Any, name: str) -> bool:
    """Whether a class of configurations has an option, also by another name (Nemotron-H's ``layers_block_type``)."""
    return hasattr(config_class, name) or name in config_class.attribute_map


def check_generation(model: Any) -> None:
    """Raise `ModelError` for a model that does not generate token by token from one sequence and its cache."""
    parameters = signature(model.forward).parameters
    beside = [name for name in parameters if name.endswith("_input_ids") and name != "audio_input_ids"]
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is Parameter.empty
        and parameter.kind is Parameter.POSITIONAL_OR_KEYWORD
        and name != "input_ids"
    ]
    if getattr(model.config, "is_encoder_decoder", False):
        why = "is an encoder-decoder, whose decoder does not read the prompt"
    elif not hasattr(model, "prepare_inputs_for_generation"):
        why = "does not generate one token after the other"
    elif required:
        why = f"needs {' and '.join(required)} for every new token, where others read their cache"
    elif beside:
        why = f"reads {' and '.join(beside)} beside the prompt"
    else:
        return
    raise ModelError(
        f"{type(model).__name__} {why}; expected a model whose decoder reads pictures and text as one sequence, such "
        "as those of the tested families."
    )


def ordinary_ids(config: Any, vocab_size: int, count: int) -> list[int]:
    """Fixed ids without a meaning in the configuration (placeholder, end of sequence), repeated where there are few."""
    special: set[int] = set()
    values = [*config.to_dict().items(), *config.get_text_config(decoder=True).to_dict().items()]
    for name, value in values:
        if name.endswith(("token_id", "token_index", "token_ids")):
            special.update(value if isinstance(value, list) else [value])
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(vocab_size, generator=generator)[: count + len(special)]
    ordinary = [i for i in shuffled.tolist() if i not in special] or shuffled.tolist()
    return [ordinary[i % len(ordinary)] for i in range(count)]


def compute_device(module: nn.Module) -> torch.device:
    """Device of a module's weights, or the execution device of offloaded weights."""
    execution = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if isinstance(execution, int):
        return torch.device("cuda", execution)
    return next(module.parameters()).device if execution is None else torch.device(execution)


_LENGTH_NAME = re.compile(
    r"window|chunk|floor_scale|block_(size|len)|index_topk|compress_rate|local_attention|original_max_position"
)
"""Names of such lengths in configurations of transformers."""
_NOT_LENGTH_NAME = re.compile(
    r"window_layers|window_pattern|use_|num_local|mamba_chunk|^chunk_size$|^(n|max)_positions"
)
"""Similar names of layer counts, switches and numbers of experts."""
WINDOWS = ("sliding_window", "attention_chunk_size", "floor_scale")  # names of lengths that count tokens
_POSITIONS = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Lengths in tokens named in a configuration."""

    windows: tuple[int, ...]  # in tokens: of sliding attention, chunks and steps of temperature
    positions: tuple[int, ...]  # beyond which queries or rotary angles are computed differently at any prefix
    unknown: dict[str, int]  # name -> value of options that look like lengths of neither kind

    @classmethod
    def of(cls, text_config: Any) -> Thresholds:
        """Read a decoder's configuration."""
        lengths = list(_lengths(text_config.to_dict()))
        known = WINDOWS if "chunked_attention" in layer_types(text_config) else WINDOWS[:1]
        windows = {value for name, value in lengths if name in known}
        positions = {value for name, value in lengths if name == _POSITIONS}
        unknown = {name: value for name, value in lengths if name not in (*known, _POSITIONS)}
        return cls(tuple(sorted(windows)), tuple(sorted(positions)), unknown)

    def probe_positions(self, context: int | None) -> list[int]:
        """Positions on both sides of every length, and at powers of four for lengths that have no name; ascending."""
        lengths = (*self.windows, *self.positions, *self.unknown.values())
        last = (context or max((*lengths, 4096)) * 4 + 2) - 1
        sides = {n + d for n in lengths for d in (-1, 0, 1)}
        spread = {4**power for power in range(3, 16)}
        return sorted(n for n in {*sides, *spread, last} if 0 < n <= last)


def _lengths(values: dict[Any, Any]) -> Iterator[tuple[str, int]]:
    for key, value in values.items():
        name = str(key)
        if isinstance(value, dict) and not name.endswith("_config"):
            yield from _lengths(value)
            continue
        is_length = _LENGTH_NAME.search(name) and not _NOT_LENGTH_NAME.search(name)
        if is_length and type(value) is int and value > 1:
            yield name, value
