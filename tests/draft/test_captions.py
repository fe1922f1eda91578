"""What the views of words put before the draft model: no picture, or a caption in its place."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import BlipConfig, BlipForConditionalGeneration, Florence2Config, Florence2ForConditionalGeneration
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from transformers.models.blip.processing_blip import BlipProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.florence2.processing_florence2 import Florence2Processor

from checkpoints import picture as gradient
from checkpoints import ready, tokenizer
from families import FAMILIES, IMAGE, VISUAL_FAMILIES
from harness import prompts_of, target
from numerals import NEWLINE, Numerals
from saccade.draft.ensemble import views
from saccade.draft.ensemble.ensemble import TextOnly
from saccade.draft.ensemble.views import Caption, OwnCaptions, PromptMedium, from_checkpoint, picture
from saccade.errors import MethodError, ModelError
from saccade.inputs.families import family_of, split
from saccade.inputs.families.family import Medium, Prompt
from saccade.loading import load_model, load_processor
from saccade.target_model.adapter import Target

sys.path.insert(0, str(Path(__file__).parents[1] / "inputs"))
import kits
from kits import VIDEO, VISUAL, kit

WORDS = Numerals()


def visuals(name: str, prompt: Prompt) -> int:
    return int(family_of(target(name).config).visual_mask(prompt.ids).sum())


@pytest.mark.parametrize("name", VISUAL_FAMILIES)
def test_the_text_view_has_one_newline_for_every_medium(name: str) -> None:
    view = TextOnly(target(name).config, WORDS)
    for kind in FAMILIES[name].kinds:
        for prompt in prompts_of(name, kind):
            seen = view.rewrite(prompt)
            assert not seen.media
            assert visuals(name, seen) == 0
            assert seen.ids.count(NEWLINE) == len(prompt.media)
            assert kind != "text" or seen == prompt


# --------------------------------------------------------------------------- captions


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (name, kind)
        for name in VISUAL_FAMILIES
        for kind in FAMILIES[name].kinds
        if kind != "text" and (not name.startswith("gemma4") or kind != "video")  # one caption for all frames
    ],
)
def test_a_caption_stands_where_the_text_view_has_a_newline(name: str, kind: str) -> None:
    model = FAMILIES[name].model()
    for prompt in split(model.config, FAMILIES[name].inputs(kind, rows=3)):
        view = Caption(model.config, WORDS, lambda seen: f"a {seen.medium.digest[:4]}")
        newlines = list(TextOnly(model.config, WORDS).rewrite(prompt).ids)
        expected, media = list[int](), iter(prompt.media)
        for token in newlines:
            if token == NEWLINE:
                medium = next(media)
                expected += WORDS.encode(f"{medium.kind}: a {medium.digest[:4]}")
            else:
                expected.append(token)
        assert view.rewrite(prompt) == Prompt(tuple(expected))


def test_an_image_is_told_once_in_one_line_and_its_time_is_counted() -> None:
    case = FAMILIES["llava"]
    config = case.model().config
    (prompt,) = split(config, case.row_inputs("images2", 0))
    captioned: list[PromptMedium] = []

    def tell(seen: PromptMedium) -> str:
        captioned.append(seen)
        return " a cat\n on a mat "

    view = Caption(config, WORDS, tell)
    assert view.rewrite(prompt) == view.rewrite(prompt)
    assert [seen.medium for seen in captioned] == list(prompt.media)
    assert all(seen.ids == (IMAGE,) * 16 for seen in captioned)
    assert set(view.captions.values()) == {"a cat on a mat"}
    assert view.seconds > 0


def test_what_the_device_still_has_to_do_is_no_part_of_a_caption_s_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A captioner is the first to wait for the target's prefill."""
    case, done = FAMILIES["llava"], list[str]()

    def tell(seen: PromptMedium) -> str:
        done.append("told")
        return "a cat"

    def wait(device: torch.device) -> None:
        time.sleep(0.05)
        done.append(f"waited for {device}")

    monkeypatch.setattr(torch.cuda, "synchronize", wait)
    config = case.model().config
    view = Caption(config, WORDS, tell, torch.device("cuda", 1))
    for _ in range(2):
        view.rewrite(split(config, case.row_inputs("image", 0))[0])
    assert done == ["waited for cuda:1", "told"]
    assert 0 < view.seconds < 0.05


