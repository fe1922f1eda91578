"""A tokenizer for the vocabulary of `families`, whose ids have no text, and a base of grammars over its ids."""

from __future__ import annotations

from collections.abc import Sequence

from families import FIRST_WORD, IMAGE, IMAGE_BREAK, IMAGE_END, LAST_WORD, VIDEO, VISION_END, VISION_START, VOCAB
from saccade.grammar import Rollback

NEWLINE = FIRST_WORD - 1
"""In no prompt of `families`."""
_SPECIAL = {
    IMAGE: "<image>",
    VIDEO: "<video>",
    VISION_START: "<|vision_start|>",
    VISION_END: "<|vision_end|>",
    IMAGE_BREAK: "[IMG_BREAK]",
    IMAGE_END: "[IMG_END]",
}


class Numerals:
    """What views ask of a Hugging Face tokenizer."""

    def __len__(self) -> int:
        return VOCAB

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        words = LAST_WORD + 1 - FIRST_WORD
        return [NEWLINE if c == "\n" else FIRST_WORD + ord(c) % words for c in text]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(ord("a") + i % 26) for i in ids if not (skip_special_tokens and i in _SPECIAL))

    def convert_ids_to_tokens(self, token: int) -> str:
        return _SPECIAL.get(token, f"word{token}")

    def get_vocab(self) -> dict[str, int]:
        return {self.convert_ids_to_tokens(i): i for i in range(VOCAB)}


class TokenList(Rollback):
    """A grammar whose matcher is the list of the tokens so far."""

    def matcher(self) -> list[int]:
        return []

    def accept(self, matcher: list[int], token: int) -> bool:
        matcher.append(token)
        return True

    def rollback(self, matcher: list[int], count: int) -> None:
        del matcher[len(matcher) - count :]
