"""An assistant loads from its folder, drafts through every surface, and is inspected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import saccade
import saccade.hf
from assistants import small, spread
from checkpoints import template, tokenizer
from saccade import vlm
from saccade.checkpoints import inspect_checkpoint
from saccade.errors import MethodError, ModelError
from saccade.loading import share_every_layer
from saccade.target_model.adapter import Target


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target with its tokenizer, and an assistant with weights alone."""
    place = tmp_path_factory.mktemp("checkpoints")
    words = tokenizer()
    text = small("gemma4_text", vocab_size=len(words))
    model = spread(transformers.Gemma4ForCausalLM, transformers.Gemma4TextConfig(**text), 1)
    model.save_pretrained(place / "target")
    words.chat_template = template("")
    words.save_pretrained(place / "target")
    config = transformers.Gemma4AssistantConfig(
        text_config={**text, "num_kv_shared_layers": 2}, backbone_hidden_size=16
    )
    share_every_layer(config)
    spread(transformers.Gemma4AssistantForCausalLM, config, 2).save_pretrained(place / "assistant")
    return str(place / "target"), str(place / "assistant")


def test_an_assistant_drafts_through_every_surface(folders: tuple[str, str]) -> None:
    plain = saccade.load(folders[0], method="plain")
    expected = [plain.generate(text, max_new_tokens=12).tokens for text in ("One", "Two words")]
    for method in (None, "chain", "dynamic-tree", "lookup-merge"):
        vlm = saccade.load(*folders, method=method)
        assert isinstance(vlm.draft_model, Target)
        assert vlm.method == (method or "auto")
        assert [output.tokens for output in vlm.generate(["One", "Two words"], max_new_tokens=12)] == expected
    ids = plain.processor.tokenizer("Once", return_tensors="pt").input_ids
    model, helper = plain.target.model, vlm.draft_model.model
    given = model.generate(ids, max_new_tokens=12, do_sample=False)
    speculation = saccade.hf.speculate(helper, "chain")
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False, custom_generate=speculation), given)


def test_methods_that_change_the_drafters_prompt_refuse_an_assistant(folders: tuple[str, str]) -> None:
    for method in ("specvlm", "tabed"):
        with pytest.raises(MethodError, match="an assistant has no prompt of its own"):
            saccade.load(*folders, method=method)


def test_an_assistant_is_inspected_and_compared_before_weights_are_read(folders: tuple[str, str]) -> None:
    found = inspect_checkpoint(folders[1], folders[0])
    assert (found.holds, found.kind, found.fits) == ("assistant", "Gemma4AssistantForCausalLM", True)
    assert found.facts["target's hidden size"] == 16
    config = transformers.AutoConfig.from_pretrained(folders[1])
    config.backbone_hidden_size = 24
    other = f"{folders[1]}-of-another"
    config.save_pretrained(other)
    (Path(other) / "model.safetensors").write_bytes((Path(folders[1]) / "model.safetensors").read_bytes())
    assert inspect_checkpoint(other, folders[0]).fits is False
    with pytest.raises(ModelError, match="its hidden size is 24 but this target's is 16"):
        vlm.check(folders[0], other)