# --------------------------------------------------------------------------- the drafter's own captions


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "image") for name in VISUAL), *((name, "video") for name in VIDEO)]
)
def test_a_drafter_is_asked_about_a_medium_as_if_it_were_given_it(name: str, kind: str) -> None:
    """Tiles, row breaks and wrappers come from the user's prompt; the rest of the question does not depend on it."""
    processor = kit(name).ours
    film = np.stack([np.asarray(gradient(shade, (56, 56))) for shade in range(6)])
    media: Any = {"images": [gradient(3, (80, 56))]} if kind == "image" else {"videos": [film]}
    seen: list[PromptMedium] = []
    view = Caption(processor.config, processor.tokenizer, lambda medium: seen.append(medium) or "")
    view.rewrite(processor.prompt("What is it?", **media))
    no_model: Any = None
    expected = processor.prompt(f"Describe the {kind} in one sentence.", **media)
    assert OwnCaptions(no_model, processor).prompt(seen[0]) == expected


@pytest.mark.parametrize("name", VIDEO)
def test_a_video_is_told_once_whatever_its_family_takes_it_for(name: str) -> None:
    processor = kit(name).ours
    films = [np.stack([np.asarray(gradient(shade, (56, 56))) for shade in shades]) for shades in ([0, 1, 2, 3], [4])]
    prompt = processor.prompt("What is it?", images=[gradient(5, (56, 56))], videos=films[:1])
    captioned: list[PromptMedium] = []

    def tell(seen: PromptMedium) -> str:
        captioned.append(seen)
        return f"a {len(captioned)}"

    view = Caption(processor.config, processor.tokenizer, tell)
    words = processor.tokenizer.decode(view.rewrite(prompt).ids)
    assert sorted(seen.kind for seen in captioned) == ["image", "video"]
    assert words.count("image: a") == words.count("video: a") == 1
    assert sum(len(seen.media) for seen in captioned) == len(prompt.media)
    film = next(seen for seen in captioned if seen.kind == "video")
    assert close(picture(processor, film.medium), gradient(2, (56, 56))) < 12  # one in the middle
    view.rewrite(processor.prompt("And now?", videos=films))
    assert len(captioned) == 3


@pytest.mark.parametrize("name", ["llava", "qwen"])
@torch.no_grad()
def test_a_drafter_s_own_caption_is_its_greedy_answer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "CAPTION_TOKENS", 9)
    model, processor = Target(load_model(ready(name))), load_processor(str(ready(name)))
    seen: list[PromptMedium] = []
    own = OwnCaptions(model, processor)
    view = Caption(processor.config, processor.tokenizer, lambda shown: seen.append(shown) or own(shown))  # type: ignore[func-returns-value]
    view.rewrite(processor.prompt("Anything.", images=[gradient(1)]))
    question = own.prompt(seen[0])
    (medium,) = question.media
    inputs: dict[str, Any] = {**medium.tensors, "input_ids": torch.tensor([question.ids])}
    if name == "qwen":
        inputs["mm_token_type_ids"] = family_of(processor.config).visual_mask(question.ids)[None].long()
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    answer = model.model.generate(**inputs, max_new_tokens=9, do_sample=False)[0, len(question.ids) :].tolist()
    assert own(seen[0]) == processor.decode(answer)
    assert view.captions[medium.digest] == " ".join(processor.decode(answer).split())
    processor.eos_token_ids = (answer[3],)
    assert own(seen[0]) == processor.decode(answer[: answer.index(answer[3])])


# --------------------------------------------------------------------------- captioners of pictures


