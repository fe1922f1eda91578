"""`saccade generate`: one question, one answer."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import typer

from saccade.cli import screen
from saccade.cli.option_groups import DecodingOptions, MarkOptions, ModelOptions, option, spread
from saccade.errors import InputError

if TYPE_CHECKING:
    from saccade.vlm import VLM


@spread
def generate(
    prompt: str = typer.Argument(help="The question; `-` reads it from standard input."),
    image: list[str] | None = option(
        None, "Image of the prompt (file or data URI); may be repeated.", "-i", metavar="FILE"
    ),
    video: list[str] | None = option(
        None, "Video of the prompt (needs the video extra); may be repeated.", "-v", metavar="FILE"
    ),
    num_frames: int | None = option(None, "Frames sampled from a video; by default the checkpoint's setting."),
    as_json: bool = option(
        False, "Print one JSON object: models, method and its options, text, tokens, marks, statistics.", "--json"
    ),
    *,
    shown: MarkOptions,
    models: ModelOptions,
    decoding: DecodingOptions,
) -> None:
    """Answer one question about images, videos or text.

    The answer streams to standard output as its tokens are accepted, statistics go to standard error.

    Examples:

    `saccade generate -t pocket -i chart.png "Read the values from the bar chart."`

    `saccade generate -t Qwen/Qwen2.5-VL-7B-Instruct -d Qwen/Qwen2.5-VL-3B-Instruct -i photo.jpg "Describe it."`

    `torchrun --nproc-per-node 2 --no-python saccade generate -t Qwen/Qwen2.5-VL-72B-Instruct --device tp "Hello."`
    """
    from saccade.inputs.chat import check_unicode

    target = models.named()
    if prompt == "-" and models.device == "tp":
        raise InputError("Standard input cannot be read by several processes; give the question as an argument.")
    question = sys.stdin.read().rstrip("\n") if prompt == "-" else prompt
    if not question.strip():
        raise InputError("The question is empty; give it as an argument, or - and write it to standard input.")
    check_unicode(question)
    images, videos = image or [], video or []
    screen.check_media(images, videos)
    options = {"seed": decoding.seed, "num_frames": num_frames, **decoding.checked()}
    vlm = models.load()
    stream = vlm.stream(question, images, videos, text_as_text=shown.text_as_text, **options)
    if as_json:
        output = screen.finish(stream, lambda _: None)
        print(json.dumps({"target": target, **_configuration(vlm, models.drafter), **output.as_dict()}))
    else:
        output = screen.answer(stream, screen.Painter(vlm.processor.tokenizer, screen.out(), shown.marks))
        screen.note(screen.summary(output, vlm.method))
    if output.finish_reason == "interrupted":
        raise typer.Exit(130)


def _configuration(vlm: VLM, named: str | None) -> dict[str, Any]:
    """Return the drafter's folder or hub id, its head's name, every option of the method, and the dtypes."""
    from saccade import methods
    from saccade.loading import name_of
    from saccade.pocket import head_path

    drafter, draft_dtype = None, None
    if vlm.head is not None:
        drafter = named or str(head_path(vlm.head.kind))
        draft_dtype = next(vlm.head.parameters()).dtype
    elif vlm.draft_model is not None and methods.needs(vlm.options) == "draft model":
        drafter = name_of(vlm.draft_model.model)
        draft_dtype = vlm.draft_model.dtype
    return {
        "drafter": drafter,
        "head": vlm.head_name,
        "method": vlm.method,
        "options": vlm.options,
        "dtype": str(vlm.target.dtype).removeprefix("torch."),
        "draft_dtype": draft_dtype and str(draft_dtype).removeprefix("torch."),
        "exact": vlm.target.exact,
    }
