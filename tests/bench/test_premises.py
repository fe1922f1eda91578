"""The papers' premises: planted ones are found, planted mistakes are seen, and the command says what it lacks."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

import saccade
from saccade.bench.answering import answer_turns
from saccade.bench.cost import Costs
from saccade.bench.metrics import Array
from saccade.bench.questions import gather
from saccade.bench.suites import parse
from saccade.cli import execute, screen
from saccade.inputs.families import family_of
from tools.results.expectations import PAPERS, auc, dream, hivis, lvspec, sage, tabed
from tools.results.premises import app, lexicon
from tools.results.probe import GAMMA, Answer, Moments, Probe, steps

RNG = np.random.default_rng(0)


def answered(count: int = 40, **parts: Any) -> Answer:
    """An answer that the drafter errs on at every token, unless told otherwise."""
    never = np.zeros(count, bool)
    return Answer(**{"relevance": np.zeros(count), "grounded": never, "content": never, "hits": {"M": never}, **parts})


@pytest.mark.parametrize("gamma", [2, 5])
def test_steps_that_follow_from_matches_are_those_that_the_engine_takes(pair: tuple[str, str], gamma: int) -> None:
    vlm = saccade.load(*pair, "chain", gamma=gamma)
    probe = Probe(vlm)
    for question in gather(parse({"tasks": ["scene"], "methods": ["plain"], "per_task": 2}, "small", "x"))[0]["scene"]:
        record = answer_turns(vlm, "", question, 0, options={"max_new_tokens": 24}, seed=0)[0].record
        hits = probe.read(vlm.processor.prompt(question.turns[0].messages), record.tokens).hits["M"]
        first = record.stats["prefill_tokens"] - 1  # of the prompt's last pass, which verifies a draft, too
        assert len(steps(hits[first:], gamma)[0]) == record.stats["target_passes"]


def test_visual_vectors_are_told_from_those_of_text(pair: tuple[str, str]) -> None:
    vlm = saccade.load(*pair, "chain")
    with torch.no_grad():
        vlm.target.model.get_input_embeddings().weight.mul_(1e-3)
    (question,) = gather(parse({"tasks": ["scene"], "methods": ["plain"], "per_task": 1}, "small", "x"))[0]["scene"]
    probe = Probe(vlm)
    probe.read(vlm.processor.prompt(question.turns[0].messages), [5, 6, 7])
    visual, text = probe.moments["inputs"]
    assert visual.rms > 20 * text.rms  # not with the roles swapped


def test_a_gap_between_the_modalities_is_measured_with_its_direction() -> None:
    def moments(vectors: torch.Tensor) -> Moments:
        made = Moments()
        made.add(vectors[:3])
        made.add(vectors[3:])
        return made

    text = torch.ones(8, 4)
    found, expected = hivis({"inputs": (moments(-3 * text), moments(text)), "last states": (moments(text),) * 2})
    assert found["RMS of inputs, visual and text"] == pytest.approx([3, 1])
    assert found["cosine of the means of inputs"] == pytest.approx(-1)
    assert found["distance of the means of inputs, in RMS of text"] == pytest.approx(4)
    assert expected == "win"
    assert hivis({"inputs": (moments(text), moments(text))})[1] == "level"


def test_certainty_is_compared_within_answers_and_never_over_their_borders() -> None:
    levels = [answered(confidence=RNG.normal(0, 0.1, 40) + level) for level in range(12)]
    found, expected = sage(levels)  # pooled over borders it would be near 1
    assert abs(found["entropy behind the root and one step later, correlation"].value) < 0.2
    assert expected == "lose"
    lasting = [answered(confidence=np.cumsum(RNG.normal(size=40))) for _ in range(12)]
    assert sage(lasting)[1] == "win"
    assert sage([answered(6, confidence=np.arange(6.0))])[1].startswith("not measured")


def test_relevance_that_marks_content_wins_and_that_of_noise_loses() -> None:
    def answers(of: Any) -> list[Answer]:
        contents = [RNG.random(40) < 0.25 for _ in range(8)]
        return [answered(content=content, relevance=of(content)) for content in contents]

    found, expected = lvspec(answers(lambda content: content + RNG.random(40) / 2))
    assert found["AUC of relevance on mismatches, lexicon"].value == 1
    assert expected == "win"
    found, expected = lvspec(answers(lambda content: RNG.random(40)))
    assert found["of them among the 70% least relevant tokens"].value == pytest.approx(0.7, abs=0.02)
    assert found["AUC of relevance on mismatches, lexicon"].value == pytest.approx(0.5, abs=0.1)
    assert expected == "lose"
    unknown = [answered(content=None, grounded=RNG.random(40) < 0.5) for _ in range(8)]
    assert "none at hand" in lvspec(unknown)[0]["truth"]
    assert lvspec([answered(hits={"M": np.ones(40, bool)})])[1].startswith("not measured")


def test_the_area_under_the_curve_is_the_share_of_pairs_in_order() -> None:
    values, truth = RNG.integers(0, 4, 60).astype(float), RNG.random(60) < 0.4
    pairs = [(a > b) + 0.5 * (a == b) for a in values[truth] for b in values[~truth]]
    assert auc(values, truth) == pytest.approx(np.mean(pairs))
    assert np.isnan(auc(values, truth & False))


def test_views_that_take_turns_leave_something_to_gain_and_equal_ones_nothing() -> None:
    good, bad = np.ones(30, bool), np.zeros(30, bool)
    turns = [answered(30, hits={"M": good, "T": bad} if i % 3 else {"M": bad, "T": good}) for i in range(12)]
    found, expected = tabed(turns, {"C": "no captions"})
    assert found["prompts on which another view is ahead of the best"] == pytest.approx(1 / 3)
    assert found["view C"] == "no captions"
    assert expected == "win"
    assert tabed([answered(30, hits={"M": good, "T": good})] * 12, {})[1] == "lose"
    assert tabed([answered()] * 2, {})[1].startswith("not measured")


@pytest.mark.parametrize(("head", "expected"), [(0.05, "win"), (0.2, "level"), (0.5, "lose")])
def test_a_head_that_costs_more_than_the_draft_model_must_accept_more(head: float, expected: str) -> None:
    costs = Costs(100, {1: 1.0, GAMMA + 1: 1.0}, {1: 0.2}, {"dream": head})
    always: Array = np.ones(60, bool)
    stats = [{"seconds": {"draft": 0.5, "verify": 0.5}}]
    found, verdict = dream(costs, [answered(60, hits={"M": always})] * 4, stats)
    assert found["its expected speed over plain decoding"] == pytest.approx(6 / 2)
    assert found["tokens per pass with which DREAM's chain is as fast"] == pytest.approx(3 * (1 + 5 * head))
    assert verdict == expected


def test_words_of_several_tokens_name_what_is_seen_with_all_of_them() -> None:
    pieces = ["A", " se", "v", "ent", "een", " rings", ",", " that", " are", " red", "1"]
    names = lexicon(lambda ids: pieces[ids[0]])(list(range(len(pieces))))
    assert "".join(np.array(pieces)[names]) == " seventeen rings red1"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        execute(app, "python -m tools.results premises", arguments)
    shown = capsys.readouterr()
    return int(str(left.value.code or 0)), shown.out, shown.err


def test_all_premises_of_a_pair_are_printed_and_parsed(
    pair: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("-t", pair[0], "-d", pair[1], "--prompts", "scene", "--count", "2", "-n", "16")
    code, out, _ = run(capsys, *arguments, "--json")
    found = json.loads(out)
    assert (code, found["answers"]) == (0, 2)
    assert list(found["methods"]) == list(PAPERS)
    assert len(found["methods"]["TABED"]["measured"]["tokens per pass, P"]) == 3
    code, out, _ = run(capsys, *arguments)
    assert "RMS of inputs, visual and text" in out
    assert out.splitlines()[-1].startswith("From 2 answers: HiViS ")


def test_without_a_draft_vlm_the_rest_is_measured(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "-t", pair[0], "--prompts", "scene", "--count", "1", "-n", "8")
    assert code == 0
    assert out.count("Expected: not measured: there is no draft VLM; give one with --drafter") == 4
    assert "T_q / T_p, fresh dream" in out


def test_a_target_without_pictures_and_wrong_prompts_are_refused_in_a_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blind = SimpleNamespace(target=SimpleNamespace(family=family_of(LlamaConfig())))
    monkeypatch.setattr(screen, "load_models", lambda models: blind)
    assert run(capsys)[2] == (
        "saccade: The target takes no pictures, which the premises are about; give a VLM with --target.\n"
    )
    code, _, complaint = run(capsys, "--prompts", "none/such.jsonl")
    assert code == 2
    assert complaint.startswith("saccade: Cannot read the prompts in none/such.jsonl")
