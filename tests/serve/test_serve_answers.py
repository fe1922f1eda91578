"""Answers of the server: those of `generate`, for any mixture and number of clients."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from live_server import Live, Question, asks, live, questions, uri

from checkpoints import vlm
from saccade.draft.suffix import SuffixDrafter
from saccade.engine import RunningBatch
from saccade.engine.step import StepRunner
from saccade.inputs.families.family import Prompt
from saccade.processors import stateless
from saccade.serve.answers import Choice
from saccade.serve.configuration import ModelEntry
from saccade.serve.logit_processors import Penalties, TokenLogprob
from saccade.serve.owner import Event
from test_text import tokenizer


def streamed(server: Live, body: dict[str, Any]) -> str:
    own = {k: body[k] for k in ("repetition_penalty", "top_k", "min_p", "speculation") if k in body}
    rest = {k: v for k, v in body.items() if k not in own}
    chunks = server.client().chat.completions.create(**rest, stream=True, extra_body=own)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def answered(server: Live, question: Question, number: int) -> str:
    """The server's answer, streamed or whole in turns."""
    if number % 2:
        return streamed(server, question.body)
    status, answer = server.post(question.body)
    assert status == 200, answer
    return str(answer["choices"][0]["message"]["content"])


def compare(server: Live, posed: list[Question], clients: int) -> None:
    model = vlm("qwen", "qwen-draft")
    expected = [question.expected(model) for question in posed]
    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(lambda pair: answered(server, pair[1], pair[0]), enumerate(posed)))
    assert found == expected


@pytest.mark.parametrize(("count", "clients"), [(16, 4), pytest.param(500, 16, marks=pytest.mark.slow)])
def test_mixed_requests_of_several_clients_are_answered_as_by_generate(shared: Live, count: int, clients: int) -> None:
    compare(shared, questions(count), clients)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages"])
def test_a_prediction_goes_with_every_other_field_of_conversations(shared: Live, path: str) -> None:
    parts = [{"type": "text", "text": "A cat "}, {"type": "text", "text": "on a mat."}]
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "prediction": {"type": "content", "content": parts}}
    if path == "/v1/completions":
        status, answer = shared.post({**body, "prompt": "What?"}, path)
        assert (status, answer["error"]["message"]) == (
            400,
            "The field prediction is not supported here; leave it out.",
        )
        return
    body["messages"] = asks("What?")
    if path == "/v1/chat/completions":
        body |= {"n": 2, "logprobs": True, "presence_penalty": 0.5, "modalities": ["text"], "max_completion_tokens": 20}
        body["tools"] = [{"type": "function", "function": {"name": "look"}}]
    status, answer = shared.post(body, path)
    assert status == 200, answer
    del body["prediction"]
    other = shared.post(body, path)[1]
    texts = [a.get("content") or [choice["message"] for choice in a["choices"]] for a in (answer, other)]
    assert texts[0] == texts[1]


def test_usage_counts_the_tokens_of_the_prediction(shared: Live) -> None:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 40, "messages": asks("What?"), "speculation": "off"}
    answer = shared.post(body)[1]
    content, body["n"] = answer["choices"][0]["message"]["content"], 2
    body |= {"temperature": 0, "prediction": {"type": "content", "content": content}}

    def counts(answer: dict[str, Any]) -> list[int]:
        assert all(choice["message"]["content"] == content for choice in answer.get("choices", ()))
        details = answer["usage"]["completion_tokens_details"]
        return [details[f"{kind}_prediction_tokens"] for kind in ("accepted", "rejected")]

    assert counts(shared.post(body)[1]) == [0, 0]
    accepted, rejected = counts(shared.post({**body, "speculation": "prompt-lookup"})[1])
    assert 40 < accepted <= 80
    body |= {"stream": True, "stream_options": {"include_usage": True}, "speculation": "prompt-lookup"}
    *_, last = shared.stream(body, "/v1/chat/completions")
    assert counts({"usage": last["usage"]}) == [accepted, rejected]


@pytest.mark.parametrize("speculation", ["off", "prompt-lookup", "short", {"method": "static-tree"}, {"gamma": 3}])
def test_no_method_changes_an_answer(shared: Live, speculation: Any) -> None:
    posed = Question({"model": "tiny", "messages": asks("What?", uri(1)), "max_tokens": 20}, {"max_new_tokens": 20})
    status, answer = shared.post(posed.with_(speculation=speculation, saccade={}).body)
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"] == posed.expected(vlm("qwen", "qwen-draft"))
    assert ("metrics" in answer) == (speculation != "off")  # those of draft tokens


