"""`saccade chat`: a conversation in the terminal, with images."""

from __future__ import annotations

from typing import Annotated

import typer

from saccade.cli import options as o
from saccade.cli import screen
from saccade.errors import InputError, SaccadeError

HELP = """\
  /image FILE   show a picture with your next message (may be repeated)
  /video FILE   show a video with your next message
  /reset        start a new conversation
  /help         this list
  /quit         leave (so does Ctrl-D); Ctrl-C stops an answer"""


def chat(
    target: o.Target = "pocket",
    image: Annotated[
        list[str] | None,
        typer.Option("--image", "-i", metavar="FILE", help="Picture for the first message; may be repeated."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    drafter: o.Drafter = None,
    method: o.MethodName = None,
    set_: o.Settings = None,
    dtype: o.Dtype = "auto",
    draft_dtype: o.DraftDtype = None,
    device: o.DeviceMap = None,
    max_new_tokens: o.MaxNewTokens = None,
    sample: o.Sample = False,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    min_p: o.MinP = None,
    repetition_penalty: o.RepetitionPenalty = None,
    stop: o.Stop = None,
    seed: o.Seed = None,
    marks: Annotated[bool, typer.Option("--marks", help="Mark the tokens that the drafter guessed.")] = False,
) -> None:
    """Talk with a model about images, turn by turn.

    Later turns reuse the KV cache of the earlier ones: only what is new is read. `/help` inside lists commands.
    """
    decoding = o.decoding(max_new_tokens, sample, temperature, top_p, top_k, min_p, repetition_penalty, stop)
    settings = o.settings(set_)
    vlm = screen.load_models(
        target, drafter, method, dtype=dtype, draft_dtype=draft_dtype, device_map=device, **settings
    )
    talk = vlm.chat(system)
    media: dict[str, list[str]] = {"image": list(image or []), "video": []}
    screen.note.print(f"{target} with method {vlm.method}. /help lists commands, /quit leaves.", style="dim")
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line:
            continue
        try:
            if line.startswith("/"):
                if line in ("/quit", "/exit"):
                    return
                if line == "/reset":
                    talk, media = vlm.chat(system), {"image": [], "video": []}
                _command(line, media)
                continue
            turn = talk.stream(line, media["image"], media["video"], seed=seed, **decoding)
            media = {"image": [], "video": []}
            output = screen.answer(turn, screen.Painter(vlm.processor.tokenizer, screen.out(), marks))
        except SaccadeError as problem:
            screen.note.print(str(problem), style="red", markup=False)
            media = {"image": [], "video": []}
            continue
        screen.note.print(screen.summary(output, vlm.method), style="dim")


def _command(line: str, media: dict[str, list[str]]) -> None:
    """Carry out a slash command."""
    name, _, argument = line[1:].partition(" ")
    argument = argument.strip().strip("'\"")
    if name in media:
        if not argument:
            raise InputError(f"/{name} needs a file, such as /{name} photo.jpg.")
        if name == "image":
            from saccade.inputs.media import load_image

            load_image(argument)  # say now what is wrong with it, not with the next message
        media[name].append(argument)
        screen.note.print(f"{argument} goes with your next message.", style="dim", markup=False)
    elif name == "help":
        screen.note.print(HELP)
    elif name != "reset":
        raise InputError(f"There is no command /{name}; /help lists those that exist.")
