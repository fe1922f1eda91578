"""Tiny random models of every image-text-to-text architecture of the installed transformers.

A configuration is the class's default one with every size in `SMALL` replaced, and with what a case overrides.
Each case is a `FamilyCase`, as those of the conformance suite.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.progress import track
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from families import (
    _DELTA,
    _INTERLEAVED_MROPE,
    _MINISTRAL_ROPE,
    _MROPE,
    ANYRES_PINPOINTS,
    BOS,
    FAMILIES,
    FIRST_WORD,
    IMAGE,
    IMAGE_BREAK,
    IMAGE_END,
    PAD,
    REFUSED,
    UNKNOWN,
    VIDEO,
    VISION_END,
    VISION_START,
    VOCAB,
    Collate,
    FamilyCase,
    Inputs,
    Medium,
    Piece,
    Row,
    _anyres_image,
    _by_row,
    _concatenated,
    _media,
    _noise,
    _pad_to,
    _pixtral_image,
    _qwen_image,
    _qwen_video,
    _square_image,
    _words,
    reference_greedy,
)
from harness import build
from saccade.engine import Engine, Request
from saccade.errors import SaccadeError
from saccade.inputs.families import split
from saccade.target_model.adapter import Target
from saccade.target_model.selfcheck import self_check

NAMES: dict[str, str] = {
    name: classes if isinstance(classes, str) else classes[0]
    for name, classes in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()
} | {"phi4_multimodal": "Phi4MultimodalForCausalLM"}
"""``model_type`` -> class of transformers."""

_IDS = {
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": None,
    **dict.fromkeys(("image_token_id", "image_token_index"), IMAGE),
    **dict.fromkeys(("video_token_id", "video_token_index"), VIDEO),
    **dict.fromkeys(("vision_start_token_id", "image_start_token_id", "video_start_token_id"), VISION_START),
    **dict.fromkeys(("vision_end_token_id", "image_end_token_id", "video_end_token_id"), VISION_END),
    **dict.fromkeys(("boi_token_id", "boi_token_index", "im_start_id"), VISION_START),
    **dict.fromkeys(("eoi_token_id", "eoi_token_index", "im_end_id"), VISION_END),
}
_COMMON = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
_SPARSE = {
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "experts_per_token"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
SMALL_TEXT: dict[str, Any] = {
    **_COMMON,
    **_SPARSE,
    **_IDS,
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), 1.0),
    "attention_multiplier": 0.25,
}
SMALL_VISION: dict[str, Any] = {
    **_COMMON,
    **_SPARSE,
    **dict.fromkeys(("hidden_size", "embed_dim"), 32),
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_heads": 2,
    "head_dim": 16,
    "depth": 2,
    "image_size": 16,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
    "encoder_hidden_size": 32,
    **dict.fromkeys(("d_model", "encoder_ffn_dim", "downsample_hidden_size"), 32),  # of audio encoders
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "output_dim": 64,
}


def shrunk(model_type: str, sizes: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Arguments of a configuration: those of ``sizes`` that its class declares, and ``more``."""
    defaults = CONFIG_MAPPING[model_type]().to_dict()
    kept = {name: value for name, value in sizes.items() if name in defaults}
    return {"model_type": model_type, **kept, **copy.deepcopy(more)}


def tiny(model_type: str, **more: Any) -> PreTrainedModel:
    """An untrained model of one architecture; ``text_config`` and so on override parts of its parts."""
    parts = {
        name: part["model_type"]
        for name, part in CONFIG_MAPPING[model_type]().to_dict().items()
        if isinstance(part, dict) and part.get("model_type")
    }
    arguments: dict[str, Any] = {}
    for name, kind in parts.items():
        sizes = SMALL_TEXT if name == "text_config" else SMALL_VISION
        own = dict(more.get(name, {}))
        arguments[name] = shrunk(own.pop("model_type", kind), sizes, **own)
    own = {name: value for name, value in more.items() if name not in parts}
    arguments = {**shrunk(model_type, _IDS if "text_config" in parts else SMALL_TEXT, **own), **arguments}
    arguments.pop("model_type")
    arguments["tie_word_embeddings"] = False  # tied ones would answer with the same token again and again
    config = AutoConfig.for_model(model_type, **arguments)
    kind = getattr(transformers, NAMES[model_type])
    return kind._from_config(config, attn_implementation="sdpa" if kind._supports_sdpa else "eager")


def case(
    name: str,
    image: Medium | None = None,
    *,
    video: Medium | None = None,
    collate: Collate = _concatenated,
    types: str | None = None,
    **more: Any,
) -> FamilyCase:
    """A case of one architecture; arguments as of `FamilyCase` and `tiny`."""
    return FamilyCase(name, lambda layers: tiny(name, **more), image, None, video, collate, types)


class _Unlike(FamilyCase):
    """An architecture that is refused for its class or configuration, before its weights are read."""

    def model(self, seed: int = 0, layers: int | None = None, eos: int | list[int] | None = None) -> PreTrainedModel:
        with torch.device("meta"):
            return self.build(layers)


