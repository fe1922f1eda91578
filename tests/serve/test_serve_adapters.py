"""LoRA adapters on the server: each a model of its own, whose answers are those of `generate` with it alone."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from live_server import TINY, asks, live, questions, uri

from checkpoints import ready, vlm
from lora_kit import random_lora
from saccade import VLM, load
from saccade.cli import main

METHODS = ("chain", "static-tree", "sage", "prompt-lookup", "plain")
_FOLDER = TemporaryDirectory()


@cache
def adapters() -> dict[str, str]:
    """One of the decoder, and one of the vision tower, too."""
    model, root = vlm("qwen", "qwen-draft").target.model, Path(_FOLDER.name)
    modules = ["q_proj", "v_proj", "down_proj"]
    return {
        "red": str(random_lora(root / "red", model, 1, target_modules=modules)),
        "blue": str(random_lora(root / "blue", model, 2, use_rslora=True)),
    }


@cache
def adaptable() -> VLM:
    return load(ready("qwen"), ready("qwen-draft"), "chain", adapters=adapters())


@pytest.mark.parametrize(("count", "clients"), [(12, 4), pytest.param(100, 8, marks=pytest.mark.slow)])
def test_requests_to_adapters_and_base_at_once_are_answered_as_alone(count: int, clients: int) -> None:
    model, rng, posed, expected = adaptable(), random.Random(count), [], []
    for question in questions(count, seed=count):
        name, method = rng.choice(("tiny", "red", "blue")), rng.choice(METHODS)
        alone = model.using(method, adapter=None if name == "tiny" else name)
        expected.append(question.expected(alone))
        posed.append(question.with_(model=name, speculation=method).body)
    with live([(replace(TINY, adapters=adapters()), model)], batches=4) as server, ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(server.post, posed))
    assert [status for status, _ in found] == [200] * count
    assert [answer["choices"][0]["message"]["content"] for _, answer in found] == expected
    assert [answer["model"] for _, answer in found] == [body["model"] for body in posed]


def test_every_adapter_is_a_model_with_its_base_as_parent() -> None:
    body = {"messages": asks("What?", uri(1)), "max_tokens": 20}
    with live([(replace(TINY, adapters=adapters()), adaptable())]) as server:
        listed = list(server.client().models.list())
        assert [(m.id, m.parent) for m in listed] == [("tiny", None), ("red", "tiny"), ("blue", "tiny")]  # type: ignore[attr-defined]
        answers = [server.post({**body, "model": m.id})[1]["choices"][0]["message"]["content"] for m in listed]
        assert len(set(answers)) == 3
        _, short = server.post({**body, "model": "red", "speculation": "short"})
        assert short["choices"][0]["message"]["content"] == answers[1]
        status, refused = server.post({**body, "model": "green"})
        assert (status, refused["error"]["code"]) == (404, "model_not_found")
        assert 'model_name="red"' in server.call("GET", "/metrics")[2].decode()


def broken(folder: Path, **changes: object) -> str:
    """A copy of an adapter with other settings."""
    source = Path(adapters()["red"])
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes((source / "adapter_model.safetensors").read_bytes())
    settings = json.loads((source / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **changes}))
    return str(folder)


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ("a=/nowhere", "The adapter a has no adapter_config.json in /nowhere; give"),
        ("a=", "The adapter 'a' must be a name with a folder"),
        ("tiny={good}", "Two models are named 'tiny'"),
        (
            {"peft_type": "IA3"},
            "The adapter a has the type IA3, and with it changes the target in",
        ),
        ({"target_modules": ["wq"]}, "The adapter a does not fit the target (Target modules {'wq'} not found"),
        ({"target_modules": ["q_proj"]}, "The adapter a does not fit the target (the target has no "),
        ({"target_modules": ["q_proj", "v_proj", "down_proj", "k_proj"]}, "the target (it lacks "),
        ({"r": 3}, "The adapter a does not fit the target (size mismatch for "),
        ({"modules_to_save": ["lm_head"]}, "The adapter a has modules_to_save, and with it"),
        ({"init_lora_weights": "pissa"}, "The adapter a has init_lora_weights=pissa, and with it"),
    ],
    ids=str,
)
def test_mistakes_of_adapters_are_found_before_loading(
    lora: str | dict[str, object],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("saccade.resolution.load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    given = lora.format(good=adapters()["red"]) if isinstance(lora, str) else f"a={broken(tmp_path / 'a', **lora)}"
    with pytest.raises(SystemExit) as end:
        main(["serve", "-t", str(ready("qwen")), "--name", "tiny", "--lora", given, "--plan"])
    assert end.value.code == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_a_configuration_names_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "serve.toml"
    named = "".join(f'{name} = "{folder}"\n' for name, folder in adapters().items())
    path.write_text(f'[[models]]\ntarget = "{ready("qwen")}"\n[models.adapters]\n{named}')
    with pytest.raises(SystemExit) as end:
        main(["serve", "--config", str(path), "--plan"])
    assert end.value.code == 0
    assert f"adapter blue: {adapters()['blue']}" in capsys.readouterr().out
