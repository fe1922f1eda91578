"""Medusa and Hydra: what a tree is grown from is what the stacks say of every path, and answers are the target's."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from heads_kit import (
    POLICIES,
    Recording,
    Text,
    engine,
    kind_of_prompt,
    prompts,
    random_head,
    recorded,
    target,
)
from torch import Tensor
from torch.nn import functional as F

from checkpoints import picture, vlm
from families import FAMILIES, Inputs, pristine, reference_greedy
from saccade.draft.heads import medusa as under_test
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.head import Head, build_head
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.heads.store import load_head, save_head
from saccade.draft.trees.policy import Chain
from saccade.engine import Request
from saccade.errors import MethodError, ModelError
from saccade.methods import build
from saccade.methods.compositions import Models
from saccade.methods.groups import TREE_OPTIONS
from saccade.target_model.forward import ForwardOutput

CLOSE = 1e-3
"""Standard deviations of the logits, as in test_head_against_slow_paths."""
FAR = 0.05
LENGTH = 16
KINDS = ("medusa", "hydra")
NAMES = ("llava", "qwen2_5_vl", "gemma3")
TREES = ("chain", "static", "dynamic")


def slow(head: Head, text: Text, name: str, length: int, path: tuple[int, ...]) -> Tensor:
    """``[V]`` behind the first ``length`` tokens and a path of guesses, from the formulas."""
    model, weights = target(name).model, dict(head.named_parameters())
    state = text.states[length - 2]
    depth = len(path)
    if head.kind == "medusa":
        inner = F.linear(state, weights[f"stacks.{depth}.0.linear.weight"], weights[f"stacks.{depth}.0.linear.bias"])
        guess = state + inner * inner.sigmoid()
    else:

        def normed(x: Tensor, which: str) -> Tensor:
            scale = (x.square().mean(-1, keepdim=True) + head.config.norm_eps).rsqrt()
            return x * scale * weights[f"{which}_norm.weight"]

        words = model.get_input_embeddings()(torch.tensor([int(text.ids[length - 1]), *path]))
        given = torch.cat([normed(state, "feature"), normed(words, "embedding").flatten()])
        hidden = F.linear(given, weights[f"inner.{depth}.weight"], weights[f"inner.{depth}.bias"])
        hidden = hidden * hidden.sigmoid()
        guess = state + F.linear(hidden, weights[f"outer.{depth}.weight"], weights[f"outer.{depth}.bias"])
    logits: Tensor = model.get_output_embeddings()(guess)
    return logits


@cache
def trained_head(name: str, kind: str) -> Head:
    """A head that has nearly learnt the answers to the family's first prompts by heart."""
    head, case, prompt_kind = random_head(name, kind), FAMILIES[name], kind_of_prompt(name)
    if kind == "medusa":
        with torch.no_grad():
            for weight in head.parameters():
                weight.mul_(0.05)
    answers = case.reference(prompt_kind, rows=3)
    texts = [Text.of(name, case.row_inputs(prompt_kind, row), answers[row][:LENGTH]) for row in range(3)]
    lm_head = target(name).model.get_output_embeddings().weight.detach()
    optimiser = torch.optim.Adam(head.parameters(), lr=3e-3)
    with torch.enable_grad():
        for step in range(150):
            text = texts[step % 3]
            root = torch.arange(len(text.ids) - LENGTH, len(text.ids) - 5)
            loss = torch.zeros(())
            for depth in range(5):
                path = text.embeddings[root[:, None] + torch.arange(depth + 1)]
                guess = head(text.states[root - 1], path, step=depth)
                loss = loss + F.cross_entropy(F.linear(guess, lm_head), text.ids[root + depth + 1])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return head.eval()


@torch.no_grad()
def difference(name: str, head: Head, policy: str, rows: int = 3) -> float:
    case, kind = FAMILIES[name], kind_of_prompt(name)
    inputs = [case.row_inputs(kind, row) for row in range(rows)]
    asked = [prompts(case, one)[0] for one in inputs]
    outputs, steps = recorded(name, head, POLICIES[policy], asked, LENGTH)
    assert [o.tokens for o in outputs] == case.reference(kind, rows=rows, n=LENGTH)
    worst = 0.0
    for row, one in enumerate(inputs):
        text, start = Text.of(name, one, outputs[row].tokens), one["input_ids"].shape[1]
        for step in steps:
            if step.emitted[row]:
                for path, logits in step.nodes(row):
                    expected = slow(head, text, name, start + len(step.emitted[row]), path)
                    worst = max(worst, float((logits - expected).abs().max() / expected.std()))
    return worst


