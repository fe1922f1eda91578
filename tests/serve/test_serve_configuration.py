"""Configuration of a server: checked before anything loads."""

from __future__ import annotations

import re
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from checkpoints import ready, vlm
from saccade.cli import main
from saccade.cli.serve import serve
from saccade.serve import server
from saccade.serve.answers import StopCutter
from saccade.serve.app import make_app
from saccade.serve.configuration import ConfigError, Limits, ModelEntry, ServerConfig, read_config
from saccade.serve.refusals import Refusal
from saccade.serve.service import Gate

GOOD = """
[server]
port = 9000
[limits]
max_rows = 3
[media]
domains = ["images.example.com"]
[[models]]
name = "words"
target = "{words}"
method = "prompt-lookup"
[models.profiles.long]
method = "prompt-lookup"
gamma = 20
[[models]]
name = "tiny"
target = "{tiny}"
drafter = "{draft}"
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "serve.toml"
    names = {"words": ready("llama"), "tiny": ready("qwen"), "draft": ready("qwen-draft")}
    for name, folder in names.items():
        text = text.replace("{" + name + "}", str(folder))
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("entry", [{"options": {"store": "a"}}, {"profiles": {"copy": {"store": "a"}}}])
def test_a_store_of_answers_that_no_request_may_use_is_refused(entry: dict[str, Any]) -> None:
    models = (ModelEntry("pocket", **entry),)
    assert ServerConfig(models).reuse_prefixes
    with pytest.raises(ConfigError, match="would keep nothing"):
        ServerConfig(models, reuse_prefixes=False)


def test_the_plan_of_several_models_loads_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.resolution.load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    with pytest.raises(SystemExit) as end:
        main(["serve", "--config", written(tmp_path, GOOD), "--max-queue", "5", "--host", "::1", "--plan"])
    assert end.value.code == 0
    plan = capsys.readouterr().out
    assert "http://::1:9000" in plan
    assert "3 per batch" in plan
    assert "5 requests may wait" in plan
    assert "profile long: method=prompt-lookup, gamma=20" in plan
    assert "model     tiny" in plan


def test_plans_need_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, draft = (shutil.copytree(ready(name), tmp_path / name) for name in ("llava", "llava-draft"))
    for file in (*target.glob("*.safetensors"), *draft.glob("*.safetensors")):
        file.unlink()
    items = tmp_path / "items.jsonl"
    items.write_text('{"prompt": "What?"}\n')
    for command in (["serve"], ["batch", str(items), "-o", str(tmp_path / "out.jsonl")]):
        with pytest.raises(SystemExit) as end:
            main([*command, "-t", str(target), "-d", str(draft), "--plan"])
        assert end.value.code == 0, capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["generate", "-t", str(target), "-d", str(draft), "What?"])
    assert "has no weights" in capsys.readouterr().err


def test_options_of_a_model_are_not_dropped_beside_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", "--config", written(tmp_path, GOOD), "-m", "chain", "--set", "gamma=3", "--exact", "--plan"])
    assert end.value.code == 2
    assert "saccade: --name and options of models are for a --target; the models of " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("port = 9000", "prot = 9000", "unknown key 'server.prot'"),
        ("port = 9000", 'port = "x"', "server.port must be a whole number"),
        ("port = 9000", "port = 99999", "from 0 to 65535"),
        ("max_rows = 3", "max_rows = 0", "limits.max_rows must be at least 1"),
        ("max_rows = 3", "rows = 3", "unknown key 'limits.rows'"),
        ('domains = ["images.example.com"]', "paths = true", "reads no paths"),
        ('name = "tiny"', 'name = "words"', "Two models are named 'words'"),
        ('name = "tiny"', 'nme = "tiny"', "unknown key"),
        ("gamma = 20", "gama = 20", "serve.toml, model words: profile long: Method prompt-lookup has"),
        ('method = "prompt-lookup"\n[', 'method = "nope"\n[', "serve.toml, model words: Unknown method 'nope'"),
        ("max_rows = 3", "max_queue = -1", "serve.toml: limits.max_queue must be at least 0"),
        ("port = 9000", "file = 'a'", "unknown key 'server.file'"),
        ("profiles.long", "profiles.off", "has the name of a method"),
        ('drafter = "{draft}"', 'drafter = "/nowhere/at/all"', "no folder '/nowhere/at/all'"),
        ('drafter = "{draft}"', 'drafter = "{words}"\nmethod = "hivis"', "hivis"),
    ],
)
def test_every_mistake_is_found_before_loading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, words: str
) -> None:
    assert old in GOOD
    with pytest.raises(SystemExit) as end:
        main(["serve", "--config", written(tmp_path, GOOD.replace(old, new)), "--plan"])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


def test_the_configurations_of_the_docs_are_read(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    example = (root / "docs" / "serve.md").read_text(encoding="utf-8").partition("```toml\n")[2].partition("```")[0]
    (tmp_path / "serve.toml").write_text(example)
    assert [model.label for model in read_config(tmp_path / "serve.toml").models] == ["qwen", "pocket"]
    assert read_config(root / "docker" / "serve.toml").models[0].method == "chain"


def test_a_taken_port_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SystemExit):
            main(["serve", "-t", str(ready("llama")), "--port", str(taken.getsockname()[1])])
    assert "choose another --port" in capsys.readouterr().err


def gate(clock: Callable[[], float] = time.monotonic, **config: Any) -> Gate:
    return Gate(ServerConfig((ModelEntry("pocket"),), **config), clock)


def scope(**headers: str) -> dict[str, Any]:
    """A request's head."""
    return {"type": "http", "headers": [(name.encode(), value.encode()) for name, value in headers.items()]}


