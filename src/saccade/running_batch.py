"""The public running batch: a ticket per request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Unpack
from weakref import WeakValueDictionary

from saccade.engine import Request, RunningBatch
from saccade.engine.batch import unread
from saccade.engine.row import Row, plan
from saccade.errors import InputError
from saccade.inputs.media import load_image
from saccade.inputs.processor import Question, RowInput, is_batch, one_or_more, predictions_of, seeds_of
from saccade.output import Output, TicketChunk
from saccade.stream import Detokenizer, PromptOptions, split_options, text_of


class Ticket:
    """One request of a `Batch`: iterate it for its chunks, or read its `output` at any time.

    Iterating runs the batch's steps as far as this request needs them; other tickets buffer their chunks until they
    are read.

    >>> batch = saccade.load("pocket").batch()
    >>> ticket = batch.add("Hello", max_new_tokens=6)
    >>> sum(len(chunk.tokens) for chunk in ticket), ticket.done
    (6, True)
    """

    def __init__(self, batch: Batch, row: Row, tokenizer: Any) -> None:
        self._batch = batch
        self._row = row
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer)

    @property
    def done(self) -> bool:
        """Whether the request has ended: complete, cancelled or failed."""
        return self._row.done

    @property
    def error(self) -> BaseException | None:
        """The error that ended the request; None without one."""
        return self._row.error

    @property
    def output(self) -> Output:
        """The output so far; its ``finish_reason`` is ``interrupted`` until the request ends."""
        output = self._row.finish(self._batch._running.engine.rule(do_sample=False).lossless)
        output.text = text_of(self._tokenizer, output.tokens)
        return output

    def cancel(self) -> None:
        """End the request before the batch's next step; its tokens so far remain."""
        self._batch._running.cancel(self._row)
        self._batch._set_aside([self._row])

    def __iter__(self) -> Iterator[TicketChunk]:
        for _ in unread([self._row], self._batch.step_once):
            yield self._next()
        if self._row.error is not None:
            raise self._row.error

    def result(self) -> Output:
        """Run the request to its end and return the output.

        Raises:
            Exception: the error that the request failed with.
        """
        for _ in unread([self._row], self._batch.step_once):
            self._row.steps.clear()
        if self._row.error is not None:
            raise self._row.error
        return self.output

    def _next(self) -> TicketChunk:
        """Remove and return the oldest chunk."""
        chunk = self._row.steps.pop(0)
        return replace(chunk, text=self._text.decode(chunk.tokens, chunk.finished))


class Batch:
    """A running batch of requests, each with its own options; see `VLM.batch`.

    Args:
        running: the engine's.
        request: makes the engine's request of a question and a seed.
        tokenizer: the target's.

    >>> batch = saccade.load("pocket").batch(max_rows=2)
    >>> tickets = [batch.add("Hello", max_new_tokens=count) for count in (2, 9, 4)]
    >>> while not batch.is_idle:
    ...     for ticket, chunk in batch.step():
    ...         pass  # send chunk.text to whoever waits for the ticket
    >>> [len(ticket.output.tokens) for ticket in tickets]
    [2, 9, 4]
    """

    def __init__(self, running: RunningBatch, request: Callable[[RowInput, int], Request], tokenizer: Any) -> None:
        self._running = running
        self._request = request
        self._tokenizer = tokenizer
        self._tickets: dict[int, Ticket] = {}
        self._ended: WeakValueDictionary[int, Ticket] = WeakValueDictionary()  # whose chunks may be unread

    def add(
        self,
        prompt: Question,
        images: Sequence[Any] = (),
        videos: Sequence[Any] = (),
        *,
        prediction: str | None = None,
        seed: int | None = None,
        **options: Unpack[PromptOptions],
    ) -> Ticket:
        """Submit one request.

        Args:
            prompt: a string, a conversation, or a `Prompt`.
            images, videos, prediction: as in `VLM.generate`.
            seed: of its random generator when sampling; None: drawn from torch's global generator.
            options: as in `VLM.generate`, for this request alone.

        Raises:
            InputError: it cannot be used as it is, or can never fit the model's context or the KV memory.
        """
        if is_batch(prompt):
            raise InputError("A ticket takes one prompt; add each prompt on its own.")
        media, generation = split_options(options)
        loaded = [load_image(image, media.limits) for image in one_or_more(images)]
        inputs = RowInput(prompt, loaded, one_or_more(videos), media, *predictions_of(prediction, 1, batch=False))
        request = self._request(inputs, seeds_of(seed, 1)[0])
        (decoding,) = plan(self._running.target, [request.prompt], tokenizer=self._tokenizer, **generation)
        row = self._running.add(request, decoding)
        ticket = Ticket(self, row, self._tokenizer)
        self._tickets[id(row)] = ticket
        return ticket

    @property
    def is_idle(self) -> bool:
        """Whether no request is running or waiting."""
        return self._running.is_idle

    def step_once(self) -> None:
        """Run one step; the tickets buffer their chunks."""
        self._set_aside([row for row, _ in self._running.step()])

    def _set_aside(self, rows: Sequence[Row]) -> None:
        """Leave the tickets of those rows that have ended to their holders."""
        for row in rows:
            if row.done and (ticket := self._tickets.pop(id(row), None)) is not None:
                self._ended[id(row)] = ticket

    def step(self) -> list[tuple[Ticket, TicketChunk]]:
        """Run one step and return every ticket's chunks, buffered ones of earlier steps included."""
        tickets = [*self._ended.values(), *self._tickets.values()]
        self._ended.clear()
        self.step_once()
        self._ended.clear()
        return [(ticket, ticket._next()) for ticket in tickets for _ in range(len(ticket._row.steps))]

    def close(self) -> None:
        """Cancel all requests and free the caches."""
        self._running.close()
        self._tickets.clear()
        self._ended.clear()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
