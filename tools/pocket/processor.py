"""The processor files of the pocket models: tokenizer, chat template, preparation of pictures and videos."""

import json
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)

from saccade.pocket.film import FPS
from saccade.pocket.labels import IMAGE_SIZE
from tools.pocket.chat import PATCHES, SPECIAL_TOKENS, TEMPLATE

_SQUARE = {
    "size": {"height": IMAGE_SIZE, "width": IMAGE_SIZE},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def wrap(tokenizer: Tokenizer, context: int) -> PreTrainedTokenizerFast:
    """The tokenizer as Hugging Face's class. The prompt text brings its own `<s>`, so it adds none."""
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
    assert [wrapped.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS] == list(
        range(len(SPECIAL_TOKENS))
    )
    return wrapped


def write_processor(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write what `LlavaOnevisionProcessor.save_pretrained` writes.

    By hand, because the class cannot be made where torchvision is missing: its video processor asks for it.
    A picture of 96 x 96 goes through unchanged, any other is resized to that; videos are sampled at the pocket
    world's own frame rate.
    """
    wrap(tokenizer, context).save_pretrained(folder)
    pictures = LlavaOnevisionImageProcessorPil(
        image_grid_pinpoints=[[IMAGE_SIZE, IMAGE_SIZE]], **_SQUARE
    ).to_dict()
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
    kept = json.loads(path.read_text())
    for name in ("backend", "extra_special_tokens"):  # of no use, and older readers stumble over them
        kept.pop(name, None)
    kept["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(kept, indent=2) + "\n")
