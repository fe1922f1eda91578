"""Kangaroo: drafts are what the target's first layers and the adapter say of every path; answers are the target's."""

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
from saccade.draft.heads import kangaroo as under_test
from saccade.draft.heads.block import Placement
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.head import Head, build_head
from saccade.draft.heads.store import load_head, save_head
from saccade.draft.trees.policy import ConfidentChain
from saccade.engine import Request
from saccade.errors import MethodError, ModelError
from saccade.methods import build
from saccade.methods.compositions import Models
from saccade.target_model.context import Context

CLOSE = 1e-3
"""Standard deviations of the logits, as in test_head_against_slow_paths."""
FAR = 0.05
LENGTH = 16
NAMES = ("llava", "qwen2_5_vl", "gemma3")
TREES = {name: POLICIES[name] for name in ("chain", "static", "dynamic")}
CHAINS = {**TREES, "confident": ConfidentChain(5, 0.6)}


def exit_of(name: str) -> int:
    """As late as it can be, so that more than one layer runs where the family has more than two."""
    return len(target(name).layers) - 1


@torch.no_grad()
def slow(name: str, head: Head, inputs: Inputs, tokens: list[int], length: int) -> Tensor:
    """``[V]`` behind a row's prompt and ``tokens``, cut to ``length``: the stock model runs it all in one piece."""
    text = Text.of(name, inputs, tokens)
    states = text.streams[head.layers[0]][:length]
    causal = torch.ones(1, length, length, dtype=torch.bool).tril()
    hidden = head(states[None], None, Placement(torch.arange(length)[None], causal))[0, -1]
    return head.logits(hidden, target(name).model.get_output_embeddings())


@cache
def trained_head(name: str) -> Head:
    """A head that has nearly learnt the answers to the family's first prompts by heart."""
    head, case, prompt_kind = (
        random_head(name, "kangaroo", exit=exit_of(name)),
        FAMILIES[name],
        kind_of_prompt(name),
    )
    answers = case.reference(prompt_kind, rows=3)
    texts = [Text.of(name, case.row_inputs(prompt_kind, row), answers[row][:LENGTH]) for row in range(3)]
    lm_head = target(name).model.get_output_embeddings().weight.detach()
    optimiser = torch.optim.Adam(head.parameters(), lr=1e-2)
    with torch.enable_grad():
        for step in range(60):
            text = texts[step % 3]
            count = len(text.ids)
            causal = torch.ones(1, count, count, dtype=torch.bool).tril()
            at = Placement(torch.arange(count)[None], causal)
            hidden = head(text.streams[head.layers[0]][None], None, at)
            logits = head.logits(hidden, lambda h: F.linear(h, lm_head))
            optimiser.zero_grad()
            F.cross_entropy(logits[0, -LENGTH - 1 : -1], text.ids[-LENGTH:]).backward()
            optimiser.step()
    return head.eval()


def worst(name: str, head: Head, rows: list[Inputs], answers: list[list[int]], steps: list[Any]) -> float:
    """Largest difference of any logit that was drafted from, in standard deviations of the logits."""
    found, nodes = 0.0, 0
    for row, inputs in enumerate(rows):
        start = inputs["input_ids"].shape[1]
        for step in steps:
            emitted = step.emitted[row]
            for path, logits in step.nodes(row) if emitted else ():
                tokens = [*answers[row][: len(emitted)], *path]
                expected = slow(name, head, inputs, tokens, start + len(tokens))
                found, nodes = max(found, float((logits - expected).abs().max() / expected.std())), nodes + 1
    assert nodes > 3 * len(rows)
    return found


