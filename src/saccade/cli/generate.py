"""`saccade generate`: one question, one answer."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade.cli import arguments as args
from saccade.cli import screen
from saccade.cli.option_groups import Decoding, Placing, spread
from saccade.errors import InputError

if TYPE_CHECKING:
    from saccade.vlm import VLM


@spread
def generate(
    prompt: Annotated[str, typer.Argument(help="The question; `-` reads it from standard input.")],
    *,
    target: args.Target = None,
    image: args.Images = None,
    video: args.Videos = None,
    num_frames: Annotated[
        int | None, typer.Option(help="Frames sampled from a video; by default the checkpoint's setting.")
    ] = None,
    drafter: args.Drafter = None,
    method: args.MethodName = None,
    set_: args.Settings = None,
    placing: Placing,
    decoding: Decoding,
    text_as_text: args.TextAsText = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object: models, method and its options, text, tokens, marks, statistics.",
        ),
    ] = False,
    marks: args.Marks = False,
) -> None:
    """Answer one question about images, videos or text.

    The answer streams to standard output as its tokens are accepted, statistics go to standard error.

    Examples:

    `saccade generate -t pocket -i chart.png "Read the values from the bar chart."`

    `saccade generate -t Qwen/Qwen2.5-VL-7B-Instruct -d Qwen/Qwen2.5-VL-3B-Instruct -i photo.jpg "Describe it."`

    `torchrun --nproc-per-node 2 --no-python saccade generate -t Qwen/Qwen2.5-VL-72B-Instruct --device tp "Hello."`
    """
    from saccade.inputs.literal import check_unicode

    if target is None:
        raise InputError(
            "No model is named; give a checkpoint folder or a hub id with --target, or --target pocket for the "
            "built-in pair."
        )
    if prompt == "-" and placing.device == "tp":
        raise InputError("Standard input cannot be read by several processes; give the question as an argument.")
    question = sys.stdin.read().rstrip("\n") if prompt == "-" else prompt
    if not question.strip():
        raise InputError("The question is empty; give it as an argument, or - and write it to standard input.")
    check_unicode(question)
    decoded = decoding.options()
    settings = args.settings(set_)
    images, videos = image or [], video or []
    screen.check_media(images, videos)
    decoding.check()
    vlm = screen.load_models(
        target,
        drafter,
        method,
        **placing.models(),
        **settings,
    )
    stream = vlm.stream(
        question, images, videos, seed=decoding.seed, num_frames=num_frames, text_as_text=text_as_text, **decoded
    )
    if as_json:
        output = screen.finish(stream, lambda _: None)
        print(json.dumps({"target": target, **_configuration(vlm, drafter), **output.as_dict()}))
    else:
        output = screen.answer(stream, screen.Painter(vlm.processor.tokenizer, screen.out(), marks))
        screen.note(screen.summary(output, vlm.method))
    if output.finish_reason == "interrupted":
        raise typer.Exit(130)


def _configuration(vlm: VLM, given: str | None) -> dict[str, Any]:
    """Return the drafter's folder or hub id, its head's name, every option of the method, and the dtypes."""
    from saccade import methods
    from saccade.loading import name_of
    from saccade.pocket import head_path

    drafter, draft_dtype = None, None
    if vlm.head is not None:
        drafter = given or str(head_path(vlm.head.kind))
        draft_dtype = _name(next(vlm.head.parameters()).dtype)
    elif vlm.draft_model is not None and methods.needs(vlm.options) == "draft model":
        drafter, draft_dtype = name_of(vlm.draft_model.model), _name(vlm.draft_model.dtype)
    return {
        "drafter": drafter,
        "head": vlm.head_name,
        "method": vlm.method,
        "options": vlm.options,
        "dtype": _name(vlm.target.dtype),
        "draft_dtype": draft_dtype,
        "exact": vlm.target.exact,
    }


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
