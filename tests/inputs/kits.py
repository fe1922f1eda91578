"""A tiny checkpoint of every family without the weights: configuration, tokenizer, processors, chat template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
import transformers as hf
from torchvision_free import VIDEO_PROCESSORS, Gemma4Processor, PixtralProcessor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from saccade.inputs.families.idefics import number_words
from saccade.inputs.processor import InputProcessor
from saccade.loading import load_processor

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
    return hf.PreTrainedTokenizerFast(
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


def _kit(
    config: Any,
    tok: Any,
    images: Any,
    template: str,
    processor: Any,
    video: dict[str, Any] | None = None,
    video_processor: str | None = None,
    marks: tuple[str, str | None] = ("<image>", None),
    **theirs: Any,
) -> Kit:
    videos = []
    if video_processor is not None:
        processor, videos = _unchecked(processor), [VIDEO_PROCESSORS[video_processor](**(video or {}))]
    ours = InputProcessor(config, tok, images, video, template)
    return Kit(config, ours, processor(images, tok, *videos, chat_template=template, **theirs), *marks)


_SQUARE = {"height": 28, "width": 28}
_CROPPED = {"size": {"shortest_edge": 28}, "crop_size": _SQUARE}
_CLIP_TOKENS = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}


def _llava(config: Any, images: Any, processor: Any, **pinpoints: Any) -> Kit:
    tok = tokenizer(["<image>"], bos=True)
    made = config(
        vision_config=hf.CLIPVisionConfig(image_size=28, patch_size=7),
        text_config=hf.LlamaConfig(),
        image_token_index=tok.convert_tokens_to_ids("<image>"),
        **pinpoints,
    )
    return _kit(made, tok, images(**_CROPPED, **pinpoints), LLAVA_TEMPLATE, processor, **_CLIP_TOKENS)


def _pixtral(merge: int) -> Kit:
    tok = tokenizer(["[IMG]", "[IMG_BREAK]", "[IMG_END]"], bos=True)
    shared = {
        "vision_config": hf.PixtralVisionConfig(image_size=64, patch_size=8),
        "image_token_index": tok.convert_tokens_to_ids("[IMG]"),
    }
    if merge > 1:
        config = hf.Mistral3Config(**shared, spatial_merge_size=merge)
    else:
        config = hf.LlavaConfig(**shared, text_config=hf.LlamaConfig())
    images = hf.PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size={"height": 8, "width": 8})
    template = chatml("[IMG]", bos="{{ bos_token }}")
    sizes = {"patch_size": 8, "spatial_merge_size": merge}
    return _kit(config, tok, images, template, PixtralProcessor, marks=("[IMG]", None), **sizes)


def _llava_onevision() -> Kit:
    tok = tokenizer(["<image>", "<video>"])
    pinpoints = [[28 * i, 28 * j] for i in range(1, 5) for j in range(1, 5)]
    config = hf.LlavaOnevisionConfig(
        vision_config=hf.SiglipVisionConfig(image_size=28, patch_size=4),
        text_config=hf.Qwen2Config(),
        image_token_index=tok.convert_tokens_to_ids("<image>"),
        video_token_index=tok.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=pinpoints,
        vision_aspect_ratio="anyres_max_4",
    )
    images = hf.LlavaOnevisionImageProcessorPil(size=_SQUARE, image_grid_pinpoints=pinpoints)
    return _kit(
        config,
        tok,
        images,
        LLAVA_TEMPLATE,
        hf.LlavaOnevisionProcessor,
        {"size": _SQUARE},
        "LlavaOnevisionVideoProcessor",
        ("<image>", "<video>"),
        num_image_tokens=49,
        vision_feature_select_strategy="full",
        vision_aspect_ratio="anyres_max_4",
    )


_QWEN_MARKS = ("<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>")
_QWEN_IDS = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}


def _qwen(config_class: Any, processor: Any, video_processor: str, patch: int) -> Kit:
    tok = tokenizer([f"<|{word}|>" for word in _QWEN_IDS.values()])
    ids = {f"{name}_token_id": tok.convert_tokens_to_ids(f"<|{word}|>") for name, word in _QWEN_IDS.items()}
    area = (2 * patch) ** 2
    images = hf.Qwen2VLImageProcessorPil(patch_size=patch, size={"shortest_edge": 4 * area, "longest_edge": 24 * area})
    video = {"patch_size": patch, "size": {"shortest_edge": 8 * area, "longest_edge": 40 * area}}
    template = chatml(*_QWEN_MARKS)
    return _kit(config_class(**ids), tok, images, template, processor, video, video_processor, _QWEN_MARKS)


def _tiled(config_class: Any, image_processor: Any, processor: Any, smol: bool) -> Kit:
    named = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", "<video>"]
    tok = tokenizer([*named, *(f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7))], bos=not smol)
    config = config_class(image_token_id=tok.convert_tokens_to_ids("<image>"), scale_factor=2)
    config.vision_config.image_size, config.vision_config.patch_size = 28, 7
    sizes = {"size": {"longest_edge": 84}, "max_image_size": {"longest_edge": 28}}
    videos: tuple[Any, ...] = ()
    if smol:
        sampling = {"max_frames": 8, "fps": 2, "video_size": {}}
        video = {**sizes, "size": {"longest_edge": 56}, "video_sampling": sampling}
        videos = (video, "SmolVLMVideoProcessor", ("<image>", "<video>"))
    template = IDEFICS_TEMPLATE.replace("Assistant:", "Answer:")  # SmolVLM's processor changes it back for videos
    return _kit(config, tok, image_processor(**sizes), template, processor, *videos, image_seq_len=4)


def _gemma3() -> Kit:
    named = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    tok = tokenizer(list(named.values()), named, bos=True)
    config = hf.Gemma3Config(
        image_token_index=tok.image_token_id,
        boi_token_index=tok.boi_token_id,
        eoi_token_index=tok.eoi_token_id,
        mm_tokens_per_image=4,
    )
    images, template = hf.Gemma3ImageProcessorPil(size=_SQUARE), chatml("<start_of_image>", bos="{{ bos_token }}")
    marks = ("<start_of_image>", None)
    return _kit(config, tok, images, template, hf.Gemma3Processor, marks=marks, image_seq_length=4)


def _gemma3n() -> Kit:
    named = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    named |= {"audio_token": "<audio_soft_token>", "boa_token": "<start_of_audio>", "eoa_token": "<end_of_audio>"}
    tok = tokenizer(list(named.values()), named, bos=True)
    config = hf.Gemma3nConfig(image_token_id=tok.image_token_id, vision_soft_tokens_per_image=4)
    images, template = hf.SiglipImageProcessorPil(size=_SQUARE), chatml("<image_soft_token>", bos="{{ bos_token }}")

    def processor(images: Any, tok: Any, **more: Any) -> Any:
        return _unchecked(hf.Gemma3nProcessor)(hf.Gemma3nAudioFeatureExtractor(), images, tok, **more)

    return _kit(config, tok, images, template, processor, marks=("<image_soft_token>", None), image_seq_length=4)


def _gemma4() -> Kit:
    named = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>"}
    named |= {"boa_token": "<|audio>", "eoa_token": "<audio|>"}
    tok = tokenizer([*named.values(), "<|video|>"], named)
    ids = {"image_token_id": tok.image_token_id, "video_token_id": tok.convert_tokens_to_ids("<|video|>")}
    config = hf.Gemma4Config(**ids, vision_config={"patch_size": 2})
    images = hf.Gemma4ImageProcessorPil(patch_size=2, max_soft_tokens=70)
    video = {"patch_size": 2, "max_soft_tokens": 70}
    marks = ("<|image|>", "<|video|>")

    def processor(images: Any, tok: Any, videos: Any, **more: Any) -> Any:
        return _unchecked(Gemma4Processor)(hf.Gemma4AudioFeatureExtractor(), images, tok, videos, **more)

    template = chatml(*marks)
    ours = InputProcessor(config, tok, images, video, template)
    videos = VIDEO_PROCESSORS["Gemma4VideoProcessor"](**video)
    return Kit(config, ours, processor(images, tok, videos, chat_template=template), *marks)


def _internvl() -> Kit:
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tok = tokenizer(list(named.values()), named)
    config = hf.InternVLConfig(image_token_id=tok.context_image_token_id, image_seq_length=4)
    images = hf.GotOcr2ImageProcessorPil(size=_SQUARE, crop_to_patches=False, max_patches=6)
    videos = ({"size": _SQUARE}, "InternVLVideoProcessor", ("<IMG_CONTEXT>", "<video>"))
    template = chatml("<IMG_CONTEXT>\n", "<video>\n")
    return _kit(config, tok, images, template, hf.InternVLProcessor, *videos, image_seq_length=4)


def _text() -> Kit:
    tok, config = tokenizer([], bos=True), hf.LlamaConfig()
    return Kit(config, InputProcessor(config, tok, None, None, chatml("")), None)


_BUILDERS: dict[str, Callable[[], Kit]] = {
    "llava": lambda: _llava(hf.LlavaConfig, hf.CLIPImageProcessorPil, hf.LlavaProcessor),
    "pixtral": lambda: _pixtral(1),
    "mistral3": lambda: _pixtral(2),
    "llava_next": lambda: _llava(
        hf.LlavaNextConfig,
        hf.LlavaNextImageProcessorPil,
        hf.LlavaNextProcessor,
        image_grid_pinpoints=[[28, 56], [56, 28], [56, 56], [28, 84]],
    ),
    "llava_onevision": _llava_onevision,
    "qwen2_vl": lambda: _qwen(hf.Qwen2VLConfig, hf.Qwen2VLProcessor, "Qwen2VLVideoProcessor", 14),
    "qwen2_5_vl": lambda: _qwen(hf.Qwen2_5_VLConfig, hf.Qwen2_5_VLProcessor, "Qwen2VLVideoProcessor", 14),
    "qwen3_vl": lambda: _qwen(hf.Qwen3VLConfig, hf.Qwen3VLProcessor, "Qwen3VLVideoProcessor", 16),
    "idefics3": lambda: _tiled(hf.Idefics3Config, Idefics3ImageProcessorPil, hf.Idefics3Processor, False),
    "smolvlm": lambda: _tiled(hf.SmolVLMConfig, SmolVLMImageProcessorPil, hf.SmolVLMProcessor, True),
    "gemma3": _gemma3,
    "gemma3n": _gemma3n,
    "gemma4": _gemma4,
    "internvl": _internvl,
    "llama": _text,
}

VISUAL = [name for name in _BUILDERS if name != "llama"]
VIDEO = ["llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "internvl", "gemma4"]


@cache
def kit(name: str) -> Kit:
    return _BUILDERS[name]()


def outside_the_registry(path: Path) -> InputProcessor:
    """The parts of LLaVA as a family that is not built in, saved and loaded again."""
    item = kit("llava")
    config = hf.VipLlavaConfig(
        vision_config=item.config.vision_config,
        text_config=item.config.text_config,
        image_token_index=item.config.image_token_id,
    )
    config.save_pretrained(path)
    item.theirs.save_pretrained(path)
    return load_processor(path)
