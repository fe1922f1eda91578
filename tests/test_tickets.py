"""Every chunk of a ticket is read once, whoever runs the batch's steps, and a batch keeps no ticket that has ended."""

from __future__ import annotations

import gc
import weakref

from checkpoints import vlm


def test_a_step_returns_what_another_tickets_reader_left_in_the_buffers() -> None:
    with vlm("llava", "llava-draft").batch(2) as batch:
        long, short = batch.add("What?", max_new_tokens=20), batch.add("And?", max_new_tokens=3)
        long.result()
        assert short.done
        found = batch.step()
        assert {ticket for ticket, _ in found} == {short}
        assert [token for _, chunk in found for token in chunk.tokens] == short.output.tokens
        assert [chunk.finished for _, chunk in found][-1]
        assert batch.step() == [], "once"


def test_a_cancelled_ticket_is_let_go_and_says_that_it_has_ended() -> None:
    with vlm("llava", "llava-draft").batch(1) as batch:
        for begun in (True, False):
            running, waiting = batch.add("What?", max_new_tokens=20), batch.add("And?", max_new_tokens=3)
            batch.step()
            cancelled = running if begun else waiting
            cancelled.cancel()
            found = [(ticket, chunk) for ticket, chunk in batch.step() if ticket is cancelled]
            assert [(chunk.tokens, chunk.finished) for _, chunk in found] == [((), True)]
            while not batch.is_idle:
                batch.step()
        left = [batch.add("What?", max_new_tokens=20) for _ in range(3)]
        batch.step()
        for ticket in left:
            ticket.cancel()
        seen = [weakref.ref(ticket) for ticket in left]
        del left, ticket, running, waiting, cancelled, found
        gc.collect()
        assert [ref() for ref in seen] == [None] * 3
