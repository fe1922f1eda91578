"""LoRA adapters of PEFT: the target's modules again, on the same weights, with those of an adapter on top."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from saccade.errors import ModelError
from saccade.inputs.families.family import Prompt
from saccade.loading import adapt, file_of
from saccade.target_model.adapter import Target
from saccade.target_model.context import Context
from saccade.target_model.traits import ordinary_ids

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # files of an adapter's folder
INITIAL = (True, False, "gaussian", "orthogonal", "eva")  # values of `init_lora_weights` that leave the base as it is
_ABOUT = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "peft_type",
    "peft_version",
    "revision",
    "task_type",
)
_MODULES = "bias", "exclude_modules", "layers_pattern", "layers_to_transform", "target_modules", "target_parameters"
_WEIGHTS = "alpha_pattern", "fan_in_fan_out", "lora_alpha", "lora_bias", "r", "rank_pattern", "use_dora", "use_rslora"
_TRAINING = "eva_config", "init_lora_weights", "lora_dropout"
KNOWN = {*_ABOUT, *_MODULES, *_WEIGHTS, *_TRAINING}
"""Settings of PEFT that may have any value: what they change are modules, by weights of the adapter alone."""
EMBEDDINGS = {"embed_tokens": "get_input_embeddings", "lm_head": "get_output_embeddings"}
"""Modules whose unchanged weight PEFT stores beside a LoRA on them, and the methods that return them."""


def adapted(target: Target, adapters: Mapping[str, str | Path]) -> dict[str, Target]:
    """Return a target with each of some adapters, on the same weights.

    Raises:
        ModelError: as `with_lora`; or an adapter changed the target's own weights, in whichever way.
    """
    if not adapters:
        return {}
    refuse_apart(target.ranks.is_split or target.shards or any(weight.is_meta for weight in target.model.parameters()))
    made, before = {}, _fingerprints(target.model)
    for name, place in adapters.items():
        made[name] = adapt(with_lora(target.model, name, place), target.exact, base=target)
        _run(made[name])
        after = _fingerprints(target.model)
        changed = [weight for weight, found in after.items() if found != before.get(weight)]
        if changed:
            raise ModelError(
                f"The adapter {name} changes {changed[0]} of the target, which all others share, so that the target "
                "must be loaded again; merge the adapter into a checkpoint of its own."
            )
    return made


def _fingerprints(model: Any) -> dict[str, list[Any]]:
    """Return the identity of every weight, and a digest of its bytes, which are read in place."""
    digests: dict[Any, str] = {}
    found: dict[str, list[Any]] = {}
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        found[name] = [id(weight)]
        for part in _parts(weight):
            storage = part.untyped_storage()
            place = part.device, storage.data_ptr()
            if place not in digests:
                digests[place] = _digest(torch.empty(0, dtype=torch.uint8, device=part.device).set_(storage))
            found[name] += [place, part.dtype, part.shape, part.stride(), part.storage_offset(), digests[place]]
    return found


def _parts(weight: Tensor) -> list[Tensor]:
    """Return the tensors that hold a weight: itself, unless it is a quantised one made of several."""
    if not hasattr(weight, "__tensor_flatten__"):
        return [weight]
    names, _ = weight.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(weight, name))]


def _digest(data: Tensor) -> str:
    """Hash the sums of all rows and columns of some bytes, as whole numbers of 8 of them, laid out as a square."""
    words = data[: len(data) // 8 * 8].view(torch.int64)
    side = int(len(words) ** 0.5)
    square = words[: side * side].view(side, side)
    sums = [square.sum(0), square.sum(1), words[side * side :], data[8 * len(words) :].long()]
    return hashlib.sha256(torch.cat(sums).cpu().numpy().tobytes()).hexdigest()


@torch.inference_mode()
def _run(target: Target) -> None:
    """Run the decoder, and every linear module that an adapter is on: some adapters change the base only then."""
    Context(target, 1).load(0, Prompt(tuple(ordinary_ids(target.config, target.vocab_size, 4))))
    for module in target.model.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Linear):
            module(torch.zeros(1, base.in_features, dtype=target.dtype, device=next(module.parameters()).device))


def refuse_apart(is_apart: Any) -> None:
    """Raise `ModelError` for adapters of a target whose weights are not all in the memory of this process."""
    if is_apart:
        raise ModelError(
            "Adapters need the whole target in the memory of one process, but it is split over several, or offloaded; "
            "give another device_map, or leave the adapters out."
        )


def with_lora(model: Any, name: str, place: str | Path) -> Any:
    """Return a model's modules again, with the same weights and an adapter from a folder or the hub.

    Raises:
        ModelError: the adapter is not complete, does not fit, or is not a LoRA alone; or PEFT is not installed.
    """
    config, weights = _read(model, name, place)
    from peft import inject_adapter_in_model, set_peft_model_state_dict

    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]  # PEFT freezes what it adds to
    clone = copy.deepcopy(model, {id(t): t for t in (*parameters, *model.buffers())})
    try:
        inject_adapter_in_model(config, clone, low_cpu_mem_usage=True)
        found = set_peft_model_state_dict(clone, weights, low_cpu_mem_usage=True)
        unfit = [f"the target has no {key}" for key in found.unexpected_keys]
        unfit += [f"it lacks {key}" for key in found.missing_keys if ".lora_" in key]
    except (ValueError, RuntimeError, KeyError, TypeError, NotImplementedError) as problem:  # by kind
        unfit = [_reason(problem)]
    for parameter in trained:
        parameter.requires_grad_(True)
    if unfit:
        raise ModelError(f"The adapter {name} does not fit the target ({unfit[0]}); give one that was made for it.")
    return clone.eval()


def _read(model: Any, name: str, place: str | Path) -> tuple[Any, dict[str, Tensor]]:
    """Return an adapter's configuration and weights."""
    if not find_spec("peft"):
        raise ModelError("Adapters need peft, which is not installed; run `pip install saccade[adapters]`.")
    from peft import PeftConfig

    settings, stored = (file_of(place, file) for file in (CONFIG, WEIGHTS))
    if settings is None or stored is None:
        raise ModelError(
            f"The adapter {name} has no {WEIGHTS if settings else CONFIG} in {place}; give the folder that PEFT's "
            "save_pretrained wrote."
        )
    try:
        odd = _odd(json.loads(settings.read_text(encoding="utf-8")))
        weights = load_file(stored)
        odd += [key for key in weights if ".lora_" not in key and not _is_stored_beside(key, weights[key], model)]
        config = None if odd else PeftConfig.from_pretrained(str(settings.parent))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as problem:
        raise ModelError(
            f"The adapter {name} cannot be read from {place} ({_reason(problem)}); save it again with PEFT."
        ) from problem
    if odd:
        raise ModelError(
            f"The adapter {name} has {odd[0]}, and with it changes the target in other ways than LoRAs do; merge it "
            "into a checkpoint of its own, or store it without that."
        )
    # PEFT computes with them in float32.
    return config, {key: weight.float() for key, weight in weights.items() if ".lora_" in key}


def _odd(values: dict[str, Any]) -> list[str]:
    """Return what an adapter's configuration sets besides the settings in `KNOWN`; those of a later PEFT, too."""
    from peft import LoraConfig

    if values.get("peft_type") != "LORA":
        return [f"the type {values.get('peft_type')}"]
    usual = LoraConfig().to_dict()
    odd = [name for name, value in values.items() if name not in KNOWN and (value or None) != (usual.get(name) or None)]
    initial = values.get("init_lora_weights", True)
    return odd if initial in INITIAL else [f"init_lora_weights={initial}"]


def _is_stored_beside(key: str, stored: Tensor, model: Any) -> bool:
    """Whether a weight that is no adapter's is the model's own, of a module whose weight PEFT stores beside a LoRA."""
    module = next((method for part, method in EMBEDDINGS.items() if part in key.split(".")), None)
    if module is None or not key.endswith(".weight"):
        return False
    own = getattr(model, module)().weight
    return stored.shape == own.shape and (own.is_meta or torch.equal(stored.to(own), own))


def _reason(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[-1].strip().rstrip(".")
