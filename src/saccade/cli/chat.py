"""`saccade chat`: a conversation in the terminal, with images and videos."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade.cli import arguments as args
from saccade.cli import screen
from saccade.errors import InputError, SaccadeError

if TYPE_CHECKING:
    from saccade.output import Output
    from saccade.vlm import VLM

HELP = """\
  /image FILE   attach an image to your next message (may be repeated)
  /video FILE   attach a video to your next message
  /reset        start a new conversation
  /help         this list
  /quit         leave (so does Ctrl-D); Ctrl-C stops an answer"""


def chat(
    target: args.Target = "pocket",
    image: Annotated[
        list[str] | None,
        typer.Option("--image", "-i", metavar="FILE", help="Image for the first message; may be repeated."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    drafter: args.Drafter = None,
    method: args.MethodName = None,
    set_: args.Settings = None,
    dtype: args.Dtype = "auto",
    draft_dtype: args.DraftDtype = None,
    device: args.DeviceMap = None,
    threads: args.Threads = None,
    max_new_tokens: args.MaxNewTokens = None,
    sample: args.Sample = False,
    temperature: args.Temperature = None,
    top_p: args.TopP = None,
    top_k: args.TopK = None,
    min_p: args.MinP = None,
    repetition_penalty: args.RepetitionPenalty = None,
    stop: args.Stop = None,
    seed: args.Seed = None,
    text_as_text: args.TextAsText = False,
    marks: args.Marks = False,
) -> None:
    """Chat with a model about images and videos.

    Later turns reuse the KV cache of the earlier ones: only new tokens are prefilled. `/help` lists the commands.
    """
    decoding = args.decoding(
        max_new_tokens, sample, temperature, top_p, top_k, min_p, repetition_penalty, stop
    )
    settings = args.settings(set_)
    screen.check_media(image or [], [])
    vlm = screen.load_models(
        target or "pocket",
        drafter,
        method,
        dtype=dtype,
        draft_dtype=draft_dtype,
        device_map=device,
        threads=threads,
        **settings,
    )
    talk = _Talk(vlm, system, image or [], {"seed": seed, "text_as_text": text_as_text, **decoding}, marks)
    screen.note(f"{target} with method {vlm.method}. /help lists commands, Ctrl-D leaves.")
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() then has history and cursor keys)
    while (line := _line()) is not None:
        try:
            if line in ("/quit", "/exit"):
                return
            talk.take(line)
        except SaccadeError as problem:
            screen.note(str(problem), "red")


def _line() -> str | None:
    """Return the next line of input; None at its end."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            if sys.stdin.isatty():
                print()
            return None
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            screen.note("\nCtrl-D leaves.")


class _Talk:
    """A conversation, and the files attached to its next message."""

    def __init__(
        self, vlm: VLM, system: str | None, images: list[str], options: dict[str, Any], marks: bool
    ) -> None:
        self._vlm = vlm
        self._system = system
        self._options = options
        self._marks = marks
        self._chat = vlm.chat(system)
        self._images, self._videos = images, list[str]()

    def take(self, line: str) -> None:
        """Run a command, or send the line as a message and print the answer.

        Raises:
            SaccadeError: there is no such command, a file cannot be used, or the message does not fit; the
                conversation is as it was before.
        """
        name, _, argument = line.partition(" ")
        if not line:
            return
        if not line.startswith("/"):
            screen.note(screen.summary(self._send(line), self._vlm.method))
        elif name in ("/image", "/video"):
            self._attach(name, argument.strip().strip("'\""))
        elif line == "/reset":
            self._chat = self._vlm.chat(self._system)
            self._images, self._videos = [], []
            screen.note("A new conversation.")
        elif line == "/help":
            screen.note(HELP)
        else:
            raise InputError(f"{line} is not a command; /help lists the commands.")

    def _send(self, text: str) -> Output:
        images, videos = self._images, self._videos
        self._images, self._videos = [], []  # even if they are refused, or every later message would fail
        turn = self._chat.stream(text, images, videos, **self._options)
        return screen.answer(turn, screen.Painter(self._vlm.processor.tokenizer, screen.out(), self._marks))

    def _attach(self, name: str, file: str) -> None:
        if not file:
            raise InputError(
                f"{name} needs a file, such as {name} holiday.{'jpg' if name == '/image' else 'mp4'}."
            )
        images, videos = ([file], []) if name == "/image" else ([], [file])
        screen.check_media(images, videos)  # a bad file is reported now, not with the next message
        self._images, self._videos = [*self._images, *images], [*self._videos, *videos]
        screen.note(f"{file} is attached to your next message.")
