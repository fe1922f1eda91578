"""Everything is read from a checkpoint's files, in the forms of today and of earlier years."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kits import LLAVA_TEMPLATE, VIDEO, VISUAL, Kit, kit, outside_the_registry, tokenizer
from test_same_as_transformers import assert_same_prompt, clip, picture, user
from transformers import GenerationConfig, LlamaConfig, PretrainedConfig

from saccade.errors import InputError, ModelError
from saccade.inputs.families import family_of, split
from saccade.inputs.processor import InputProcessor
from saccade.loading import load_processor


def save_today(k: Kit, path: Path) -> None:
    """One processor_config.json with everything in it."""
    k.config.save_pretrained(path)
    k.theirs.save_pretrained(path)


def save_of_old(k: Kit, path: Path) -> None:
    """One file per part, and the template in JSON."""
    k.config.save_pretrained(path)
    k.ours.tokenizer.save_pretrained(path)
    k.ours.image_processor.save_pretrained(path)
    if hasattr(k.theirs, "video_processor"):
        k.theirs.video_processor.save_pretrained(path)
    (path / "chat_template.json").write_text(json.dumps({"chat_template": k.ours.chat_template}))


@pytest.mark.parametrize("save", [save_today, save_of_old])
@pytest.mark.parametrize("name", VISUAL)
def test_a_loaded_checkpoint_makes_the_same_prompts(name: str, save: object, tmp_path: Path) -> None:
    k = kit(name)
    save(k, tmp_path)  # type: ignore[operator]
    loaded = load_processor(str(tmp_path))
    image = picture(100, 70)
    assert_same_prompt(loaded.prompt("Hi?", [image]), k.ours.prompt("Hi?", [image]))
    if name in VIDEO:
        video = clip(8, 60, 45, 3.0)
        assert_same_prompt(loaded.prompt("Hi?", videos=[video]), k.ours.prompt("Hi?", videos=[video]))


def test_a_qwen2_checkpoint_without_video_file_takes_its_image_settings(tmp_path: Path) -> None:
    k = kit("qwen2_vl")
    save_of_old(k, tmp_path)
    (tmp_path / "video_preprocessor_config.json").unlink()
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    settings |= {"min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 4}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    prompt = load_processor(str(tmp_path)).prompt("?", videos=[clip(2, 560, 560, 2.0)])
    assert prompt.media[0].tensors["video_grid_thw"].tolist() == [[1, 4, 4]]


def test_a_language_model_needs_no_processor(tmp_path: Path) -> None:
    LlamaConfig().save_pretrained(tmp_path)
    tok = tokenizer([], bos=True)
    tok.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}"
    tok.save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=[3, 5]).save_pretrained(tmp_path)
    loaded = load_processor(str(tmp_path))
    assert loaded.decode(loaded.prompt("Hello").ids) == "Hello"
    assert loaded.eos_token_ids == (3, 5)


def test_ids_that_end_an_answer_come_from_the_configuration_then_the_tokenizer() -> None:
    k = kit("llama")
    assert InputProcessor(k.config, k.ours.tokenizer).eos_token_ids == (k.config.eos_token_id,)
    config = LlamaConfig(eos_token_id=None)
    assert InputProcessor(config, k.ours.tokenizer).eos_token_ids == (k.ours.tokenizer.eos_token_id,)
    assert InputProcessor(config, k.ours.tokenizer, eos_token_ids=[7]).eos_token_ids == (7,)


def test_a_missing_checkpoint_or_part_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^The configuration of [^\n]*\.$"):
        load_processor(str(tmp_path / "nothing"))
    with pytest.raises(ModelError, match="does not say which checkpoint it is from"):
        load_processor("")
    k = kit("llava")
    k.config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"^The tokenizer of [^\n]*\.$"):
        load_processor(str(tmp_path))
    k.ours.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"^The image processor of [^\n]*\.$"):
        load_processor(str(tmp_path))
    (tmp_path / "processor_config.json").write_text("{")
    with pytest.raises(ModelError):
        load_processor(str(tmp_path))


def test_the_wrong_tokenizer_is_found_out_at_once() -> None:
    with pytest.raises(ModelError, match="has no token"):
        InputProcessor(kit("qwen2_vl").config, tokenizer([]))


def test_images_without_image_processor_are_refused() -> None:
    k = kit("llava")
    processor = InputProcessor(k.config, k.ours.tokenizer, chat_template=LLAVA_TEMPLATE)
    with pytest.raises(ModelError, match="no image processor"):
        processor.prompt("?", [picture(40, 30)])


def test_an_unknown_family_goes_through_its_own_processor(tmp_path: Path) -> None:
    loaded, theirs = outside_the_registry(tmp_path), kit("llava").theirs
    config = loaded.config
    assert not family_of(config).is_known
    pictures = [picture(40, 30), picture(30, 40)]
    prompt = loaded.prompt("Which?", pictures)
    text = theirs.apply_chat_template(user({"type": "image"}, {"type": "image"}, "Which?"), add_generation_prompt=True)
    batch = theirs(text=text, images=pictures, return_tensors="pt")
    assert list(prompt.ids) == batch["input_ids"][0].tolist()
    made = family_of(config).join(prompt.media)
    assert made.keys() == {"pixel_values"}
    assert made["pixel_values"].equal(batch["pixel_values"])
    assert_same_prompt(split(config, batch)[0], prompt)
    assert len(family_of(config).media_spans(prompt)) == 1
    assert loaded.text_only(prompt).media == ()
    with pytest.raises(InputError, match=r"The processor of vipllava refuses the prompt"):
        loaded.prompt("Which <image>?", pictures)


def test_an_unknown_family_cannot_be_built_from_parts() -> None:
    class Strange(PretrainedConfig):
        model_type = "strange"
        vision_config = {"model_type": "clip"}  # noqa: RUF012

    k = kit("llama")
    processor = InputProcessor(Strange(), k.ours.tokenizer, chat_template="{{ messages[0]['role'] }}")
    with pytest.raises(ModelError, match="strange is not built in"):
        processor.prompt("Hi")
