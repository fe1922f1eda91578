"""What a head computes in a tree, with cache and batch, is what every path gives as a sequence of its own.

Answers are the target's whatever a head guesses, and a conversation continues from its cache. One file for all kinds:
those whose entries get the target's state at one token, DREAM with its second cache, Kangaroo on the target's first
layers, and Medusa's and Hydra's stacks without a cache.
"""

from __future__ import annotations

from typing import Any

import pytest

from families import FAMILIES, Inputs, pristine, reference_greedy
from heads_kit import (
    AHEAD,
    DRAFTING,
    EVERY,
    POLICIES,
    Recording,
    dropped_of,
    engine,
    entries_of,
    kind_of_prompt,
    prompts,
    random_head,
    recorded,
    trained_head,
    worst_difference,
)
from saccade.draft.heads import session as under_test
from saccade.draft.heads.dream import Dream, MemoryEntries
from saccade.draft.heads.head import Head
from saccade.draft.heads.registry import HEAD_KINDS
from saccade.draft.heads.session import HeadDraftSession
from saccade.draft.trees.policy import ConfidentChain
from saccade.engine import Request
from saccade.engine.row import plan
from saccade.target_model.context import Context

NAMES = ("llama", "llava", "qwen2_5_vl", "qwen3_vl", "gemma3", "smolvlm")
FIRST, SECOND = 11, 7


def close(head: Head) -> float:
    """Standard deviations of the logits: hundreds of roundings of float32.

    The mistakes of tools/plants.toml move them by 0.05 and more, in DREAM's states by 0.004: features have no order.
    """
    return 1e-4 if head.kind == "dream" else 1e-3


def difference(
    name: str, head: Head, policy: Any = "dynamic", rows: int = 3, kind: str = "", n: int = 9, least: int = 0
) -> float:
    """Of an answer of n tokens, the target's own, of which at least ``least`` of every row were drafted."""
    case, kind = FAMILIES[name], kind or kind_of_prompt(name)
    inputs = [case.row_inputs(kind, row) for row in range(rows)]
    requests = [prompts(case, one)[0] for one in inputs]
    outputs, steps = recorded(name, head, POLICIES.get(policy, policy), requests, n)
    assert [o.tokens for o in outputs] == case.reference(kind, rows=rows, n=n)
    assert min(output.stats.accepted_tokens for output in outputs) >= least
    return worst_difference(name, head, inputs, outputs, steps)


@pytest.mark.singly
@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("name", NAMES)
def test_trees_of_ragged_rows(name: str, kind: str) -> None:
    head = trained_head(name, kind)
    least = 1 if kind in AHEAD else 3
    assert difference(name, head, rows=2, n=6 if kind == "kangaroo" else 10, least=least) < close(head)


SHALLOW = [(kind, policy) for kind in AHEAD for policy in ("chain", "static")]
DEEP = [(kind, policy) for kind in (*DRAFTING, "dream") for policy in ("chain", "static", "sage")]


@pytest.mark.singly
@pytest.mark.parametrize(("kind", "policy"), [*DEEP, *SHALLOW, ("kangaroo", ConfidentChain(5, 0.6))])
def test_every_policy(kind: str, policy: Any) -> None:
    head = trained_head("llava", kind)
    assert difference("llava", head, policy, rows=2, n=5) < close(head)


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *(("hivis", {"after_image": after}) for after in ("text", "visual")),
    *(("eagle2", {"text_only": True, "after_image": after}) for after in ("text", "visual")),
    ("eagle2", {"text_only": True, "features": "none"}),
    ("peagle", {"text_only": True}),
    ("eagle2", {"blocks": 3}),
    ("dream", {"keep": 1.0}),
    ("dream", {"keep": 0.5}),
    ("dream", {"keep": 0.25, "cross": 2}),
    ("dream", {"gate": "replace"}),
    ("dream", {"initial": False}),
    ("dream", {"final": False}),
    ("dream", {"cross": 0}),  # the direct path alone
    ("dream", {"cross": 0, "direct": False}),
    ("dream", {"gate": "replace", "direct": False}),
    ("hivis", {"norms": "all"}),
    ("eagle2", {"norms": "none"}),
]


@pytest.mark.singly
@pytest.mark.parametrize("prompt_kind", ["image", "images2", "video", "text"])
@pytest.mark.parametrize(("kind", "options"), VARIANTS, ids=str)
def test_options_with_several_images_videos_and_words_alone(
    kind: str, options: dict[str, Any], prompt_kind: str
) -> None:
    head = random_head("qwen2_5_vl", kind, **options)
    assert difference("qwen2_5_vl", head, rows=2, kind=prompt_kind, n=5) < close(head)


