"""A tiny checkpoint of every family without the weights: configuration, tokenizer, processors, chat template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import tokenizers
from torchvision_free import VIDEO_PROCESSORS, PixtralProcessor
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Idefics3Config,
    InternVLConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaOnevisionConfig,
    Mistral3Config,
    PixtralVisionConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3VLConfig,
    SiglipVisionConfig,
    SmolVLMConfig,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from saccade.inputs.families.idefics import number_words
from saccade.inputs.processor import InputProcessor

processing_smolvlm.num2words = number_words  # not installed; only looked up for the frame count


@dataclass(frozen=True)
class Kit:
    """One family's inputs, ours and Hugging Face's, from the same parts."""

    config: Any
    ours: InputProcessor
    theirs: Any
    image: str = "<image>"
    video: str | None = None


def chatml(image: str, video: str | None = None, bos: str = "") -> str:
    video_part = f"{{% elif part['type'] == 'video' %}}{video}" if video else ""
    return (
        bos + "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        f"{{% for part in message['content'] %}}{{% if part['type'] == 'image' %}}{image}{video_part}"
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


LLAVA_TEMPLATE = (
    "{% for message in messages %}{{ message['role'].upper() + ': ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'video') %}{{ '<video>\n' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
"""As LLaVA-1.5's own: content that is a plain string vanishes."""

IDEFICS_TEMPLATE = processing_smolvlm.DEFAULT_CHAT_TEMPLATE


