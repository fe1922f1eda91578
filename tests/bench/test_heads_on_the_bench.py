"""Heads and a draft model in one run: found by kind or name, their steps timed, the formulas beside them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from bench_kit import suite
from test_bench_metrics import record
from test_paper_tables import predictions
from test_paper_tables import run as run_of
from torch import Tensor

import saccade
from saccade.bench import cost
from saccade.bench.cost import Costs
from saccade.bench.preparing import prepare
from saccade.bench.records import RecordedRun
from saccade.bench.report.tables import contents
from saccade.bench.runner import Runner
from saccade.draft.heads.dflash import DFlash
from saccade.draft.heads.head import Head, HeadConfig, build_head
from saccade.draft.heads.registry import HEAD_KINDS
from saccade.errors import MethodError, SaccadeError
from saccade.model_spec import ModelSpec
from tools.results.paper_tables import predicted, step_times

METHODS: list[Any] = [
    "chain",
    {"name": "hivis", "tree": "chain"},
    {"name": "eagle2", "head": "text-only", "label": "blind"},
    {"name": "eagle2", "head": "all", "label": "seeing"},
    {"name": "dream", "label": "DREAM", "optional": True},
]


@pytest.fixture(scope="module")
def heads(vlm: saccade.VLM) -> dict[str, Head]:
    """Untaught ones for the tiny target."""
    torch.manual_seed(0)
    made = {"hivis": ("hivis", False), "text-only": ("eagle2", True), "all": ("eagle2", False)}
    configs = {
        name: HeadConfig.from_target(vlm.target, kind, **({"text_only": True} if blind else {}))
        for name, (kind, blind) in made.items()
    }
    return {name: build_head(config) for name, config in configs.items()}


@pytest.fixture(scope="module")
def headed(vlm: saccade.VLM, heads: dict[str, Head]) -> saccade.VLM:
    assert vlm.draft_model is not None
    drafter = {"drafter": vlm.draft_model.model, "draft_processor": vlm.draft_processor}
    return saccade.VLM(vlm.target.model, vlm.processor, heads=heads, **drafter)


@pytest.fixture(scope="module")
def made(headed: saccade.VLM, tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """Lossless methods are held to plain decoding's tokens while it runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "ROUNDS", 1)
        prepared = prepare(suite(methods=METHODS, per_task=1, turns=1), headed, ModelSpec("tiny", "tinier"))
        return Runner(prepared, tmp_path_factory.mktemp("runs") / "heads").run()


def test_one_run_has_them_all_and_says_which_head_was_which(made: RecordedRun) -> None:
    methods = {m["label"]: m["head"] for m in made.header.config["methods"]}
    heads = {"hivis-chain": "hivis", "blind": "text-only", "seeing": "all"}
    assert methods == {"plain": None, "chain": None, **heads}
    assert {r.method for r in made.records} == set(methods)
    assert all(r.equal for r in made.records if r.method != "plain")
    facts = made.header.models["heads"]
    kinds = {"hivis": "hivis", "text-only": "eagle2", "all": "eagle2"}
    assert {name: fact["type"] for name, fact in facts.items()} == kinds
    assert facts["text-only"]["options"]["text_only"] is True
    assert made.header.models["drafter"]["name"] == "tinier"
    (missing,) = [m for m in made.header.config["missing"] if m.startswith("Method")]
    assert missing.startswith(
        "Method DREAM: Method dream needs a trained dream head, but only a draft model and the heads hivis, "
    )


def test_every_head_has_a_step_time_and_a_prediction(made: RecordedRun) -> None:
    costs = Costs.of(made.header.costs)
    assert costs is not None
    assert set(costs.heads) == {"hivis", "text-only", "all"}
    table = step_times(made)
    assert table is not None
    assert [column.name for column in table.columns][-3:] == ["T_q ms, hivis", "T_q ms, text-only", "T_q ms, all"]
    assert contents([made])[0].name == "small, tiny with tinier, hivis, text-only, all"
    found = predictions(made)
    assert set(found) == {"chain", "hivis-chain", "blind", "seeing"}
    for label, head in (("hivis-chain", "hivis"), ("blind", "text-only"), ("seeing", "all")):
        assert found[label][-1] == pytest.approx(costs.heads[head] / costs.target_seconds(1), abs=1e-3)


