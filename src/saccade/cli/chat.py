"""`saccade chat`: a conversation in the terminal, with images and videos."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from saccade.cli import arguments as args
from saccade.cli import screen
from saccade.cli.option_groups import Decoding, Placing, spread
from saccade.cli.remote import RemoteChat
from saccade.errors import InputError, SaccadeError

if TYPE_CHECKING:
    from saccade.vlm import VLM

HELP = """\
  /image FILE   attach an image to your next message (may be repeated)
  /video FILE   attach a video to your next message
  /reset        start a new conversation
  /help         this list
  /quit         leave (so does Ctrl-D); Ctrl-C stops an answer"""


@spread
def chat(
    *,
    target: args.Target = None,
    image: Annotated[
        list[str] | None,
        typer.Option("--image", "-i", metavar="FILE", help="Image for the first message; may be repeated."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    drafter: args.Drafter = None,
    method: args.MethodName = None,
    set_: args.Settings = None,
    placing: Placing,
    decoding: Decoding,
    text_as_text: args.TextAsText = False,
    marks: args.Marks = False,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Talk to a server instead, such as http://127.0.0.1:8000/v1; --target and --method then name its "
            "models and methods, and SACCADE_API_KEY has its key.",
        ),
    ] = None,
) -> None:
    """Chat with a model about images and videos.

    Later turns reuse the KV cache of the earlier ones: only new tokens are prefilled. `/help` lists the commands.
    """
    settings = args.settings(set_)
    screen.check_media(image or [], [])
    options = {"seed": decoding.seed, **decoding.options()}
    talker: _Local | RemoteChat
    if url is not None:
        if drafter is not None or settings or text_as_text or placing != Placing():
            raise InputError(
                "--drafter, --set, --text-as-text and options of devices, number formats and --exact are for models "
                "loaded here; leave them out with --url."
            )
        talker = RemoteChat(url, target, method, system, options, marks)
        screen.note(f"{url}. /help lists commands, Ctrl-D leaves.")
    else:
        from saccade.target_model.lean import caveat

        decoding.check()
        vlm = screen.load_models(
            target or "pocket",
            drafter,
            method,
            **placing.models(),
            **settings,
        )
        talker = _Local(vlm, system, {"text_as_text": text_as_text, **options}, marks)
        screen.note(f"{target or 'pocket'} with method {vlm.method}. /help lists commands, Ctrl-D leaves.")
        if said := caveat(vlm.target, vlm.lossless):
            screen.note(said)
    talk = _Talk(talker, image or [])
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


class _Local:
    """A conversation with a model of this process."""

    def __init__(self, vlm: VLM, system: str | None, options: dict[str, Any], marks: bool) -> None:
        self._vlm, self._system, self._options, self._marks = vlm, system, options, marks
        self.reset()

    def reset(self) -> None:
        """Begin a new conversation."""
        self._chat = self._vlm.chat(self._system)

    def send(self, text: str, images: list[str], videos: list[str]) -> str:
        """Send a message, print the answer, and return a line of statistics."""
        turn = self._chat.stream(text, images, videos, **self._options)
        painter = screen.Painter(self._vlm.processor.tokenizer, screen.out(), self._marks)
        return screen.summary(screen.answer(turn, painter), self._vlm.method)


class _Talk:
    """A conversation, and the files attached to its next message."""

    def __init__(self, talker: _Local | RemoteChat, images: list[str]) -> None:
        self._talker = talker
        self._images, self._videos = images, list[str]()

    def take(self, line: str) -> None:
        """Run a command, or send the line as a message and print the answer."""
        name, _, argument = line.partition(" ")
        if not line:
            return
        if not line.startswith("/"):
            screen.note(self._send(line))
        elif name in ("/image", "/video"):
            self._attach(name, argument.strip().strip("'\""))
        elif line == "/reset":
            self._talker.reset()
            self._images, self._videos = [], []
            screen.note("A new conversation.")
        elif line == "/help":
            screen.note(HELP)
        else:
            raise InputError(f"{line} is not a command; /help lists the commands.")

    def _send(self, text: str) -> str:
        images, videos = self._images, self._videos
        self._images, self._videos = [], []  # even if they are refused, or every later message would fail
        return self._talker.send(text, images, videos)

    def _attach(self, name: str, file: str) -> None:
        if not file:
            raise InputError(f"{name} needs a file, such as {name} holiday.{'jpg' if name == '/image' else 'mp4'}.")
        images, videos = ([file], []) if name == "/image" else ([], [file])
        screen.check_media(images, videos)  # a bad file is reported now, not with the next message
        self._images, self._videos = [*self._images, *images], [*self._videos, *videos]
        screen.note(f"{file} is attached to your next message.")
