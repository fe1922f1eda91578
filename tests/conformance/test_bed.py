"""The test bed itself: a comparison with `generate` proves something only if these hold."""

from __future__ import annotations

import pytest
import torch

from families import FAMILIES, VISUAL_FAMILIES, Inputs, pristine, reference_greedy, reset_rope_deltas

CASES = [(name, kind) for name, case in FAMILIES.items() for kind in case.kinds]


def teacher_forced(model: torch.nn.Module, inputs: Inputs, answer: list[int]) -> torch.Tensor:
    """Logits [len(answer), V] of an uncached forward over prompt and answer."""
    more = torch.tensor([answer])
    longer = {**inputs, "input_ids": torch.cat([inputs["input_ids"], more], 1)}
    for name, value in (("attention_mask", 1), ("token_type_ids", 0), ("mm_token_type_ids", 0)):
        if name in inputs:
            longer[name] = torch.cat([inputs[name], torch.full_like(more, value)], 1)
    reset_rope_deltas(model)
    with torch.no_grad():
        logits = model(**longer).logits[0]
    reset_rope_deltas(model)
    return logits[inputs["input_ids"].shape[1] - 1 : -1]


@pytest.mark.some_families
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_greedy_tokens_win_by_a_margin_far_above_rounding(name: str, kind: str) -> None:
    """fp32 paths differ by about 1e-5 in the logits; a margin of 1e-3 leaves two orders of magnitude."""
    case = FAMILIES[name]
    answers = case.reference(kind, rows=3)
    assert len(set().union(*answers)) >= 16, "models that repeat themselves cannot tell positions apart"
    for row, answer in enumerate(answers):
        logits = teacher_forced(pristine(name), case.row_inputs(kind, row), answer)
        assert logits.argmax(-1).tolist() == answer
        best = logits.topk(2, dim=-1).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-3


@pytest.mark.some_families
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_draft_model_is_partly_right(name: str, kind: str) -> None:
    case = FAMILIES[name]
    draft = case.draft_model()
    hits = []
    for row in range(3):
        answer = case.reference(kind, rows=3)[row]
        logits = teacher_forced(draft, case.row_inputs(kind, row), answer)
        hits += (logits.argmax(-1) == torch.tensor(answer)).tolist()
    assert 0.4 <= sum(hits) / len(hits) <= 0.85


@pytest.mark.some_families
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_generate_on_a_left_padded_batch_equals_generate_row_by_row(name: str, kind: str) -> None:
    """So rows can be compared one by one even where the engine is given the batch."""
    case = FAMILIES[name]
    inputs = case.inputs(kind, rows=3)
    assert len({int(length) for length in inputs["attention_mask"].sum(-1)}) > 1, "rows should differ in length"
    assert reference_greedy(pristine(name), inputs) == case.reference(kind, rows=3)


@pytest.mark.some_families
@pytest.mark.parametrize("name", VISUAL_FAMILIES)
def test_the_answer_depends_on_the_pixels(name: str) -> None:
    case = FAMILIES[name]
    for kind in set(case.kinds) - {"text"}:
        inputs = case.row_inputs(kind, 0)
        pixels = "pixel_values_videos" if kind == "video" else "pixel_values"
        changed = {**inputs, pixels: -inputs[pixels]}
        assert reference_greedy(pristine(name), changed, 16) != [case.reference(kind)[0][:16]]


@pytest.mark.parametrize(("name", "kind"), [("mistral", "text"), ("gemma3", "image"), ("gemma3", "text")])
def test_the_sliding_window_is_short_enough_to_matter(name: str, kind: str) -> None:
    case = FAMILIES[name]
    wide = case.model()
    config = wide.config.get_text_config()
    config.sliding_window = 1000
    for module in wide.modules():
        if getattr(module, "sliding_window", None):
            module.sliding_window = 1000
    assert reference_greedy(wide, case.row_inputs(kind, 0))[0] != case.reference(kind)[0]


def test_image_tokens_of_gemma3_see_each_other_both_ways() -> None:
    case = FAMILIES["gemma3"]
    inputs = case.row_inputs("image", 0)
    causal = {name: tensor for name, tensor in inputs.items() if name != "token_type_ids"}
    assert reference_greedy(pristine("gemma3"), causal, 16)[0] != case.reference("image")[0][:16]