@pytest.mark.parametrize("kind", [*DRAFTING, "dream"])
def test_a_prompt_read_in_pieces(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "CHUNK", 3)
    head = random_head("smolvlm", kind)
    assert difference("smolvlm", head, n=5) < close(head)


# --------------------------------------------------------------------------- turns


def difference_in_second_turn(name: str, head: Head, kind: str, follow_up: str, rows: int = 2) -> float:
    """Rows end their first answers inside accepted paths, so that tokens are left which the head has not run."""
    case, recording = FAMILIES[name], Recording(POLICIES["dynamic"])
    first: list[Inputs] = [case.row_inputs(kind, row) for row in range(rows)]
    session = engine(name, head, recording).open(rows)
    answers, _ = recorded(name, head, recording, [prompts(case, one)[0] for one in first], FIRST, session)
    second = [case.continued(kind, row, answer.tokens, follow_up=follow_up) for row, answer in enumerate(answers)]
    outputs, steps = recorded(name, head, recording, [prompts(case, one)[0] for one in second], SECOND, session)
    dropped = []
    for output, one, before in zip(outputs, second, first, strict=True):
        assert output.tokens == reference_greedy(pristine(name), one, SECOND)[0]
        start = output.stats.reused_tokens
        assert start == before["input_ids"].shape[1] + FIRST - 1
        dropped.append(dropped_of(name, before, head) | dropped_of(name, one, head, start))
    return worst_difference(name, head, second, outputs, steps, dropped)


@pytest.mark.some_families
@pytest.mark.singly
@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("name", NAMES)
def test_ragged_rows_go_on_with_another_image(name: str, kind: str) -> None:
    head, prompt_kind = trained_head(name, kind), kind_of_prompt(name)
    assert difference_in_second_turn(name, head, prompt_kind, prompt_kind) < close(head)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("hivis", {"after_image": "text"}), ("hivis", {"after_image": "visual"}), ("dream", {"keep": 0.5})],
)
def test_words_after_an_image_and_an_image_after_words(kind: str, options: dict[str, Any]) -> None:
    head = random_head("llava", kind, **options)
    assert difference_in_second_turn("llava", head, "image", "text") < close(head)
    assert difference_in_second_turn("llava", head, "text", "image") < close(head)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in ("hivis", "dream", "kangaroo", "hydra") else [pytest.mark.slow])
        for kind in EVERY
    ],
)
def test_other_prompts_in_the_same_session(kind: str) -> None:
    """The same question again, another image under the same words, a shared beginning, words alone, and back."""
    name, head = "llava", trained_head("llava", kind)
    case, recording = FAMILIES[name], Recording(POLICIES["dynamic"])
    image = case.row_inputs("image", 0)
    other = {**image, "pixel_values": image["pixel_values"].flip(0).neg()}
    longer = case.continued("image", 0, case.reference("image")[0][:5])
    every = [image, image, other, *([] if kind == "dream" else [longer]), case.row_inputs("text", 1), image]
    session = engine(name, head, recording).open(1)
    for inputs in every:
        outputs, steps = recorded(name, head, recording, [prompts(case, inputs)[0]], SECOND, session)
        assert outputs[0].tokens == reference_greedy(pristine(name), inputs, SECOND)[0]
        # Where the image is reused, it also stays as it was read.
        is_reused = outputs[0].stats.reused_tokens > inputs["input_ids"].shape[1] // 2
        dropped = dropped_of(name, image if is_reused else inputs, head)
        assert worst_difference(name, head, [inputs], outputs, steps, [dropped]) < close(head)


def test_an_answer_that_was_broken_off() -> None:
    name, head = "llava", trained_head("llava", "hivis")
    case, recording = FAMILIES[name], Recording(POLICIES["dynamic"])
    inputs = case.row_inputs("image", 0)
    (prompt,) = prompts(case, inputs)
    under = engine(name, head, recording)
    session = under.open(1)
    run = under.start([Request(prompt)], plan(under.target, [prompt], max_new_tokens=20), session)
    answer: list[int] = []
    for step in run.steps:
        answer.extend(step.tokens[0])
        if len(answer) > 4:
            break
    run.steps.close()
    longer = case.continued("image", 0, answer)
    outputs, steps = recorded(name, head, recording, [prompts(case, longer)[0]], SECOND, session)
    assert outputs[0].stats.reused_tokens == len(prompt) + len(answer) - 1
    assert worst_difference(name, head, [longer], outputs, steps) < close(head)


