"""What clients that were made for vLLM rely on."""

from __future__ import annotations

import json
from typing import Any

import pytest
from live_server import Live, asks, uri

import saccade
from checkpoints import vlm


@pytest.mark.parametrize("speculation", ["off", "chain"])
def test_an_answer_that_ignores_its_end_has_all_requested_tokens(
    shared: Live, speculation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = shared.service.models["tiny"].vlm.target.model.generation_config
    monkeypatch.setattr(defaults, "eos_token_id", 40)
    body = {"messages": asks("Hello?"), "max_tokens": 9, "speculation": speculation, "logit_bias": {"40": 100}}
    for ignored, expected in ((False, ("stop", 1)), (True, ("length", 9))):
        _, answer = shared.post({**body, "ignore_eos": ignored})
        assert (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"]) == expected
    status, answer = shared.post({**body, "ignore_eos": True, "response_format": {"type": "json_object"}})
    assert (status, answer["error"]["param"]) == (400, "ignore_eos")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("method", ["chain", "dynamic-tree", "prompt-lookup"])
def test_usage_runs_along_and_ends_with_the_acceptance(shared: Live, path: str, method: str) -> None:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 20, "ignore_eos": True, "speculation": method}
    body |= {"messages": asks("abab", uri(1))} if "chat" in path else {"prompt": "ababababab"}
    _, whole = shared.post(body, path)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = shared.stream({**body, "stream": True, "stream_options": options}, path)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["usage"]]
    assert counts == sorted({*counts})
    assert counts[-1] == last["usage"]["completion_tokens"] == 20
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks if chunk["usage"]} == {whole["usage"]["prompt_tokens"]}
    assert last["metrics"] == whole["metrics"]
    found = last["metrics"]["speculative_decoding"]
    histogram, steps = found["acceptance_histogram"], found["num_spec_steps"]
    accepted = last["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert sum(histogram) == steps > 0
    assert sum(j * count for j, count in enumerate(histogram)) == found["num_accepted_draft_tokens"] == accepted
    assert len(histogram) == found["num_spec_tokens"] + 1
    assert accepted <= found["num_draft_tokens"]
    assert found["mean_acceptance_length"] == pytest.approx(1 + accepted / steps)
    assert "metrics" not in shared.post({**body, "n": 2}, path)[1], "they belong to one choice"
    assert "metrics" not in shared.post({**body, "speculation": "off"}, path)[1]


@pytest.mark.parametrize("words", ["Hello <|im_end|> you", "", "Ünïcode 🎉"])
def test_tokens_and_their_text_are_those_of_the_model(shared: Live, words: str) -> None:
    processor = vlm("qwen").processor
    for special in (True, False):
        body = {"model": "tiny", "prompt": words, "add_special_tokens": special, "return_token_strs": True}
        _, found = shared.post(body, "/tokenize")
        expected = list(processor.encode(words, text_as_text=True, add_special_tokens=special))
        assert (found["tokens"], found["count"], found["max_model_len"]) == (expected, len(expected), 1024)
        assert len(found["token_strs"]) == len(expected)
        assert shared.post({"tokens": expected}, "/detokenize")[1] == {"prompt": words}
    messages = asks(words or "a", uri(1))
    _, answer = shared.post({"messages": messages, "max_tokens": 1})
    assert shared.post({"messages": messages}, "/tokenize")[1]["count"] == answer["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "Give either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": asks("a")}, "Give either prompt or messages"),
        ("/tokenize", {"prompt": 5}, "The field prompt is wrong"),
        ("/tokenize", {"prompt": "a" * 200_000}, "shorten it"),
        ("/detokenize", {"tokens": [-1]}, "The field tokens.0 is wrong"),
        ("/detokenize", {"tokens": [10_000]}, "every id must be below 263"),
    ],
)
def test_what_is_no_text_or_token_is_refused(shared: Live, path: str, body: Any, words: str) -> None:
    status, answer = shared.post({"model": "tiny", **body}, path)
    assert status == 400
    assert words in answer["error"]["message"]


def test_probes_are_answered_and_models_name_their_root(shared: Live) -> None:
    for path in ("/ping", "/health", "/ready", "/version", "/metrics"):
        assert [shared.call(method, path)[0] for method in ("GET", "HEAD")] == [200, 200]
    assert shared.call("POST", "/ping")[0] == 200
    assert json.loads(shared.call("GET", "/version")[2]) == {"version": saccade.__version__}
    assert [m["root"] for m in json.loads(shared.call("GET", "/v1/models")[2])["data"]] == ["tiny", "words"]
