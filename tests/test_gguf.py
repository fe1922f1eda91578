"""Models in GGUF files give the tokens of `generate`, drafted or not; other files are refused in a sentence."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoints import ready
from saccade import load
from saccade.errors import ModelError

needs_gguf = pytest.mark.skipif(find_spec("gguf") is None, reason="gguf is not installed")

QUESTION = "What is it?"
NAMES = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def written(file: Path, form: str) -> Path:
    """Write the llama checkpoint as a GGUF file."""
    import gguf

    source = ready("llama")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    config: Any = model.config
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    tokens = {i: token for token, i in tokenizer.get_vocab().items()} | {config.vocab_size - 1: "!!"}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([tokens.get(i, f"<unused{i}>") for i in range(config.vocab_size)])
    writer.add_token_merges(["! !"] * 2)  # transformers expects some, and 5.17 more than one
    writer.add_bos_token_id(tokenizer.eos_token_id)  # which transformers 5.17 needs, and nothing adds
    writer.add_eos_token_id(tokenizer.eos_token_id)
    kind = gguf.GGMLQuantizationType[form]
    for name, weight in model.state_dict().items():
        numbers = weight.float()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads:  # rotated in pairs of neighbours
            numbers = numbers.view(heads, 2, -1, numbers.shape[1]).transpose(1, 2).reshape(numbers.shape)
        part = next(theirs for ours, theirs in NAMES.items() if f".{ours}." in f".{name}")
        layer = f"blk.{name.split('.')[2]}." if ".layers." in name else ""
        exact = gguf.GGMLQuantizationType.F32 if numbers.dim() == 1 else kind
        data = gguf.quants.quantize(numbers.numpy(), exact)
        writer.add_tensor(f"{layer}{part}.weight", data, raw_dtype=exact)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return file


@needs_gguf
@pytest.mark.parametrize("form", ["F16", "Q8_0"])
def test_a_gguf_file_is_a_target_and_a_draft_model_with_generate_s_tokens(form: str, tmp_path: Path) -> None:
    file = written(tmp_path / "model.gguf", form)
    vlm = load(file, file, "chain")
    prompt = vlm.processor.prompt(QUESTION)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name)
    ids = torch.tensor([prompt.ids])
    answer = stock.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
    expected = tuple(answer[0, ids.shape[1] :].tolist())
    for method in ("plain", "chain", "dynamic-tree", "auto"):
        assert tuple(vlm.using(method).generate(prompt, max_new_tokens=24).tokens) == expected


@needs_gguf
def test_a_gguf_file_has_its_own_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')  # of another checkpoint in its folder
    vlm = load(written(tmp_path / "model.gguf", "F16"))
    assert vlm.processor.tokenizer.decode(vlm.processor.prompt(QUESTION).ids).endswith(QUESTION)
    assert vlm.processor.eos_token_ids == (vlm.target.config.eos_token_id,)


@needs_gguf
def test_a_gguf_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    import gguf

    file = tmp_path / "mmproj.gguf"
    writer = gguf.GGUFWriter(str(file), "clip")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelError, match=r"clip is not supported.*; transformers reads GGUF files of some text models"):
        load(file)


def test_a_gguf_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"There is no file .*none.gguf; give a GGUF file that exists"):
        load(tmp_path / "none.gguf")
