"""`saccade chat`: a conversation in the terminal, with images and videos."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from saccade.cli import screen
from saccade.cli.option_groups import DecodingOptions, MarkOptions, ModelOptions, option, spread
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
    image: list[str] | None = option(None, "Image for the first message; may be repeated.", "-i", metavar="FILE"),
    system: str | None = option(None, "System message."),
    shown: MarkOptions,
    url: str | None = option(
        None,
        "Talk to a server instead, such as http://127.0.0.1:8000/v1; --target and --method then name its models and "
        "methods, and SACCADE_API_KEY has its key.",
        metavar="URL",
    ),
    models: ModelOptions,
    decoding: DecodingOptions,
) -> None:
    """Chat with a model about images and videos.

    Later turns reuse the KV cache of the earlier ones: only new tokens are prefilled. `/help` lists the commands.
    """
    screen.check_media(image or [], [])
    talker: _Local | RemoteChat
    if url is not None:
        if shown.text_as_text or models != ModelOptions(target=models.target, method=models.method):
            raise InputError(
                "--drafter, --head, --set, --text-as-text and options of devices, number formats and --exact are for "
                "models loaded here; leave them out with --url."
            )
        options = {"seed": decoding.seed, **decoding.options()}
        talker = RemoteChat(url, models.target, models.method, system, options, shown.marks)
        screen.note(f"{url}. /help lists commands, Ctrl-D leaves.")
    else:
        from saccade.target_model.lean import caveat

        options = {"text_as_text": shown.text_as_text, "seed": decoding.seed, **decoding.checked()}
        models = models.or_pocket()
        vlm = models.load()
        talker = _Local(vlm, system, options, shown.marks)
        screen.note(f"{models.target} with method {vlm.method}. /help lists commands, Ctrl-D leaves.")
        if warning := caveat(vlm.target, vlm.lossless):
            screen.note(warning)
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
            images, videos = self._images, self._videos
            self._images, self._videos = [], []  # even if they are refused, or every later message would fail
            screen.note(self._talker.send(line, images, videos))
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

    def _attach(self, name: str, file: str) -> None:
        if not file:
            raise InputError(f"{name} needs a file, such as {name} holiday.{'jpg' if name == '/image' else 'mp4'}.")
        images, videos = ([file], []) if name == "/image" else ([], [file])
        screen.check_media(images, videos)  # a bad file is reported now, not with the next message
        self._images, self._videos = [*self._images, *images], [*self._videos, *videos]
        screen.note(f"{file} is attached to your next message.")