def tokenizer(special: list[str], named: dict[str, str] | None = None, bos: bool = False) -> Any:
    """Byte-level, so that every text has tokens; two newlines are one token, as in many real vocabularies."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate([*alphabet, "ĊĊ"])}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("Ċ", "Ċ")]))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>", *special])
    if bos:
        core.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>" if bos else None,
        eos_token="</s>",
        pad_token="</s>",
        padding_side="left",
        additional_special_tokens=special,
        extra_special_tokens=named or {},
    )


def _unchecked(processor: type) -> type:
    """Takes the video processors that were made to run without torchvision."""
    return type(processor.__name__, (processor,), {"check_argument_for_proper_class": lambda *_: object})


def _llava() -> Kit:
    tok = tokenizer(["<image>"], bos=True)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(image_size=28, patch_size=7),
        text_config=LlamaConfig(),
        image_token_index=tok.convert_tokens_to_ids("<image>"),
    )
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    theirs = LlavaProcessor(
        images,
        tok,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=LLAVA_TEMPLATE,
    )
    return Kit(config, InputProcessor.from_parts(config, tok, images, None, LLAVA_TEMPLATE), theirs)


def _pixtral(mistral3: bool) -> Kit:
    tok = tokenizer(["[IMG]", "[IMG_BREAK]", "[IMG_END]"], bos=True)
    template = chatml("[IMG]", bos="{{ bos_token }}")
    index = tok.convert_tokens_to_ids("[IMG]")
    vision = PixtralVisionConfig(image_size=64, patch_size=8)
    merge = 2 if mistral3 else 1
    if mistral3:
        config = Mistral3Config(vision_config=vision, image_token_index=index, spatial_merge_size=merge)
    else:
        config = LlavaConfig(vision_config=vision, text_config=LlamaConfig(), image_token_index=index)
    images = PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size={"height": 8, "width": 8})
    theirs = PixtralProcessor(images, tok, patch_size=8, spatial_merge_size=merge, chat_template=template)
    return Kit(config, InputProcessor.from_parts(config, tok, images, None, template), theirs, "[IMG]")


def _llava_next() -> Kit:
    tok = tokenizer(["<image>"], bos=True)
    pinpoints = [[28, 56], [56, 28], [56, 56], [28, 84]]
    config = LlavaNextConfig(
        vision_config=CLIPVisionConfig(image_size=28, patch_size=7),
        text_config=LlamaConfig(),
        image_token_index=tok.convert_tokens_to_ids("<image>"),
        image_grid_pinpoints=pinpoints,
    )
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=pinpoints
    )
    theirs = LlavaNextProcessor(
        images,
        tok,
        patch_size=7,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=LLAVA_TEMPLATE,
    )
    return Kit(config, InputProcessor.from_parts(config, tok, images, None, LLAVA_TEMPLATE), theirs)


def _llava_onevision() -> Kit:
    tok = tokenizer(["<image>", "<video>"])
    pinpoints = [[28 * i, 28 * j] for i in range(1, 5) for j in range(1, 5)]
    config = LlavaOnevisionConfig(
        vision_config=SiglipVisionConfig(image_size=28, patch_size=4),
        text_config=Qwen2Config(),
        image_token_index=tok.convert_tokens_to_ids("<image>"),
        video_token_index=tok.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=pinpoints,
        vision_aspect_ratio="anyres_max_4",
    )
    size = {"size": {"height": 28, "width": 28}}
    images = LlavaOnevisionImageProcessorPil(**size, image_grid_pinpoints=pinpoints)
    theirs = _unchecked(LlavaOnevisionProcessor)(
        images,
        tok,
        VIDEO_PROCESSORS["LlavaOnevisionVideoProcessor"](**size),
        num_image_tokens=49,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_4",
        chat_template=LLAVA_TEMPLATE,
    )
    return Kit(config, InputProcessor.from_parts(config, tok, images, size, LLAVA_TEMPLATE), theirs, video="<video>")


_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_QWEN_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


def _qwen(config_class: type, processor: type, video_processor: str, patch: int) -> Kit:
    tok = tokenizer(["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"])
    template = chatml(_QWEN_IMAGE, _QWEN_VIDEO)
    config = config_class(
        image_token_id=tok.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tok.convert_tokens_to_ids("<|video_pad|>"),
        vision_start_token_id=tok.convert_tokens_to_ids("<|vision_start|>"),
        vision_end_token_id=tok.convert_tokens_to_ids("<|vision_end|>"),
    )
    factor = (2 * patch) ** 2
    images = Qwen2VLImageProcessorPil(patch_size=patch, size={"shortest_edge": 4 * factor, "longest_edge": 24 * factor})
    video = {"patch_size": patch, "size": {"shortest_edge": 8 * factor, "longest_edge": 40 * factor}}
    theirs = _unchecked(processor)(images, tok, VIDEO_PROCESSORS[video_processor](**video), chat_template=template)
    ours = InputProcessor.from_parts(config, tok, images, video, template)
    return Kit(config, ours, theirs, _QWEN_IMAGE, _QWEN_VIDEO)


def _tiled(config_class: type, image_processor: type, smol: bool) -> Kit:
    named = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", "<video>"]
    tok = tokenizer([*named, *(f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7))], bos=not smol)
    config = config_class(image_token_id=tok.convert_tokens_to_ids("<image>"), scale_factor=2)
    config.vision_config.image_size, config.vision_config.patch_size = 28, 7
    sizes = {"size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28}}
    images = image_processor(**sizes)
    video = {**sizes, "size": {"longest_edge": 56}, "video_sampling": {"max_frames": 8, "fps": 2, "video_size": {}}}
    ours = InputProcessor.from_parts(config, tok, images, video if smol else None, IDEFICS_TEMPLATE)
    if not smol:
        return Kit(config, ours, Idefics3Processor(images, tok, image_seq_len=4, chat_template=IDEFICS_TEMPLATE))
    theirs = _unchecked(processing_smolvlm.SmolVLMProcessor)(
        images, tok, VIDEO_PROCESSORS["SmolVLMVideoProcessor"](**video), image_seq_len=4, chat_template=IDEFICS_TEMPLATE
    )
    return Kit(config, ours, theirs, video="<video>")


def _gemma3() -> Kit:
    named = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tok = tokenizer(list(named.values()), named, bos=True)
    template = chatml("<start_of_image>", bos="{{ bos_token }}")
    config = Gemma3Config(
        image_token_index=tok.image_token_id,
        boi_token_index=tok.boi_token_id,
        eoi_token_index=tok.eoi_token_id,
        mm_tokens_per_image=4,
    )
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    theirs = Gemma3Processor(images, tok, chat_template=template, image_seq_length=4)
    return Kit(config, InputProcessor.from_parts(config, tok, images, None, template), theirs, "<start_of_image>")


def _internvl() -> Kit:
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tok = tokenizer(list(named.values()), named)
    template = chatml("<IMG_CONTEXT>\n", "<video>\n")
    config = InternVLConfig(image_token_id=tok.context_image_token_id, image_seq_length=4)
    size = {"size": {"height": 28, "width": 28}}
    images = GotOcr2ImageProcessorPil(**size, crop_to_patches=False, max_patches=6)
    theirs = _unchecked(InternVLProcessor)(
        images, tok, VIDEO_PROCESSORS["InternVLVideoProcessor"](**size), image_seq_length=4, chat_template=template
    )
    return Kit(
        config, InputProcessor.from_parts(config, tok, images, size, template), theirs, "<IMG_CONTEXT>", "<video>"
    )


def _text() -> Kit:
    tok = tokenizer([], bos=True)
    config = LlamaConfig()
    return Kit(config, InputProcessor.from_parts(config, tok, None, None, chatml("")), None)


_BUILDERS: dict[str, Callable[[], Kit]] = {
    "llava": _llava,
    "pixtral": lambda: _pixtral(mistral3=False),
    "mistral3": lambda: _pixtral(mistral3=True),
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "qwen2_vl": lambda: _qwen(Qwen2VLConfig, Qwen2VLProcessor, "Qwen2VLVideoProcessor", 14),
    "qwen2_5_vl": lambda: _qwen(Qwen2_5_VLConfig, Qwen2_5_VLProcessor, "Qwen2VLVideoProcessor", 14),
    "qwen3_vl": lambda: _qwen(Qwen3VLConfig, Qwen3VLProcessor, "Qwen3VLVideoProcessor", 16),
    "idefics3": lambda: _tiled(Idefics3Config, Idefics3ImageProcessorPil, smol=False),
    "smolvlm": lambda: _tiled(SmolVLMConfig, SmolVLMImageProcessorPil, smol=True),
    "gemma3": _gemma3,
    "internvl": _internvl,
    "llama": _text,
}

VISUAL = [name for name in _BUILDERS if name != "llama"]
VIDEO = ["llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "internvl"]


@cache
def kit(name: str) -> Kit:
    return _BUILDERS[name]()
