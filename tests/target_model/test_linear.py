"""Copies of weights: equal products, the rows that they serve, and weights changed behind their back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from checkpoints import ready
from families import FAMILIES, reference_greedy
from harness import prompts, running_on
from saccade import cpu, load
from saccade.draft.lookup import PromptLookup
from saccade.engine import Engine, Request
from saccade.engine.batch import LOOK
from saccade.target_model import linear
from saccade.target_model.adapter import Target
from saccade.target_model.int8 import round_weights
from saccade.target_model.linear import Linear, StepThreads, faster_rows, halved, pack_where_faster


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack every weight, for two rows and more."""
    monkeypatch.setattr(linear, "faster_rows", lambda *_: {"packed": range(2, 1 << 20)})


def of_16_bits(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16().float()


each_layout = pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=pytest.mark.skipif(not linear.works(name, torch.float32), reason=f"no {name} copies"))
        for name in linear.LAYOUTS
    ],
)


@each_layout
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 70])
def test_a_copied_weight_has_the_product_of_the_plain_one(rows: int, biased: bool, threads: int, layout: str) -> None:
    torch.manual_seed(rows)
    product = Linear(of_16_bits(96, 64), torch.randn(96) if biased else None)
    assert product.pack({layout: range(2, 64)}) == product.weight.nbytes * linear.LAYOUTS[layout][1]
    x = torch.randn(rows, 64)
    with running_on(threads):
        torch.testing.assert_close(product(x), F.linear(x, product.weight, product.bias), rtol=1e-5, atol=1e-4)
    assert (rows in product._rows) == (2 <= rows < 64)


needs_halves = pytest.mark.skipif(not linear.works("halved", torch.float32), reason="no float16 products on this CPU")


@needs_halves
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_halved_weight_holds_every_number_exactly_or_is_none(dtype: torch.dtype) -> None:
    """Read back by a product with ones, whose sums have one summand: numbers of all sizes that float16 can have."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    for size in (1e-3, 0.4, 1.0, 3e4):
        numbers = every[(every.abs() <= size) & (every.abs() >= size * 2.0**-20)]
        copied = halved(numbers[:, None].expand(-1, 8).contiguous())
        assert copied is not None
        product, factor = copied
        assert torch.equal(product(factor * torch.eye(1, 8), None)[0], numbers)
    smallest = torch.tensor([[1.0, 2.0**-40 * (1 + 2.0**-7)]])
    for other in (smallest, torch.tensor([[1.0, 1 / 3]]), torch.tensor([[1e5]]), torch.tensor([[torch.inf]])):
        assert halved(other) is None
    assert halved(torch.full((2, 2), torch.nan)) is None
    assert halved(torch.zeros(2, 2)) is not None


@needs_halves
@pytest.mark.parametrize("threads", [1, 2])
def test_a_weight_in_int8_steps_is_held_as_these(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    head = torch.nn.Linear(64, 96)
    round_weights(torch.nn.Sequential(head), head)
    copied = halved(head.weight.detach())
    assert copied is not None
    product, factor = copied
    x = torch.randn(3, 64, dtype=torch.float64)
    for bias in (None, head.bias.detach()):
        expected = F.linear(x, head.weight.detach().double(), None if bias is None else bias.double()).float()
        torch.testing.assert_close(product(factor * x.float(), bias), expected, rtol=1e-6, atol=1e-6)


@needs_halves
def test_a_weight_that_float16_does_not_hold_takes_the_next_layout() -> None:
    product = Linear(of_16_bits(96, 64))
    layouts = {"halved": range(1, 64), "packed": range(4, 8)}
    product.pack(layouts)
    assert product._rows == range(1, 64)
    product.weight[5, 5] = 1 / 3
    product.refresh()
    assert product._rows == range(4, 8)
    x = torch.randn(4, 64)
    torch.testing.assert_close(product(x), F.linear(x, product.weight), rtol=1e-5, atol=1e-4)
    assert Linear(product.weight).pack({"halved": range(1, 64)}) == 0


def in_place(weight: torch.nn.Parameter) -> None:
    weight.data.mul_(1.5)


def moved(weight: torch.nn.Parameter) -> None:
    weight.data = weight.data * 1.5


def one_row(weight: torch.nn.Parameter) -> None:
    with torch.no_grad():
        weight[37].mul_(1.5)  # none of the sampled elements


@each_layout
@pytest.mark.parametrize("change", [in_place, moved, one_row])
def test_a_changed_weight_is_copied_again(change: Callable[[Any], None], layout: str) -> None:
    weight = torch.nn.Parameter(of_16_bits(96, 64))
    product = Linear(weight)
    product.pack({layout: range(1, 64)})
    change(weight)
    product.refresh()
    x = torch.randn(4, 64)
    torch.testing.assert_close(product(x), F.linear(x, weight), rtol=1e-5, atol=1e-4)


WORDS = "What is it? It is what it is."


@pytest.mark.parametrize("family", ["llava", "qwen"])
def test_packed_weights_draft_and_verify_plain_decoding_s_tokens(family: str, everywhere: None) -> None:
    """Also with weights that are changed in place later."""
    vlm = load(ready(family), ready(f"{family}-draft"), dtype="float32")
    lean = vlm.target._fast.decoder
    assert lean is not None
    assert len(lean._copied.products) == 4 * len(vlm.target.layers) + 1
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


@needs_halves
def test_halved_weights_draft_and_verify_plain_decoding_s_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the built-in models' bfloat16 weights are exact in float16 once they are scaled."""
    question = "Describe the shapes in the picture."
    with monkeypatch.context() as patch:
        patch.setattr(linear, "faster_rows", lambda *_: {})
        expected = load("pocket", dtype="float32").using("plain").generate(question, max_new_tokens=40).tokens
    monkeypatch.setattr(linear, "faster_rows", lambda *_: {"halved": range(1, 1 << 20)})
    vlm = load("pocket", dtype="float32")
    lean = vlm.target._fast.decoder
    assert lean is not None
    assert len(lean._copied.products) == 4 * len(vlm.target.layers) + 1
    for method in ("plain", "chain", "dynamic-tree"):
        assert vlm.using(method).generate(question, max_new_tokens=40).tokens == expected


