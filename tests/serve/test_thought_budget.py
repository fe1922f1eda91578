"""Budgets of thoughts: exact in every method, by every family's marks, beside what else ends or forms an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import PAINT, Live, asks, live, unmarked

from checkpoints import llama, tokenizer, vlm
from conftest import THINKER
from saccade import load
from saccade.serve.configuration import ModelEntry
from saccade.serve.logit_processors import ThoughtBudget
from saccade.serve.schemas import CallPolicy
from saccade.serve.tools import THOUGHTS, ReplyFormat

MARKS = ("<think>", "</think>")
CALL = ("<tool_call>", "</tool_call>")
TEMPLATE = f"{{{{ tools }}}}{MARKS}{CALL}"
METHODS = ("off", "chain", "static-tree", "dynamic-tree")


def _marked() -> Any:
    tok = tokenizer()
    tok.add_tokens([*MARKS, *CALL])
    return tok


# -- the processor -----------------------------------------------------------------------------------------------


def decoded(budget: ThoughtBudget, script: Sequence[int], size: int) -> list[int]:
    """Tokens of a model that goes on with its script whatever it was made to write."""
    state, tokens, left = budget.start(()), list[int](), list(script)
    while left and len(tokens) < 200:
        logits = torch.zeros(size)
        logits[left[0]] = 1.0
        token = int(budget.scores(state, logits).argmax())
        if token == left[0]:
            left.pop(0)
        state = budget.advance(state, token)
        tokens.append(token)
    return tokens


WORDS = ("a", " ", *MARKS, CALL[1])


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from(WORDS), max_size=24),
    st.sampled_from(["", "assistant: <think>", "<think>x</think>"]),
    st.integers(0, 4),
)
def test_a_thought_of_the_parser_is_closed_at_its_budget_and_no_other_token_changes(
    words: list[str], begun: str, most: int
) -> None:
    tok = _marked()
    replies = ReplyFormat(tok, TEMPLATE)

    def in_thought(so_far: Sequence[str]) -> bool:
        parser = replies.parser(CallPolicy(), begun)
        assert parser is not None
        for word in (*so_far, "x"):  # after which a mark is whole
            parser.add(word)
        return parser.in_reasoning

    expected, count = list[str](), 0  # tokens of the thought so far
    for word in words:
        if in_thought(expected) and count == most and word != MARKS[1]:
            expected.append(MARKS[1])
        count = count + 1 if in_thought(expected) else 0
        expected.append(word)
        count *= in_thought(expected)
    ids = dict(zip(WORDS, tok.convert_tokens_to_ids(["a", "Ġ", *WORDS[2:]]), strict=True))
    budget = ThoughtBudget(replies, most, begun, frozenset())
    assert decoded(budget, [ids[word] for word in words], len(tok)) == [ids[word] for word in expected]


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("marks", THOUGHTS, ids=lambda marks: marks[1])
def test_marks_of_every_family_end_a_thought(marks: tuple[str, str], added: bool) -> None:
    tok = tokenizer()
    if added:
        tok.add_tokens([mark.strip() for mark in marks])
    replies = ReplyFormat(tok, "".join(marks))
    for begun, begin in (("", marks[0]), (marks[0], "")):
        script = tok.encode(f"{begin}123456789", add_special_tokens=False)
        text = tok.decode(decoded(ThoughtBudget(replies, 4, begun, frozenset()), script, len(tok)))
        thought = 4 - begin.endswith("\n")  # what follows the mark's word is of the thought
        assert text == begin + "123456789"[:thought] + marks[1] + "123456789"[thought:]
        parser = replies.parser(CallPolicy(), begun)
        assert parser is not None
        assert parser.add(text, "stop").reasoning == "123456789"[:thought].strip()


def test_the_marks_of_a_tokenizers_own_response_template_end_a_thought() -> None:
    tok = tokenizer()
    fields = {"thinking": {"open": "(", "close": ")"}, "content": {"content": "text"}}
    tok.response_template = {"start_anchor": "assistant: ", "fields": fields}
    replies, begun = ReplyFormat(tok, "{{ tools }}"), "assistant: ("
    script = tok.encode("abcdef", add_special_tokens=False)
    tokens = decoded(ThoughtBudget(replies, 2, begun, frozenset()), script, len(tok))
    assert tok.decode(tokens) == "ab)cdef"
    assert r"\x29" in replies.grammar(CallPolicy(), begun, None), "a form comes after the thought"


def test_a_mark_waits_where_a_grammar_does_not_allow_it() -> None:
    tok = _marked()
    budget = ThoughtBudget(ReplyFormat(tok, TEMPLATE), 0, "<think>", frozenset())
    end = tok.convert_tokens_to_ids("</think>")
    scores = torch.randn(len(tok), generator=torch.Generator().manual_seed(0))
    assert budget.scores(budget.start(()), scores.clone()).isfinite().nonzero().flatten().tolist() == [end]
    scores[end] = float("-inf")
    assert torch.equal(budget.scores(budget.start(()), scores.clone()), scores)


# -- on a live server --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """Two tiny models with drafters: one that can think, by marks that are tokens, and one that cannot."""
    folders = [tmp_path_factory.mktemp("thinker") for _ in range(2)]
    for seed, folder in enumerate(folders):
        llama(folder, seed=seed + 3, tok=_marked())
        (folder / "chat_template.jinja").write_text(THINKER)
    models = [(ModelEntry("thinker"), load(*folders, "chain")), (ModelEntry("tiny"), vlm("llama"))]
    with live(models, batches=8) as running:
        yield running


OPEN = {"chat_template_kwargs": {"enable_thinking": True}}  # the template opens a thought


def asked(server: Live, method: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a request whose answer has no mark of the model's own."""
    body: dict[str, Any] = {"model": "thinker", "messages": asks("Hm?"), "temperature": 0, "speculation": method}
    body |= {"max_tokens": 24, "logit_bias": unmarked(server)}
    return {**body, "saccade": {"trace": True}, **fields}