def test_the_case_of_host_names_does_not_matter() -> None:
    door = gate(allowed_hosts=("Models.Example.com",))
    for host in ("models.example.com", "Models.Example.com:8000", "MODELS.EXAMPLE.COM"):
        door.client(scope(host=host))
    with pytest.raises(Refusal, match="is not served"):
        door.client(scope(host="example.com"))


def test_a_key_file_without_keys_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# none yet\n")
    path = written(tmp_path, GOOD.replace("port = 9000", f'api_key_file = "{tmp_path}/keys"'))
    with pytest.raises(ConfigError, match="holds no API key"):
        read_config(path).keys()


@pytest.mark.parametrize("models", [[], ["-t", "pocket", "--api-key-file"]])
def test_a_file_that_cannot_be_read_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], models: list[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", *(models or ["--config"]), str(tmp_path / "none"), "--plan"])
    assert "none: No such file or directory; give a " in capsys.readouterr().err


def test_keys_are_compared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SACCADE_API_KEYS", "right,other")
    keys = gate(host="0.0.0.0")
    name = keys.client(scope(authorization="Bearer right"))
    assert name == keys.client(scope(authorization="bearer right")) != keys.client(scope(authorization="Bearer other"))
    for wrong in ("right", "Bearer righ", "Bearer rightx", "Bearer ", ""):
        with pytest.raises(Refusal, match="API key"):
            keys.client(scope(authorization=wrong))


def test_a_minute_later_a_client_may_ask_again() -> None:
    now = [0.0]
    door = gate(lambda: now[0], limits=Limits(requests_per_minute=2))
    for _ in range(2):
        with door.request("a"):
            pass
    with pytest.raises(Refusal) as refused, door.request("a"):
        pass
    assert refused.value.retry_after == 60
    with door.request("b"):
        pass
    now[0] = 60.0
    with door.request("a"):
        pass


def test_a_request_that_fails_is_no_longer_under_way() -> None:
    door = gate(limits=Limits(requests_per_key=1))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), door.request("a"):
            raise ZeroDivisionError
    with door.request("a"), pytest.raises(Refusal, match="1 concurrent requests"), door.request("a"):
        pass


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_text_before_a_stop_string_is_the_same_for_any_pieces(size: int) -> None:
    text, stops = "aab aabc aabcd end", ["aabcd", "bcx", "nothing"]
    cutter, text_before = StopCutter(stops), ""
    for start in range(0, len(text), size):
        text_before += cutter.add(text[start : start + size])
    assert text_before + cutter.add("", last=True) == "aab aabc "
    assert cutter.stopped


def test_the_help_names_every_route() -> None:
    app = make_app(ServerConfig((ModelEntry("words"),)), [vlm("llama")])
    routes = {route.path.replace(":path", "") for route in app.routes if isinstance(route, APIRoute)} - {
        "/v1/models/{name}"  # one of those at /v1/models
    }
    words = set(re.findall(r"`(/[^`]*)`", serve.__doc__ or ""))
    assert words == routes | {"/"}


@pytest.mark.parametrize("exact", [False, True])
def test_the_start_message_says_what_bfloat16_may_change(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    announcements: list[str] = []

    class Silent:
        def __init__(self, config: ServerConfig, app: object, announcement: str) -> None:
            announcements.append(announcement)

        def run(self, sockets: list[socket.socket]) -> None:
            sockets[0].close()

    monkeypatch.setattr(server, "Server", Silent)
    entry = ModelEntry(str(ready("llama")), name="words", dtype="bfloat16", exact=exact)
    server.serve(ServerConfig((entry,), port=0))
    assert announcements[0].startswith("Serving words on")
    assert announcements[0].count("exact mode (--exact) prevents that") == (not exact)
