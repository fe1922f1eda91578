"""Sessions: who may use them, generations that overtake each other, and exceptions wherever in a step they come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import add, alone, engine, prompts

from checkpoints import picture, vlm
from saccade import InputError
from saccade.target_model.adapter import Target
from saccade.target_model.cache import RowCache


def test_a_session_of_another_method_or_model_is_refused() -> None:
    """Its judges could be lossy, its drafter's trees larger than the caches were made for."""
    lossless = vlm("llava", "llava-draft")
    lossy = lossless.using("fly")
    for opened, user in ((lossy, lossless), (lossless, lossy), (vlm("llava", method="plain"), vlm("qwen"))):
        with pytest.raises(InputError, match="opened with another method, other options or another model"):
            user.generate("What?", session=opened.engine.open(1))


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


@pytest.mark.parametrize("then", ["go on", "close"])
def test_an_overtaken_turn_leaves_the_conversation_to_the_one_that_overtook(then: str) -> None:
    chat = vlm("llava", "llava-draft").chat()
    turn = chat.stream("What?", [picture(1)])
    steps = iter(turn)
    next(steps)
    before = turn.output.tokens
    second = chat.send("And here?", [picture(2)])
    conversation = words(chat)
    assert conversation == ["And here?", second.text]
    if then == "close":
        steps.close()
    else:
        with pytest.raises(InputError, match="Another turn of the conversation has begun"):
            next(steps)
    assert (turn.output.tokens, turn.output.finish_reason) == (before, "interrupted")
    assert words(chat) == conversation
    third = chat.send("Well?")
    assert third.stats.reused_tokens > second.stats.prompt_tokens
    assert words(chat) == [*conversation, "Well?", third.text]


def test_a_turn_that_begins_when_the_conversation_has_gone_on_is_refused() -> None:
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


@pytest.mark.parametrize("method", ["chain", "tabed", "specvlm"])
def test_what_was_broken_off_leaves_nothing_behind(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = vlm("llava", "llava-draft").using(method)
    expected = model.generate("What?", [picture(1)]).tokens
    forward = Target.forward
    for at in (2, 17):
        session, calls = model.engine.open(1), 0

        def breaking(self: Target, *given: Any, at: int = at, **named: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            logits = forward(self, *given, **named)
            if calls == at:
                raise KeyboardInterrupt
            return logits

        with monkeypatch.context() as patched:
            patched.setattr(Target, "forward", breaking)
            with pytest.raises(KeyboardInterrupt):
                model.generate("What?", [picture(1)], session=session)
        assert model.generate("What?", [picture(1)], session=session).tokens == expected


@pytest.mark.parametrize("method", ["plain", "lookup"])
def test_entries_that_a_broken_step_did_not_commit_are_computed_again(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row's content is written down just before they are committed."""
    batch, prompt = engine(method).open(1, prefill_chunk=5), prompts()[1]

    def refuse(*_: Any) -> None:
        raise RuntimeError("planted")

    broken = add(batch, prompt)
    with monkeypatch.context() as patched:
        patched.setattr(RowCache, "commit", refuse)
        batch.step()
    assert "planted" in str(broken.error)
    again = add(batch, prompt)
    for _ in range(100):
        batch.step()
    assert again.output == alone(method, prompt)


def test_a_stream_opened_before_another_answer_failed_still_runs() -> None:
    """What it needs of the session is made when it begins, not when it is opened."""
    model = vlm("llava", "llava-draft")
    session = model.engine.open(1)
    stream = model.stream("What?", [picture(1)], session=session)
    assert session.is_idle

    def breaking(ids: torch.Tensor, scores: Any) -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        model.generate("And?", session=session, stopping_criteria=[breaking])
    for _ in stream:
        pass
    assert stream.output.tokens == model.generate("What?", [picture(1)]).tokens


@pytest.mark.parametrize("lacking", ["reserve", "preallocate"])
@pytest.mark.parametrize("method", ["plain", "chain"])
def test_a_row_for_which_there_is_no_memory_fails_and_leaves_its_place(
    method: str, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("out of memory")

    batch = engine(method).open(2)
    running = [] if lacking == "preallocate" else [add(batch, prompts()[0])]
    batch.step()
    rows = [*running, add(batch, prompts()[1]), add(batch, prompts()[2])]
    with monkeypatch.context() as patched:
        patched.setattr(RowCache, lacking, refuse)
        stepped = [row for row, _ in batch.step()]
    failed, later = rows[:-1], rows[-1]
    assert stepped == failed, "the caches are undefined then, so rows under way fail, too"
    assert all("out of memory" in str(row.error) for row in failed)
    again = [add(batch, prompt) for prompt in prompts()[:2]]
    for _ in range(100):
        batch.step()
    assert batch.is_idle, "the slot that had been assigned is free again"
    for row, prompt in [(later, prompts()[2]), *zip(again, prompts(), strict=False)]:
        assert row.output == alone(method, prompt)
