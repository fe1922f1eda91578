"""Packed weights: equal products, the rows that they serve, and weights changed behind their back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from checkpoints import ready
from families import FAMILIES, reference_greedy
from harness import prompts
from saccade import cpu, load
from saccade.draft.lookup import PromptLookup
from saccade.engine import Engine, Request
from saccade.target_model import linear
from saccade.target_model.adapter import Target
from saccade.target_model.linear import Linear, StepThreads, pack_where_faster, packed_rows


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack every weight, for two rows and more."""
    monkeypatch.setattr(linear, "packed_rows", lambda weight: range(2, 1 << 20))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 70])
def test_a_packed_weight_has_the_product_of_the_plain_one(rows: int, biased: bool) -> None:
    torch.manual_seed(rows)
    product = Linear(torch.randn(96, 64), torch.randn(96) if biased else None)
    product.pack(range(2, 64))
    x = torch.randn(rows, 64)
    torch.testing.assert_close(product(x), F.linear(x, product.weight, product.bias), rtol=1e-5, atol=1e-4)
    assert (rows in product._rows) == (2 <= rows < 64)


def in_place(weight: torch.nn.Parameter) -> None:
    weight.data.mul_(1.5)


def moved(weight: torch.nn.Parameter) -> None:
    weight.data = weight.data * 1.5


def one_row(weight: torch.nn.Parameter) -> None:
    with torch.no_grad():
        weight[37].mul_(1.5)  # none of the sampled elements


@pytest.mark.parametrize("change", [in_place, moved, one_row])
def test_a_changed_weight_is_packed_again(change: Callable[[Any], None]) -> None:
    weight = torch.nn.Parameter(torch.randn(96, 64))
    product = Linear(weight)
    product.pack(range(1, 64))
    change(weight)
    product.refresh()
    x = torch.randn(4, 64)
    torch.testing.assert_close(product(x), F.linear(x, weight), rtol=1e-5, atol=1e-4)


WORDS = "What is it? It is what it is."


@pytest.mark.parametrize("family", ["llava", "qwen"])
def test_packed_weights_draft_and_verify_plain_decoding_s_tokens(family: str, everywhere: None) -> None:
    """Also with weights that are changed in place later."""
    vlm = load(ready(family), ready(f"{family}-draft"), dtype="float32")
    lean = vlm.target._lean
    assert lean is not None
    assert len(lean._copied) == 4 * len(vlm.target.layers) + 1
    answers = []
    for _ in range(2):
        with vlm.target.stock():
            expected = vlm.using("plain").generate(WORDS, max_new_tokens=20).tokens
        assert vlm.generate(WORDS, max_new_tokens=20).tokens == expected
        answers.append(expected)
        with torch.no_grad():
            for layer in vlm.target.layers:
                in_place(layer.mlp.down_proj.weight)
    assert answers[0] != answers[1]


def test_nothing_is_packed_beyond_half_of_the_free_memory(everywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    products = [Linear(torch.randn(64, 64)) for _ in range(4)]
    monkeypatch.setattr(cpu, "available_memory", lambda: 2 * 4 * products[0].weight.nbytes - 1)
    assert pack_where_faster(products) == []
    monkeypatch.setattr(cpu, "available_memory", lambda: 2 * 4 * products[0].weight.nbytes)
    assert pack_where_faster(products) == products


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ((2, 2, 2, 2, 2, 2, 2), (0, 0)),
        ((2, 0.5, 0.5, 0.5, 2, 2, 2), (2, 16)),
        ((0.5, 2, 0.5, 0.5, 0.5, 2, 0.5), (4, 32)),
        ((2, 0.95, 2, 2, 2, 2, 2), (0, 0)),
    ],
)
def test_the_longest_stretch_of_rows_that_clearly_gains_is_packed(
    ours: tuple[float, ...], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(ours)
    monkeypatch.setattr(cpu, "shortest_times", lambda *products: [1.0, next(times)])
    assert linear._measure(64, 32, torch.float32) == expected


def test_small_weights_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "remember", lambda name, measure: (2, 64))
    assert packed_rows(torch.empty(256, 255)) == range(0)
    assert packed_rows(torch.empty(512, 1024)) == range(2, 64)


