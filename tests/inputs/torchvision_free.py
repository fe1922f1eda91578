"""The Hugging Face processors that ask for torchvision, made to run without it.

Their code is imported while an empty ``torchvision`` stands in, and the few torchvision calls that they make
(resize, normalise) are done by Pillow and torch. What they count, sample, order and tokenise is theirs.
"""

from __future__ import annotations

import importlib
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.utils import is_torchvision_available

_NAMES = [
    "torchvision",
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
]


def _import_all() -> dict[str, Any]:
    stands_in = not is_torchvision_available()  # asked first, because the answer is remembered
    modules = {name: types.ModuleType(name) for name in _NAMES if stands_in}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    sys.modules.update(modules)
    try:
        wanted = {
            "pixtral.processing_pixtral": "PixtralProcessor",
            "qwen2_vl.video_processing_qwen2_vl": "Qwen2VLVideoProcessor",
            "qwen3_vl.video_processing_qwen3_vl": "Qwen3VLVideoProcessor",
            "smolvlm.video_processing_smolvlm": "SmolVLMVideoProcessor",
            "internvl.video_processing_internvl": "InternVLVideoProcessor",
            "llava_onevision.video_processing_llava_onevision": "LlavaOnevisionVideoProcessor",
        }
        return {
            name: getattr(importlib.import_module(f"transformers.models.{module}"), name)
            for module, name in wanted.items()
        }
    finally:
        for name in modules:
            del sys.modules[name]


_FOUND = _import_all()
PixtralProcessor = _FOUND.pop("PixtralProcessor")


def _resize(self: Any, image: torch.Tensor, size: Any, resample: Any = None, **_: Any) -> torch.Tensor:
    if tuple(image.shape[-2:]) == (size.height, size.width):
        return image
    flat = image.reshape(-1, *image.shape[-3:]).permute(0, 2, 3, 1).numpy()
    resized = [Image.fromarray(f).resize((size.width, size.height), Image.Resampling(int(resample))) for f in flat]
    pixels = torch.from_numpy(np.stack([np.asarray(r) for r in resized])).permute(0, 3, 1, 2)
    return pixels.reshape(*image.shape[:-3], *pixels.shape[1:])


def _normalize(self: Any, image: torch.Tensor, mean: Any, std: Any, **_: Any) -> torch.Tensor:
    mean, std = (torch.as_tensor(v, dtype=torch.float32).view(-1, 1, 1) for v in (mean, std))
    return (image - mean) / std


def _without_torchvision(video_processor: type) -> type:
    base = video_processor.__mro__[1]
    own = {"normalize": _normalize, "convert_to_rgb": lambda self, video: video}
    if "resize" not in vars(video_processor):
        own["resize"] = _resize
    else:  # its own resize ends in super().resize(...)
        base.resize = _resize
    return type(video_processor.__name__, (video_processor,), own)


VIDEO_PROCESSORS = {name: _without_torchvision(found) for name, found in _FOUND.items()}
