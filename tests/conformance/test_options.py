"""Generation options act at every tree node with that node's own prefix, as `generate` applies them to one path."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

from families import BOS, EOS, FAMILIES, FIRST_WORD, LAST_WORD, pristine, reference_greedy
from harness import METHODS, OPTIONS, draft, engine, requests, run, tokens
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine
from saccade.target_model.adapter import Target

NEW = 24
NAMES = ("llama", "qwen2_5_vl", "gemma3")


def kind_of(name: str) -> str:
    return FAMILIES[name].kinds[0]


def common(name: str) -> list[int]:
    """Tokens of the unconstrained answer of row 0: forbidding or rewarding these changes something."""
    return FAMILIES[name].reference(kind_of(name))[0]


@cache
def expected(name: str, option: str, rows: int) -> list[list[int]]:
    case = FAMILIES[name]
    options = OPTIONS[option](common(name))
    inputs = [case.row_inputs(kind_of(name), row) for row in range(rows)]
    return [reference_greedy(pristine(name), one, NEW, **options)[0] for one in inputs]


@pytest.mark.singly
@pytest.mark.parametrize(
    ("name", "method"), [*(("llama", method) for method in METHODS), ("qwen2_5_vl", "dynamic"), ("gemma3", "static")]
)
@pytest.mark.parametrize("option", OPTIONS)
def test_option_equals_generate(name: str, option: str, method: str) -> None:
    outputs = run(name, method, FAMILIES[name].inputs(kind_of(name), rows=2), NEW, **OPTIONS[option](common(name)))
    assert tokens(outputs) == expected(name, option, 2)


@pytest.mark.parametrize(
    "option", [o for o in OPTIONS if o not in ("remove_invalid_values", "sampling_settings_without_sampling")]
)
def test_the_option_changes_the_answer(option: str) -> None:
    assert any(expected(name, option, 1) != [common(name)[:NEW]] for name in NAMES)


@pytest.mark.parametrize("method", METHODS)
def test_every_option_at_once(method: str) -> None:
    name = "qwen2_5_vl"
    answer = common(name)
    options = {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[answer[1]]],
        "suppress_tokens": [answer[4]],
        "min_new_tokens": 10,
        "eos_token_id": [answer[5], answer[20]],
        "forced_eos_token_id": answer[20],
    }
    case = FAMILIES[name]
    rows = [case.row_inputs("image", row) for row in range(3)]
    wanted = [reference_greedy(pristine(name), row, NEW, **options)[0] for row in rows]
    assert tokens(run(name, method, case.inputs("image", 3), NEW, **options)) == wanted


# --------------------------------------------------------------------------- where options come from


def test_the_options_of_the_checkpoint_count_when_the_caller_is_silent() -> None:
    case = FAMILIES["qwen2_5_vl"]
    model, reference = case.model(), case.model()
    for each in (model, reference):
        each.generation_config.repetition_penalty = 1.3
        each.generation_config.max_new_tokens = 20
        each.generation_config.eos_token_id = EOS
    inputs = case.row_inputs("image", 0)
    (wanted,) = reference.generate(**inputs)[:, inputs["input_ids"].shape[1] :].tolist()
    under_test = Engine(Target(model), ModelDrafter(draft("qwen2_5_vl"), Chain(4)))
    asked = requests("qwen2_5_vl", rows=1)
    assert tokens(under_test.generate(asked)) == [wanted]
    assert wanted != case.reference("image", n=20)[0]
    assert tokens(under_test.generate(asked, repetition_penalty=1.0)) == case.reference("image", n=20)


@pytest.mark.parametrize("method", METHODS)
def test_max_length_counts_each_row_s_own_prompt(method: str) -> None:
    case = FAMILIES["llama"]
    rows = requests("llama")
    outputs = engine("llama", method).generate(rows, max_length=30)
    for row, (asked, output) in enumerate(zip(rows, outputs, strict=True)):
        assert output.tokens == case.reference("text", rows=3, n=30 - len(asked.prompt))[row]


def test_a_prompt_of_one_token_with_a_forced_first_token() -> None:
    inputs = {"input_ids": torch.tensor([[BOS]]), "attention_mask": torch.tensor([[1]])}
    for options in ({}, {"forced_bos_token_id": 77}):
        wanted = reference_greedy(pristine("llama"), inputs, NEW, **options)
        assert tokens(run("llama", "static", inputs, NEW, **options)) == wanted
    assert wanted[0][0] == 77


# --------------------------------------------------------------------------- the caller's own code


class ForbidAfter(LogitsProcessor):
    """Forbids a token wherever another one came directly before it: needs every node's own prefix."""

    stateless = True

    def __init__(self, before: int, token: int) -> None:
        self.before, self.token = before, token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[input_ids[:, -1] == self.before, self.token] = float("-inf")
        return scores


class EndsWith(StoppingCriteria):
    stateless = True

    def __init__(self, *ids: int) -> None:
        self.ids = torch.tensor(ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return (input_ids[:, -len(self.ids) :] == self.ids).all(-1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_own_logits_processors_and_stopping_criteria(name: str, method: str) -> None:
    case, answer = FAMILIES[name], common(name)
    options = {"logits_processor": [ForbidAfter(answer[4], answer[5])]}
    inputs = case.row_inputs(kind_of(name), 0)
    (wanted,) = reference_greedy(pristine(name), inputs, NEW, **options)
    assert wanted != answer[:NEW]
    options["stopping_criteria"] = [EndsWith(*wanted[17:19])]
    (output,) = run(name, method, inputs, NEW, **options)
    assert output.tokens == reference_greedy(pristine(name), inputs, NEW, **options)[0]
    assert len(output.tokens) < NEW
    assert output.finish_reason == "stop"


@pytest.mark.parametrize("method", METHODS)
def test_prefix_allowed_tokens_fn_sees_each_row(method: str) -> None:
    case = FAMILIES["llama"]
    words = range(FIRST_WORD, LAST_WORD + 1)

    def allowed(batch: int, ids: torch.Tensor) -> list[int]:
        return [w for w in words if (w + int(ids[-1]) + batch) % 3]

    rows = [case.row_inputs("text", row) for row in range(2)]
    wanted = [
        reference_greedy(pristine("llama"), rows[0], NEW, prefix_allowed_tokens_fn=allowed)[0],
        reference_greedy(pristine("llama"), rows[1], NEW, prefix_allowed_tokens_fn=lambda _, ids: allowed(1, ids))[0],
    ]
    outputs = run("llama", method, case.inputs("text", 2), NEW, prefix_allowed_tokens_fn=allowed)
    assert tokens(outputs) == wanted
