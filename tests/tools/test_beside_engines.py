"""What the table of engines says, and how peers get the pair and are driven, without any of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import beside_engines
from benchmarks.beside_engines import BASELINE, Engine, Results, Turn, embedded, ours, rows, write_pair
from benchmarks.engines.peer import END, Decoder, decode
from benchmarks.pocket_pair import load, stock_inputs
from saccade.loading import load_processor
from saccade.pocket import draft_path, draw, target_path


def test_ratios_are_to_the_best_peer_of_the_same_format_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    own, fast, small = ours("own", "float32"), Engine("fast", "float32", "-"), Engine("small", "int8", "-")
    monkeypatch.setattr(beside_engines, "ENGINES", (BASELINE, own, fast, small))

    def turns(milliseconds: float, is_equal: bool = True) -> dict[int, list[Turn]]:
        """Of two prompts: 11 tokens in 5 passes, 21 in 3; the middle one of three rounds counts."""
        sizes = {1: (11, 5), 2: (21, 3)}
        return {
            prompt: [
                Turn(tokens, passes, is_equal, (tokens - 1) * milliseconds * times / 1000, tokens - 1)
                for times in (0.1, 9, 1)
            ]
            for prompt, (tokens, passes) in sizes.items()
        }

    results: Results = {
        (1, BASELINE, "plain"): turns(20),
        (1, own, "plain"): turns(6),
        (1, own, "5"): turns(3),
        (1, own, "auto"): turns(1.5),
        (1, fast, "plain"): turns(4),
        (1, fast, "5"): turns(2),
        (1, fast, "7"): turns(1),
        (1, small, "plain"): turns(1, is_equal=False),
        (2, own, "plain"): turns(8),
    }
    assert list(rows(results)) == [
        ["1", "transformers, float32", "20.00 (4.00)", "", "", "", "5.00", "", "6 of 6"],
        ["1", "Saccade (own), float32", "6.00 (4.00)", "3.00 (4.00)", "", "1.50 (4.00)", "1.50", "1.50", "18 of 18"],
        ["1", "fast, float32", "4.00 (4.00)", "2.00 (4.00)", "1.00 (4.00)", "", "1.00", "1.00", "18 of 18"],
        ["1", "small, int8", "1.00 (4.00)", "", "", "", "1.00", "", "0 of 6"],
        ["2", "Saccade (own), float32", "8.00 / 1000.00 (4.00)", "", "", "", "", "", "6 of 6"],
    ]


def test_an_answer_counts_up_to_its_end_and_without_its_first_token() -> None:
    first = {"tokens": [7], "passes": 1, "processor": 0.25, "wall": 0.5}
    whole = {"tokens": [7, 8, END, 9], "passes": 2, "processor": 1.25, "wall": 2.5}
    assert Turn.of(first, whole, [7, 8], limit=10) == Turn(3, 2, True, 1.0, 2.0)
    assert not Turn.of(first, whole, [7, 8, 9], limit=10).is_equal
    assert Turn.of(first, whole | {"tokens": [7, 8, 9]}, [7, 8, 9], limit=3).tokens == 3


class _Fake:
    """A decoder whose next token depends on all that it has read, and that errs once in ``every`` tokens."""

    def __init__(self, prompt: Sequence[int], every: int = 0) -> None:
        self.known, self._every = list(prompt), every

    def read(self, tokens: Sequence[int], outputs: int = 1) -> list[int]:
        made = []
        for token in tokens:
            self.known.append(token)
            value = 3 + random.Random(str(self.known)).randrange(60)
            is_wrong = self._every and random.Random(f"wrong {self.known}").randrange(self._every) == 0
            made.append(END if value < 5 else value + (100 if is_wrong else 0))
        return made[-outputs:]

    def cut(self, length: int) -> None:
        del self.known[length:]


@pytest.mark.parametrize("gamma", [1, 2, 5, 7])
@pytest.mark.parametrize("every", [1, 3, 1000])
def test_a_chain_of_drafted_tokens_makes_plain_tokens_in_fewer_passes(gamma: int, every: int) -> None:
    passes, lengths = [0, 0], set()
    for seed in range(30):
        prompt, limit = [seed, 1, 4], 1 + seed
        plain, plain_passes = decode(_Fake(prompt), None, 9, len(prompt), limit, 0, END)
        target, draft = _Fake(prompt), _Fake(prompt, every)
        chained, chain_passes = decode(target, draft, 9, len(prompt), limit, gamma, END)
        assert chained == plain
        assert target.known == [*prompt, *plain[:-1]]
        assert draft.known == target.known[: len(draft.known)]
        assert END not in plain[:-1]
        passes[0], passes[1] = passes[0] + plain_passes, passes[1] + chain_passes
        lengths.add(len(plain) == limit)
    assert lengths == {True, False}
    if every == 1:
        assert passes[1] >= 0.9 * passes[0]
    if every == 1000:
        assert passes[1] <= passes[0] / min(gamma, 5) + 30


def test_peers_read_of_a_prompt_what_both_models_read(tmp_path: Path) -> None:
    write_pair(tmp_path, target_path(), 2)
    prompt = load_processor(str(target_path())).prompt(
        draw(beside_engines.FIRST_SEED + 1, beside_engines.FIRST_TASKS[1], "verbose").messages()
    )
    for name, path in (("target", target_path()), ("draft", draft_path())):
        model, decoder = load(path, "float32", "cpu"), Decoder.read(tmp_path, name)
        assert len(decoder.ids[1]) == len(prompt)
        own = torch.from_numpy(decoder.embeddings[decoder.ids[1]])
        assert torch.equal(own, embedded(model, stock_inputs(model, [prompt])))
        assert set(decoder.weights) == {*model.model.language_model.state_dict(), "lm_head.weight"}
