"""`saccade chat`: a conversation in the terminal, with images and videos."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from saccade.cli import screen
from saccade.cli.account import account, plain_pass
from saccade.cli.option_groups import DecodingOptions, ModelOptions, ReadingOptions, option
from saccade.errors import InputError, SaccadeError

if TYPE_CHECKING:
    from saccade.output import Output
    from saccade.vlm import VLM

HELP = """\
  /image FILE   attach an image to your next message (may be repeated)
  /video FILE   attach a video to your next message
  /stats        speed, accepted draft tokens and time saved in this conversation
  /reset        start a new conversation
  /help         this list
  /quit         leave (so does Ctrl-D); Ctrl-C stops an answer"""


def chat(
    *,
    image: list[str] | None = option(None, "Image for the first message; may be repeated.", "-i", metavar="FILE"),
    system: str | None = option(None, "System message."),
    marks: bool = option(False, "Mark accepted draft tokens: green or ‹ ›, loosely accepted ones yellow or « »."),
    reading: ReadingOptions,
    models: ModelOptions,
    decoding: DecodingOptions,
) -> None:
    """Chat with a model about images and videos.

    Later turns reuse the KV cache of the earlier ones: only new tokens are prefilled. `/help` lists the commands. Where
    the checkpoint's generation_config samples, so does this command, and says so; `--temperature 0` is greedy.
    """
    screen.check_media(image or [])
    decoded = decoding.checked()
    models = replace(models, target=models.target or "pocket")
    from saccade.target_model.exact import caveat

    vlm = screen.load_models(models)
    sampling = screen.sampled(vlm.target.model.generation_config, decoded, decoding.seed)
    session = Session(vlm, system, {"seed": sampling.get("seed"), **asdict(reading), **decoded}, marks)
    session.files["image"] = image or []
    screen.note(f"{models.target} with method {vlm.method}. /help lists commands, Ctrl-D leaves.")
    screen.note_sampling(sampling, decoded)
    if warning := caveat(vlm.target, vlm.lossless):
        screen.note(warning)
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  (input() then has history and cursor keys)
    while (line := _line()) not in (None, "/quit", "/exit"):
        try:
            session.handle(line or "")
        except SaccadeError as problem:
            screen.note(str(problem), "red")


def _line() -> str | None:
    """Return the next line of input; None at its end."""
    prompt = "> " if sys.stdin.isatty() else ""
    try:
        return input(prompt).strip()
    except EOFError:
        print(end="\n" if prompt else "")
        return None
    except KeyboardInterrupt:
        if not prompt:
            raise
        screen.note("\nCtrl-D leaves.")
        return ""


class Session:
    """A conversation, and the files of its next message."""

    def __init__(self, vlm: VLM, system: str | None, options: dict[str, Any], marks: bool) -> None:
        self._vlm, self._system, self._options, self._marks = vlm, system, options, marks
        self._plain: float | None = None  # seconds of plain decoding's passes
        self.reset()

    def reset(self) -> None:
        """Begin a new conversation."""
        self._chat = self._vlm.chat(self._system)
        self._answers: list[Output] = []
        self.files: dict[str, list[str]] = {"image": [], "video": []}

    def handle(self, line: str) -> None:
        """Run a command, or send the line as a message and print the answer."""
        command, _, argument = line.partition(" ")
        kind = command.removeprefix("/")
        if line and not line.startswith("/"):
            images, videos = self.files["image"], self.files["video"]
            self.files = {"image": [], "video": []}  # even if they are refused, or every later message would fail
            turn = self._chat.stream(line, images, videos, **self._options)
            painter = screen.Painter(self._vlm.processor.tokenizer, screen.out(), self._marks)
            self._answers.append(screen.answer(turn, painter))
            self._plain = self._plain or plain_pass(self._vlm, self._options, self._answers[-1])
            screen.note(account(self._answers[-1:], self._vlm.method, self._plain))
        elif kind in self.files:
            file = argument.strip().strip("'\"")
            if not file:
                raise InputError(f"/{kind} needs a file, such as /image holiday.jpg.")
            screen.check_media(**{kind: [file]})  # reported now, not with the next message
            self.files[kind] = [*self.files[kind], file]
            screen.note(f"{file} is attached to your next message.")
        elif line == "/stats":
            screen.note(account(self._answers, self._vlm.method, self._plain) if self._answers else "No answer yet.")
        elif line == "/reset":
            self.reset()
            screen.note("A new conversation.")
        elif line == "/help":
            screen.note(HELP)
        elif line:
            raise InputError(f"{line} is not a command; /help lists the commands.")