@pytest.mark.parametrize(
    ("names", "refused"), [(("predicting",), "chain"), (("gemma4", "gemma4-assistant"), "mtp")], ids=str
)
def test_what_comes_with_a_target_drafts_for_several_clients(names: tuple[str, ...], refused: str) -> None:
    bodies: list[dict[str, Any]] = [
        {"messages": asks(words), "max_tokens": 10, "temperature": heat, "seed": 5}
        for words in ("Hello there", "Two")
        for heat in (0, 0.8)
    ]
    with live([(ModelEntry("model"), vlm(*names))]) as server, ThreadPoolExecutor(4) as pool:
        found, alone = list(pool.map(server.post, bodies)), [server.post(body) for body in bodies]
        off = [server.post({**body, "speculation": "off"}) for body in bodies]
        (about,) = server.client().models.list()
        assert refused not in about.saccade["methods"]
        for method in about.saccade["methods"]:
            status, answer = server.post({**bodies[0], "max_tokens": 2, "speculation": method})
            assert status == 200, answer
        status, answer = server.post({**bodies[0], "speculation": refused})
        assert (status, answer["error"]["param"]) == (400, "speculation")
    assert [status for status, _ in found] == [200] * 4
    texts = [[answer["choices"] for _, answer in answers] for answers in (found, alone, off)]
    assert texts[0] == texts[1]
    assert texts[0][::2] == texts[2][::2]
    assert all(answer["metrics"]["speculative_decoding"]["draft_acceptance_rate"] < 1 for _, answer in found)


def test_penalties_are_those_of_the_processor_alone(shared: Live) -> None:
    model, messages = vlm("qwen", "qwen-draft"), asks("Say it again, and again?")
    prompt = model.processor.prompt(messages)
    processor = stateless(Penalties(len(prompt), 1.5, 0.5))
    expected = model.generate(messages, max_new_tokens=30, logits_processor=[processor]).text
    body = {"messages": messages, "max_tokens": 30, "presence_penalty": 1.5, "frequency_penalty": 0.5}
    _, answer = shared.post({"model": "tiny", **body})
    assert answer["choices"][0]["message"]["content"] == expected
    assert expected != model.generate(messages, max_new_tokens=30).text, "the penalties must change something"


def test_choices_of_one_request_are_rows_with_seeds_of_their_own(shared: Live) -> None:
    messages = asks("Anything?")
    body = {"model": "tiny", "messages": messages, "max_tokens": 12, "temperature": 1.2, "seed": 5, "n": 3}
    _, answer = shared.post(body)
    options = {"max_new_tokens": 12, "do_sample": True, "temperature": 1.2, "top_k": 0}
    model = vlm("qwen", "qwen-draft")
    expected = [model.generate(messages, seed=5 + index, **options).text for index in range(3)]
    assert [choice["message"]["content"] for choice in answer["choices"]] == expected
    assert len(set(expected)) > 1


def test_raw_completions_continue_ids_and_text_without_a_template(shared: Live) -> None:
    model = vlm("llama")
    ids = model.processor.tokenizer("One, two,")["input_ids"]
    expected = model.generate(Prompt(tuple(ids)), max_new_tokens=9).text
    for prompt in ("One, two,", ids, ["One, two,"], [ids]):
        status, answer = shared.post({"model": "words", "prompt": prompt, "max_tokens": 9}, "/v1/completions")
        assert status == 200, answer
        assert answer["choices"][0]["text"] == expected


def test_control_tokens_that_clients_write_are_text(shared: Live) -> None:
    model, text = vlm("qwen", "qwen-draft"), "What </s><|im_end|><|image_pad|> is it?"
    expected = model.generate(asks(text, uri(1)), max_new_tokens=9, text_as_text=True).text
    status, answer = shared.post({"model": "tiny", "messages": asks(text, uri(1)), "max_tokens": 9})
    assert status == 200, answer
    assert answer["choices"][0]["message"]["content"] == expected
    raw = Prompt(vlm("llama").processor.encode("One, </s> two,", text_as_text=True))
    assert raw.ids != vlm("llama").processor.encode("One, </s> two,")
    status, answer = shared.post({"model": "words", "prompt": "One, </s> two,", "max_tokens": 9}, "/v1/completions")
    assert status == 200, answer
    assert (status, answer["choices"][0]["text"]) == (200, vlm("llama").generate(raw, max_new_tokens=9).text)


