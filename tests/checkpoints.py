"""Tiny complete checkpoint folders: weights, tokenizer, processor, chat template, all that `saccade.load` reads.

The weights are random but sharp (see `families`), and the answers are printable ASCII, one byte a token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers
import torch
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GenerationConfig,
    Glm4MoeConfig,
    LlamaConfig,
    LlavaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import families
from assistants import small, spread
from families import FamilyCase, perturbed
from saccade import VLM, load
from saccade.loading import share_every_layer

IMAGES = ["<image>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
"""Placeholders of both families, so that one tokenizer serves every checkpoint here."""

PRINTABLE = 94
"""Ids from 0 on are the printable ASCII characters, in order."""


def tokenizer(swapped: bool = False, more: Sequence[str] = ()) -> Any:
    """Byte-level, without merges; ``swapped``: another one, in which two ids changed places."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    if swapped:
        alphabet[5], alphabet[6] = alphabet[6], alphabet[5]
    core = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(["<s>", "</s>", *IMAGES, *more])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>", padding_side="left"
    )


def template(image: str, video: str = "") -> str:
    """Takes content as a string or as parts, and every role."""
    return (
        "<s>{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
        f"{{% for p in m['content'] %}}{{% if p['type'] == 'image' %}}{image}"
        f"{{% elif p['type'] == 'video' %}}{video}{{% else %}}{{{{ p['text'] }}}}{{% endif %}}{{% endfor %}}"
        "{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )


def _text(vocabulary: int) -> dict[str, Any]:
    return {**families._text(None), "vocab_size": vocabulary, "pad_token_id": None, "bos_token_id": None}


def _finish(config: Any, seed: int, noise: float = 0.0, answers: int = PRINTABLE) -> PreTrainedModel:
    """Sharp weights, ``noise`` on them for a drafter, and only the first ids as answers."""
    auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = FamilyCase("tiny", lambda _: auto.from_config(config)).model(seed)
    if noise:
        model = perturbed(model, noise, seed)
    with torch.no_grad():
        model.get_output_embeddings().weight[answers:] = 0
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=24)
    return model


def _with_tokenizer(path: Path, tok: Any) -> Path:
    tok.chat_template = template("")
    tok.save_pretrained(path)
    return path


def llama(
    path: Path, *, seed: int = 1, padded: int = 0, tok: Any = None, answers: int = PRINTABLE, **shape: Any
) -> Path:
    """A language model; ``padded`` rows of its vocabulary have no token."""
    tok = tok or tokenizer()
    config = LlamaConfig(**{**_text(len(tok) + padded), **shape})
    _finish(config, seed, answers=answers).save_pretrained(path)
    return _with_tokenizer(path, tok)


def llava(path: Path, *, seed: int = 0, noise: float = 0.0, side: int = 28, tok: Any = None, **save: Any) -> Path:
    """A LLaVA-1.5 for square images of ``side`` pixels, 16 tokens each at 28; ``noise`` makes it a drafter."""
    tok = tok or tokenizer()
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=side, patch_size=7
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**_text(len(tok))),
        image_token_index=tok.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )
    images = CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    return _save(path, _finish(config, seed, noise), tok, images, template("<image>"), **save)


def qwen(path: Path, *, seed: int = 0, noise: float = 0.0) -> Path:
    """A Qwen2.5-VL for images of any shape, and videos."""
    tok = tokenizer()
    config = Qwen2_5_VLConfig(
        vision_config={
            "depth": 2,
            "num_heads": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "patch_size": 4,
        },
        text_config={
            **_text(len(tok)),
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
        },
        tie_word_embeddings=False,
        **{
            f"{name}_id": tok.convert_tokens_to_ids(f"<|{word}|>")
            for name, word in (
                ("image_token", "image_pad"),
                ("video_token", "video_pad"),
                ("vision_start_token", "vision_start"),
                ("vision_end_token", "vision_end"),
            )
        },
    )
    images = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 4 * 64, "longest_edge": 24 * 64})
    wrapped = "<|vision_start|><|{}_pad|><|vision_end|>"
    text = template(wrapped.format("image"), wrapped.format("video"))
    return _save(path, _finish(config, seed, noise), tok, images, text)


