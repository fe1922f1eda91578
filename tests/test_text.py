"""Pieces of text that come with the tokens, joined, are the text of all tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from saccade.stream import INCOMPLETE, Detokenizer, decode, text_of

SPECIAL = ["<s>", "</s>"]
SAMPLES = [
    "Straße, 東京都 und São Paulo",
    "naïve café — 5 €",
    "🙂🙂👩‍🚀 done",
    "مرحبا بالعالم",
    "two  spaces\n\n and tabs\t",
]


def byte_level(merges: int) -> tokenizers.Tokenizer:
    """As GPT-2's, Llama 3's and Qwen's: a token is a run of bytes, also part of a character."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + merges, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    core.train_from_iterator(SAMPLES * 20, trainer)
    return core


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2's: ▁ for a space, one in front of the text, and single bytes for unknown characters."""
    vocabulary = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefgh", "▁a", "▁b"]
    core = tokenizers.Tokenizer(
        models.BPE({t: i for i, t in enumerate(vocabulary)}, [("▁", "a"), ("▁", "b")], byte_fallback=True)
    )
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(SPECIAL)
    return core


@cache
def tokenizer(name: str) -> Any:
    core = {"bytes": lambda: byte_level(0), "merges": lambda: byte_level(120), "fallback": byte_fallback}[name]()
    # True as in Llama 3's files: the space before a full stop would go when the full stop comes
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=True
    )


def streamed(tok: Any, ids: list[int], sizes: list[int]) -> list[str]:
    """Pieces for the ids, some at a time."""
    text, pieces, at = Detokenizer(tok), [], 0
    for size in [*sizes, len(ids)]:
        pieces.append(text.add(ids[at : at + size]))
        at += size
    return [*pieces, text.finish()]


TEXTS = st.text(st.one_of(st.sampled_from("ab .,'€é東🙂 "), st.characters(exclude_categories=["Cs"])), max_size=30)
SIZES = st.lists(st.integers(0, 4), max_size=60)


TOKENIZERS = pytest.mark.parametrize("name", ["bytes", "merges", "fallback"])


@TOKENIZERS
@settings(deadline=None, max_examples=100)
@given(text=TEXTS, sizes=SIZES, data=st.data())
def test_pieces_of_a_text_with_special_tokens_anywhere_join_to_it_and_hold_no_broken_character(
    name: str, text: str, sizes: list[int], data: Any
) -> None:
    tok = tokenizer(name)
    assume(not any(special in text for special in tok.all_special_tokens))  # which decoding leaves out
    ids = tok(text, add_special_tokens=False)["input_ids"]
    for place in sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)), reverse=True):
        ids.insert(place, tok.eos_token_id)
    pieces = streamed(tok, ids, sizes)
    assert "".join(pieces) == decode(tok, ids) == text
    assert INCOMPLETE in text or not any(INCOMPLETE in piece for piece in pieces)


@TOKENIZERS
@settings(deadline=None, max_examples=100)
@given(data=st.data(), sizes=SIZES)
def test_pieces_of_any_tokens_join_to_their_text(name: str, data: Any, sizes: list[int]) -> None:
    """Also of tokens that make no valid text, as a model may well emit."""
    tok = tokenizer(name)
    ids = data.draw(st.lists(st.integers(0, len(tok) - 1), max_size=40))
    assert "".join(streamed(tok, ids, sizes)) == text_of(tok, ids)
    if name != "fallback" or INCOMPLETE not in decode(tok, ids):
        assert text_of(tok, ids) == decode(tok, ids)


@TOKENIZERS
@settings(deadline=None, max_examples=100)
@given(text=TEXTS, data=st.data(), sizes=SIZES)
def test_whole_characters_stay_when_generation_ends_inside_the_next(
    name: str, text: str, data: Any, sizes: list[int]
) -> None:
    """A decoder with byte fallback makes nothing of a run of bytes that is not whole."""
    tok, text = tokenizer(name), text.replace(INCOMPLETE, "")
    ids = tok(text, add_special_tokens=False)["input_ids"]
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    shown = text_of(tok, ids)
    assert "".join(streamed(tok, ids, sizes)) == shown
    whole = shown.rstrip(INCOMPLETE)
    assert text.startswith(whole)
    assert len(shown) - len(whole) <= 3  # bytes of a character without its last


def test_what_was_streamed_stays_when_the_bytes_behind_it_make_no_character() -> None:
    tok = tokenizer("fallback")
    ids = tok("你好", add_special_tokens=False)["input_ids"]
    assert decode(tok, ids[:-1]) == INCOMPLETE * 5
    for sizes in ([1] * 6, [6], [2, 4], [5, 1]):
        assert "".join(streamed(tok, ids[:-1], sizes)) == text_of(tok, ids[:-1]) == "你" + INCOMPLETE * 2
