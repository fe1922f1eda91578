"""Conversations whose turns go on from the KV cache of the earlier ones."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from saccade.errors import InputError
from saccade.inputs.media import load_image
from saccade.inputs.requests import kept_video, one_or_more
from saccade.output import Output
from saccade.stream import Chunk, Stream

if TYPE_CHECKING:
    from saccade.vlm import VLM


class Chat:
    """A conversation with one model.

    Attributes:
        messages: what was said so far, in content-list form, pictures and videos as they were decoded; may be
            cut or edited between turns.
    """

    def __init__(self, vlm: VLM, system: str | None = None) -> None:
        self.messages: list[dict[str, Any]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": [{"type": "text", "text": system}]})
        self._vlm = vlm
        self._session = vlm.engine.open(1)
        self._moves = 0  # how often a turn began or became part of the conversation
        self._turn: Turn | None = None  # the latest that began

    def send(
        self, text: str, images: Sequence[Any] = (), videos: Sequence[Any] = (), **options: Any
    ) -> Output:
        """Say something and wait for the answer; arguments as in `VLM.generate`."""
        turn = self.stream(text, images, videos, **options)
        for _ in turn:
            pass
        return turn.output

    def stream(
        self, text: str, images: Sequence[Any] = (), videos: Sequence[Any] = (), **options: Any
    ) -> Turn:
        """Say something and read the answer as it comes; arguments as in `VLM.stream`.

        Pictures and videos are read once: later turns see the frames that ``num_frames`` or ``fps`` chose now.
        The turn becomes part of the conversation when its iteration ends, wherever that is; one that fails, is
        stopped before its first token, or is overtaken by another one, leaves the conversation as it was.
        """
        sampling = {name: options.get(name) for name in ("num_frames", "fps")}
        films = [kept_video(self._vlm.processor, video, **sampling) for video in one_or_more(videos)]
        content: list[dict[str, Any]] = [
            *({"type": "image", "image": load_image(i)} for i in one_or_more(images)),
            *({"type": "video", "video": film} for film in films),
            {"type": "text", "text": text},
        ]
        asked = [*self.messages, {"role": "user", "content": content}]
        stream = self._vlm.stream(asked, session=self._session, **options)
        return Turn(self, asked, stream)


class Turn:
    """One answer of a chat under way; iterating it raises `InputError` once another turn has begun."""

    def __init__(self, chat: Chat, asked: list[dict[str, Any]], stream: Stream) -> None:
        self._chat = chat
        self._asked = asked
        self._stream = stream
        self._moves = chat._moves

    def __iter__(self) -> Generator[Chunk, None, None]:
        self._check_latest()
        self._move()
        earlier, self._chat._turn = self._chat._turn, self
        if earlier is not None and earlier is not self:
            earlier._stream.cancel()
        failed = False
        try:
            for chunk in self._stream:
                self._check_latest()
                yield chunk
        except Exception:
            failed = True
            raise
        finally:
            output = self.output
            if output.tokens and not failed and self._is_latest:
                answer = {"role": "assistant", "content": [{"type": "text", "text": output.text}]}
                self._chat.messages = [*self._asked, answer]
                self._move()

    def _check_latest(self) -> None:
        if not self._is_latest:
            raise InputError(
                "The conversation has gone on since this turn was asked; ask it again, and read a turn as far as you "
                "want it before you ask the next."
            )

    @property
    def _is_latest(self) -> bool:
        return self._moves == self._chat._moves

    def _move(self) -> None:
        self._chat._moves += 1
        self._moves = self._chat._moves

    @property
    def output(self) -> Output:
        """The answer so far."""
        return self._stream.output
