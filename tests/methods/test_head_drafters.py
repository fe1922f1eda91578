"""A head's folder is a drafter like any other: in Python, on the command line, in `generate`, in suites."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import checkpoints
from checkpoints import picture, ready
from saccade import VLM, MethodError, ModelError, load
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.head import build_head
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.heads.store import load_head, save_head

QUESTION = "What is this?"


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


@cache
def head_folder(kind: str, family: str = "llava") -> Path:
    torch.manual_seed(0)
    path = Path(_folder().name) / f"{family}-{kind}"
    save_head(build_head(HeadConfig.from_target(checkpoints.vlm(family).target, kind)), path)
    return path


@cache
def with_head(kind: str, method: str | None = None, **options: Any) -> VLM:
    return load(ready("llava"), head_folder(kind), method, **options)


@cache
def plain_text() -> str:
    text: str = load(ready("llava"), method="plain").generate(QUESTION, [picture()]).text
    return text


@pytest.mark.parametrize("kind", ["eagle3", "vispec", "dream", "medusa", "kangaroo"])
def test_a_folder_picks_its_own_method(kind: str) -> None:
    vlm = with_head(kind)
    assert vlm.method == kind
    assert vlm.lossless
    assert isinstance(vlm.engine.drafter, HeadDrafter)
    output = vlm.generate(QUESTION, [picture()])
    assert output.text == plain_text()
    assert output.stats.drafted_tokens > 0


def test_options_reach_the_tree() -> None:
    drafter = with_head("hivis").using("hivis", top=3, max_depth=2, total=5).engine.drafter
    assert drafter is not None
    assert (drafter.max_depth, drafter.max_nodes, drafter.max_children) == (2, 6, 3)
    chain = with_head("hivis").using("hivis", tree="chain", gamma=7).engine.drafter
    assert chain is not None
    assert (chain.max_depth, chain.draws) == (7, True)


def test_a_head_needs_no_folder() -> None:
    vlm = load(ready("llava"), method="plain")
    head = load_head(head_folder("eagle2"), vlm.target)
    assert load(vlm.target.model, head).method == "eagle2"
    assert VLM(vlm.target.model, vlm.processor, drafter=head).generate(QUESTION, [picture()]).text == plain_text()


def test_a_head_s_dtype() -> None:
    def dtype(**options: Any) -> torch.dtype:
        head = load(ready("llava"), head_folder("hivis"), **options).head
        assert head is not None
        return next(head.parameters()).dtype

    assert dtype(dtype="bfloat16") == torch.float32  # a small one on a CPU
    assert dtype(draft_dtype="bfloat16") == torch.bfloat16
    rough = load(ready("llava"), head_folder("hivis"), draft_dtype="bfloat16")
    assert rough.generate(QUESTION, [picture()]).text == plain_text()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: with_head("hivis", "eagle2"),
            MethodError,
            "Method eagle2 needs a trained eagle2 head, but only the head hivis is given; give its folder",
        ),
        (lambda: with_head("hivis", "plain"), MethodError, "Method plain takes no drafter"),
        (
            lambda: load(ready("qwen"), head_folder("hivis")),
            ModelError,
            "made for another target: its model class",
        ),
        (lambda: with_head("hivis").using("chain"), MethodError, "Method chain needs a draft model"),
        (lambda: with_head("hivis", tree="bush"), MethodError, "tree of method hivis must be one of"),
        (lambda: load(ready("llava"), head_folder("hivis"), draft_dtype="int8"), ModelError, "dtype 'int8'"),
    ],
)
def test_what_does_not_fit_together_is_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_in_generate() -> None:
    from saccade import hf

    model = load(ready("llava"), method="plain").target.model
    head = load_head(head_folder("hivis"), load(model, method="plain").target)
    ids = torch.tensor([[5, 9, 12, 40, 7]])
    expected = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)
    speculation = hf.speculate(head, tree="chain", gamma=3)
    got = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False, custom_generate=speculation)
    assert got.tolist() == expected.tolist()
    assert speculation.outputs[0].stats.drafted_tokens > 0
    from_folder = hf.speculate(head_folder("hivis"), "hivis", tree="chain", gamma=3)
    again = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False, custom_generate=from_folder)
    assert again.tolist() == expected.tolist()
    assert from_folder.outputs[0].stats.accepted_histogram == speculation.outputs[0].stats.accepted_histogram
    with pytest.raises(MethodError, match="takes no drafter"):
        hf.speculate(head, "prompt-lookup")
    with pytest.raises(
        MethodError, match=r"a trained eagle2 head, but only the head hivis is given; .* choose method hi"
    ):
        hf.speculate(str(head_folder("hivis")), "eagle2")
    with pytest.raises(MethodError, match="no option gama; its options are: draft_with, tree, top"):
        hf.speculate(head, gama=3)


def test_a_suite_leaves_out_what_the_loaded_drafter_cannot_do() -> None:
    from saccade.bench.preparing import prepare
    from saccade.bench.suites import MethodEntry, Suite, TaskEntry

    entries = [MethodEntry("plain", "plain"), MethodEntry("hivis", "hivis")]
    more = (MethodEntry("eagle2", "eagle2", optional=True), MethodEntry("chain", "chain", optional=True))
    tasks = (TaskEntry(name="scene", task="scene"),)
    suite = Suite("s", "t", tasks, (*entries, *more), per_task=1)
    prepared = prepare(suite, with_head("hivis"), ("target", str(head_folder("hivis"))))
    assert list(prepared.methods) == ["plain", "hivis"]
    assert [m.split(":")[0] for m in prepared.missing] == ["Method eagle2", "Method chain"]
    models = prepared.models()
    assert models["drafter"] is None
    assert models["heads"]["hivis"]["type"] == "hivis"
    with pytest.raises(MethodError, match="needs a draft model"):
        prepare(Suite("s", "t", tasks, (*entries, MethodEntry("chain", "chain"))), with_head("hivis"))
