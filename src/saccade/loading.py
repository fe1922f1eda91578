"""Checkpoints from disk or the hub, complete or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from saccade.errors import ModelError
from saccade.target.adapter import Target

SMALL = 50_000_000
"""Parameters below which a drafter runs faster in float32 on a CPU (measured for layers 128-256 wide)."""


def load_model(
    path: str | Path, *, dtype: str | torch.dtype = "auto", device_map: Any = None, **options: Any
) -> Any:
    """Load a causal language model or an image-text-to-text model, with every weight that it needs.

    Args:
        path: a checkpoint folder, or a hub id.
        dtype: ``auto`` (as stored), a name such as ``bfloat16``, or a torch dtype.
        device_map: as in `from_pretrained`: ``auto`` (needs accelerate), a device, or a dictionary.
        options: further arguments of `from_pretrained`.

    Raises:
        ModelError: there is no such checkpoint, it is incomplete or corrupt, or its kind is not supported.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    path = str(path)
    try:
        config = AutoConfig.from_pretrained(path)
        sees = type(config) in AutoModelForImageTextToText._model_mapping
        auto = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        if not sees and type(config) not in AutoModelForCausalLM._model_mapping:
            raise ModelError(
                f"{path} holds a {config.model_type} model, which does not generate text from text and images; "
                "give a language model or a vision-language model."
            )
        model, info = auto.from_pretrained(
            path,
            config=config,
            dtype=_dtype(dtype),
            device_map=device_map,
            output_loading_info=True,
            **options,
        )
    except ModelError:
        raise
    except Exception as problem:  # transformers, safetensors and hub raise many kinds
        raise ModelError(f"Cannot load {path}: {_first_sentence(problem)}") from problem
    missing = sorted(info["missing_keys"]) + sorted(str(m) for m in info.get("mismatched_keys", ()))
    if missing:
        raise ModelError(
            f"The checkpoint {path} is incomplete: {len(missing)} weights are missing, among them {missing[0]}; "
            "download it again."
        )
    return model


def load_target(path: str | Path, **options: Any) -> Target:
    """A checkpoint behind the adapter; an architecture outside the conformance suite is checked first."""
    return adapt(load_model(path, **options))


def adapt(model: Any) -> Target:
    """A loaded model behind the adapter, checked where the conformance suite does not cover it."""
    target = Target(model)
    if not target.family.tested:
        from saccade.target.selfcheck import self_check

        self_check(target)
        target.use_lean()
    return target


def draft_dtype(model: Any) -> torch.dtype:
    """The dtype in which a drafter runs best: float32 for a small one on a CPU, else as it is."""
    weight = next(model.parameters())
    small = sum(p.numel() for p in model.parameters()) < SMALL
    return torch.float32 if weight.device.type == "cpu" and small else weight.dtype


def shared_vocabulary(target: Any, drafter: Any, names: tuple[str, str]) -> int:
    """Number of leading ids that mean the same to both tokenizers.

    Args:
        target, drafter: tokenizers.
        names: how to call them in the error.

    Raises:
        ModelError: they are different tokenizers. A padded vocabulary, or tokens that one of them has at its
            end, are fine.
    """
    ours, theirs = target.get_vocab(), drafter.get_vocab()
    shared = min(len(ours), len(theirs))
    differ = next((t for t, i in theirs.items() if i < shared and ours.get(t) != i), None)
    if differ is not None:
        raise ModelError(
            f"The drafter {names[1]} has another tokenizer than the target {names[0]} (token {differ!r} has "
            f"id {theirs[differ]} there and {ours.get(differ)} here); give a drafter of the same family."
        )
    return shared


def _dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if isinstance(dtype, str) and dtype != "auto":
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise ModelError(f"Unknown dtype {dtype!r}; expected auto, float32, bfloat16 or float16.")
        return found
    return dtype


def _first_sentence(problem: Exception) -> str:
    lines = str(problem).strip().splitlines()
    return lines[0].rstrip(".") + "." if lines else f"{type(problem).__name__}."
