"""Milliseconds of host time that a grammar costs in one step: a chain of 32 nodes, by size of the vocabulary.

Answers to four schemas: an ordinary form, and chains of which nearly every token is forced (a constant), one of a few
(words of an enum in a row), or free (text in a string). `copy` is that of the logits alone, which a step with
processors makes anyway. The vocabularies are made here, byte-level, with merges of up to four letters or digits and of
JSON's signs; `--tokenizer` takes a real one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import product
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from saccade.grammar import Rollback, json_schema
from saccade.tree import DraftTree
from saccade.verify.rule import Processing, RowProcessing

END = "</s>"
WORDS = ["red", "blue", "green", "yellow", "purple", "orange", "white", "cyan"]
TEXT = "the quick brown fox jumps over the lazy dog, and then it sleeps for the rest of a long and quiet winter "
DATE = {"type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}$"}
FORM = {
    "invoice_number": {"type": "string", "maxLength": 12},
    "issue_date": DATE,
    "currency": {"enum": ["EUR", "USD", "GBP", "CHF"]},
    "seller_name": {"type": "string", "maxLength": 24},
    "is_paid": {"type": "boolean"},
    "subtotal": {"type": "number", "minimum": 0, "maximum": 99999},
    "payment_method": {"enum": ["bank_transfer", "credit_card", "cash", "direct_debit"]},
}
ANSWER = {
    "invoice_number": "INV-2041",
    "issue_date": "2026-03-14",
    "currency": "CHF",
    "seller_name": "Nordlicht GmbH",
    "is_paid": True,
    "subtotal": 1204.5,
    "payment_method": "credit_card",
}
PLACES: dict[str, tuple[Any, Any]] = {
    "form": ({"type": "object", "properties": FORM, "required": list(FORM)}, ANSWER),
    "forced": ({"const": 2 * TEXT}, 2 * TEXT),
    "enum": ({"type": "array", "items": {"enum": WORDS}}, 6 * WORDS),
    "free": ({"type": "string", "maxLength": 500}, 4 * TEXT),
}
"""A schema and an answer by the kind of place that they consist of."""


def merges() -> Iterator[tuple[str, str]]:
    """Pairs in order: JSON's signs, then two letters or digits, a blank in front, and four letters."""
    for word in ('":"', '","', '":', '",', '{"', '"}', "},", '},{"', 'Ġ"', ":[", "]}", '":{"', '":['):
        yield word[0], word[1]
        yield from ((word[:end], word[end]) for end in range(2, len(word)))
    letters = "etaoinshrdlcumwfgypbvkjxqz"
    pairs = ["".join(pair) for pair in product(letters, repeat=2)]
    yield from product(letters, repeat=2)
    yield from product("0123456789", repeat=2)
    yield from (("Ġ", part) for part in (*letters, *pairs))
    yield from product(pairs, pairs)


def made(size: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with so many ids."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    pairs = []
    for pair in merges():
        if len(vocabulary) == size - 1:
            break
        if "".join(pair) not in vocabulary:
            vocabulary["".join(pair)] = len(vocabulary)
            pairs.append(pair)
    core = Tokenizer(models.BPE(vocabulary, pairs))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END)


def scored(grammar: Rollback, tokens: list[int], logits: torch.Tensor) -> tuple[float, float, float]:
    """Milliseconds of a step on these tokens, and the shares of its nodes that allow one token, and up to 64."""
    row, prompt = RowProcessing([grammar]), [1, 2, 3]
    step = Processing([row])
    step(DraftTree.root_only(torch.tensor([3])), logits[:, :1], [prompt])  # the prefill's, which makes the matcher
    chain = torch.tensor([tokens[: logits.shape[1]]])
    tree = DraftTree.chains(chain, torch.ones_like(chain, dtype=torch.bool))
    begun = time.process_time()
    scores = step(tree, logits, [[*prompt, tokens[0]]])
    milliseconds = 1000 * (time.process_time() - begun)
    allowed = scores[0].isfinite()
    assert allowed[torch.arange(logits.shape[1]), tokens[1 : logits.shape[1] + 1]].all(), "an answer is not allowed"
    assert not allowed.all(1).any(), "a node has no mask"
    count = allowed.sum(1)
    return milliseconds, (count == 1).float().mean().item(), (count <= 64).float().mean().item()


def looked_up(grammar: Rollback, tokens: list[int]) -> float:
    """Milliseconds of the host's share: what the matcher says at every place, without any tensor."""
    place = grammar.start(())
    begun = time.process_time()
    for token in tokens:
        place = place.after(token)
        assert place.run or place.packed is not None
    return 1000 * (time.process_time() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="*", default=[32_000, 128_256, 248_320], help="of the vocabularies")
    parser.add_argument("--tokenizer", nargs="*", default=[], help="tokenizer.json of real ones")
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = {f"made, {size:,}": made(size) for size in options.sizes}
    known |= {file: PreTrainedTokenizerFast(tokenizer_file=file, eos_token=None) for file in options.tokenizer}
    print(f"{options.nodes} nodes, ms (of it the host's lookups; share of nodes with one token allowed, with up to 64)")
    for name, tokenizer in known.items():
        if tokenizer.eos_token is None:
            tokenizer.eos_token = tokenizer.convert_ids_to_tokens(len(tokenizer) - 1)
        logits = torch.randn(1, options.nodes, len(tokenizer))
        grammars = {place: json_schema(schema, tokenizer, len(tokenizer)) for place, (schema, _) in PLACES.items()}
        tokens = {}
        for place, (_, answer) in PLACES.items():
            text = json.dumps(answer, separators=(",", ":"))
            tokens[place] = tokenizer.encode(text, add_special_tokens=False)
        times: dict[str, list[Any]] = {"copy": []} | {place: [] for place in PLACES}
        for _ in range(options.repeats):
            begun = time.process_time()
            logits.to(torch.float32, copy=True)
            times["copy"].append((1000 * (time.process_time() - begun), 0, 0))
            for place, grammar in grammars.items():
                host = looked_up(grammar, tokens[place][: options.nodes])
                times[place].append((*scored(grammar, tokens[place], logits), host))
        cells = []
        for place, each in times.items():
            details = ""
            if place != "copy":
                host = median(ms for *_, ms in each)
                details = f" (host {host:.1f}; {each[0][1]:.2f}, {each[0][2]:.2f})"
            cells.append(f"{place} {median(ms for ms, *_ in each):.1f}{details}")
        print(f"{name}: " + "; ".join(cells), flush=True)


if __name__ == "__main__":
    main()
