"""Generations that share a session take turns in it; in a conversation the latest turn is the one that counts."""

from __future__ import annotations

from typing import Any

import pytest

from checkpoints import picture, vlm
from saccade import InputError


def words(chat: Any) -> list[str]:
    return [message["content"][-1]["text"] for message in chat.messages]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_stream_and_a_generation_share_a_session_and_both_are_right(rows: int) -> None:
    model = vlm("llava", "llava-draft")
    session = model.engine.open(rows)
    stream = model.stream("What?", [picture(1)], session=session)
    steps = iter(stream)
    next(steps)
    between = model.generate("And here?", [picture(2)], session=session)
    list(steps)
    assert stream.output.tokens == model.generate("What?", [picture(1)]).tokens
    assert between.tokens == model.generate("And here?", [picture(2)]).tokens


def test_a_stream_that_is_never_read_takes_no_place() -> None:
    model = vlm("llava", "llava-draft")
    session = model.engine.open(1)
    model.stream("What?", [picture(1)], session=session)
    assert session.is_idle


@pytest.mark.parametrize("then", ["go on", "close"])
def test_an_overtaken_turn_leaves_the_conversation_to_the_one_that_overtook(then: str) -> None:
    chat = vlm("llava", "llava-draft").chat()
    turn = chat.stream("What?", [picture(1)])
    steps = iter(turn)
    next(steps)
    said = turn.output.tokens
    second = chat.send("And here?", [picture(2)])
    conversation = words(chat)
    assert conversation == ["And here?", second.text]
    if then == "close":
        steps.close()
    else:
        with pytest.raises(InputError, match="Another turn of the conversation has begun"):
            next(steps)
    assert (turn.output.tokens, turn.output.finish_reason) == (said, "interrupted")
    assert words(chat) == conversation
    third = chat.send("Well?")
    assert third.stats.reused_tokens > second.stats.prompt_tokens
    assert words(chat) == [*conversation, "Well?", third.text]


def test_a_turn_that_begins_when_the_conversation_has_gone_on_is_refused() -> None:
    """It was asked without what has been said since."""
    chat = vlm("llava", "llava-draft").chat()
    first, second = chat.stream("What?"), chat.stream("And?")
    list(first)
    conversation = words(chat)
    with pytest.raises(InputError, match="send this one again"):
        list(second)
    assert words(chat) == conversation == ["What?", first.output.text]


def test_a_turn_that_was_left_may_go_on_while_it_is_the_latest() -> None:
    chat = vlm("llava", "llava-draft").chat()
    turn = chat.stream("What?", [picture(1)])
    chat.stream("Never read")
    for _ in turn:
        break
    assert words(chat) == ["What?", turn.output.text]
    list(turn)
    assert words(chat) == ["What?", turn.output.text]
    assert turn.output.tokens == vlm("llava", "llava-draft").generate("What?", [picture(1)]).tokens