def test_a_step_that_fails_for_all_rows_costs_only_the_culprit_its_answer() -> None:
    """The others are repeated alone; what they had streamed already is not sent twice."""
    with live(max_rows=4) as server:
        model, owner = vlm("qwen", "qwen-draft"), server.service.owner
        posed = [q.with_(max_tokens=30) for q in questions(9, seed=3)][:3]
        posed = [replace(q, options={**q.options, "max_new_tokens": 30}) for q in posed]
        expected = [question.expected(model) for question in posed]
        poisoned = {"model": "tiny", "messages": asks("poison"), "max_tokens": 30, "temperature": 0}
        ids = model.processor.prompt(asks("poison")).ids
        target = model.target
        forward, sent = target.forward, list[list[int]]()

        def failing(*arguments: Any, **options: Any) -> Any:
            """Raise where all rows have begun, and then wherever the culprit is."""
            server.until(lambda: owner._submitted.total() == 4)
            rows = [row for lane in owner._lanes.values() for job in lane.feed.running for row in job.rows]
            begun = [len(row.output) for row in rows if row.output]
            if any(tuple(row.ids[: len(ids)]) == ids for row in rows) and (sent or len(begun) == 4):
                sent.append(begun)
                raise RuntimeError("planted: out of memory")
            return forward(*arguments, **options)

        target.forward = failing  # type: ignore[method-assign]
        try:
            with ThreadPoolExecutor(4) as pool:
                bad = pool.submit(server.post, poisoned)
                found = list(pool.map(lambda pair: answered(server, pair[1], pair[0]), enumerate(posed)))
                status, answer = bad.result()
        finally:
            del target.forward
        assert [len(begun) for begun in sent] == [4, 0], "all had begun, and then the culprit alone had not"
        assert found == expected
        assert status == 500
        assert answer["error"]["code"] == "internal_error"
        assert "planted" not in str(answer), "the cause stays in the log"


def test_a_batch_that_fails_costs_jobs_that_wait_to_be_repeated_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step fails for all rows; then the batch itself fails while the first of them is repeated alone."""
    with live(max_rows=4) as server:
        model = vlm("qwen", "qwen-draft")
        posed = [q for q in questions(9, seed=3) if q.body["max_tokens"] >= 8][:3]
        expected = [question.expected(model) for question in posed]
        lanes, stock, failed = server.service.owner._lanes, RunningBatch.step, list[str]()

        def failing(batch: RunningBatch) -> Any:
            server.until(lambda: failed or server.service.owner._submitted.total() == len(posed))
            feed = next(lane.feed for lane in lanes.values() if lane.feed.batch is batch)
            if len(feed.suspects) > 1 and "batch" not in failed:
                failed.append("batch")
                raise MemoryError("planted")
            return stock(batch)

        def failing_step(runner: StepRunner) -> None:
            if len(runner._state.active) == len(posed) and "step" not in failed:
                failed.append("step")
                raise RuntimeError("planted")
            run_step(runner)

        run_step = StepRunner.run
        monkeypatch.setattr(RunningBatch, "step", failing)
        monkeypatch.setattr(StepRunner, "run", failing_step)
        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(lambda question: server.post(question.body), posed))
        assert failed == ["step", "batch"]
        assert sorted(status for status, _ in found) == [200, 200, 500]
        for (status, answer), text in zip(found, expected, strict=True):
            assert status == 500 or answer["choices"][0]["message"]["content"] == text
        server.until(lambda: server.is_idle, 5)


TEXT = "a b ab é b 🙂 a"


def logprobs(name: str, chat: bool) -> tuple[str, dict[str, list[object]]]:
    """Text and log-probabilities of an answer, token by token."""
    choice = Choice(tokenizer(name), (), chat, 1, traced=False)
    for token in tokenizer(name).encode(TEXT, add_special_tokens=False):
        choice.add(Event((token,), ("target",), (TokenLogprob(token, -1.0, ((token, -1.0),)),)))
    return choice.text, choice.logprobs


@pytest.mark.parametrize("name", ["bytes", "merges", "fallback"])
def test_words_have_their_spaces_and_their_places(name: str) -> None:
    text, found = logprobs(name, chat=False)
    words = [str(word) for word in found["tokens"]]
    assert "".join(words).strip().startswith("a b ab ")
    for word, place in zip(words, found["text_offset"], strict=True):
        assert isinstance(place, int)
        if "\ufffd" not in word:
            assert text[place:].startswith(word if place else word.lstrip())


@pytest.mark.parametrize("name", ["bytes", "merges", "fallback"])
def test_bytes_of_tokens_join_to_the_answer(name: str) -> None:
    """Also those of characters that are several tokens, as OpenAI's clients join them."""
    text, found = logprobs(name, chat=True)
    entries = [entry for entry in found["content"] if isinstance(entry, dict)]
    assert bytes(b for entry in entries for b in entry["bytes"]).decode().strip() == text.strip()
    assert all(entry["top_logprobs"][0]["bytes"] == entry["bytes"] for entry in entries)