def tokens(answer: dict[str, Any]) -> list[list[str]]:
    """Texts of the tokens of every choice of an answer."""
    return [[token["text"] for step in each["steps"] for token in step["tokens"]] for each in answer["choices"]]


def thought(server: Live, method: str = "off", **fields: Any) -> tuple[int, list[str], dict[str, Any]]:
    """Tokens in front of the mark that ends a thought, all of them, and the message, which is that of its stream."""
    body = asked(server, method, {**OPEN, **fields})
    status, answer = server.post(body)
    assert status == 200, answer
    (written,), message = tokens(answer["saccade"]), answer["choices"][0]["message"]
    deltas = [event["choices"][0]["delta"] for event in server.stream({**body, "stream": True})]
    for name in ("content", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (message.get(name) or "")
    return (written.index(MARKS[1]) if MARKS[1] in written else -1), written, message


@pytest.mark.parametrize("budget", [0, 1, 6, 23])
def test_a_thought_that_would_go_on_has_its_budget_and_the_answer_follows(server: Live, budget: int) -> None:
    count, written, message = thought(server, thinking_token_budget=budget, max_tokens=30)
    assert (count, len(written)) == (budget, 30)
    assert message["content"].strip() == "".join(written[budget + 1 :]).strip()
    assert message.get("reasoning_content", "").strip() == "".join(written[:budget]).strip()
    for method in METHODS[1:]:
        assert thought(server, method, thinking_token_budget=budget, max_tokens=30)[1] == written


@pytest.mark.parametrize("method", METHODS)
def test_sampled_thoughts_of_a_batch_have_their_budget(server: Live, method: str) -> None:
    body = asked(
        server, method, {**OPEN, "thinking_token_budget": 5, "temperature": 1.0, "top_k": 5, "n": 4, "seed": 5}
    )
    answers = tokens(server.post(body)[1]["saccade"])
    assert len({tuple(written) for written in answers}) == 4
    for written in answers:
        assert (written.index(MARKS[1]), written.count(MARKS[1])) == (5, 1)


def test_a_budget_that_is_not_reached_changes_nothing(server: Live) -> None:
    count, written, _ = thought(server)
    assert (count, len(written)) == (-1, 24)
    for budget in (24, 1000, -1):
        assert thought(server, "chain", thinking_token_budget=budget)[1] == written
    assert thought(server, thinking_token_budget=23)[1] == [*written[:23], MARKS[1]]
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    assert thought(server, thinking_token_budget=0, **off)[1:] == thought(server, **off)[1:]


@pytest.mark.parametrize(("words", "expected"), [("<think>so far", 4), ("<think>so far</think>So", -1), ("So", -1)])
def test_a_budget_counts_from_the_end_of_a_continued_message(server: Live, words: str, expected: int) -> None:
    fields: Any = {"messages": [{"role": "assistant", "content": words}], "continue_final_message": True}
    answers = [thought(server, method, thinking_token_budget=4, **fields) for method in METHODS]
    assert [count for count, _, _ in answers] == [expected] * len(METHODS)
    assert all(answer[1:] == answers[0][1:] for answer in answers)


def test_a_budget_holds_beside_a_minimum_and_without_ends(server: Live) -> None:
    for fields in ({"min_tokens": 20}, {"ignore_eos": True}):
        count, written, _ = thought(server, "chain", thinking_token_budget=4, **fields)
        assert (count, len(written)) == (4, 24)


def test_a_form_follows_a_thought_that_is_ended(server: Live) -> None:
    pytest.importorskip("llguidance", reason="forms need the serve or grammar extra")
    begin = server.service.models["thinker"].vlm.processor.tokenizer.convert_tokens_to_ids(CALL[0])
    bias = {**unmarked(server), str(begin): 50}  # else the model goes on with blanks
    call: Any = {"tools": [{"type": "function", "function": PAINT}], "tool_choice": "required", "logit_bias": bias}
    call |= {"parallel_tool_calls": False}
    for form in (call, {"guided_choice": ["yes", "no"]}):
        answers = [thought(server, method, thinking_token_budget=7, max_tokens=90, **form) for method in METHODS]
        count, written, message = answers[0]
        assert (count, [answer[1] for answer in answers]) == (7, [written] * len(METHODS))
        if form is call:
            (called,) = message["tool_calls"]
            assert json.loads(called["function"]["arguments"])["layers"] in range(1, 10)
        else:
            assert message["content"] in ("yes", "no")


def test_other_routes_take_a_budget_by_their_names(server: Live) -> None:
    reasoning = thought(server, thinking_token_budget=6)[2]["reasoning_content"]
    for kind in ("enabled", "adaptive"):
        body = asked(server, "chain", {"thinking": {"type": kind, "budget_tokens": 6}})
        status, message = server.post(body, "/v1/messages")
        assert status == 200, message
        assert [block["type"] for block in message["content"]] == ["thinking", "text"]
        assert message["content"][0]["thinking"] == reasoning
    body = asked(server, "chain", {**OPEN, "input": "Hm?", "max_output_tokens": 24, "thinking_token_budget": 6})
    status, answer = server.post(
        {name: body[name] for name in body.keys() - {"messages", "max_tokens"}}, "/v1/responses"
    )
    assert status == 200, answer
    assert answer["output"][0]["content"][0]["text"] == reasoning


def test_a_model_without_thoughts_refuses_a_budget_by_the_name_of_its_route(server: Live) -> None:
    body = {"model": "tiny", "messages": asks("Hm?"), "max_tokens": 4}
    for path, field, name in (
        ("/v1/chat/completions", {"thinking_token_budget": 9}, "thinking_token_budget"),
        ("/v1/messages", {"thinking": {"type": "adaptive", "budget_tokens": 9}}, "thinking.budget_tokens"),
    ):
        status, answer = server.post({**body, **field}, path)
        assert status == 400
        assert answer["error"]["message"].startswith(f"{name}: this model writes no thoughts")
    assert server.post({**body, "thinking_token_budget": -1})[0] == 200
    status, answer = server.post({**body, "thinking_token_budget": -2})
    assert (status, answer["error"]["param"]) == (400, "thinking_token_budget")