def test_tabeds_formula_takes_a_head_s_own_step_and_depth() -> None:
    # As TABED's Appendix G.1 for a draft model: block efficiency 2.29, five steps of 0.063: 1.74.
    costs = Costs(kv=100, target={1: 2.0, 64: 2.0}, draft={1: 1.9}, heads={"mine": 0.126, "other": 1.0})
    records = [record("a", "plain", 2.0), record("a", "h", 1.0, histogram=(0, 71, 29), drafted=500)]
    run = run_of(records, costs)
    run.header.config["methods"] = [
        {"label": "plain", "needs": "nothing", "max_depth": 0, "head": None},
        {"label": "h", "needs": "head", "max_depth": 5, "head": "mine"},
    ]
    assert predictions(run)["h"][1] == 1.74
    assert predictions(run)["h"][-1] == 0.063
    run.header.config["methods"][1]["head"] = "gone"
    assert predicted(run) is None  # runs from before heads were timed


@pytest.mark.parametrize("kind", list(HEAD_KINDS))
def test_a_head_s_step_is_one_pass_of_the_head(kind: str, vlm: saccade.VLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that ticks once per forward of the head: not five, not one per chain, none of the prompt's.

    Of one forward that drafts all five tokens of a chain, each has a fifth.
    """
    head = build_head(HeadConfig.from_target(vlm.target, kind))
    passes: list[int] = []

    def count(head: Head, inputs: tuple[Any, ...], _: Tensor) -> None:
        if not isinstance(head, DFlash) or inputs[1] is not None:  # it also writes keys and values of the context
            passes.append(1)

    head.register_forward_hook(count)

    def ticks(call: Callable[[], object], device: torch.device) -> float:
        before = len(passes)
        call()
        return float(len(passes) - before)

    monkeypatch.setattr(cost, "_timed", ticks)
    monkeypatch.setattr(cost, "ROUNDS", 3)
    prompt = vlm.processor.prompt(suite_question(vlm))
    costs = cost.measure(vlm.target, prompt, None, prompt, heads={"mine": head})
    assert costs.heads == {"mine": 0.2 if kind in ("peagle", "dflash", "dflash2", "dspark") else 1.0}
    assert Costs.of(json.loads(json.dumps(asdict(costs)))) == costs


def suite_question(vlm: saccade.VLM) -> Any:
    """The messages of a question with a picture."""
    return next(iter(prepare(suite(), vlm).questions.values()))[0].turns[0].messages


def test_a_suite_names_heads_and_refuses_what_it_cannot_mean(headed: saccade.VLM) -> None:
    found = suite(methods=[{"name": "eagle2", "head": "text-only"}, {"name": "hivis", "top": 3}])
    assert [(m.label, m.head, m.options) for m in found.methods] == [
        ("plain", None, {}),
        ("eagle2-text-only", "text-only", {}),
        ("hivis-3", None, {"top": 3}),
    ]
    with pytest.raises(SaccadeError, match="head must be text, not 3"):
        suite(methods=[{"name": "eagle2", "head": 3}])
    for entry, message in (
        ({"name": "eagle2"}, r"Method eagle2 can use several heads \(text-only, all\)"),
        ({"name": "hivis", "head": "all"}, "The head all is of the kind eagle2"),
        ({"name": "chain", "head": "all"}, "Method chain takes no head"),
    ):
        with pytest.raises(MethodError, match=message):
            prepare(suite(methods=[entry]), headed)


def test_a_suite_leaves_out_what_the_loaded_drafter_cannot_do(vlm: saccade.VLM, heads: dict[str, Head]) -> None:
    alone = saccade.VLM(vlm.target.model, vlm.processor, drafter=heads["hivis"])
    optional = [{"name": name, "optional": True} for name in ("eagle2", "chain")]
    prepared = prepare(suite(methods=["hivis", *optional], per_task=1), alone, ModelSpec("target", "hivis"))
    assert list(prepared.methods) == ["plain", "hivis"]
    assert [m.split(":")[0] for m in prepared.missing if m.startswith("Method")] == ["Method eagle2", "Method chain"]
    models = prepared.models()
    assert models["drafter"] is None
    assert models["heads"]["hivis"]["type"] == "hivis"
    with pytest.raises(MethodError, match="needs a draft model"):
        prepare(suite(methods=["chain"]), alone)