def difference(name: str, head: Head, policy: Any, rows: int = 3, n: int = LENGTH // 2) -> float:
    case, kind = FAMILIES[name], kind_of_prompt(name)
    inputs = [case.row_inputs(kind, row) for row in range(rows)]
    outputs, steps = recorded(name, head, policy, [prompts(case, one)[0] for one in inputs], n)
    assert [o.tokens for o in outputs] == case.reference(kind, rows=rows, n=n)
    return worst(name, head, inputs, [o.tokens for o in outputs], steps)


@pytest.mark.parametrize("name", NAMES)
def test_every_node_is_guessed_from_what_the_first_layers_say_of_its_path(name: str) -> None:
    assert difference(name, trained_head(name), CHAINS["dynamic"]) < CLOSE


@pytest.mark.parametrize("policy", ["static", "confident"])
def test_other_trees_too(policy: str) -> None:
    assert difference("llava", trained_head("llava"), CHAINS[policy]) < CLOSE


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_answers_are_the_target_s(name: str, rows: int) -> None:
    case, prompt_kind = FAMILIES[name], kind_of_prompt(name)
    asked = [Request(p) for p in prompts(case, case.inputs(prompt_kind, rows=rows))]
    expected = case.reference(prompt_kind, rows=rows, n=LENGTH + 4)
    accepted = drafted = 0
    for policy in CHAINS.values():
        outputs = engine(name, trained_head(name), policy).generate(asked, max_new_tokens=LENGTH + 4)
        assert [o.tokens for o in outputs] == expected
        accepted += sum(o.stats.accepted_tokens for o in outputs)
        drafted += sum(o.stats.drafted_tokens for o in outputs)
    assert LENGTH * rows < accepted < drafted


@pytest.mark.parametrize("kind", ["text", "images2", "video"])
@pytest.mark.parametrize("name", ["llama", "qwen3_vl", "smolvlm"])
def test_an_untaught_head_never_changes_the_answer(name: str, kind: str) -> None:
    case = FAMILIES[name]
    if kind not in case.kinds:
        pytest.skip("the family has no such media")
    asked = [Request(p) for p in prompts(case, case.inputs(kind, rows=3))]
    outputs = engine(name, random_head(name, "kangaroo"), CHAINS["confident"]).generate(asked, max_new_tokens=8)
    assert [o.tokens for o in outputs] == case.reference(kind, rows=3, n=8)


def second_turn(name: str, head: Head) -> float:
    """Rows end their first answers inside accepted paths, so that tokens are left which the head has not run."""
    case, recording, kind = FAMILIES[name], Recording(CHAINS["confident"]), kind_of_prompt(name)
    session = engine(name, head, recording).open(3)
    first = [case.row_inputs(kind, row) for row in range(3)]
    answers, _ = recorded(name, head, recording, [prompts(case, i)[0] for i in first], 11, session)
    second = [case.continued(kind, row, answer.tokens, follow_up=kind) for row, answer in enumerate(answers)]
    outputs, steps = recorded(name, head, recording, [prompts(case, i)[0] for i in second], 6, session)
    for output, inputs, before in zip(outputs, second, first, strict=True):
        assert output.tokens == reference_greedy(pristine(name), inputs, 6)[0]
        assert output.stats.reused_tokens == before["input_ids"].shape[1] + 11 - 1
    return worst(name, head, second, [o.tokens for o in outputs], steps)


@pytest.mark.parametrize("name", NAMES)
def test_ragged_rows_go_on_with_another_image(name: str) -> None:
    assert second_turn(name, trained_head(name)) < CLOSE


def test_other_prompts_in_the_same_session() -> None:
    name, head = "llava", trained_head("llava")
    case, recording = FAMILIES[name], Recording(CHAINS["confident"])
    image = case.row_inputs("image", 0)
    other = {**image, "pixel_values": image["pixel_values"].flip(0).neg()}
    session = engine(name, head, recording).open(1)
    for inputs in (image, image, other, case.row_inputs("text", 1), image):
        outputs, steps = recorded(name, head, recording, [prompts(case, inputs)[0]], 6, session)
        assert outputs[0].tokens == reference_greedy(pristine(name), inputs, 6)[0]
        assert worst(name, head, [inputs], [outputs[0].tokens], steps) < CLOSE


def _states_of_the_token_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test.KangarooDraftSession, "lag", 1)