def test_a_tree_policy_begins_again_with_another_prompt_and_continues_in_the_next_turn() -> None:
    name, case = "llava", FAMILIES["llava"]
    under = engine(name, trained_head(name, "hivis"), POLICIES["sage"])
    session, begun = under.open(1), []
    assert isinstance(session.drafting, HeadDraftSession)
    shaping = session.drafting._shaping
    restart = shaping.restart
    shaping.restart = lambda row: (begun.append(row), restart(row))  # type: ignore[method-assign,func-returns-value]

    def answer_to(inputs: Inputs) -> list[int]:
        (output,) = under.generate([Request(prompts(case, inputs)[0])], max_new_tokens=6, session=session)
        return output.tokens

    answer = answer_to(case.row_inputs("image", 0))
    answer_to(case.continued("image", 0, answer))
    assert begun == []
    answer_to(case.row_inputs("image", 1))
    assert begun == [0]


# --------------------------------------------------------------------------- entries


@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "smolvlm"])
def test_hidden_visual_tokens_have_no_entries(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first token has none either, and the first answer token has one after the first step."""
    monkeypatch.setattr("saccade.target_model.cache.QUANTUM", 1)
    case = FAMILIES[name]
    (prompt,) = prompts(case, case.row_inputs("image", 0))
    words = len(prompt) - sum(m.n_tokens for m in prompt.media)
    for head, expected in (
        (random_head(name, "hivis"), words),
        (random_head(name, "eagle2", text_only=True), words),
        (random_head(name, "eagle2"), len(prompt)),
    ):
        under = engine(name, head, Recording(POLICIES["chain"]))
        session = under.open(1)
        under.generate([Request(prompt)], max_new_tokens=1, session=session)
        assert entries_of(session).cache.lengths == [expected - 1]
        assert entries_of(session).cache.capacity(0) < len(prompt) + 20 - (len(prompt) - expected)


@pytest.mark.parametrize("keep", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("name", ["llava", "qwen3_vl", "gemma3", "smolvlm"])
def test_visual_tokens_that_dream_drops_are_not_run(name: str, keep: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.target_model.cache.QUANTUM", 1)
    case, head, ran = FAMILIES[name], random_head(name, "dream", keep=keep), list[int]()
    (prompt,) = prompts(case, case.row_inputs("image", 0))
    words = len(prompt) - sum(m.n_tokens for m in prompt.media)
    kept = sum(max(1, int(keep * m.n_tokens + 0.5)) for m in prompt.media)
    assert isinstance(head, Dream)
    assert head.first is not None
    head.first.register_forward_pre_hook(lambda _, args: ran.append(args[0].shape[1]))
    under = engine(name, head, POLICIES["chain"])
    session = under.open(1)
    under.generate([Request(prompt)], max_new_tokens=2, session=session)
    own = entries_of(session)
    assert isinstance(own, MemoryEntries)
    assert (ran[0], own.cache.lengths, own.memory.lengths) == (words + kept - 1, [words + kept], [len(prompt)])
    assert own.cache.capacity(0) == own.memory.capacity(0) - (len(prompt) - words - kept)


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_a_drafter_counts_the_bytes_that_it_holds_of_a_token(kind: str) -> None:
    under = engine("llava", random_head("llava", kind), POLICIES["chain"])
    session = under.open(1)
    (prompt,) = prompts(FAMILIES["llava"], FAMILIES["llava"].row_inputs("image", 0))
    under.generate([Request(prompt)], max_new_tokens=2, session=session)
    own = entries_of(session)
    held = [cache.nbytes / cache.slots for cache in own.caches if cache.slots]
    features = own.features.at[0]
    assert own.drafter.facts.entry_bytes == sum(held) + features.nbytes / len(features)


def test_pending_entries_of_the_target_are_gone_before_it_verifies(monkeypatch: pytest.MonkeyPatch) -> None:
    pending, run = list[int](), Context.run

    def noting(self: Context, blocks: Any) -> Any:
        pending.extend(self.cache.pending)
        return run(self, blocks)

    monkeypatch.setattr(Context, "run", noting)
    difference("llava", trained_head("llava", "kangaroo"), "chain", rows=1)
    assert set(pending) == {0}
