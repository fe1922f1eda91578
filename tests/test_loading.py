"""Checkpoints are loaded whole or refused in one sentence; drafters must speak the target's tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, BertConfig, BertLMHeadModel, CLIPConfig, T5Config

import checkpoints
from checkpoints import ready, tokenizer
from saccade import ModelError, SaccadeError, load, loading
from saccade.loading import check_device, check_dtype, fastest_dtype, load_model
from saccade.resolution import shared_vocabulary

pytestmark = pytest.mark.formats


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def cut_short(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def another_model(config: type) -> Callable[[Path], None]:
    return lambda folder: config().save_pretrained(folder)


def real_bert(folder: Path) -> None:
    config = BertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=300
    )
    BertLMHeadModel(config).save_pretrained(folder)


def with_code(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save({"bias": Path("x")}, folder / "pytorch_model.bin")


V_PROJ = "language_model.model.layers.0.self_attn.v_proj.weight"
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "has no weights"),
    "cut short": (cut_short, "model.safetensors is damaged or only partly downloaded"),
    "garbage": (lambda d: (d / "model.safetensors").write_bytes(b"\x10" + bytes(40)), "is damaged or only"),
    "code": (with_code, r"carries code \(pathlib\.\w+\), which is never run; give weights as safetensors"),
    "tensor gone": (
        lambda d: edit_weights(d, lambda w: w.pop(V_PROJ)),
        r"lacks the weight model.language_model.layers.0.self_attn.v_proj.weight;",
    ),
    "tensor of another shape": (
        lambda d: edit_weights(d, lambda w: w.update({V_PROJ: torch.zeros(3)})),
        r"wrong shape for the weight model.language_model.layers.0.self_attn.v_proj.weight;",
    ),
    "no config": (lambda d: (d / "config.json").unlink(), "has no config.json"),
    "broken config": (lambda d: (d / "config.json").write_text("{"), "JSON file of .* is damaged"),
    "config of nothing": (lambda d: (d / "config.json").write_text("{}"), "cannot be loaded"),
    "unknown architecture": (lambda d: edit_config(d, model_type="strange"), "`strange`"),
    "no tokenizer": (lambda d: (d / "tokenizer.json").unlink(), "cannot be loaded .it has no tokenizer.json."),
    "no image processor": (lambda d: (d / "preprocessor_config.json").unlink(), "The image processor of"),
    "encoder and decoder": (another_model(T5Config), "holds a t5 model, which does not generate text"),
    "embeddings": (another_model(CLIPConfig), "holds a clip model, which does not generate text"),
    "no decoder": (real_bert, "BertLMHeadModel has no decoder layers"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_broken_checkpoint_is_refused_and_the_fault_named(damage: str, tmp_path: Path) -> None:
    folder = shutil.copytree(ready("llava"), tmp_path / "model")
    do, words = DAMAGE[damage]
    do(folder)
    with pytest.raises(ModelError, match=words) as caught:
        load(folder)
    assert str(folder) in str(caught.value) or damage == "no decoder"
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_a_sharded_checkpoint_loads_and_a_missing_shard_is_named(tmp_path: Path) -> None:
    checkpoints.llava(tmp_path, max_shard_size="150KB")
    whole = load_model(ready("llava")).state_dict()
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    loaded = load_model(tmp_path).state_dict()
    assert loaded.keys() == whole.keys()
    assert all(loaded[name].equal(whole[name]) for name in whole)
    shards[1].unlink()
    with pytest.raises(ModelError, match=f"lacks {shards[1].name}, one of its weight files"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("", "is empty"),
        ("/nowhere/at/all", "There is no folder '/nowhere/at/all'"),
        ("./nowhere", "There is no folder"),
        ("~/nowhere-at-all", "There is no folder"),
        # a hub id, and the tests have no network
        ("drfat", r"There is no folder drfat here, .* \(We couldn't connect to [^;]*\); give the owner, too"),
        (__file__, "is a file, but no GGUF file; give one, or the folder"),
    ],
)
def test_a_missing_checkpoint_is_distinguished_from_an_unreachable_one(place: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        load(place)


ConnectError = type("ConnectError", (Exception,), {"__module__": "httpx"})
"""As the hub's client raises them."""


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (OSError("You are trying to access a gated repo.\nMake sure"), "(You are trying to access a gated repo);"),
        (ConnectError("403 Forbidden: no."), "(403 Forbidden: no); check the spelling, the"),
        (ValueError("Unrecognized model in some/model. Should"), "some/model cannot be loaded (Unrecognized model in"),
    ],
)
def test_an_unreachable_hub_is_distinguished_from_an_unusable_checkpoint(
    problem: Exception, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def from_pretrained(*_: object, **__: object) -> None:
        raise problem

    monkeypatch.setattr(AutoConfig, "from_pretrained", from_pretrained)
    with pytest.raises(ModelError) as caught:
        load("some/model")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("." if "cannot be loaded" in words else "your access (hf auth login).")


def test_where_the_hub_cannot_be_reached_no_file_is_tried_again_and_the_target_is_named_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def head(*_: object, **__: object) -> None:
        raise ConnectError("refused")

    monkeypatch.setattr(loading, "_IS_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(loading, "get_session", lambda: SimpleNamespace(head=head))
    away = "cannot be reached, so that offline mode is on"
    for target, words in (("some/target", away), ("target", "as in OWNER/target, or check")):
        with pytest.raises(ModelError, match=f"There is no folder {target} here, and the hub .*{words}"):
            load(target, "some/drafter")
        assert constants.HF_HUB_OFFLINE


def test_a_home_folder_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(ready("llama").parent))
    assert load("~/llama").generate("Hi", max_new_tokens=2).tokens


def test_code_of_a_checkpoint_never_runs(tmp_path: Path) -> None:
    folder = shutil.copytree(ready("llava"), tmp_path / "model")
    (folder / "own.py").write_text("raise SystemExit('it ran')")
    names = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.T", "own.T"]}
    edit_config(folder, auto_map=names)
    tokens = folder / "tokenizer_config.json"
    tokens.write_text(json.dumps(json.loads(tokens.read_text()) | {"auto_map": names}))
    assert load(folder).generate("Hi", max_new_tokens=2).tokens  # built in, so it needs none of that
    edit_config(folder, model_type="own")
    with pytest.raises(ModelError, match="needs code of its own, which is never run"):
        load(folder)


def test_faults_of_the_drafter_are_found_before_the_target_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.resolution.load_model", lambda *_, **__: pytest.fail("weights were read"))
    for drafter, options in (("llama-swapped", {}), ("llava-draft", {"gamma": "x"}), ("llava-draft", {"dtype": "x"})):
        with pytest.raises(SaccadeError):
            load(ready("llava"), ready(drafter), **options)
    with pytest.raises(ModelError, match="no folder"):
        load(ready("llava"), "/nowhere/at/all")


# -- dtype and device --------------------------------------------------------------------------------------


def test_a_dtype_is_a_name_or_itself() -> None:
    assert check_dtype("bfloat16") == check_dtype(torch.bfloat16) == torch.bfloat16
    assert check_dtype("auto") == "auto"
    for wrong in ("float99", "int8", torch.int8, "load"):
        with pytest.raises(ModelError, match=r"is not one of auto, float32, bfloat16, float16"):
            check_dtype(wrong)


def test_models_load_in_the_given_dtype_and_a_small_drafter_on_a_cpu_in_float32() -> None:
    vlm = load(ready("llava"), ready("llava-draft"), dtype="bfloat16")
    assert vlm.target.dtype == torch.bfloat16
    assert vlm.draft_model is not None
    assert vlm.draft_model.dtype == torch.float32
    vlm = load(ready("llava"), ready("llava-draft"), draft_dtype="bfloat16")
    assert vlm.target.dtype == torch.float32
    assert vlm.draft_model is not None
    assert vlm.draft_model.dtype == torch.bfloat16


def test_a_large_drafter_stays_in_its_dtype() -> None:
    large = torch.nn.Linear(10_000, 5_001, bias=False, device="meta", dtype=torch.bfloat16)
    assert fastest_dtype(large) == torch.bfloat16


@pytest.mark.parametrize("device", ["strange", "meta", "cpu0", 77, "cuda:77", 1.5])
def test_a_device_that_does_not_exist_is_refused(device: object) -> None:
    with pytest.raises(ModelError, match=r"^The device .* cannot be used here \([^\n]*\); choose cpu, "):
        load(ready("llava"), device_map=device)


@pytest.mark.parametrize("place", ["cpu", {"": "cpu"}, "auto"])
def test_a_device_map_changes_no_answer(place: object) -> None:
    pytest.importorskip("accelerate")
    expected = checkpoints.vlm("llava").generate("Where?", [checkpoints.picture()], max_new_tokens=4)
    placed = load(ready("llava"), device_map=place).generate("Where?", [checkpoints.picture()], max_new_tokens=4)
    assert placed.tokens == expected.tokens


def test_spreading_needs_accelerate_and_a_single_device_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.loading.find_spec", lambda _: None)
    assert check_device("cpu") == torch.device("cpu")
    assert load_model(ready("llava"), device_map="cpu").device == torch.device("cpu")
    for spread in ("auto", {"": "cpu"}):
        with pytest.raises(ModelError, match="needs accelerate, which is not installed"):
            check_device(spread)


# -- tokenizers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "shared"),
    [
        ((), (), 0),
        (("<x>", "<y>"), (), 0),
        ((), ("<x>", "<y>"), 0),
        (("<x>",), ("<y>",), 1),
        (("<x>",), ("<y>", "<x>"), 1),
    ],
)
def test_added_tokens_may_differ_and_those_of_one_vocabulary_alone_are_left_out(
    ours: tuple[str, ...], theirs: tuple[str, ...], shared: int
) -> None:
    both = tokenizer(more=ours), tokenizer(more=theirs)
    assert shared_vocabulary(*both, ("a", "b")) == len(tokenizer()) + shared


def test_another_tokenizer_is_refused_with_both_names_and_the_first_token_that_differs() -> None:
    with pytest.raises(ModelError, match=r"The drafter small has another tokenizer than the target big") as caught:
        shared_vocabulary(tokenizer(), tokenizer(swapped=True), ("big", "small"))
    assert """(token "'" has id 5 there and id 6 here)""" in str(caught.value)


def test_a_padded_vocabulary_is_cut_to_what_is_shared(tmp_path: Path) -> None:
    """The model's logits are wider than its tokenizer; no draft may come from the padding, no answer suffers."""
    checkpoints.llama(tmp_path, padded=64)
    expected = checkpoints.vlm("llama").generate("Tell me")
    vlm = load(ready("llama"), tmp_path)
    assert vlm.draft_model is not None
    assert vlm.draft_model.vocab_size == len(tokenizer()) + 64
    assert vlm.engine.drafter.vocab_size == len(tokenizer())
    assert vlm.generate("Tell me").tokens == expected.tokens
    assert load(tmp_path, ready("llama")).generate("Tell me", max_new_tokens=4).stats.new_tokens == 4
