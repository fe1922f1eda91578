"""The number format of training: bfloat16 where the processor multiplies in it, else float32.

A processor without such instructions emulates them: an AVX2 machine takes twenty times as long for Muon's products in
bfloat16 as in float32.
"""

from contextlib import AbstractContextManager, nullcontext

import torch

from saccade.cpu import has_instructions


def dtype_for(device: torch.device) -> torch.dtype:
    """The format that matrix products of training are computed in on a device."""
    if device.type == "cuda":
        multiplies = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        multiplies = device.type == "cpu" and has_instructions(torch.bfloat16)
    return torch.bfloat16 if multiplies else torch.float32


def precision_on(device: torch.device, wanted: str) -> str:
    """``fp32`` or ``bf16`` for a recipe's precision, of which ``auto`` is `dtype_for`."""
    if wanted != "auto":
        return wanted
    return "bf16" if dtype_for(device) == torch.bfloat16 else "fp32"


def fast_products(device: torch.device) -> AbstractContextManager[None]:
    """Autocast to `dtype_for`; nothing where that is float32."""
    dtype = dtype_for(device)
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype)


def description(device: torch.device) -> str:
    """Device and number format of a run, such as `"2 CPU threads, float32"`."""
    kind = "float32" if dtype_for(device) == torch.float32 else "bfloat16 autocast"
    if device.type == "cuda":
        return f"one {torch.cuda.get_device_name()}, {kind}"
    threads = torch.get_num_threads()
    return f"{threads} CPU thread{'' if threads == 1 else 's'}, {kind}"