def _guesses_that_do_not_see_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "pad", lambda x, by, value: F.pad(x, by, value=False))


def _all_guesses_at_the_root_s_position(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Context.early_exit
    monkeypatch.setattr(
        Context,
        "early_exit",
        lambda self, rows, t, a, depth, layer: right(self, rows, t, a, depth * 0, layer),
    )


@pytest.mark.parametrize(
    "mistake",
    [_states_of_the_token_before, _guesses_that_do_not_see_the_root, _all_guesses_at_the_root_s_position],
)
def test_a_planted_mistake_is_noticed(monkeypatch: pytest.MonkeyPatch, mistake: Any) -> None:
    head = trained_head("gemma3")
    mistake(monkeypatch)
    assert difference("gemma3", head, CHAINS["dynamic"], rows=1) > FAR


def test_states_lost_between_turns_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = under_test.KangarooDraftSession.load

    def forgetful(self: Any, row: int, prompt: Any, read: Any) -> None:
        self._features[row][max(self._known[row] - 1, 0) :] = 0
        right(self, row, prompt, read)

    monkeypatch.setattr(under_test.KangarooDraftSession, "load", forgetful)
    assert second_turn("llava", trained_head("llava")) > FAR


def test_pending_entries_of_the_target_are_gone_before_it_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    right, pending = Context.run, []

    def noting(self: Context, pieces: Any) -> Any:
        pending.extend(self.cache.pending)
        return right(self, pieces)

    monkeypatch.setattr(Context, "run", noting)
    difference("llava", trained_head("llava"), CHAINS["chain"], rows=1)
    assert set(pending) == {0}


@pytest.mark.parametrize(("layers", "left"), [(2, 1), (16, 1), (17, 2), (32, 2), (40, 3)])
def test_a_sixteenth_of_the_layers_drafts(layers: int, left: int) -> None:
    from saccade.draft.heads.kangaroo import Kangaroo

    assert Kangaroo.reads(layers) == (left,)
    assert Kangaroo.reads(layers, exit=1) == (1,)


@pytest.mark.parametrize("given", [2, -1, 1.0, "1", True])
def test_an_exit_that_cannot_be_is_refused(given: Any) -> None:
    with pytest.raises(ModelError, match="exit must be a whole number below the target's 2 layers"):
        HeadConfig.from_target(target("llava"), "kangaroo", exit=given)


def test_a_head_comes_back_as_it_was(tmp_path: Any) -> None:
    head = random_head("gemma3", "kangaroo", exit=2)
    assert head.layers == (2,)
    save_head(head, tmp_path)
    again = load_head(tmp_path, target("gemma3"))
    assert again.config == head.config
    for name, tensor in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    changed = (tmp_path / "config.json").read_text().replace('"exit": 2', '"exit": 3')
    (tmp_path / "config.json").write_text(changed)
    with pytest.raises(ModelError, match="reads layer 2, not 3 as its exit says"):
        load_head(tmp_path, target("gemma3"))


def test_the_method_by_name() -> None:
    owner = vlm("llava")
    head = build_head(HeadConfig.from_target(owner.target, "kangaroo")).to(owner.target.dtype)
    parts = Models(owner.target, head=head)
    prompt = owner.processor.prompt("What is it?", [picture(3)])
    (expected,) = build("plain", parts).generate([Request(prompt)], max_new_tokens=12)
    drafted = {}
    for threshold in (0.0, 0.6, 1.0):
        under = build("kangaroo", parts, gamma=3, confidence=threshold)
        (output,) = under.generate([Request(prompt)], max_new_tokens=12)
        assert output.tokens == expected.tokens
        drafted[threshold] = output.stats.drafted_tokens / output.stats.target_passes
    assert drafted[0.0] > 2 > drafted[1.0] > 0
    with pytest.raises(MethodError, match="confidence of method kangaroo must be in the range 0 to 1, not 60"):
        build("kangaroo", parts, confidence=60.0)
