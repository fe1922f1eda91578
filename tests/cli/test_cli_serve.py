"""`saccade serve --help`, and `saccade chat --url` against a server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Shell

from checkpoints import picture, saved_picture, vlm
from saccade.cli.chat import RemoteChat

sys.path.insert(0, str(Path(__file__).parents[1] / "serve"))
from live_server import Live, live


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live() as found:
        yield found


def test_a_model_is_named_once(shell: Shell) -> None:
    assert "No model is named" in shell("serve").err
    assert "--replicas is for engines on Ray" in shell("serve", "-t", "pocket", "--replicas", "2", "--plan").complaint
    assert "give one of them" in shell("serve", "-t", "pocket", "--config", "x.toml").err


def test_a_conversation_with_a_server_is_that_of_a_local_one(server: Live, shell: Shell, tmp_path: Path) -> None:
    talk = vlm("qwen", "qwen-draft").chat("Be short.")
    file = saved_picture(tmp_path / "a.png", 1)
    options = {"max_new_tokens": 12}
    answers = [talk.send("What is it?", [picture(1)], **options).text, talk.send("Sure?", **options).text]
    lines = [f"/image {file}", "What is it?", "x" * 3000, "Sure?"]
    result = shell("chat", "--url", server.url, "--system", "Be short.", "-n", "12", stdin="\n".join(lines))
    assert result.out.splitlines()[:1] == answers[:1]
    assert result.out.splitlines()[-1] == answers[1]
    assert "refuses: The sequence needs" in result.err
    assert "12 tokens, " in result.err
    assert "of them drafted" in result.err


def test_sampling_with_a_server_is_sampling(server: Live, shell: Shell) -> None:
    """Of a temperature of 1 where no other is given; the checkpoint itself is for greedy decoding."""
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 5, "max_new_tokens": 12}
    messages = [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}]
    expected = vlm("qwen", "qwen-draft").generate(messages, **options).text
    assert expected != vlm("qwen", "qwen-draft").generate(messages, max_new_tokens=12).text
    asked = ("chat", "--url", server.url, "-n", "12", "--seed", "5", "--sample")
    assert shell(*asked, stdin="Why?\n").out == expected + "\n"


def test_options_of_models_are_refused_with_a_server(server: Live, shell: Shell) -> None:
    for option in (("--exact",), ("--device", "cpu"), ("--dtype", "float32"), ("-d", "pocket")):
        assert "leave them out with --url" in shell("chat", "--url", server.url, *option).complaint


def test_ctrl_c_ends_an_answer_of_a_server_and_not_the_conversation(
    server: Live, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, bodies = RemoteChat._events, list[Any]()

    def interrupted(self: RemoteChat, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        bodies.append(body)
        for number, event in enumerate(stock(self, body)):
            yield event
            if len(bodies) == 1 and number == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(RemoteChat, "_events", interrupted)
    result = shell("chat", "--url", server.url, "-n", "200", "-m", "off", stdin="Why?\nAnd then?\n/quit\n")
    assert result.code == 0
    assert "interrupted" in result.err
    begun, _ = result.out.split("\n", 1)
    assert [message["role"] for message in bodies[1]["messages"]] == ["user", "assistant", "user"]
    assert bodies[1]["messages"][1]["content"] == begun
    server.until(lambda: server.is_idle)


def test_marks_of_a_server_join_to_its_answer(server: Live, shell: Shell) -> None:
    plain = shell("chat", "--url", server.url, "-n", "12", stdin="Why?\n").out
    marked = shell("chat", "--url", server.url, "-n", "12", "--marks", "-m", "chain", stdin="Why?\n").out
    assert "‹" in marked
    assert marked.replace("‹", "").replace("›", "") == plain


@pytest.mark.parametrize(
    "url",
    ["http://localhost:80x0", "http://[::1", "localhost:99999", "ftp://localhost", "my server", "http://local..host"],
)
def test_an_address_that_is_none_is_refused_at_once(shell: Shell, url: str) -> None:
    assert f"{url} is no address of a server" in shell("chat", "--url", url, stdin="Hello\n").complaint


def test_a_server_that_is_not_there_is_one_sentence(shell: Shell) -> None:
    result = shell("chat", "--url", "http://127.0.0.1:9", stdin="Hello\n")
    assert "cannot be reached" in result.err
    assert "check --url" in result.err
