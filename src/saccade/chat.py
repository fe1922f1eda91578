"""Conversations whose turns reuse the KV cache of the earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Unpack

from saccade.errors import InputError
from saccade.inputs.media import load_image
from saccade.inputs.processor import InputProcessor, one_or_more
from saccade.output import Chunk, Output
from saccade.stream import PromptOptions, Stream, split_options


class Chat:
    """A conversation with one model; see `VLM.chat`.

    Args:
        stream: streams of a VLM bound to the conversation's session.
        processor: the target's.
        system: system message; None for none.

    Attributes:
        messages: all turns so far, in content-list form, images and videos decoded; may be cut or edited between
            turns.

    >>> chat = saccade.load("pocket").chat()
    >>> chat.send("How many bars are there?", images=[draw(1, "chart").image], max_new_tokens=8).stats.new_tokens
    8
    >>> [message["role"] for message in chat.messages]
    ['user', 'assistant']
    """

    def __init__(self, stream: Callable[..., Stream], processor: InputProcessor, system: str | None = None) -> None:
        self.messages: list[dict[str, Any]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": [{"type": "text", "text": system}]})
        self._stream = stream
        self._processor = processor
        self._moves = 0  # how often a turn began or became part of the conversation
        self._turn: Turn | None = None  # the latest that began

    def send(
        self,
        text: str,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        *,
        prediction: str | None = None,
        seed: int | None = None,
        **options: Unpack[PromptOptions],
    ) -> Output:
        """Send a user message and return the answer; arguments as in `VLM.generate`.

        >>> saccade.load("pocket").chat().send("Hello", max_new_tokens=4).finish_reason
        'length'
        """
        turn = self.stream(text, images, videos, prediction=prediction, seed=seed, **options)
        for _ in turn:
            pass
        return turn.output

    def stream(
        self,
        text: str,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        *,
        prediction: str | None = None,
        seed: int | None = None,
        streamer: Any = None,
        trace: bool = False,
        **options: Unpack[PromptOptions],
    ) -> Turn:
        """Send a user message and stream the answer; arguments as in `VLM.stream`.

        Images and videos are decoded once: later turns reuse the frames that ``num_frames`` or ``fps`` select now.
        The turn becomes part of the conversation when its iteration ends, wherever that is; one that fails, is
        stopped before its first token, or is overtaken by another one, leaves the conversation unchanged.

        >>> turn = saccade.load("pocket").chat().stream("Hello", max_new_tokens=4)
        >>> sum(len(chunk.tokens[0]) for chunk in turn)
        4
        """
        media, _ = split_options(options)
        films = [self._processor.load_video(video, media) for video in one_or_more(videos)]
        content: list[dict[str, Any]] = [
            *({"type": "image", "image": load_image(i, media.limits)} for i in one_or_more(images)),
            *({"type": "video", "video": film} for film in films),
            {"type": "text", "text": text},
        ]
        messages = [*self.messages, {"role": "user", "content": content}]
        rest: dict[str, Any] = {"streamer": streamer, "trace": trace, **options}
        stream = self._stream(messages, prediction=prediction, seed=seed, **rest)
        return Turn(self, messages, stream)


class Turn:
    """One answer of a chat in progress; iterating it raises `InputError` once another turn has begun."""

    def __init__(self, chat: Chat, messages: list[dict[str, Any]], stream: Stream) -> None:
        self._chat = chat
        self._messages = messages
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
                self._chat.messages = [*self._messages, answer]
                self._move()

    def _check_latest(self) -> None:
        if not self._is_latest:
            raise InputError(
                "Another turn of the conversation has begun since; send this one again, and read each turn before you "
                "send the next."
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
