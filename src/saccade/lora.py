"""LoRA adapters of PEFT: the target's modules again, on the same weights, with those of an adapter on top."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from saccade.errors import ModelError
from saccade.loading import adapt, file_of
from saccade.target_model.adapter import Target

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # files of an adapter's folder
INITIAL = (True, False, "gaussian", "orthogonal", "eva")  # values of `init_lora_weights` that leave the base as it is
REFUSED = ("modules_to_save", "layer_replication", "alora_invocation_tokens", "arrow_config")
"""Settings of PEFT that change more than modules of the target, or by more than what these read."""


def adapted(target: Target, name: str, place: str | Path) -> Target:
    """Return a target with an adapter, on the same weights; errors as of `with_lora`."""
    refuse_apart(target.ranks or target.shards or any(weight.is_meta for weight in target.model.parameters()))
    return adapt(with_lora(target.model, name, place), target.exact, base=target)


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
    config, weights = _read(name, place)
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


def _read(name: str, place: str | Path) -> tuple[Any, dict[str, Tensor]]:
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
        config, weights = PeftConfig.from_pretrained(str(settings.parent)), load_file(stored)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as problem:
        raise ModelError(
            f"The adapter {name} cannot be read from {place} ({_reason(problem)}); save it again with PEFT."
        ) from problem
    odd = [] if config.peft_type == "LORA" else [f"the type {config.peft_type.value}"]
    odd += [setting for setting in REFUSED if getattr(config, setting, None)]
    if getattr(config, "init_lora_weights", True) not in INITIAL:
        odd.append(f"init_lora_weights={config.init_lora_weights}")
    odd += [key for key in weights if ".lora_" not in key]
    if odd:
        raise ModelError(
            f"The adapter {name} has {odd[0]}, and with it changes the target in other ways than LoRAs do; merge it "
            "into a checkpoint of its own, or store it without that."
        )
    return config, {key: weight.float() for key, weight in weights.items()}  # in which PEFT computes with them


def _reason(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[-1].strip().rstrip(".")
