"""Answers with a form or a prediction: what every method is given, and how the answers are scored."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import saccade
from saccade import grammar
from saccade.bench import suites
from saccade.bench.answering import follows
from saccade.bench.expectations import Expectation
from saccade.bench.preparing import Prepared, prepare
from saccade.bench.questions import gather
from saccade.bench.runner import Runner
from saccade.errors import SaccadeError
from saccade.pocket import target_path
from saccade.serve.schemas import CallPolicy, Function
from saccade.serve.tools import SYNTAXES, ReplyFormat
from saccade.stream import Stream

Prepare = Callable[..., Prepared]
SCHEMA = {
    "type": "object",
    "properties": {"shape": {"enum": ["ring", "cross"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["shape", "count"],
    "additionalProperties": False,
}
TEXT = " ".join(f"line {number} has {number * number} dollars." for number in range(50))


def test_every_method_answers_by_the_schema_and_the_answer_is_valid_by_another_validator(
    prepared: Prepare, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "shape.json").write_text(json.dumps(SCHEMA))
    of_file = {"task": "scene", "name": "file", "schema": str(tmp_path / "shape.json")}
    made = prepared(tasks=[{"task": "scene", "schema": SCHEMA}, of_file], max_new_tokens=60)
    run = Runner(made, folder).run()
    assert len(run.records) == 8
    for record in run.records:
        Draft202012Validator(SCHEMA).validate(json.loads(record.text))
        assert record.scores == {"valid": 1.0}
        assert record.equal is (None if record.method == "plain" else True)
    assert [task["schema"] for task in run.header.config["tasks"]] == [SCHEMA, SCHEMA]


def test_an_answer_that_is_cut_off_is_not_valid(prepared: Prepare, folder: Path) -> None:
    run = Runner(prepared(tasks=[{"task": "scene", "schema": SCHEMA}], max_new_tokens=4), folder).run()
    assert {record.scores["valid"] for record in run.records} == {0.0}


def test_prompts_of_the_users_take_grammars_too(vlm: saccade.VLM, folder: Path, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "Which colour?"}], "reference": "red"}
    (tmp_path / "mine.jsonl").write_text(json.dumps(row))
    entry = {"file": str(tmp_path / "mine.jsonl"), "name": "mine", "lark": 'start: "red" | "blue"'}
    content = {"tasks": [entry], "methods": ["chain"], "max_new_tokens": 20}
    run = Runner(prepare(suites.parse(content, "mine", "mine.toml"), vlm), folder).run()
    for record in run.records:
        assert record.text in ("red", "blue")
        assert record.scores == {"valid": 1.0, "exact": record.text == "red", "contains": record.text == "red"}


def test_a_pocket_task_may_ask_in_other_words() -> None:
    entry = {"task": "chart", "prompt": "{question} Answer as JSON: {{}}"}
    asked, plainly = (
        gather(suites.parse({"tasks": [task], "methods": ["plain"]}, "a", "a.toml"))[0]["chart"][0]
        for task in (entry, "chart")
    )
    assert asked.turns[0].text == f"{plainly.turns[0].text} Answer as JSON: {{}}"
    assert asked.turns[0].messages[0]["content"][-1]["text"] == asked.turns[0].text


def test_the_calls_of_the_suite_are_those_that_the_server_forces() -> None:
    """In the grammars of both, a call of every syntax is read to its end."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target_path())
    entries = [task for task in suites.load("forms").tasks if task.lark is not None]
    arguments = json.loads(re.search(r"args: %json (.*)", entries[0].lark or "")[1])  # type: ignore[index]
    click = Function(name="click", parameters={k: v for k, v in arguments.items() if k != "x-guidance"})
    values = {"x": 40, "y": 7, "button": "left", "double": False}
    written = json.dumps(values)
    calls = {
        "call-hermes": f'<tool_call>\n{{"name": "click", "arguments": {written}}}\n</tool_call>',
        "call-qwen3-coder": "<tool_call>\n<function=click>\n"
        + "".join(f"<parameter={k}>\n{json.dumps(v).strip(chr(34))}\n</parameter>\n" for k, v in values.items())
        + "</function>\n</tool_call>",
        "call-glm": "<tool_call>click\n"
        + "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{json.dumps(v).strip(chr(34))}</arg_value>\n"
            for k, v in values.items()
        )
        + "</tool_call>",
        "call-mistral": f"[TOOL_CALLS]click[ARGS]{written}",
        "call-mistral-7b": f'[TOOL_CALLS] [{{"name": "click", "arguments": {written}}}]',
        "call-gemma4": '<|tool_call>call:click{x:40,y:7,button:<|"|>left<|"|>,double:false}<tool_call|>',
        "call-llama": f'{{"name": "click", "parameters": {written}}}',
    }
    assert [entry.name for entry in entries] == list(calls)
    assert len(calls) == len(SYNTAXES)
    order = [2, 0, 1, 3, 4, 5, 6]  # of the suite's calls among the server's syntaxes
    for entry, number in zip(entries, order, strict=True):
        template = "tools " + " ".join(SYNTAXES[number].marks)
        theirs = ReplyFormat(tokenizer, template).grammar(CallPolicy([click], [click], False), "", None)
        for text in (entry.lark or "", theirs):
            ids = [*tokenizer.encode(calls[entry.name], add_special_tokens=False), tokenizer.eos_token_id]
            assert follows(grammar.lark(text, tokenizer, len(tokenizer)), ids), entry.name
            assert not follows(grammar.lark(text, tokenizer, len(tokenizer)), ids[:-1])