@pytest.mark.parametrize("policy", TREES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_node_is_guessed_from_what_its_path_says(kind: str, policy: str) -> None:
    assert difference("llava", trained_head("llava", kind), policy) < CLOSE


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_the_target_s(name: str, kind: str, rows: int) -> None:
    case, prompt_kind = FAMILIES[name], kind_of_prompt(name)
    asked = [Request(p) for p in prompts(case, case.inputs(prompt_kind, rows=rows))]
    expected = case.reference(prompt_kind, rows=rows, n=LENGTH + 4)
    for policy in TREES:
        outputs = engine(name, trained_head(name, kind), POLICIES[policy]).generate(asked, max_new_tokens=LENGTH + 4)
        assert [o.tokens for o in outputs] == expected
        assert all(0 < o.stats.accepted_tokens < o.stats.drafted_tokens for o in outputs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_turn_goes_on_from_the_prompt_s_last_state(kind: str) -> None:
    name, case, recording = "llava", FAMILIES["llava"], Recording(POLICIES["dynamic"])
    head = trained_head(name, kind)
    session = engine(name, head, recording).open(3)
    first = [case.row_inputs("image", row) for row in range(3)]
    answers, _ = recorded(name, head, recording, [prompts(case, i)[0] for i in first], 7, session)
    second: list[Inputs] = [
        case.continued("image", row, answer.tokens, follow_up="text") for row, answer in enumerate(answers)
    ]
    outputs, steps = recorded(name, head, recording, [prompts(case, i)[0] for i in second], 5, session)
    for row, inputs in enumerate(second):
        assert outputs[row].tokens == reference_greedy(pristine(name), inputs, 5)[0]
        text, start = Text.of(name, inputs, outputs[row].tokens), inputs["input_ids"].shape[1]
        path, logits = steps[0].nodes(row)[0]
        torch.testing.assert_close(logits, slow(head, text, name, start + 1, path), atol=1e-3, rtol=1e-3)


def _state_of_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    right = under_test.AheadDraftSession.observe

    def before(self: Any, rows: Any, tree: Any, scores: Tensor, verdict: Any, reading: Any) -> None:
        hidden = {layer: states.roll(1, 1) for layer, states in reading.hidden.items()}
        right(self, rows, tree, scores, verdict, ForwardOutput(reading.logits, hidden))

    monkeypatch.setattr(under_test.AheadDraftSession, "observe", before)


def _path_without_its_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    right = under_test.paths_to

    def wrong(frontier: Any, ran: Tensor) -> Tensor:
        paths = right(frontier, ran)
        return torch.cat([paths[..., :1], paths[..., 1:].flip(-1)], -1)

    monkeypatch.setattr(under_test, "paths_to", wrong)


@pytest.mark.parametrize("mistake", [_state_of_the_root, _path_without_its_middle])
def test_a_planted_mistake_is_noticed(monkeypatch: pytest.MonkeyPatch, mistake: Any) -> None:
    head = trained_head("llava", "hydra")
    mistake(monkeypatch)
    assert difference("llava", head, "dynamic") > FAR


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_deeper_than_the_stacks_is_refused(kind: str) -> None:
    with pytest.raises(ModelError, match=f"This {kind} head drafts 5 tokens ahead, but the tree has up to 6"):
        HeadDrafter(random_head("llava", kind), target("llava"), Chain(6))


def test_a_new_medusa_head_guesses_the_target_s_own_next_token_again() -> None:
    head = build_head(HeadConfig.from_target(target("llava"), "medusa", layers=2))
    x = torch.randn(1, 3, 64)
    for step in range(5):
        assert torch.equal(head(x, step=step), x)
    with pytest.raises(ModelError, match="layers must be at least 1"):
        build_head(HeadConfig.from_target(target("llava"), "medusa", layers=0))


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_comes_back_as_it_was(kind: str, tmp_path: Any) -> None:
    head = random_head("llava", kind)
    save_head(head, tmp_path)
    again = load_head(tmp_path, target("llava"))
    assert again.config == head.config
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


@pytest.mark.parametrize("options", [{}, *({"tree": tree} for tree in TREE_OPTIONS)])
def test_default_lengths_are_at_most_a_head_s_stacks(options: dict[str, str]) -> None:
    owner = vlm("llava")
    head = build_head(HeadConfig.from_target(owner.target, "medusa", steps=2)).to(owner.target.dtype)
    engine = build("medusa", Models(owner.target, head=head), **options)
    (output,) = engine.generate([Request(owner.processor.prompt("What is it?", [picture(3)]))], max_new_tokens=12)
    assert output.stats.drafted_tokens > 0


@pytest.mark.parametrize("kind", KINDS)
def test_methods_by_name(kind: str) -> None:
    owner = vlm("llava")
    head = build_head(HeadConfig.from_target(owner.target, kind))
    parts = Models(owner.target, head=head.to(owner.target.dtype))
    prompt = owner.processor.prompt("What is it?", [picture(3)])
    (expected,) = build("plain", parts).generate([Request(prompt)], max_new_tokens=12)
    for options in ({}, {"tree": "dynamic"}, {"tree": "chain", "gamma": 3}):
        (output,) = build(kind, parts, **options).generate([Request(prompt)], max_new_tokens=12)
        assert output.tokens == expected.tokens
        assert output.stats.drafted_tokens > 0
    for deep in ({"tree": "dynamic", "max_depth": 6}, {"tree": "chain", "gamma": 6}):
        with pytest.raises(MethodError, match="drafts 5 tokens ahead, but the tree has up to"):
            build(kind, parts, **deep)
