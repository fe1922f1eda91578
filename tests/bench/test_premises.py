"""The papers' premises: planted ones are found, planted mistakes are seen, and the command says what it lacks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from commands import Shell
from transformers import LlamaConfig

import saccade
from families import FAMILIES
from harness import prompt, target
from saccade.bench.answering import answer_turns
from saccade.bench.cost import Costs
from saccade.bench.metrics import Array
from saccade.bench.premises import PAPERS, auc, dream, hivis, lvspec, sage, tabed
from saccade.bench.probe import GAMMA, LEXICON, PROXY, Answer, Probe, lexicon, steps
from saccade.bench.questions import gather
from saccade.bench.suites import parse
from saccade.cli import screen
from saccade.errors import ModelError
from saccade.inputs.families import family_of
from saccade.pocket import draw

NEVER = np.zeros(40, bool)


def answered(hits: Array = NEVER, content: Array = NEVER, truth: str = LEXICON, **parts: Any) -> Answer:
    """An answer that the drafter errs on at every token, unless other hits are given."""
    truths = {PROXY: content} | {truth: content}
    return Answer(**{"relevance": 0.0 * hits, "depends": truths, "touches": truths, "hits": {"M": hits}, **parts})


@pytest.mark.parametrize("gamma", [2, 5])
def test_steps_that_follow_from_matches_are_those_that_the_engine_takes(pair: tuple[str, str], gamma: int) -> None:
    vlm = saccade.load(*pair, "chain", gamma=gamma)
    for question in gather(parse({"tasks": ["scene"], "methods": ["plain"], "per_task": 2}, "small", "x"))[0]["scene"]:
        record = answer_turns(vlm, "", question, 0, options={"max_new_tokens": 24}, seed=0)[0].record
        hits = Probe(vlm).read(vlm.processor.prompt(question.turns[0].messages), record.tokens).drafted
        first = record.stats["prefill_tokens"] - 1  # of the prompt's last pass, which verifies a draft, too
        assert len(steps(hits[first:], gamma)[0]) == record.stats["target_passes"]


def test_visual_vectors_are_told_from_those_of_text(pair: tuple[str, str]) -> None:
    vlm = saccade.load(*pair, "chain")
    with torch.no_grad():
        vlm.target.model.get_input_embeddings().weight.mul_(1e-3)
    (question,) = gather(parse({"tasks": ["scene"], "methods": ["plain"], "per_task": 1}, "small", "x"))[0]["scene"]
    probe = Probe(vlm)
    probe.read(vlm.processor.prompt(question.turns[0].messages), [5, 6, 7])
    assert probe.sizes["inputs, visual"][0].mean() > 20 * probe.sizes["inputs, text"][0].mean()  # not swapped


def refuse(*_: Any, **__: Any) -> None:
    raise ModelError("It has attention code of its own.")


def test_a_target_whose_attention_cannot_be_read_is_measured_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.bench.probe.AttentionProbe", refuse)
    words = SimpleNamespace(text_only=lambda _: prompt("llava", "text"))
    own = SimpleNamespace(target=target("llava"), drafts_from_prompts=False, draft_model=None, processor=words)
    probe = Probe(own)  # type: ignore[arg-type]
    probe.read(prompt("llava", "image"), [7, 8, 9])
    assert (probe.attention, probe.unread) == ({}, "It has attention code of its own.")
    assert len(probe.sizes["inputs, visual"]) == 1


@pytest.mark.parametrize("name", ["llava", "gemma3", "qwen2_5_vl"])
def test_attention_to_visual_tokens_is_that_of_an_eager_target_reading_its_answer(name: str) -> None:
    asked, words, tokens = prompt(name, "image"), prompt(name, "text"), [7, 8, 9, 10]
    own = SimpleNamespace(target=target(name), drafts_from_prompts=False, draft_model=None)
    own.processor = SimpleNamespace(text_only=lambda _: words)
    probe, eager = Probe(own), FAMILIES[name].model()  # type: ignore[arg-type]
    probe.read(asked, tokens)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        layers = eager(**FAMILIES[name].continued("image", 0, tokens), output_attentions=True).attentions
    visual, end = target(name).family.visual_mask(asked.ids), len(asked)
    rows = {"the prompt after them": slice(int(visual.nonzero()[-1]) + 1, end), "the answer": slice(end, end + 3)}
    for whose, queries in rows.items():
        expected = [float(layer[0, :, queries, :end][..., visual].sum(-1).mean()) for layer in layers]
        assert probe.attention[whose][0] == pytest.approx(expected, abs=1e-5), whose


@pytest.mark.parametrize(("visual", "expected"), [(3, "win"), (0.4, "win"), (1.9, "level"), (0.6, "level")])
def test_a_gap_between_the_modalities_counts_in_both_directions(visual: float, expected: str) -> None:
    sizes = {"inputs, visual": [np.full(5, visual)] * 12, "inputs, text": [np.ones(2)] * 12}
    found, verdict = hivis(sizes, {"the answer": [np.array([0.5, 0.1, 0.3]), np.array([0.7, 0.1, 0.1])]})
    assert (found.pop("RMS of inputs, text"), verdict) == (1, expected)
    assert list(found.values()) == pytest.approx([visual, 0.6, 0.15])
    assert hivis({name: each[1:] for name, each in sizes.items()}, {})[1].startswith("too few: 11 of 12 answers (raise")


@pytest.mark.parametrize(("steps", "memory", "expected"), [(9, 0, "level"), (9, 0.1, "win"), (200, 0.3, "win")])
def test_entropy_lasts_where_it_exceeds_a_series_without_memory(steps: int, memory: float, expected: str) -> None:
    """In short answers its correlation is below 0 even where it lasts; pooled over answers it would be near 1."""
    rng = np.random.default_rng(0)
    series = [np.convolve(rng.normal(size=steps + 1), [1, memory], "valid") + 9 * level for level in range(600)]
    found, verdict = sage([answered(np.zeros(steps, bool), confidence=each) for each in series])
    assert (found["of a series without memory"], verdict.split(" (")[0]) == (pytest.approx(-1 / steps), expected)


@pytest.mark.parametrize(("period", "missed", "depths", "expected"), [(20, 1, "8, 5", "win"), (8, 4, "3, 5", "lose")])
def test_without_memory_deeper_trees_win_and_shallower_ones_lose(
    period: int, missed: int, depths: str, expected: str
) -> None:
    hits = np.arange(200) % period >= missed
    found, verdict = sage([answered(hits, confidence=np.random.default_rng(i).random(200)) for i in range(12)])
    assert (verdict.split(" (")[0], list(found.values())[-2]) == (expected, depths)
    ends = np.random.default_rng(0).normal(size=(12, 200))
    ends[:, 1::2] = ends[:, 1::2].cumsum(1)
    assert "alpha_of=accepted" in sage([answered(np.arange(200) % 2 == 0, confidence=each) for each in ends])[1]
    short, level = answered(NEVER[:6], confidence=np.arange(6.0)), answered(confidence=np.ones(40))
    assert sage([short, level] * 12)[1].startswith("too few: 0 of 12 answers of 8 steps")


@pytest.mark.parametrize(("noise", "expected"), [(0.5, "win"), (2.2, "level"), (9.0, "lose")])
def test_relevance_that_marks_content_wins_and_that_of_noise_loses(noise: float, expected: str) -> None:
    rng = np.random.default_rng(0)
    contents = [rng.random(40) < 0.25 for _ in range(12)]
    found, verdict = lvspec([answered(content=each, relevance=each + noise * rng.random(40)) for each in contents])
    assert verdict == expected, found
    in_order = 1 - max(1 - 1 / noise, 0) ** 2 / 2  # of uniform noise
    assert found["AUC of relevance on mismatches, lexicon"].value == pytest.approx(in_order, abs=0.04)
    assert found["of them among the 70% least relevant tokens"].value == pytest.approx(0.7, abs=0.02)
    assert found["tokens that depend on what is seen, lexicon"].value == pytest.approx(np.mean(contents))


def test_few_mismatches_decide_nothing_and_leave_no_nan() -> None:
    unknown, expected = lvspec([answered(np.ones(40, bool), truth=PROXY)] * 12)
    assert unknown["truth"].startswith("the proxy alone")
    assert unknown["AUC of relevance on mismatches, proxy"] is None
    assert expected.startswith("too few: 0 of 50 forgiven mismatches")
    assert lvspec([answered()] * 11)[1].startswith("too few: 11 of 12 answers")


def test_the_area_under_the_curve_is_the_share_of_pairs_in_order() -> None:
    rng = np.random.default_rng(0)
    values, truth = rng.integers(0, 4, 60).astype(float), rng.random(60) < 0.4
    pairs = [(a > b) + 0.5 * (a == b) for a in values[truth] for b in values[~truth]]
    assert auc(values, truth) == pytest.approx(np.mean(pairs))
    assert np.isnan(auc(values, truth & False))


@pytest.mark.parametrize(("misses", "expected"), [(40, "win"), (2, "level"), (0, "lose")])
def test_views_that_take_turns_leave_something_to_gain_and_equal_ones_nothing(misses: int, expected: str) -> None:
    weaker = np.arange(40) % 20 >= misses / 2
    turns = [{"M": ~NEVER, "T": weaker} if i % 3 else {"M": weaker, "T": ~NEVER} for i in range(12)]
    answers = [replace(answered(), hits=hits) for hits in turns]
    found, verdict = tabed(answers, {"C": "no captions"})
    assert (found["view C"], verdict) == ("no captions", expected)
    assert found["prompts on which another view is ahead of the best"] == pytest.approx(1 / 3 if misses else 0)
    assert tabed(answers[1:], {})[1].startswith("too few")
    assert tabed([answered()] * 12, {})[1].startswith("not measured")


@pytest.mark.parametrize(("head", "expected"), [(0.05, "win"), (0.19, "level"), (0.5, "lose")])
def test_a_head_that_costs_more_than_the_draft_model_must_accept_more(head: float, expected: str) -> None:
    costs = Costs(100, {1: 1.0, GAMMA + 1: 1.0}, {1: 0.2}, {"dream": head})
    always = [answered(np.ones(60, bool))] * 12
    found, verdict = dream(costs, always)
    assert found["its expected speed over plain decoding"] == pytest.approx(6 / 2)
    assert found["tokens per pass with which DREAM's chain is as fast"] == pytest.approx(3 * (1 + 5 * head))
    assert (verdict, dream(costs, always[1:])[1][:8]) == (expected, "too few:")


def test_words_of_several_tokens_name_what_is_seen_with_all_of_them() -> None:
    pieces = ["A", " se", "v", "ent", "een", " rings", ",", " that", " are", " red", "1"]
    names = lexicon(lambda ids: pieces[ids[0]])(list(range(len(pieces))))
    assert "".join(np.array(pieces)[names]) == " seventeen rings red1"


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(capsys, monkeypatch)


def test_all_premises_of_a_pair_are_printed_and_parsed(pair: tuple[str, str], shell: Shell, tmp_path: Path) -> None:
    arguments = ("premises", "-t", pair[0], "-d", pair[1], "-n", "16", "--count", "2", "--prompts")
    found = json.loads(shell(*arguments, "scene", "--json").out, parse_constant=pytest.fail)  # of NaN and infinities
    assert (found["answers"], list(found["methods"])) == (2, list(PAPERS))
    assert len(found["methods"]["TABED"]["measured"]["tokens per pass, P"]) == 3
    assert "truth" not in found["methods"]["LVSpec"]["measured"]
    draw(0, "scene").image.save(tmp_path / "0.png")
    row = {"image": "0.png", "conversations": [{"from": "human", "value": "<image>What is this?"}]}
    (tmp_path / "scene.jsonl").write_text(json.dumps(row))
    out = shell(*arguments, tmp_path / "scene.jsonl").out
    assert "the proxy alone" in out, "a file named like a pocket task is not the pocket's"
    assert out.splitlines()[-1].startswith("From 1 answer: HiViS, LVSpec, TABED and DREAM too few: 1 of 12 answers (")


def test_without_a_draft_vlm_the_rest_is_measured(
    pair: tuple[str, str], shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("saccade.bench.probe.AttentionProbe", refuse)
    out = shell("premises", "-t", pair[0], "--prompts", "scene", "--count", "1", "-n", "8").out
    assert "TABED and DREAM not measured: there is no draft VLM (give one with --drafter)." in out.splitlines()[-1]
    assert "T_q / T_p, fresh dream" in out
    assert "It has attention code of its own." in out


def test_targets_without_pictures_and_wrong_prompts_are_refused(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    blind = SimpleNamespace(target=SimpleNamespace(family=family_of(LlamaConfig())))
    monkeypatch.setattr(screen, "load_models", lambda models: blind)
    assert shell("premises").complaint.startswith("The target takes no pictures, which the premises are about; give")
    assert "Cannot read the prompts in none" in shell("premises", "--prompts", "none/such.jsonl").complaint
