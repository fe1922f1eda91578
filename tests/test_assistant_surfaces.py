"""An assistant loads from its folder, drafts through every surface, and is inspected."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import transformers

import saccade
import saccade.hf
from checkpoints import ready, tokenizer
from saccade import vlm
from saccade.checkpoints import inspect_checkpoint
from saccade.errors import MethodError, ModelError
from saccade.target_model.adapter import Target


@pytest.fixture
def folders() -> tuple[str, str]:
    """A target with its tokenizer, and an assistant with weights alone."""
    return str(ready("gemma4")), str(ready("gemma4-assistant"))


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


def test_an_assistant_is_inspected_and_compared_before_weights_are_read(
    folders: tuple[str, str], tmp_path: Path
) -> None:
    found = inspect_checkpoint(folders[1], folders[0])
    assert (found.holds, found.kind, found.fits) == ("assistant", "Gemma4AssistantForCausalLM", True)
    assert found.facts["target's hidden size"] == 16
    assert [(check.what, check.head, check.target) for check in found.checks][:2] == [
        ("hidden size", 16, 16),
        ("vocabulary", *[len(tokenizer())] * 2),
    ]
    config = transformers.AutoConfig.from_pretrained(folders[1])
    config.backbone_hidden_size = 24
    other = shutil.copytree(folders[1], tmp_path / "other")
    config.save_pretrained(other)
    found = inspect_checkpoint(other, folders[0])
    assert [check.what for check in found.checks if not check.fits] == ["hidden size"]
    assert found.fits is False
    with pytest.raises(ModelError, match="its hidden size is 24 but this target's is 16"):
        vlm.check(folders[0], other)


def test_an_assistant_alone_is_refused_before_its_tokenizer_is_missed(folders: tuple[str, str]) -> None:
    with pytest.raises(ModelError, match="is an assistant, which drafts for another model and cannot answer alone"):
        vlm.check(folders[1])
