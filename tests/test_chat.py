"""Conversations: later turns read only what is new, and no failure loses an earlier turn."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import media_files
from checkpoints import picture, vlm
from saccade import InputError

PAIRS = [("llava", "llava-draft"), ("llava", "llama"), ("qwen", "qwen-draft"), ("llama", None)]


def one_shot(name: str, messages: list[dict[str, Any]]) -> list[int]:
    """The answer to a whole conversation asked at once, without speculation."""
    tokens: list[int] = vlm(name, method="plain").generate(messages).tokens
    return tokens


@pytest.mark.parametrize(("target", "drafter"), PAIRS)
def test_every_turn_equals_asking_anew_and_reads_only_what_is_new(target: str, drafter: str | None) -> None:
    """With an image in the first turn, none in the second, another one in the third."""
    sees = target != "llama"
    chat = vlm(target, drafter).chat("Be short.")
    held = -1
    for turn, shade in enumerate([1, None, 2]):
        images = [picture(shade)] if sees and shade is not None else []
        before = list(chat.messages)
        output = chat.send(f"Question {turn}?", images)
        asked = chat.messages[:-1]
        assert asked[:-1] == before
        assert asked[-1]["role"] == "user"
        assert output.tokens == one_shot(target, asked)
        assert chat.messages[-1] == {"role": "assistant", "content": [{"type": "text", "text": output.text}]}
        assert output.stats.reused_tokens > held
        held = output.stats.prompt_tokens
    assert [m["role"] for m in chat.messages] == ["system", *["user", "assistant"] * 3]


def test_one_image_need_not_be_a_list() -> None:
    chat, listed = (vlm("llava").chat() for _ in range(2))
    assert chat.send("What?", picture(1)).tokens == listed.send("What?", [picture(1)]).tokens


def test_history_may_be_cut_between_turns() -> None:
    chat = vlm("llava", "llava-draft").chat()
    first = chat.send("What?", [picture(1)])
    chat.send("And now?")
    del chat.messages[2:]
    again = chat.send("Or else?")
    assert again.tokens == one_shot("llava", chat.messages[:-1])
    assert again.stats.reused_tokens >= first.stats.prompt_tokens


def test_an_abandoned_turn_counts_with_the_tokens_it_has() -> None:
    chat = vlm("llava", "llava-draft").chat()
    turn = chat.stream("What?", [picture(1)])
    for _ in turn:
        if len(turn.output.tokens) > 3:
            break
    assert chat.messages[-1]["content"][0]["text"] == turn.output.text != ""
    second = chat.send("Go on?")
    assert second.tokens == one_shot("llava", chat.messages[:-1])
    assert second.stats.reused_tokens > turn.output.stats.prompt_tokens


class Breaking:
    """A logits processor that raises at the given call, in the middle of a step."""

    stateless = True

    def __init__(self, error: type[BaseException], at: int) -> None:
        self.error, self.left = error, at

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if not self.left:
            raise self.error
        return scores


@pytest.mark.parametrize("at", [1, 9])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_turn_broken_off_inside_a_step_harms_no_later_one(error: type[BaseException], at: int) -> None:
    """What an interrupted answer has stays in the conversation; a failed one leaves nothing."""
    chat = vlm("llava", "llava-draft").chat()
    chat.send("What?", [picture(1)])
    before = list(chat.messages)
    turn = chat.stream("And here?", [picture(2)], logits_processor=[Breaking(error, at)])
    with pytest.raises(error):
        list(turn)
    begun = at > 2  # the first two calls judge the pass that ends the prompt, the second one its first guess
    counts = error is KeyboardInterrupt and begun
    assert bool(turn.output.tokens) == begun
    assert len(chat.messages) == len(before) + 2 * counts
    assert chat.messages[: len(before)] == before
    assert chat.send("Well?").tokens == one_shot("llava", chat.messages[:-1])


def test_what_is_refused_leaves_the_conversation_as_it_was() -> None:
    chat = vlm("llava", "llava-draft").chat()
    first = chat.send("What?", [picture(1)])
    said = list(chat.messages)
    for words, images, options in (
        ("?", ["/no/such/file.png"], {}),
        ("?" * 2000, [], {}),
        ("?", [], {"max_new_tokens": 0}),
        ("<image>", [], {}),
    ):
        with pytest.raises(InputError):
            chat.send(words, images, **options)
        assert chat.messages == said
    second = chat.send("And?")
    assert second.tokens == one_shot("llava", chat.messages[:-1])
    assert second.stats.reused_tokens > first.stats.prompt_tokens


# -- videos


def film(path: Path, frames: int = 48) -> str:
    """A clip of 8 frames a second that grows lighter."""
    path.write_bytes(media_files.film([np.full((64, 64, 3), 4 * shade, np.uint8) for shade in range(frames)], rate=8))
    return str(path)


@pytest.mark.parametrize("drafter", [None, "qwen-draft"])
@pytest.mark.parametrize("sampling", [{}, {"num_frames": 4}, {"fps": 1.0}], ids=["own", "frames", "rate"])
def test_later_turns_reuse_a_video_and_need_its_file_no_more(
    sampling: dict[str, Any], drafter: str | None, tmp_path: Path
) -> None:
    model = vlm("qwen", drafter)
    chat, first = model.chat(), film(tmp_path / "first.mp4")
    alone = model.generate("What moves?", videos=[first], **sampling)
    said = chat.send("What moves?", videos=[first], **sampling)
    assert said.tokens == alone.tokens
    assert said.stats.prompt_tokens == alone.stats.prompt_tokens
    Path(first).unlink()
    for words, videos, options in (
        ("And what colour?", [], {}),
        ("And here?", [film(tmp_path / "second.mp4", 24)], {"num_frames": 6}),
        ("Sure?", [], {"fps": 3.0}),
    ):
        held = said.stats.prompt_tokens
        said = chat.send(words, videos=videos, **options)
        assert said.stats.reused_tokens > held
        assert said.tokens == vlm("qwen", method="plain").generate(chat.messages[:-1]).tokens


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qwen", {"num_frames": 4, "fps": 1.0}, "give one of them"),
        ("llava", {}, "no videos"),
        ("llama", {}, "reads text only"),
    ],
)
def test_a_video_that_cannot_be_taken_is_refused_for_its_own_reason(
    name: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    chat = vlm(name).chat()
    with pytest.raises(InputError, match=message):
        chat.send("What moves?", videos=[film(tmp_path / "film.mp4", 8)], **options)
    assert chat.messages == []


# -- running batches


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