def _save(path: Path, model: Any, tok: Any, images: Any, text: str, **save: Any) -> Path:
    model.save_pretrained(path, **save)
    tok.save_pretrained(path)
    images.save_pretrained(path)
    (path / "chat_template.json").write_text(json.dumps({"chat_template": text}))
    return path


def predicting(path: Path) -> Path:
    """A GLM-4.5 whose checkpoint has a layer of multi-token prediction after its two others."""
    tok, experts = tokenizer(), {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = _finish(Glm4MoeConfig(**{**_text(len(tok)), "num_hidden_layers": 3, "head_dim": 16, **experts}), 0)
    width, last = model.config.hidden_size, model.get_decoder().layers[-1]
    last.enorm, last.hnorm, norm = (torch.nn.RMSNorm(width) for _ in range(3))
    last.shared_head = torch.nn.ModuleDict({"norm": norm})
    last.eh_proj = torch.nn.Linear(2 * width, width, bias=False)
    model.config.num_hidden_layers, model.config.num_nextn_predict_layers = 2, 1
    model.save_pretrained(path)
    return _with_tokenizer(path, tok)


def gemma4(path: Path) -> Path:
    """A language model of Gemma 4."""
    tok = tokenizer()
    text = small("gemma4_text", vocab_size=len(tok))
    spread(Gemma4ForCausalLM, Gemma4TextConfig(**text), 1).save_pretrained(path)
    return _with_tokenizer(path, tok)


def gemma4_assistant(path: Path) -> Path:
    """Its assistant, weights alone."""
    text = small("gemma4_text", vocab_size=len(tokenizer()), num_kv_shared_layers=2)
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=16)
    share_every_layer(config)
    spread(Gemma4AssistantForCausalLM, config, 2).save_pretrained(path)
    return path


MAKERS: dict[str, Callable[[Path], Path]] = {
    "llava": llava,
    "llava-draft": lambda path: llava(path, noise=0.1),
    "llava-small-images": lambda path: llava(path, noise=0.1, side=14),
    "qwen": qwen,
    "qwen-draft": lambda path: qwen(path, noise=0.1),
    "predicting": predicting,
    "gemma4": gemma4,
    "gemma4-assistant": gemma4_assistant,
    "llama": llama,
    "llama-long": lambda path: llama(path, max_position_embeddings=40_000),
    "llama-bytes": lambda path: llama(path, answers=256),
    "llama-swapped": lambda path: llama(path, tok=tokenizer(swapped=True)),
}


@cache
def ready(name: str) -> Path:
    """A checkpoint folder, made once per process; not to be written to."""
    return MAKERS[name](Path(_folder().name) / name)


@cache
def vlm(name: str, drafter: str | None = None, method: str | None = None, **options: Any) -> VLM:
    """A loaded one, shared by the tests of a process; with a draft model a chain, which drafts in every step."""
    if drafter is None:
        return load(ready(name), None, method, **options)
    return load(ready(name), ready(drafter), method or "chain", **options)


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


def picture(shade: int = 0, size: tuple[int, int] = (40, 30)) -> Image.Image:
    """A gradient; another one for every shade."""
    across = torch.linspace(0, 255, size[0]).expand(size[1], -1)
    down = torch.linspace(0, 255, size[1])[:, None].expand(-1, size[0])
    pixels = torch.stack([across, down, torch.full_like(across, 37.0 * shade % 256)], -1)
    return Image.fromarray(pixels.byte().numpy())


def saved_picture(path: Path, shade: int = 0) -> str:
    """The same as a PNG file."""
    picture(shade).save(path)
    return str(path)


def says(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    """A conversation of one user message."""
    return [{"role": "user", "content": list(parts)}]


def text(words: str) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "text", "text": words}
