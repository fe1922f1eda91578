"""EAGLE-3 heads with a vocabulary of their own, and folders in the layouts in which heads are released."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from heads_kit import random_head
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import picture, ready
from saccade import load
from saccade.cli import app
from saccade.draft.heads.config import HeadConfig
from saccade.draft.heads.eagle import Eagle3
from saccade.draft.heads.head import Head
from saccade.draft.heads.store import kind_at
from saccade.hf import speculate
from saccade.target_model.adapter import Target

KNOWN = 40
QUESTION = "What is this?"
AnyHead = TypeVar("AnyHead", bound=Head)


def randomised(head: AnyHead) -> AnyHead:
    """No norm stays one, so that two of them cannot change places unseen; and tokens from all over the vocabulary."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for name, weight in head.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
        if isinstance(head, Eagle3) and head.has_lm_head:
            count, every = len(head.token_ids), head.config.vocab_size
            head.token_ids.copy_(torch.randperm(every)[:count].sort().values)
    return head.eval()


@cache
def original(name: str = "llava", known: int = KNOWN) -> Eagle3:
    head = random_head(name, "eagle3", own_vocabulary=known)
    assert isinstance(head, Eagle3)
    return randomised(head)


def released(head: Eagle3, folder: Path, to: Target, block: str = "midlayer.", binary: bool = False) -> Path:
    """Write a head as it would have been released, for a target of the same shape."""
    config, weights = head.config, dict(head.state_dict())
    ids = weights.pop("token_ids")
    theirs = {"fc.weight": weights["fc.weight"], "norm.weight": weights["norm.weight"]}
    theirs["lm_head.weight"] = weights["lm_head.weight"]
    theirs[f"{block}input_layernorm.weight"] = weights["embedding_norm.weight"]
    theirs[f"{block}hidden_norm.weight"] = weights["feature_norm.weight"]
    for name, weight in weights.items():
        if name.startswith(("self_attn.", "mlp.", "post_attention_layernorm.")):
            theirs[block + name] = weight
    theirs["embed_tokens.weight"] = to.model.get_input_embeddings().weight
    if len(ids) < config.vocab_size:
        theirs["d2t"] = ids - torch.arange(len(ids))
        theirs["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    own = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(ids)}
    return write(folder, config, theirs, binary, **own)


def write(folder: Path, config: HeadConfig, weights: dict[str, Tensor], binary: bool = False, **more: Any) -> Path:
    """Weights in one of the two formats, and a Llama's config.json, in which some settings are others."""
    theirs = {name: weight.detach().clone() for name, weight in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    if binary:
        torch.save(theirs, folder / "pytorch_model.bin")
    else:
        save_file(theirs, folder / "model.safetensors")
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "max_position_embeddings": 2048,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope["rope_theta"],
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
        **more,
    }
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def drop(folder: Path, *keys: str) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if k not in keys}))


def reweigh(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def same(one: Head, other: Any) -> None:
    assert type(other) is type(one)
    assert other.config == one.config
    theirs, ours = one.state_dict(), other.state_dict()
    assert set(theirs) == set(ours)
    for name, weight in theirs.items():
        assert ours[name].dtype == weight.dtype
        assert torch.equal(ours[name], weight), name


def assert_taken_everywhere(folder: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Loaded as a drafter and by name, in Hugging Face's `generate`, and on the command line."""
    assert kind_at(folder) == kind
    plain = load(ready("llava"), method="plain").generate(QUESTION, [picture()]).text
    vlm = load(ready("llava"), drafter=folder)
    assert vlm.method == kind
    output = vlm.generate(QUESTION, [picture()])
    assert output.text == plain
    assert output.stats.drafted_tokens > 0
    named = load(ready("llava"), heads={"small": folder}, method=kind)
    assert named.generate(QUESTION, [picture()]).text == plain

    model, ids = vlm.target.model, torch.tensor([[5, 9, 12, 40, 7]])
    expected = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False)
    speculation = speculate(str(folder), tree="chain", gamma=3)
    got = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False, custom_generate=speculation)
    assert got.tolist() == expected.tolist()

    given = ["--target", str(ready("llava")), "-d", str(folder), "-n", "12", "--json", QUESTION]
    app(["generate", *given], standalone_mode=False)
    assert json.loads(capsys.readouterr().out)["method"] == kind