def _unlike(name: str, **parts: Any) -> FamilyCase:
    def build(_: int | None) -> PreTrainedModel:
        config = CONFIG_MAPPING[name](**copy.deepcopy(parts))
        return getattr(transformers, NAMES[name])._from_config(config)

    return _Unlike(name, build)


def _views(tokens: int, size: int, *, wrapped: bool = False) -> Medium:
    """One image as a whole, after tiles of it in every second one; each of side ``size`` in pixels."""

    def build(generator: torch.Generator, variant: int) -> Piece:
        tiles = 2 * (variant % 2)
        tensors = {"pixel_values": _noise(generator, 1, 3, size, size), "num_local_patches": torch.tensor([tiles])}
        if tiles:
            tensors["pixel_values_local"] = _noise(generator, tiles, 3, size, size)
        if wrapped:
            view = (VISION_START, *(IMAGE,) * tokens, VISION_END)
            return Piece(view * (tiles + 1), tensors)
        return Piece((IMAGE,) * (tokens * (tiles + 1) + 1), tensors)

    return build


def _molmo_image(generator: torch.Generator, variant: int) -> Piece:
    """A small view and a large one, whose patches are pooled two by two; rows end with a token of their own."""
    rows, columns = [(2, 3), (3, 2), (2, 2)][variant % 3]
    small, large = (
        (VISION_START, *(*(IMAGE,) * 2, IMAGE_BREAK) * 2, VISION_END),
        (*(IMAGE,) * columns, IMAGE_BREAK) * rows,
    )
    crops = 3
    pooled = torch.randint(-1, crops * 16, (4 + rows * columns, 4), generator=generator)
    pooled[:, 0] = pooled[:, 0].abs()
    tensors = {
        "pixel_values": _noise(generator, crops, 16, 3 * 4**2),
        "image_token_pooling": pooled,
        "image_grids": torch.tensor([[2, 2, rows, columns]]),
        "image_num_crops": torch.tensor([crops]),
    }
    return Piece((*small, VISION_START, *large, VISION_END), tensors)


def _molmo_video(generator: torch.Generator, variant: int) -> Piece:
    """Frames after their times."""
    frames, rows, columns = [(2, 2, 2), (3, 1, 2), (2, 2, 1)][variant % 3]
    frame = (VISION_START, *(IMAGE,) * (rows * columns), VISION_END)
    tensors = {
        "pixel_values_videos": _noise(generator, frames, 16, 3 * 4**2),
        "video_token_pooling": torch.randint(0, frames * 16, (frames * rows * columns, 4), generator=generator),
        "video_grids": torch.tensor([[frames, rows, columns]]),
    }
    ids = [token for _ in range(frames) for token in (*_words(generator, 2).ids, *frame)]
    return Piece(tuple(ids), tensors)


def _molmo(rows: list[Row]) -> Inputs:
    """Media after one another; crops of several images share their indices, and wrappers count as image tokens."""
    inputs, crops = _concatenated(rows), 0
    if "image_token_pooling" in inputs:
        parts = []
        for pooled, count in zip(_media(rows, "image_token_pooling"), _media(rows, "image_num_crops"), strict=True):
            parts.append(torch.where(pooled < 0, pooled, pooled + crops * 16))
            crops += int(count)
        inputs["image_token_pooling"] = torch.cat(parts)
    ids = torch.tensor([[token for piece in rows[0] for token in piece.ids]])
    visual = torch.tensor([IMAGE, IMAGE_BREAK, VISION_START, VISION_END])
    return {**inputs, "mm_token_type_ids": torch.isin(ids, visual).long()}


def _llama4_image(generator: torch.Generator, variant: int) -> Piece:
    """One tile, or two of them behind one another and the whole image."""
    tiles = 1 + 2 * (variant % 2)
    tile = (IMAGE,) * 4
    ids = (
        (VISION_START, *tile, IMAGE_BREAK, *tile, IMAGE_END, *tile, VISION_END)
        if tiles > 1
        else (VISION_START, *tile, VISION_END)
    )
    return Piece(ids, {"pixel_values": _noise(generator, tiles, 3, 16, 16)})


def _mllama_image(generator: torch.Generator, variant: int) -> Piece:
    """A single token; up to four tiles of the image, which differ in their arrangement."""
    number, tiles = [(1, 1), (2, 2), (3, 2)][variant % 3]
    pixels = torch.zeros(1, 1, 2, 3, 16, 16)
    pixels[:, :, :tiles] = _noise(generator, 1, 1, tiles, 3, 16, 16)
    tensors = {
        "pixel_values": pixels,
        "aspect_ratio_ids": torch.tensor([[number]]),
        "aspect_ratio_mask": (torch.arange(2) < tiles).long()[None, None],
    }
    return Piece((IMAGE,), tensors)