@pytest.mark.parametrize("wrong", [0.0, 0.05, 0.15])
def test_a_prediction_has_its_share_of_wrong_words(wrong: float) -> None:
    right = TEXT.split()
    found = [Expectation("plain", wrong=wrong).predict(TEXT, f"a-{seed}").split() for seed in range(20)]
    changed = 0
    for words in found:
        blocks = SequenceMatcher(None, right, words, autojunk=False).get_opcodes()
        changed += sum(max(b - a, d - c) for kind, a, b, c, d in blocks if kind != "equal")
    assert changed / 20 / len(right) == pytest.approx(wrong, abs=0.02)
    assert len({tuple(words) for words in found}) == (20 if wrong else 1)
    again = Expectation("plain", wrong=wrong).predict(TEXT, "a-3")
    assert again.split() == found[3]
    assert wrong or again == TEXT


def test_the_four_kinds_of_wrong_words_all_occur() -> None:
    kinds = set()
    for seed in range(40):
        words = Expectation("reference", wrong=0.25).predict("one two three four", str(seed)).split()
        kinds.add((len(words), len(set(words) & {"one", "two", "three", "four"})))
    assert kinds == {(4, 3), (3, 3), (5, 4)}
    spelt = [w for s in range(40) for w in Expectation("plain", wrong=1.0).predict("one two", str(s)).split()]
    assert any(len(w) == 3 and w not in ("one", "two") for w in spelt)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"of": "plain"}, "plain"),
        ({"of": "reference"}, "answer"),
        ({"text": "Something else."}, "Something else."),
        (None, None),
    ],
)
def test_every_method_gets_the_same_prediction(
    prepared: Prepare, folder: Path, monkeypatch: pytest.MonkeyPatch, table: dict[str, str] | None, expected: str | None
) -> None:
    stream, given = saccade.VLM.stream, list[Any]()

    def recorded(self: saccade.VLM, prompt: Any, **options: Any) -> Stream:
        given.append((self.method, options.pop("prediction", None)))
        return stream(self, prompt, **options)

    monkeypatch.setattr(saccade.VLM, "stream", recorded)
    entry: dict[str, Any] = {"task": "receipt"} | ({} if table is None else {"prediction": table})
    made = prepared(tasks=[entry], methods=["chain", "prompt-lookup"], repeats=2)
    run = Runner(made, folder).run()
    for question in made.questions["receipt"]:
        plain = next(r.text for r in run.records if r.prompt_id == question.id and r.method == "plain")
        right = {"plain": plain, "answer": question.turns[0].answer}.get(str(expected), expected)
        texts = [text for method, text in given if text is not None]
        assert (right in texts) is (right is not None)
    predicted = [method for method, text in given if text is not None]
    assert sorted(predicted) == ([] if table is None else sorted(["plain", "chain", "prompt-lookup"] * 4))


def test_a_prompt_without_a_right_answer_cannot_predict_it(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"messages": [{"role": "user", "content": "Say one."}]}')
    entry = {"file": str(tmp_path / "mine.jsonl"), "name": "mine", "prediction": {"of": "reference"}}
    with pytest.raises(SaccadeError, match="mine-1 has no right answer to predict"):
        gather(suites.parse({"tasks": [entry], "methods": ["plain"]}, "a", "a.toml"))