BODY = {"model": "tiny", "messages": asks("What is in this picture, in all detail?", uri(5, (48, 48))), "max_tokens": 4}
FIRST, SECOND = {"authorization": "Bearer first"}, {"authorization": "Bearer second"}


def reused(server: Live, headers: dict[str, str], **fields: Any) -> tuple[int, int]:
    """Cached prompt tokens of a request, and media that it found in the cache."""
    before = server.service.owner.counts.media_hits.total()
    status, _, answer = server.call("POST", "/v1/chat/completions", json.dumps({**BODY, **fields}).encode(), headers)
    assert status == 200, answer
    usage = json.loads(answer)["usage"]
    server.until(lambda: server.is_idle)
    hits = server.service.owner.counts.media_hits.total() - before
    return usage["prompt_tokens_details"]["cached_tokens"], hits


@pytest.mark.parametrize("speculation", ["off", "chain"])
def test_another_key_learns_nothing_of_an_earlier_prompt(keys: str, speculation: str) -> None:
    with live(api_key_file=keys) as server:
        assert reused(server, FIRST, speculation=speculation) == (0, 0)
        assert reused(server, SECOND, speculation=speculation) == (0, 0)
        for key in (FIRST, SECOND):
            assert reused(server, key, speculation=speculation)[0] > 16


def test_a_salt_of_the_request_separates_within_a_key_and_without_keys(keys: str, shared: Live) -> None:
    with live(api_key_file=keys) as server:
        assert reused(server, FIRST, cache_salt="a") == (0, 0)
        assert reused(server, SECOND, cache_salt="a") == (0, 0)
        assert reused(server, FIRST, cache_salt="a")[0] > 16
    assert reused(shared, {}, cache_salt="b") == (0, 0)
    assert reused(shared, {}, cache_salt="c") == (0, 0)
    assert reused(shared, {}, cache_salt="b")[0] > 16


def test_earlier_answers_are_drafted_from_within_a_key_and_salt_alone(keys: str) -> None:
    with live(api_key_file=keys) as server:

        def accepted(headers: dict[str, str], **fields: Any) -> int:
            body = {**BODY, "max_tokens": 24, "speculation": "suffix", "saccade": {}, **fields}
            status, _, answer = server.call("POST", "/v1/chat/completions", json.dumps(body).encode(), headers)
            assert status == 200, answer
            drafts = json.loads(answer).get("metrics", {}).get("speculative_decoding", {})
            return int(drafts.get("num_accepted_draft_tokens", 0))

        first = accepted(FIRST)
        others = accepted(SECOND), accepted(FIRST, cache_salt="a")
        assert max(first, *others) < accepted(FIRST) / 2


def test_keys_share_where_the_server_says_so(keys: str) -> None:
    with live(api_key_file=keys, share_prefixes=True) as server:
        assert reused(server, FIRST) == (0, 0)
        assert reused(server, SECOND)[0] > 16


def test_nothing_is_reused_where_reuse_is_off() -> None:
    with live(reuse_prefixes=False, max_rows=1) as server:
        for _ in range(2):
            assert reused(server, {}, n=2) == (0, 0)
            assert reused(server, {}, cache_salt="a") == (0, 0)
            assert reused(server, {}, speculation="suffix") == (0, 0)
        drafter = server.service.models["tiny"].setting("suffix").vlm.engine.drafter
        assert isinstance(drafter, SuffixDrafter)
        assert drafter.store.tokens == 0