def _mllama(rows: list[Row]) -> Inputs:
    """All images of the row, and which tokens attend to which: those from its token to the next one."""
    media = [piece for piece in rows[0] if piece.tensors]
    if not media:
        return {}
    inputs = {name: torch.cat([piece.tensors[name] for piece in media], 1) for name in media[0].tensors}
    ids = torch.tensor([token for piece in rows[0] for token in piece.ids])
    current = (ids == IMAGE).cumsum(0)[:, None] == torch.arange(1, len(media) + 1)
    return {**inputs, "cross_attention_mask": current[None, :, :, None] * inputs["aspect_ratio_mask"][:, None]}


def _phi_image(generator: torch.Generator, variant: int) -> Piece:
    """A small view, and crops of which the last one may be half empty."""
    rows, columns, filled = [(1, 1, 4), (1, 2, 4), (2, 1, 2)][variant % 3]
    seen = torch.zeros(1, 3, 4, 4, dtype=torch.long)
    seen[:, : 1 + rows * columns] = 1
    seen[:, rows * columns, filled:] = 0
    height, width = 2 * rows - (4 - filled) // 2, 2 * columns
    tensors = {
        "image_pixel_values": _noise(generator, 1, 3, 3, 16, 16) * (seen.amax((2, 3)) > 0)[..., None, None, None],
        "image_sizes": torch.tensor([[16 * rows, 16 * columns]]),
        "image_attention_mask": seen,
    }
    return Piece((IMAGE,) * (height * (width + 1) + 1 + 6), tensors)


_LATENT = {"head_dim": 32, "num_key_value_heads": 4}
_SAM = {
    "hidden_size": 32,
    "output_channels": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 4,
    "window_size": 3,
    "global_attn_indexes": [1],
    "mlp_dim": 48,
}


class _ImagesInVideos(FamilyCase):
    """A family whose videos have the placeholders of images, and are told apart by their token types (GLM-4V)."""

    def _assemble(self, rows: list[Row]) -> Inputs:
        inputs = super()._assemble(rows)
        inputs["input_ids"][inputs["input_ids"] == VIDEO] = IMAGE
        return inputs


