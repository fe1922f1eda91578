"""Live servers for the tests of this folder that leave their settings alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from live_server import TINY, WORDS, Live, live

import saccade
from checkpoints import llama, tokenizer, vlm
from saccade.serve.configuration import ModelEntry

THINKER = (
    "<s>{% if tools %}{{ tools | tojson }} in <tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}{{ m.content }}{{ m.tool_calls }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% if enable_thinking %}<think>\n{% endif %}{% endif %}{# </think> #}"
)


@pytest.fixture(scope="session")
def shared() -> Iterator[Live]:
    with live([(TINY, vlm("qwen", "qwen-draft")), (WORDS, vlm("llama"))]) as server:
        yield server


@pytest.fixture(scope="module")
def pocket() -> Iterator[Live]:
    with live([(ModelEntry("pocket"), saccade.load("pocket", method="chain"))], kv_memory_mib=512) as server:
        yield server


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server of a tiny model whose template takes tools, and can open a thought."""
    tok, folder = tokenizer(), tmp_path_factory.mktemp("thinker")
    tok.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    llama(folder, seed=3, tok=tok)
    (folder / "chat_template.jinja").write_text(THINKER)
    with live([(ModelEntry("thinker"), saccade.load(folder))]) as server:
        yield server


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A server of a byte-level model whose answers end with its tokenizer's end."""
    pytest.importorskip("llguidance", reason="schemas need the serve or grammar extra")
    tok = tokenizer()
    folder = llama(tmp_path_factory.mktemp("writer") / "llama", tok=tok, answers=len(tok), seed=4)
    with live([(WORDS, saccade.load(folder, method="prompt-lookup"))]) as server:
        yield server


@pytest.fixture
def keys(tmp_path: Path) -> str:
    """A file of two API keys."""
    path = tmp_path / "keys"
    path.write_text("# two\nfirst\nsecond\n")
    return str(path)