def test_stock_modules_run_on_packed_weights_in_forwards_alone(everywhere: None) -> None:
    """Hooks fire, changed weights count, gradients flow, and the model is as it was in between."""
    case = FAMILIES["qwen3_5"]
    model = case.model()
    engine = Engine(Target(model), PromptLookup())
    asked = [Request(prompt) for prompt in prompts(case, case.inputs("image", rows=3))]
    calls: list[bool] = []
    module = model.model.language_model.layers[0].mlp.down_proj
    module.register_forward_hook(lambda own, *_: calls.append("forward" in vars(own)))
    for changed in (False, True):
        if changed:
            module.weight.data.mul_(1.5)
        answers = engine.generate(asked, max_new_tokens=16)
        assert all(calls)
        calls.clear()
        expected = [reference_greedy(model, case.row_inputs("image", row), 16)[0] for row in range(3)]
        assert [answer.tokens for answer in answers] == expected
        assert not any(calls)
        calls.clear()
    model(**case.row_inputs("text", 0)).logits.sum().backward()
    assert module.weight.grad is not None


def test_a_changed_row_of_one_of_the_fused_projections_is_noticed(everywhere: None) -> None:
    target = Target(FAMILIES["llava"].model())
    layer, lean = target.layers[0], target._lean
    assert lean is not None
    with torch.no_grad():
        layer.self_attn.k_proj.weight[3].mul_(2.0)
    x = torch.randn(4, layer.self_attn.k_proj.in_features)
    fused = lean._layers[0].qkv
    assert not torch.allclose(fused(x), F.linear(x, fused.weight, fused.bias), atol=1e-4)
    assert lean.is_current
    torch.testing.assert_close(fused(x), F.linear(x, fused.weight, fused.bias), rtol=1e-4, atol=1e-4)


def test_weights_of_a_format_that_the_processor_cannot_pack_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN raises for bfloat16 where there is AVX2 alone."""

    def refuse(weight: torch.Tensor, rows: int) -> Any:
        raise RuntimeError("bf16 path needs the cpu support avx512")

    linear._can_pack.cache_clear()
    monkeypatch.setattr(linear, "reordered", refuse)
    try:
        assert packed_rows(torch.zeros(1024, 1024)) == range(0)
    finally:
        linear._can_pack.cache_clear()


class Machine:
    """Steps whose seconds depend on the number of threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, counts: list[int]) -> None:
        self.now, self.set, self.used = 0.0, 1, list[int]()
        self.threads = StepThreads(counts, lambda: self.now)
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.set)
        monkeypatch.setattr(torch, "set_num_threads", lambda number: setattr(self, "set", number))

    def run(self, seconds: dict[int, float], steps: int, tokens: int = 8, stage: str = "forward") -> list[int]:
        """Numbers of threads of some steps."""
        used = []
        for _ in range(steps):
            with self.threads.on(stage, tokens):
                used.append(self.set)
                self.now += seconds[self.set]
            assert self.set == 1
        return used


def test_steps_take_the_fastest_number_of_threads_and_larger_ones_begin_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = Machine(monkeypatch, [1, 2, 4])
    used = machine.run({1: 1.0, 2: 0.6, 4: 0.4}, 40)
    assert used[-20:].count(4) >= 18
    assert machine.run({1: 8.0, 2: 4.0, 4: 2.0}, 1, tokens=100) == [4]
    assert machine.run({1: 8.0, 2: 4.0, 4: 2.0}, 1, tokens=100, stage="draft") == [1]


def test_threads_that_share_their_cores_are_tried_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [1, 2])
    assert machine.run({1: 1.0, 2: 50.0}, 6000).count(2) == 2
    assert machine.run({1: 1.0, 2: 0.5}, 4000)[-10:].count(2) >= 9  # once they have the cores alone
    used = Machine(monkeypatch, [1, 2]).run({1: 1.0, 2: 1.05}, 1000)
    assert 0.1 < used.count(2) / len(used) < 0.25  # each loses a twentieth


def test_a_number_of_threads_that_was_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [3])
    assert machine.run({1: 1.0}, 5) == [1] * 5


def test_steps_without_tokens_teach_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [1, 2])
    assert machine.run({1: 0.0, 2: 0.0}, 5, tokens=0) == [1] * 5


def test_a_forked_process_takes_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, [1, 2])
    monkeypatch.setattr(linear, "_PROCESS", 0)
    assert machine.run({1: 1.0, 2: 0.5}, 9) == [1] * 9
