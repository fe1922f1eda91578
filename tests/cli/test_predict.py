"""What steps of a target and its drafter read, by their configurations alone, and the speed-up that follows."""

from __future__ import annotations

import json
from math import isclose
from pathlib import Path
from typing import Any

import pytest
from commands import Shell

from families import pristine
from saccade.errors import ModelError
from saccade.memory_plan import ModelSize, PairSize

QWEN = Path(__file__).parents[1] / "shapes" / "qwen2.5-vl-7b"
EMBEDDING = 152_064 * 3584
QWEN_3B = {"hidden_size": 2048, "intermediate_size": 11_008, "num_hidden_layers": 36, "num_attention_heads": 16}


def written(folder: Path, values: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


def qwen(folder: Path, **changes: Any) -> str:
    values = json.loads((QWEN / "config.json").read_text())
    values["vision_config"]["out_hidden_size"] = changes.get("hidden_size", 3584)
    return written(folder, {**values, **changes})


def eagle3(folder: Path, **changes: Any) -> str:
    """A head's config.json in SGLang's layout."""
    sizes = {"hidden_size": 3584, "intermediate_size": 18_944, "num_attention_heads": 28, "num_key_value_heads": 4}
    values = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "vocab_size": 152_064}
    return written(folder, {**values, "draft_vocab_size": 32_000, **sizes, **changes})


def test_a_draft_model_costs_its_share_of_the_weights_that_a_step_reads(tmp_path: Path) -> None:
    small = qwen(tmp_path / "3b", **QWEN_3B, num_key_value_heads=2, vocab_size=151_936, tie_word_embeddings=True)
    pair = PairSize.of(str(QWEN), small)
    assert isclose(pair.target.step() / 2, 7_070_619_136 - 3584, rel_tol=1e-4)  # all of the decoder but its embedding
    assert isclose(pair.cost, 0.436, rel_tol=0.01)
    assert (pair.verify_cost(6), pair.one_pass, pair.longest) == (1, False, 32)


def test_a_head_reads_its_own_weights_and_the_lm_head_that_it_shares(tmp_path: Path) -> None:
    shared, own = PairSize.of(str(QWEN), "hivis"), PairSize.of(str(QWEN), eagle3(tmp_path / "sgl"))
    assert isclose(shared.step / 2, shared.weights + EMBEDDING)
    assert isclose(own.step / 2, own.weights)  # an LM head of 32,000 tokens is among them
    assert own.weights == 402_803_200  # as `saccade train --plan` counts them
    assert PairSize.of(str(QWEN), "dflash").one_pass
    block = written(
        tmp_path / "block",
        json.loads((tmp_path / "sgl" / "config.json").read_text())
        | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": None, "dtype": "bfloat16"},
    )
    assert isclose(PairSize.of(str(QWEN), block).cost, PairSize.of(str(QWEN), "eagle2").cost, rel_tol=0.05)


def test_verifying_more_tokens_reads_more_experts() -> None:
    size = ModelSize("qwen3_vl_moe", pristine("qwen3_vl_moe").config)
    assert size.step() < size.step(2) < size.step(64) <= size.each * size.weights


def test_a_head_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="another target: its hidden size is 4096 but this target's is 3584"):
        PairSize.of(str(QWEN), eagle3(tmp_path / "head", hidden_size=4096))


def test_a_quantised_target_is_refused(tmp_path: Path) -> None:
    quantised = qwen(tmp_path / "q", quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(ModelError, match="is quantised, and its bytes are not known"):
        PairSize.of(quantised, "hivis")


def test_a_prediction_knows_verification_and_configurations(shell: Shell, tmp_path: Path) -> None:
    shown = " ".join(shell("predict", "-a", "0.8", "-c", "0.45", "-v", "1.6").out.split())
    assert "verify cost 1.6" in shown
    assert "speedup 0.958" in shown  # 3.69 / (5 * 0.45 + 1.6)
    table = shell("predict", "-t", str(QWEN), "-d", eagle3(tmp_path / "sgl")).out
    assert "drafter      403 million weights; a step reads 0.806 GB" in table
    assert "cost ratio   0.057" in table
    assert "0.70        2.94         2.29" in table


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-a", "0.8"], "Give either --cost, or --target and --drafter"),
        (["-c", "0.1"], "No acceptance is given; add --acceptance"),
        (["-a", "0.8", "-t", str(QWEN)], "Give either --cost, or --target and --drafter"),
        (["-c", "0.1", "-t", str(QWEN), "-d", "hivis"], "Give either --cost, or --target and --drafter"),
        (["-a", "0.8", "-c", "0.1", "-v", "0"], "--verify takes a number above 0, such as 1.6, not 0"),
        (["-a", "0.8", "-c", "0.1", "-v", "nowhere"], "nowhere"),
        (["-t", str(QWEN), "-d", "nobody/nothing"], "the hub could not give it"),
        (["-t", str(QWEN.parent), "-d", "hivis"], "has no config.json"),
    ],
)
def test_what_a_prediction_lacks_is_said_in_one_sentence(shell: Shell, arguments: list[str], sentence: str) -> None:
    assert sentence in shell("predict", *arguments).complaint
