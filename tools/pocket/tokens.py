"""Tokenizer (byte-level BPE, trained on text of the world), loss weights of its tokens, and files of the processor."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

from saccade.pocket import words
from saccade.pocket.film import FPS
from saccade.pocket.labels import IMAGE_SIZE
from saccade.pocket.sample import IMAGE_MARK, WORLD, Sample
from tools.pocket.batches import PATCHES, SPECIAL_TOKENS, training_samples
from tools.pocket.recipe import Recipe

_RELATIONS = ("above", "below", "larger", "smaller", "same", "more", "less", "yes", "no")
_CHANGES = ("up", "down", "appears", "leaves", "gone", "stays", "moves", "back", "day", "night")


def train_tokenizer(recipe: Recipe) -> Tokenizer:
    """Train a tokenizer of at most `recipe.vocabulary` tokens; the special tokens come first, in order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def texts() -> Iterator[str]:
        for sample in training_samples(Random(f"tokens/{recipe.seed}"), recipe.tokenizer_samples, 0.5):
            for turn in (*sample.turns, (sample.question, sample.answer)):
                yield turn[0].replace(IMAGE_MARK, "\n")
                yield turn[1]

    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def content_weights(tokenizer: Tokenizer, vocabulary: int, weight: float) -> torch.Tensor:
    """Loss weights `[vocabulary]`: `weight` for words that state a fact of the picture, 1 for all others."""
    closed = (words.COLOURS, words.COLUMNS, words.GOODS, words.NUMBERS, words.ORDINALS, words.ROWS, words.SIZES)
    content = {*_RELATIONS, *_CHANGES, *(word for group in closed for word in group)}
    content |= {word.lower() for word in (*words.DAYS, *words.NAMES, *words.TOWNS)}
    content |= {words.plural(shape, count) for shape in words.SHAPES for count in (1, 2)}
    weights = torch.ones(vocabulary)
    for number in range(tokenizer.get_vocab_size()):
        word = tokenizer.decode([number]).strip().lower()
        if word in content or word.isdecimal():
            weights[number] = weight
    return weights


def decisive_weights(tokenizer: Tokenizer, sample: Sample, weight: float) -> list[float]:
    """Loss weights of the tokens of a sample's true answer: `weight` for words of `Task.decisive`, 1 for others.

    One token of forty decides most answers, and plain training learns it last.
    """
    pattern = WORLD[sample.task].decisive or r"(?!)"  # which matches nothing
    return pattern_weights(tokenizer, sample.answer, pattern, weight)


def pattern_weights(tokenizer: Tokenizer, answer: str, pattern: str | re.Pattern[str], weight: float) -> list[float]:
    """Loss weights of an answer's tokens: `weight` for those within matches of a pattern, 1 for others."""
    spans = [found.span() for found in re.finditer(pattern, answer)]
    offsets = tokenizer.encode(answer).offsets
    return [weight if any(first < end and start < last for first, last in spans) else 1.0 for start, end in offsets]


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