def test_copies_take_half_of_the_free_memory_at_most(everywhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    products = [Linear(torch.randn(64, 64)) for _ in range(4)]
    monkeypatch.setattr(cpu, "available_memory", lambda: 2 * 4 * products[0].weight.nbytes - 1)
    assert pack_where_faster(products) == products[:3]
    monkeypatch.setattr(cpu, "available_memory", lambda: 2 * 4 * products[0].weight.nbytes)
    assert pack_where_faster(products) == products


@pytest.mark.parametrize(
    ("halves", "packs", "expected"),
    [
        ((2, 2, 2, 2), (2, 2, 2, 2), {}),
        ((0.5, 0.5, 0.5, 2), (2, 0.6, 0.5, 0.5), {"halved": range(1, 16), "packed": range(4, 128)}),
        ((2, 2, 2, 0.5), (0.5, 2, 0.5, 0.5), {"halved": range(0), "packed": range(16, 128)}),
        ((0.95, 2, 2, 2), (0.95, 0.5, 2, 2), {"packed": range(4, 16)}),
    ],
)
def test_the_longest_stretch_of_rows_that_clearly_gains_is_copied(
    halves: Sequence[float], packs: Sequence[float], expected: dict[str, range], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = zip(halves, packs, strict=True)
    monkeypatch.setattr(linear, "works", lambda *_: True)
    monkeypatch.setattr(cpu, "shortest_times", lambda *products, repeats: [*next(times), 1.0])
    monkeypatch.setattr(cpu, "remember", lambda name, measure: measure())
    found = faster_rows(torch.empty(512, 128))
    assert found == {layout: rows for layout, rows in expected.items() if rows}


def test_as_many_weights_are_measured_in_turn_as_a_model_has(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    monkeypatch.setattr(cpu, "remember", lambda name, measure: (names.append(name), 2, 64)[1:] * 2)
    monkeypatch.setattr(linear, "works", lambda *_: True)
    weight = torch.empty(512, 512)
    for together in (0, 3 << 20, 1 << 40):
        assert faster_rows(weight, together) == {"halved": range(2, 64), "packed": range(2, 64)}
    assert [name.split()[3:5] for name in names] == [["1", "of"], ["4", "of"], ["64", "of"]]


def test_small_weights_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "remember", lambda name, measure: (2, 64) * 2)
    assert faster_rows(torch.empty(256, 255)) == {}


def test_packed_weights_of_stock_modules_are_not_looked_at_in_every_step(
    everywhere: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, looks = FAMILIES["qwen3_5"], list[Linear]()
    refresh = Linear.refresh
    monkeypatch.setattr(Linear, "refresh", lambda product: looks.append(product) or refresh(product))
    engine = Engine(Target(case.model()))
    looks.clear()
    (answer,) = engine.generate([Request(prompts(case, case.inputs("text", rows=1))[0])], max_new_tokens=2 * LOOK)
    assert answer.tokens == case.reference("text", rows=1, n=2 * LOOK)[0]
    assert 1 <= len(looks) / len(set(map(id, looks))) <= 3  # as the row joins, and every so many steps


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
    layer, lean = target.layers[0], target._fast.decoder
    assert lean is not None
    with torch.no_grad():
        layer.self_attn.k_proj.weight[3].mul_(2.0)
    x = torch.randn(4, layer.self_attn.k_proj.in_features)
    fused = lean._layers[0].qkv
    assert not torch.allclose(fused(x), F.linear(x, fused.weight, fused.bias), atol=1e-4)
    assert lean.is_current
    torch.testing.assert_close(fused(x), F.linear(x, fused.weight, fused.bias), rtol=1e-4, atol=1e-4)


def test_weights_of_a_format_that_the_processor_cannot_multiply_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """oneDNN raises for bfloat16 where there is AVX2 alone, and fbgemm on other kinds of processors."""

    def refuse(weight: torch.Tensor, rows: int) -> Any:
        raise RuntimeError("bf16 path needs the cpu support avx512")

    linear.works.cache_clear()
    monkeypatch.setattr(linear, "LAYOUTS", {"halved": (refuse, 0.5), "packed": (refuse, 1)})
    try:
        assert faster_rows(torch.zeros(1024, 1024)) == {}
    finally:
        linear.works.cache_clear()


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