def close(ours: Image.Image, theirs: Image.Image) -> float:
    """Mean difference of two pictures at a size of 16 x 16, in shades of 255."""
    small = [np.asarray(i.resize((16, 16), Image.Resampling.BOX), dtype=float) for i in (ours, theirs)]
    return float(np.abs(small[0] - small[1]).mean())


@pytest.mark.parametrize("name", VISUAL)
def test_a_medium_is_turned_back_into_its_picture(name: str) -> None:
    processor = kit(name).ours
    for shade, size in ((1, (56, 56)), (5, (112, 56))):
        image = gradient(shade, size)
        (medium, *_) = processor.prompt("What?", images=[image]).media
        shown = picture(processor, medium)
        if size[0] != size[1] and shown.width == shown.height and name in ("llava", "llava_next"):
            continue  # cropped, not squeezed
        assert close(shown, image) < 8  # resampling and 8 bits; other gradients are more than 40 away
    assert close(picture(processor, medium), gradient(3, (56, 56)).rotate(90)) > 25


def test_tensors_of_an_unknown_family_make_no_picture() -> None:
    medium = Medium("image", {"pixel_values": torch.zeros(1, 3, 4, 4)}, 1, "0")
    with pytest.raises(MethodError, match="let the drafter caption for itself"):
        picture(kit("llama").ours, medium)


# --------------------------------------------------------------------------- captioning checkpoints


def blip(path: Path) -> Path:
    tok = tokenizer(more=["<b>"])
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {f"{name}_token_id": getattr(tok, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    text = {**shape, **ids, "sep_token_id": tok.eos_token_id, "vocab_size": len(tok), "encoder_hidden_size": 32}
    vision = {**shape, "image_size": 16, "patch_size": 8, "projection_dim": 32}
    config = BlipConfig(text_config={**text, "projection_dim": 32}, vision_config=vision, projection_dim=32)
    BlipForConditionalGeneration(config).save_pretrained(path)
    BlipProcessor(BlipImageProcessorPil(size={"height": 16, "width": 16}), tok).save_pretrained(path)
    return path


def florence(path: Path) -> Path:
    tok = kits.tokenizer(["<image>"], {"image_token": "<image>"}, bos=True)
    stages = {"embed_dim": [8, 16], "num_heads": [2, 2], "num_groups": [2, 2], "depths": [1, 1]}
    patches = {"patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1], "patch_prenorm": [False, True]}
    sizes = {"window_size": 4, "projection_dim": 32, "max_temporal_embeddings": 4, "max_position_embeddings": 16}
    text = {"model_type": "bart", "vocab_size": len(tok), "d_model": 32, "forced_eos_token_id": None}
    for part in ("encoder", "decoder"):
        text |= {f"{part}_layers": 1, f"{part}_attention_heads": 2, f"{part}_ffn_dim": 48}
    text |= {f"{name}_token_id": getattr(tok, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = Florence2Config(
        text_config={**text, "decoder_start_token_id": tok.eos_token_id},
        vision_config={**stages, **patches, **sizes},
        image_token_id=tok.convert_tokens_to_ids("<image>"),
    )
    Florence2ForConditionalGeneration(config).save_pretrained(path)
    images = CLIPImageProcessorPil(size={"height": 32, "width": 32}, do_center_crop=False)
    images.image_seq_length = 17
    Florence2Processor(images, tok, num_additional_image_tokens=1).save_pretrained(path)
    return path


@pytest.mark.parametrize("make", [blip, florence])
def test_a_captioning_checkpoint_tells_a_picture_in_words(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "CAPTION_TOKENS", 5)
    caption = from_checkpoint(str(make(tmp_path / "captioner")), torch.device("cpu"))
    words = caption(gradient(1))
    assert caption(gradient(1)) == words
    assert "<image>" not in words


def test_a_captioning_checkpoint_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no config"):
        from_checkpoint(str(tmp_path), torch.device("cpu"))
