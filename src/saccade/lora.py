"""LoRA adapters of PEFT: the target's modules again, on the same weights, with those of an adapter on top."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from saccade.errors import ModelError
from saccade.loading import adapt, empty_model, file_of
from saccade.target_model.adapter import Target

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # files of an adapter's folder
INITIAL = {True, False, "gaussian", "orthogonal", "eva"}  # values of `init_lora_weights` that leave the base as it is
REFUSED = ["modules_to_save", "trainable_token_indices", "layer_replication", "alora_invocation_tokens", "arrow_config"]
REFUSED += ["use_bdlora", "use_qalora", "velora_config", "monteclora_config", "kasa_config", "megatron_config"]
"""Settings of PEFT that replace a part of the model, or whose effect depends on more than a module's input."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA as PEFT stored it."""

    name: str
    config: Any  # PEFT's `LoraConfig`
    weights: Mapping[str, Tensor]

    @classmethod
    def read(cls, name: str, folder: str | Path) -> Adapter:
        """Read an adapter from a folder or the hub; `ModelError` where it is not complete, or not a LoRA alone."""
        if not find_spec("peft"):
            raise ModelError("Adapters need peft, which is not installed; run `pip install saccade[adapters]`.")
        from peft import LoraConfig

        settings, stored = (file_of(folder, file) for file in (CONFIG, WEIGHTS))
        if settings is None or stored is None:
            raise ModelError(
                f"The adapter {name} has no {WEIGHTS if settings else CONFIG} in {folder}; give the folder that PEFT's "
                "save_pretrained wrote."
            )
        try:
            values = json.loads(settings.read_text(encoding="utf-8"))
            kind = values["peft_type"]
            config = LoraConfig.from_pretrained(str(settings.parent)) if kind == "LORA" else None
            weights = load_file(stored)
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as problem:
            raise ModelError(
                f"The adapter {name} cannot be read from {folder} ({_reason(problem)}); save it again with PEFT."
            ) from problem
        if config is None:
            raise ModelError(f"The adapter {name} is of PEFT's type {kind}; give one of type LORA.")
        setting = next((each for each in REFUSED if getattr(config, each, None)), "")
        if config.init_lora_weights not in INITIAL:
            setting = f"init_lora_weights={config.init_lora_weights!r}"
        other = next((key for key in weights if ".lora_" not in key), "")
        if setting or other:
            what = f"is stored with {setting}" if setting else f"holds {other}"
            raise ModelError(
                f"The adapter {name} {what}, which changes more than LoRAs on modules of the target do; merge it into "
                "a checkpoint of its own, or store it without that."
            )
        # As PEFT computes with them, whatever the target's dtype is.
        return cls(name, config, {key: w.float() if w.is_floating_point() else w for key, w in weights.items()})

    def on(self, model: Any) -> Any:
        """Return a model's modules again, with the same weights and the adapter; `ModelError` where it does not fit."""
        from peft import inject_adapter_in_model, set_peft_model_state_dict

        parameters = list(model.parameters())
        trained = [p for p in parameters if p.requires_grad]  # PEFT freezes what it adds to
        clone = copy.deepcopy(model, {id(t): t for t in (*parameters, *model.buffers())})
        try:
            inject_adapter_in_model(copy.deepcopy(self.config), clone, low_cpu_mem_usage=True)
            found = set_peft_model_state_dict(clone, dict(self.weights), low_cpu_mem_usage=True)
        except (ValueError, RuntimeError, KeyError, TypeError, NotImplementedError) as problem:
            raise self._unfit(_reason(problem)) from problem
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)
        lacking = [key for key in found.missing_keys if ".lora_" in key]
        if lacking or found.unexpected_keys:
            raise self._unfit(f"it lacks {lacking[0]}" if lacking else f"the target has no {found.unexpected_keys[0]}")
        return clone.eval()

    def check(self, config: Any) -> None:
        """Raise `ModelError` where the adapter does not fit a target of this configuration."""
        self.on(empty_model(config))

    def _unfit(self, reason: str) -> ModelError:
        return ModelError(f"The adapter {self.name} does not fit the target ({reason}); give one that was made for it.")


def read_adapters(adapters: Mapping[str, str | Path | Adapter]) -> dict[str, Adapter]:
    """Read adapters by name."""
    return {name: a if isinstance(a, Adapter) else Adapter.read(name, a) for name, a in adapters.items()}


def adapted(target: Target, adapter: Adapter) -> Target:
    """Return a target with an adapter on the same weights, packed copies included."""
    refuse_apart(target.ranks or target.shards or any(weight.is_meta for weight in target.model.parameters()))
    return adapt(adapter.on(target.model), target.exact, base=target)


def refuse_apart(is_apart: Any) -> None:
    """Raise `ModelError` for adapters of a target whose weights are not all in the memory of this process."""
    if is_apart:
        raise ModelError(
            "Adapters need the whole target in the memory of one process, but it is split over several, or offloaded; "
            "give another device_map, or leave the adapters out."
        )


def _reason(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[-1].strip().rstrip(".")
