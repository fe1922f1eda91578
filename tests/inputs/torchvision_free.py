"""The Hugging Face processors that ask for torchvision, made to run without it.

Their code is imported while an empty ``torchvision`` stands in, and the few torchvision calls that they make
(resize, normalise) are done by Pillow and torch. What they count, sample, order and tokenise is theirs.
"""

from __future__ import annotations

import builtins
import importlib
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers.image_utils import SizeDict
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size
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
    functional: Any = modules.get(_NAMES[-1], types.ModuleType("torchvision"))
    functional.InterpolationMode = object  # read in annotations
    unimported = {"tvF": functional} if stands_in else {}  # where transformers imports it from torchvision alone
    vars(builtins).update(unimported)
    try:
        wanted = {
            "pixtral.processing_pixtral": "PixtralProcessor",
            "gemma4.processing_gemma4": "Gemma4Processor",
            "qwen2_vl.video_processing_qwen2_vl": "Qwen2VLVideoProcessor",
            "qwen3_vl.video_processing_qwen3_vl": "Qwen3VLVideoProcessor",
            "smolvlm.video_processing_smolvlm": "SmolVLMVideoProcessor",
            "internvl.video_processing_internvl": "InternVLVideoProcessor",
            "llava_onevision.video_processing_llava_onevision": "LlavaOnevisionVideoProcessor",
            "gemma4.video_processing_gemma4": "Gemma4VideoProcessor",
            "gemma4_unified.image_processing_gemma4_unified": "patches_merge",
        }
        return {
            name: getattr(importlib.import_module(f"transformers.models.{module}"), name)
            for module, name in wanted.items()
        }
    finally:
        for name in modules:
            del sys.modules[name]
        for name in unimported:
            delattr(builtins, name)


_FOUND = _import_all()
PixtralProcessor = _FOUND.pop("PixtralProcessor")
Gemma4Processor = _FOUND.pop("Gemma4Processor")
patches_merge = _FOUND.pop("patches_merge")


def _resize(self: Any, image: torch.Tensor, size: Any, resample: Any = None, **_: Any) -> torch.Tensor:
    if tuple(image.shape[-2:]) == (size.height, size.width):
        return image
    flat = image.reshape(-1, *image.shape[-3:]).permute(0, 2, 3, 1).numpy()
    resized = [Image.fromarray(f).resize((size.width, size.height), Image.Resampling(int(resample))) for f in flat]
    pixels = torch.from_numpy(np.stack([np.asarray(r) for r in resized])).permute(0, 3, 1, 2)
    return pixels.reshape(*image.shape[:-3], *pixels.shape[1:])


def _resize_to_patches(
    self: Any, video: torch.Tensor, patch_size: int, max_patches: int, pooling_kernel_size: int, resample: Any
) -> torch.Tensor:
    """Of Gemma 4's videos."""
    height, width = get_aspect_ratio_preserving_size(*video.shape[-2:], patch_size, max_patches, pooling_kernel_size)
    return _resize(self, video, SizeDict(height=height, width=width), resample)


def _normalize(self: Any, image: torch.Tensor, mean: Any, std: Any, **_: Any) -> torch.Tensor:
    mean, std = (torch.as_tensor(v, dtype=torch.float32).view(-1, 1, 1) for v in (mean, std))
    return (image - mean) / std


def _without_torchvision(video_processor: type) -> type:
    base = video_processor.__mro__[1]
    own = {"normalize": _normalize, "convert_to_rgb": lambda self, video: video}
    if hasattr(video_processor, "aspect_ratio_preserving_resize"):
        own["aspect_ratio_preserving_resize"] = _resize_to_patches
    elif "resize" not in vars(video_processor):
        own["resize"] = _resize
    else:  # its own resize ends in super().resize(...)
        base.resize = _resize
    return type(video_processor.__name__, (video_processor,), own)


VIDEO_PROCESSORS = {name: _without_torchvision(found) for name, found in _FOUND.items()}
