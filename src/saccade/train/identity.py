"""Whether a target is still the same one."""

from __future__ import annotations

import hashlib
from typing import Any

from saccade.target.adapter import Target

_VALUES = 64


def identity(target: Target) -> dict[str, Any]:
    """Class, size, precision and a digest over some values of every weight."""
    digest = hashlib.sha256()
    for name, weight in target.model.named_parameters():
        digest.update(name.encode())
        if weight.device.type != "meta":  # offloaded weights are elsewhere
            flat = weight.detach().flatten()
            some = flat[:: max(flat.numel() // _VALUES, 1)][:_VALUES]
            digest.update(some.float().cpu().numpy().tobytes())
    return {
        "class": type(target.model).__name__,
        "layers": len(target.layers),
        "hidden_size": target.text_config.hidden_size,
        "vocabulary": target.vocab_size,
        "dtype": str(target.dtype).removeprefix("torch."),
        "weights": digest.hexdigest()[:16],
    }
