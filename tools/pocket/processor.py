"""Chat format of the pocket models: special tokens, samples as token ids, and the matching processor files."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)

from saccade.pocket.film import FPS
from saccade.pocket.labels import GRID, IMAGE_SIZE
from saccade.pocket.sample import Sample

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<image>", "<user>", "<assistant>", "<video>")
PAD, BEGIN, END, IMAGE, USER, ASSISTANT, VIDEO = range(7)

PATCHES = GRID * GRID
FRAME_TOKENS = (GRID // 2) ** 2
NEWLINE = 1

TEMPLATE = (
    "{{ '<s>' }}"
    "{% for message in messages %}"
    "{{ '<' + message['role'] + '>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<image>' }}"
    "{% elif part['type'] == 'video' %}{{ '<video>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}"
    "{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ '</s>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
"""Jinja template over Hugging Face messages; contents may be strings or lists of image, video and text parts."""


def image_tokens(tiled: bool) -> int:
    """Number of tokens of a picture, by the rule of the class.

    A single picture is tiled: encoded as a whole and as its one tile, with a newline after every row of the tile.
    Each of several pictures is encoded once, with one newline.
    """
    return 2 * PATCHES + GRID * NEWLINE if tiled else PATCHES + NEWLINE


def video_tokens(frames: int) -> int:
    """Number of tokens of a video: frames pooled 2 x 2, and one newline at the end."""
    return frames * FRAME_TOKENS + NEWLINE


def _part(tokenizer: Tokenizer, part: dict[str, Any], sample: Sample, media: bool, tiled: bool) -> list[int]:
    if part["type"] == "text":
        return list(tokenizer.encode(part["text"]).ids)
    if not media:
        return list(tokenizer.encode("\n").ids)
    if part["type"] == "image":
        return [IMAGE] * image_tokens(tiled and len(sample.images) == 1)
    return [VIDEO] * video_tokens(len(sample.video or ()))


def prompt_ids(
    tokenizer: Tokenizer, sample: Sample, media: bool = True, tiled: bool = True
) -> tuple[list[int], list[bool]]:
    """Token ids of a conversation up to the answer, and flags of those in earlier answers."""
    ids, answers = [BEGIN], [False]
    for message in sample.messages(media=False):
        is_answer = message["role"] == "assistant"
        ids.append(ASSISTANT if is_answer else USER)
        answers.append(False)
        for part in message["content"]:
            piece = _part(tokenizer, part, sample, media, tiled)
            ids += piece
            answers += [is_answer] * len(piece)
        if is_answer:
            ids.append(END)
            answers.append(True)
    return [*ids, ASSISTANT], [*answers, False]


_SQUARE = {
    "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def wrap(tokenizer: Tokenizer, context: int) -> PreTrainedTokenizerFast:
    """The tokenizer as Hugging Face's class; it adds no `<s>`, which the template writes."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        extra_special_tokens={
            "image_token": "<image>",
            "user_token": "<user>",
            "assistant_token": "<assistant>",
            "video_token": "<video>",
        },
        padding_side="left",
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )
    assert [wrapped.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    return wrapped


def write_processor(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write what `LlavaOnevisionProcessor.save_pretrained` writes.

    The files are written directly, because the class needs torchvision for its video processor. Pictures are resized to
    96 x 96, and videos are sampled at the pocket world's frame rate.
    """
    wrap(tokenizer, context).save_pretrained(folder)
    pictures = LlavaOnevisionImageProcessorPil(image_grid_pinpoints=[[IMAGE_SIZE, IMAGE_SIZE]], **_SQUARE).to_dict()
    pictures["image_processor_type"] = "LlavaOnevisionImageProcessor"
    videos = {
        "video_processor_type": "LlavaOnevisionVideoProcessor",
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "do_sample_frames": True,
        "fps": FPS,
        "resample": 3,
        "rescale_factor": 1 / 255,
        **_SQUARE,
    }
    settings = {
        "image_processor": pictures,
        "image_token": "<image>",
        "num_image_tokens": PATCHES,
        "processor_class": "LlavaOnevisionProcessor",
        "video_processor": videos,
        "video_token": "<video>",
        "vision_aspect_ratio": "anyres_max_9",
        "vision_feature_select_strategy": "default",
    }
    (folder / "processor_config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for name in ("backend", "extra_special_tokens"):  # not needed, and an error in older versions
        config.pop(name, None)
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n")