def _glm(name: str) -> FamilyCase:
    build = partial(tiny, name, text_config={"rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}})
    video = _qwen_video(timestamps=True)
    return _ImagesInVideos(name, lambda layers: build(), _qwen_image, video=video, types="mm_token_type_ids")


def _changed(medium: Medium, change: Callable[[Mapping[str, Tensor]], dict[str, Tensor]]) -> Medium:
    """The same medium with other tensors."""

    def build(generator: torch.Generator, variant: int) -> Piece:
        piece = medium(generator, variant)
        return Piece(piece.ids, change(piece.tensors))

    return build


def _with(medium: Medium, **more: Tensor) -> Medium:
    return _changed(medium, lambda tensors: {**tensors, **more})


def _pixels(medium: Medium, change: Callable[[Tensor], Tensor]) -> Medium:
    return _changed(medium, lambda tensors: {k: change(t) if "pixel" in k else t for k, t in tensors.items()})


def _without_time(medium: Medium) -> Medium:
    """The same medium with patches of a single frame."""
    return _pixels(medium, lambda t: t[:, : t.shape[1] // 2])


def _unflattened(medium: Medium) -> Medium:
    """The same medium with patches ``[n, 3, 4, 4]``."""
    return _pixels(medium, lambda t: t.unflatten(1, (3, 4, 4)))


_unmerged_image, _unmerged_video = _without_time(_qwen_image), _without_time(_qwen_video())
_STAMPED: dict[str, Any] = {"video": _qwen_video(timestamps=True), "types": "mm_token_type_ids"}


def _padded_patches(generator: torch.Generator, variant: int) -> Piece:
    """Patches padded to 24 with a mask (LFM2-VL)."""
    height, width = [(4, 6), (4, 4), (2, 6)][variant % 3]
    count = height * width
    tensors = {
        "pixel_values": _pad_to(_noise(generator, 1, count, 3 * 4**2), (1, 24, 3 * 4**2)),
        "pixel_attention_mask": (torch.arange(24) < count).long()[None],
        "spatial_shapes": torch.tensor([[height, width]]),
    }
    return Piece((VISION_START, *(IMAGE,) * (count // 4), VISION_END), tensors)


def _strip(merged: int, kind: str = "image") -> Medium:
    """Patches in one long strip, of which ``merged`` become a token (MiniCPM-V); a video has two frames of one size."""
    end, frames = ("", 1) if kind == "image" else ("_videos", 2)

    def build(generator: torch.Generator, variant: int) -> Piece:
        height, width = [(8, 8), (4, 8), (8, 4)][variant % 3]
        one = (VISION_START, *({"image": IMAGE, "video": VIDEO}[kind],) * (height * width // merged), VISION_END)
        tensors = {
            f"pixel_values{end}": _noise(generator, 1, 3, 4, 4 * frames * height * width),
            f"target_sizes{end}": torch.tensor([[height, width]] * frames),
        }
        return Piece(one * frames, tensors)

    return build


def _strips(rows: list[Row]) -> Inputs:
    names = ("pixel_values", "target_sizes", "pixel_values_videos", "target_sizes_videos")
    media = {name: _media(rows, name) for name in names}
    return {name: torch.cat(parts, -1 if "pixel" in name else 0) for name, parts in media.items() if parts}


def _flat_patches(generator: torch.Generator, variant: int) -> Piece:
    """Patches of all images one after another (Nemotron-H Omni)."""
    height, width = [(4, 6), (4, 4), (2, 6)][variant % 3]
    count = height * width
    tensors = {"pixel_values": _noise(generator, count, 3 * 4**2), "image_grid_hw": torch.tensor([[height, width]])}
    return Piece((VISION_START, *(IMAGE,) * (count // 4), VISION_END), tensors)


_CONV = {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3}
_STRIPS: dict[str, Any] = {
    "collate": _strips,
    "text_config": {**_DELTA, "num_hidden_layers": 3, "rope_parameters": _INTERLEAVED_MROPE},
}


def _clip_frames(generator: torch.Generator, variant: int) -> Piece:
    """Three frames with a class token each (Video-LLaVA)."""
    return Piece((VIDEO,) * 51, {"pixel_values_videos": _noise(generator, 1, 3, 3, 16, 16)})


_PERCEIVER = {
    "hidden_size": 64,
    "resampler_n_latents": 4,
    "resampler_depth": 1,
    "resampler_n_heads": 2,
    "resampler_head_dim": 16,
    "num_key_value_heads": 2,
}


def _paired_frames(generator: torch.Generator, variant: int) -> Piece:
    """Two frames to a token (Ernie 4.5)."""
    grid = [(2, 4, 6), (4, 4, 4), (2, 6, 4)][variant % 3]
    values = _noise(generator, math.prod(grid), 3 * 4**2)
    ids = (VISION_START, *(VIDEO,) * (math.prod(grid) // 8), VISION_END)
    return Piece(ids, {"pixel_values_videos": values, "video_grid_thw": torch.tensor([grid])})


def _experts_by_kind(rows: list[Row]) -> Inputs:
    """Media after one another, and which tokens go to the experts for pictures (Ernie 4.5)."""
    ids = torch.tensor([[token for piece in rows[0] for token in piece.ids]])
    visual = torch.tensor([IMAGE, VIDEO, VISION_START, VISION_END])
    return {**_concatenated(rows), "moe_mm_token_type_ids": torch.isin(ids, visual).long()}


def _lined_patches(generator: torch.Generator, variant: int) -> Piece:
    """Rows of tokens with a newline each, between two more tokens of the picture (HunYuan-VL)."""
    grid = [(1, 4, 6), (1, 4, 4), (1, 2, 6)][variant % 3]
    tokens = grid[1] // 2 * (grid[2] // 2 + 1) + 2
    values = _noise(generator, math.prod(grid), 3 * 4**2)
    ids = (VISION_START, *(IMAGE,) * tokens, VISION_END)
    return Piece(ids, {"pixel_values": values, "image_grid_thw": torch.tensor([grid])})


def _fuyu_image(generator: torch.Generator, variant: int) -> Piece:
    """Flat patches of one picture (Fuyu)."""
    return Piece((IMAGE,) * 8, {"pixel_values": _noise(generator, 1, 8, 3 * 4**2)})


def _tiles(generator: torch.Generator, variant: int) -> Piece:
    """One or two tiles of a picture (Granite Docling)."""
    count = 1 + variant % 2
    tensors = {
        "pixel_values": _noise(generator, 1, count, 3, 16, 16),
        "pixel_attention_mask": torch.ones(1, count, dtype=torch.bool),
    }
    return Piece((IMAGE,) * (4 * count), tensors)


def _tiles_of_a_row(rows: list[Row]) -> Inputs:
    media = {name: _media(rows, name) for name in ("pixel_values", "pixel_attention_mask")}
    return {name: torch.cat(parts, 1) for name, parts in media.items() if parts}


_CODES = {f"IMGIMG{chr(65 + code)}Z": FIRST_WORD + code for code in range(8)}
"""Names of a picture's codes in the vocabulary of models that quantise pictures."""
_VQ = {"num_embeddings": 8, "embed_dim": 8, "latent_channels": 32, "base_channels": 32, "channel_multiplier": [1, 1]}


def _coded_image(generator: torch.Generator, variant: int) -> Piece:
    """A code for every four pixels, and one more at the end of a row (Emu3)."""
    rows, columns = [(3, 4), (4, 2), (2, 3)][variant % 3]
    tensors = {
        "pixel_values": _noise(generator, 1, 3, 2 * rows, 2 * columns),
        "image_sizes": torch.tensor([[2 * rows, 2 * columns]]),
    }
    return Piece((VISION_START, *(IMAGE,) * (rows * (columns + 1)), VISION_END), tensors)


def _two_tiles(name: str, token: int) -> Medium:
    """Two tiles of an image, or two frames (Perception LM)."""
    return lambda generator, variant: Piece((token,) * 8, {name: _noise(generator, 1, 2, 3, 16, 16)})


_CASES = (
    # squares of pixels
    case("aya_vision", _square_image(4, 16)),
    case("aria", _square_image(8, 16), projector_patch_to_query_dict={16: 8}),
    case("cohere2_vision", _square_image(4, 16), alignment_intermediate_size=64),
    case("deepseek_vl", _square_image(16, 16)),
    case("idefics2", _square_image(4, 16, wrapped=True, masked=True), collate=_by_row, perceiver_config=_PERCEIVER),
    case("lighton_ocr", _pixtral_image(4, 2), spatial_merge_size=2),
    case(
        "ovis2",
        _square_image(16, 16, wrapped=True),
        vision_config={"vocab_size": 40},
        visual_indicator_token_ids=[VISION_START, VISION_END, IMAGE_BREAK, IMAGE_END, VIDEO],
        hidden_size=64,
        vocab_size=VOCAB,
    ),
    case(
        "qianfan_ocr", _square_image(4, 16, wrapped=True), vision_config={"image_size": [16, 16], "patch_size": [4, 4]}
    ),
    case(
        "video_llava",
        _changed(_square_image(16, 16), lambda tensors: {"pixel_values_images": tensors["pixel_values"]}),
        video=_clip_frames,
    ),
    case("vipllava", _square_image(16, 16), vision_feature_layers=[-1, -2]),
    case(
        "hunyuan_vl",
        _lined_patches,
        types="mm_token_type_ids",
        text_config={"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2, 2]}},
        vision_config={
            "text_hidden_size": 64,
            "num_key_value_heads": 2,
            "max_image_size": 64,
            "temporal_patch_size": 1,
        },
    ),
    case(
        "janus",
        _square_image(16, 16),
        vision_config={"projection_dim": 64},
        vq_config={
            "base_channels": 32,
            "num_embeddings": 16,
            "embed_dim": 8,
            "latent_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
        },
    ),
    case("fuyu", _fuyu_image, image_size=16, patch_size=4),
    case(
        "granite_docling",
        _tiles,
        collate=_tiles_of_a_row,
        vision_config={"scale_factor": 2, "deepstack_visual_indexes": [0, 1]},
    ),
    # a picture's features enter in front of several layers
    case(
        "granite4_vision",
        _anyres_image,
        image_grid_pinpoints=ANYRES_PINPOINTS,
        downsample_rate="1/2",
        deepstack_layer_map=[[-2, 2], [-1, 0]],
        spatial_target_layers=[1, 3],
        text_config={"model_type": "granite4_vision_text", "num_hidden_layers": 4},
        vision_config={"hidden_size": 64, "patch_size": 2},
        qformer_config={"use_qformer_text_input": False, "cross_attention_frequency": 1},
    ),
    case(
        "emu3",
        _coded_image,
        vocabulary_map={
            "<image>": IMAGE,
            "<|extra_200|>": IMAGE_BREAK,
            **{f"<|visual token {code:06}|>": FIRST_WORD + code for code in range(8)},
        },
        vq_config={
            "codebook_size": 8,
            "base_channels": 32,
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
            "attn_resolutions": [],
        },
    ),
    case(
        "muse_spark",
        _qwen_image,
        video=_qwen_video(),
        projector_hidden_size=32,
        out_hidden_size=128,
        text_config={
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "layer_rope_theta": [10000.0, 0, 10000.0, 0],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "sliding_window": 16,
            "moe_hidden_size": 32,
        },
        vision_config={"pos_emb_height": 4, "pos_emb_width": 4},
        audio_config={"patch_sizes": [4, 2], "hidden_sizes": [16, 32], "depths": [1, 1]},
    ),
    # with towers of transformers in place of timm's
    case("fast_vlm", _square_image(16, 16), vision_config={"model_type": "sam_vision_model", **_SAM, "image_size": 16}),
    case(
        "perception_lm",
        _two_tiles("pixel_values", IMAGE),
        video=_two_tiles("pixel_values_videos", VIDEO),
        projector_pooling_ratio=2,
        vision_config={"model_type": "clip_vision_model", "model_args": {"embed_dim": 32}},
    ),
    # refused by the names of their layers
    case("inkling2", vision_config={"text_hidden_size": 64}),
    case(
        "dots3_note",
        text_config={"num_key_value_heads": 4},
        vision_config={"mlp_layer_types": ["dense", "sparse"], "adapter_in_dim": 32, "adapter_out_dim": 64},
        audio_config={"adapter_input_size": 32, "adapter_out_dim": 64},
    ),
    *(case(name, _square_image(16, 64), vision_config=_SAM) for name in ("got_ocr2", "pp_chart2table")),
    case(
        "chameleon",
        _square_image(64, 16),
        vocabulary_map={"<image>": IMAGE, **_CODES},
        vq_config={**_VQ, "resolution": 16, "num_res_blocks": 1},
    ),
    case(
        "deepseek_vl_hybrid",
        _with(_square_image(16, 16), high_res_pixel_values=torch.linspace(-1, 1, 3 * 32**2).view(1, 3, 32, 32)),
        high_res_vision_config={
            "image_size": 32,
            "output_channels": 32,
            "window_size": 4,
            "global_attn_indexes": [1],
            "num_pos_feats": 16,
            "mlp_dim": 48,
        },
    ),
    case(
        "shieldgemma2",
        _square_image(16, 16, wrapped=True),
        types="token_type_ids",
        mm_tokens_per_image=16,
        vision_config={"patch_size": 2, "vision_use_head": False},
        text_config={"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    case(
        "paligemma",
        _square_image(16, 16),
        types="token_type_ids",
        vision_config={"projection_dim": 64},
        projection_dim=64,
        hidden_size=64,
    ),
    case(
        "kimi_k25",
        _unflattened(_unmerged_image),  # no video, at which transformers 5.23 itself fails
        text_config={"num_key_value_heads": 4, "num_hidden_layers": 3},
        vision_config={"pos_emb_height": 8, "pos_emb_width": 8},
        projection_hidden_size=32,
    ),
    case(
        "paddleocr_vl",
        _unflattened(_unmerged_image),
        types="mm_token_type_ids",
        text_config={"rope_parameters": _MROPE},
    ),
    case(
        "ernie4_5_vl_moe",
        _unmerged_image,
        video=_paired_frames,
        collate=_experts_by_kind,
        types="mm_token_type_ids",
        text_config={
            "num_hidden_layers": 3,  # so that attention follows the experts
            "rope_parameters": {**_MROPE, "mrope_section": [3, 3, 2]},
            "moe_intermediate_size": [32, 16],
        },
    ),
    case("muse_glimmer", _qwen_image, video=_qwen_video(), projector_hidden_size=32, out_hidden_size=128),
    case("minimax_m3_vl"),
    *(_glm(name) for name in ("glm4v", "glm46v", "glmga", "glm4v_moe", "glm_ocr")),
    case("hyperclovax_vision_v2", _qwen_image, video=_qwen_video()),
    case("exaone4_5", _qwen_image, video=_qwen_video()),
    case("cosmos3_omni", _qwen_image, **_STAMPED, text_config={"rope_parameters": _INTERLEAVED_MROPE}),
    case(
        "cohere_compass",
        _qwen_image,
        **_STAMPED,
        text_config={
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 16,
            "rope_parameters": {"sliding_attention": _INTERLEAVED_MROPE, "full_attention": _INTERLEAVED_MROPE},
        },
    ),
    case(
        "qwen2_5_omni_thinker",
        _qwen_image,
        video=_with(_qwen_video(), video_second_per_grid=torch.tensor([0.5])),
        vision_start_token_id=VISION_START,
        text_config={"rope_parameters": _MROPE},
        vision_config={"window_size": 16, "fullatt_block_indexes": [1]},
    ),
    case(
        "qwen3_omni_moe_thinker",
        _qwen_image,
        video=_with(_qwen_video(), video_second_per_grid=torch.tensor([1.0])),
        vision_start_token_id=VISION_START,
        text_config={"rope_parameters": _INTERLEAVED_MROPE},
    ),
    case(
        "video_llama_3",
        _with(_unmerged_image, image_merge_sizes=torch.tensor([2])),
        video=_with(_unmerged_video, video_merge_sizes=torch.tensor([2])),
    ),
    case(
        "cosmos3_edge",
        _unmerged_image,
        **{**_STAMPED, "video": _without_time(_STAMPED["video"])},
        text_config={"rope_parameters": _INTERLEAVED_MROPE},
    ),
    case("lfm2_vl", _padded_patches, collate=_concatenated, vision_config={"num_patches": 16}, text_config=_CONV),
    case(
        "lfm3_vl",
        _qwen_image,
        video=_qwen_video(),
        text_config={
            "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
            "num_hidden_layers": 4,
            "sliding_window": 16,
        },
        vision_config={"layer_types": ["conv", "full_attention"], "temporal_patch_size": 2},
    ),
    case(
        "nemotron_h_omni",
        _flat_patches,  # no video, at which transformers 5.23 itself fails
        vision_hidden_size=32,
        projector_hidden_size=32,
        vision_config={"max_img_size": 64, "video_temporal_patch_size": 2},
        text_config={
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    # recurrent layers among kinds that are refused by name
    case(
        "qwen4_exp",
        text_config={
            "layer_types": ["linear_attention", "indexed_attention"],
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 8,
            "indexer_compress_ratio": 4,
        },
    ),
    case(
        "glm5_next",
        text_config={
            "layer_types": ["linear_attention", "indexed_attention"],
            "num_key_value_heads": 4,
            "qk_rope_head_dim": 0,
        },
    ),
    case("inkling_mm_model"),
    case("minicpmv4_6", _strip(16), video=_strip(16, "video"), vision_config={"insert_layer_id": 0}, **_STRIPS),
    case("minicpm_ocr", _strip(4), video=_strip(4, "video"), vision_config={"insert_layer_id": 0}, **_STRIPS),
    case(
        "minicpmv4_7",
        _strip(16),
        video=_strip(16, "video"),
        types="mm_token_type_ids",
        image_start_id=VISION_START,
        image_end_id=VISION_END,
        slice_start_id=IMAGE_BREAK,
        slice_end_id=IMAGE_END,
        newline_id=FIRST_WORD,
        vision_config={"insert_layer_id": 0},
        **_STRIPS,
    ),
    # chunked attention, and a temperature that rises with the position
    case(
        "llama4",
        _llama4_image,
        text_config={
            "num_hidden_layers": 4,
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0, 1, 0],
            "moe_layers": [1, 3],
            "intermediate_size_mlp": 96,
            "attention_chunk_size": 8,
            "floor_scale": 4,
            "attn_scale": 4.0,
            "num_experts_per_tok": 1,
        },
        vision_config={
            "intermediate_size": 128,
            "vision_output_dim": 32,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
        },
    ),
    # cross-attention to pictures
    case(
        "mllama",
        _mllama_image,
        collate=_mllama,
        text_config={"num_hidden_layers": 4, "cross_attention_layers": [1, 3]},
        vision_config={
            "num_global_layers": 1,
            "attention_heads": 2,
            "vision_output_dim": 96,
            "max_num_tiles": 2,
            "intermediate_layers_indices": [0, 1],
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        },
    ),
    case(
        "phi4_multimodal",
        _phi_image,
        sliding_window=16,
        vision_config={"crop_size": 16, "image_token_id": IMAGE},
        audio_config={
            "num_blocks": 1,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "input_size": 8,
            "nemo_conv_channels": 8,
        },
    ),
    # others
    case(
        "kosmos-2", text_config={"embed_dim": 64, "layers": 2, "ffn_dim": 96, "attention_heads": 4}, latent_query_num=4
    ),
    case(
        "kosmos-2.5",
        text_config={"embed_dim": 64, "layers": 2, "ffn_dim": 96, "attention_heads": 4},
        vision_config={"patch_embed_hidden_size": 48, "max_num_patches": 16},
        latent_query_num=4,
    ),
    case("idefics", vision_config={"embed_dim": 32}),
    case(
        "unlimited_ocr",
        vision_config={
            "sam_config": {**_SAM, "downsample_channels": [32, 32]},
            "encoder_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
        },
    ),
    # latent attention, whose queries are scaled beyond a position
    case(
        "mistral4",
        num_hidden_layers=3,
        first_k_dense_replace=1,
        rope_parameters={**_MINISTRAL_ROPE, "partial_rotary_factor": 0.5},
        **_LATENT,
    ),
    case("mistral_large4"),
    # one view of an image and tiles
    case(
        "step3p7",
        _views(4, 32, wrapped=True),
        text_config={
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "dense", "sparse", "sparse"],
            "sliding_window": 12,
            "num_sliding_attention_heads": 6,
            "share_expert_dim": 32,
            "query_pre_attn_scalar": 16,
        },
        vision_config={"image_size": 32, "max_position_embeddings": 64},
    ),
    case(
        "deepseek_ocr2",
        _views(144, 64),
        text_config={"mlp_layer_types": ["dense", "sparse"]},
        vision_config={
            "sam_config": {**_SAM, "downsample_channels": [32, 32]},
            "encoder_config": {"hidden_size": 32, "intermediate_size": 48, **_COMMON, "vocab_size": 8},
        },
    ),
    case(
        "molmo2",
        _molmo_image,
        video=_molmo_video,
        collate=_molmo,
        image_patch_id=IMAGE,
        text_config={
            "vocab_size": VOCAB - 8,
            "additional_vocab_size": 8,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
            "rope_scaling_layers": [1],
        },
        vision_config={"image_size": [16, 16], "num_key_value_heads": 2},
        adapter_config={"vision_feature_layer": [1, 0], "text_hidden_size": 64, "num_key_value_heads": 2},
    ),
    # encoder-decoders
    _unlike("florence2"),
    _unlike("pix2struct"),
    _unlike("pp_formulanet"),
    _unlike("t5gemma2", encoder={"text_config": {"hidden_size": 64}}, decoder={"hidden_size": 64}),
    _unlike("udop"),
    _unlike("vision-encoder-decoder", encoder={"model_type": "vit"}, decoder={"model_type": "gpt2"}),
    # other ways to generate
    _unlike("diffusion_gemma", text_config={"num_experts": 2, "top_k_experts": 1, "moe_intermediate_size": 8}),
    _unlike("pi0"),
    _unlike("git"),
    # forwards that need the picture, or another sequence, again
    _unlike("evolla"),
    *(_unlike(name) for name in ("blip", "blip-2", "instructblip", "instructblipvideo")),
)
ARCHITECTURES: dict[str, FamilyCase] = {each.name: each for each in _CASES}
"""Architectures outside the conformance suite, by ``model_type``."""


@dataclass(frozen=True)
class Outcome:
    """How one architecture does under speculation."""

    status: str  # "exact with pictures", "exact with text", or "refused"
    note: str = ""  # the kinds of prompts, or the sentence that a user gets
    tokens: int = 0  # compared with those of `generate`


def _sees(case: FamilyCase, kind: str, answer: Sequence[int]) -> bool:
    """Whether a prompt's answer is another one where all its pixels have the other sign."""
    inputs = case.row_inputs(kind, 0)
    blank = {name: -t if t.is_floating_point() else t for name, t in inputs.items()}
    return reference_greedy(case.model(), blank, len(answer))[0] != list(answer)


def _second_turn(case: FamilyCase, kind: str, engine: Engine, answer: Sequence[int], length: int) -> int:
    """Compare the answer to a further question in the same row; returns the number of tokens."""
    first, inputs = case.row_inputs(kind, 0), case.continued(kind, 0, answer, "text")
    expected = reference_greedy(case.model(), inputs, length)[0]
    session = engine.open(1)
    for row in (first, inputs):
        (prompt,) = split(engine.target.config, row)
        (output,) = engine.generate([Request(prompt)], max_new_tokens=length, session=session)
    assert output.tokens == expected, f"{case.name}: a second turn differs with {kind}"
    return len(expected)


def outcome(case: FamilyCase, rows: Sequence[int] = (1, 3), length: int = 56) -> Outcome:
    """Compare a case's answers to all kinds of prompts, by every method of `METHODS`, with those of `generate`.

    Raises:
        AssertionError: where a token differs.
    """
    try:
        target, draft = Target(case.model()), Target(case.draft_model())
        self_check(target)
        engines = {method: build(target, draft, method) for method in ("chain", "dynamic", "lookup")}
        compared = 0
        for kind in case.kinds:
            asked = [split(target.config, case.row_inputs(kind, row))[0] for row in range(max(rows))]
            expected = [
                reference_greedy(case.model(), case.row_inputs(kind, row), length)[0] for row in range(max(rows))
            ]
            if kind != "text":
                assert len(set(expected[0])) > 4, f"{case.name}: answers repeat few tokens"
                assert _sees(case, kind, expected[0]), f"{case.name}: answers ignore the {kind}"
            for method, engine in engines.items():
                for count in rows:
                    requests = [Request(prompt) for prompt in asked[:count]]
                    answers = [output.tokens for output in engine.generate(requests, max_new_tokens=length)]
                    assert answers == expected[:count], f"{case.name}: {method} differs with {kind}, {count} rows"
                    compared += sum(map(len, answers))
            compared += _second_turn(case, kind, engines["chain"], expected[0], length)
    except SaccadeError as error:
        return Outcome("refused", str(error))
    visual = [kind for kind in case.kinds if kind != "text"]
    return Outcome("exact with pictures" if visual else "exact with text", ", ".join(case.kinds), compared)


def rows(names: Iterable[str]) -> Iterator[str]:
    """Rows of the table of architectures."""
    cases = {**FAMILIES, **UNKNOWN, **REFUSED, **ARCHITECTURES}
    for name in names:
        result = outcome(cases[name])
        note = result.note if result.status == "refused" else f"{result.note}: {result.tokens:,} tokens"
        yield f"| {name} | {result.status} | {note} |\n"


PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
_HEAD = """# Architectures

The image-text-to-text architectures of transformers {version}, with a tiny random model each: greedy answers to
prompts with one picture, two pictures, a video and text alone, by a chain, a dynamic tree and prompt lookup, one row
and three rows at once, compared with `generate` in float32. No token differs; what cannot be exact is refused before
anything is generated, with the sentence shown. `python tests/architectures.py [MODEL_TYPE ...]` writes this page, and
`pytest -m slow tests/test_architectures.py` compares it. In place of towers of timm, which Saccade does not install,
FastVLM and Perception LM have ones of transformers whose outputs have the same shapes.

| `model_type` | outcome | kinds of prompts and tokens compared, or the reason |
|---|---|---|
"""

if __name__ == "__main__":
    names = sys.argv[1:] or sorted(NAMES)
    old = PAGE.read_text(encoding="utf-8").splitlines(keepends=True) if PAGE.exists() else []
    lines = {line.split()[1]: line for line in old if line.startswith("| ") and line.split()[1] in NAMES}
    for name in track(names, "Comparing with generate"):
        try:
            (lines[name],) = rows([name])
        except Exception as error:
            lines.pop(name, None)
            print(f"{name} is left out: {type(error).__name__}: {error}")
    page = _HEAD.format(version=transformers.__version__) + "".join(lines[name] for name in sorted(lines))
    PAGE.write_text(page, encoding="utf-8")
