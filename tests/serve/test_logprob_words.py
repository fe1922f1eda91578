"""Tokens of log-probabilities: their texts and places in the answer, with every kind of tokenizer."""

from __future__ import annotations

import pytest

from saccade.serve.answers import Choice
from saccade.serve.decoding import TokenLogprob
from saccade.serve.owner import Event
from test_text import tokenizer

TEXT = "a b ab é b 🙂 a"


def logprobs(name: str, chat: bool) -> tuple[str, dict[str, list[object]]]:
    """Text and log-probabilities of an answer, token by token."""
    choice = Choice(tokenizer(name), (), chat, 1, traced=False)
    for token in tokenizer(name).encode(TEXT, add_special_tokens=False):
        choice.add(Event((token,), ("target",), (TokenLogprob(token, -1.0, ((token, -1.0),)),)))
    return choice.text, choice.logprobs


@pytest.mark.parametrize("name", ["bytes", "merges", "fallback"])
def test_words_have_their_spaces_and_their_places(name: str) -> None:
    text, found = logprobs(name, chat=False)
    words = [str(word) for word in found["tokens"]]
    assert "".join(words).strip().startswith("a b ab ")
    for word, place in zip(words, found["text_offset"], strict=True):
        assert isinstance(place, int)
        if "\ufffd" not in word:
            assert text[place:].startswith(word if place else word.lstrip())


@pytest.mark.parametrize("name", ["bytes", "merges", "fallback"])
def test_bytes_of_tokens_join_to_the_answer(name: str) -> None:
    """Also those of characters that are several tokens, as OpenAI's clients join them."""
    text, found = logprobs(name, chat=True)
    entries = [entry for entry in found["content"] if isinstance(entry, dict)]
    assert bytes(b for entry in entries for b in entry["bytes"]).decode().strip() == text.strip()
    assert all(entry["top_logprobs"][0]["bytes"] == entry["bytes"] for entry in entries)
