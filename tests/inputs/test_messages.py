"""Every way to write a conversation, and one sentence when text and media do not match."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from kits import LLAVA_TEMPLATE, VIDEO, VISUAL, kit
from PIL import Image
from test_same_as_transformers import assert_same_prompt, clip, picture, user

from media_files import data_uri, encoded
from saccade.errors import InputError
from saccade.inputs.processor import InputProcessor, MediaOptions

IMAGE = picture(40, 30)


PNG = encoded("PNG", IMAGE)
DATA = data_uri(PNG)


def test_hugging_face_and_openai_parts_mean_the_same(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(PNG)
    k = kit("qwen2_vl")
    expected = k.ours.prompt("What is this?", [IMAGE])
    for part in (
        {"type": "image", "image": IMAGE},
        {"type": "image", "image": str(path)},
        {"type": "image", "path": str(path)},
        {"type": "image", "url": path.as_uri()},
        {"type": "image", "base64": base64.b64encode(PNG).decode()},
        {"type": "image_url", "image_url": {"url": DATA}},
        {"type": "image_url", "image_url": DATA},
        {"type": "input_image", "image_url": DATA},
    ):
        assert_same_prompt(k.ours.prompt(user(part, "What is this?")), expected)
    assert_same_prompt(k.ours.prompt([{"role": "user", "content": [
        {"type": "input_image", "image_url": DATA}, {"type": "input_text", "text": "What is this?"}
    ]}]), expected)  # fmt: skip


def test_listed_images_fill_the_places_that_have_none() -> None:
    k = kit("qwen2_vl")
    other = picture(64, 64, 9)
    both = k.ours.prompt(user({"type": "image"}, "and", {"type": "image", "image": other}), [IMAGE])
    assert_same_prompt(both, k.ours.prompt(user({"type": "image"}, "and", {"type": "image"}), [IMAGE, other]))


def test_messages_are_not_changed() -> None:
    messages = user({"type": "image", "image": IMAGE}, "What?")
    kit("qwen2_vl").ours.prompt(messages)
    assert messages == user({"type": "image", "image": IMAGE}, "What?")


def test_a_language_model_gets_what_its_tokenizer_makes() -> None:
    k = kit("llama")
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": [{"type": "text", "text": "Bye"}, {"type": "text", "text": "!"}]},
    ]
    joined = [*turns[:3], {"role": "user", "content": "Bye!"}]
    expected = k.ours.tokenizer.apply_chat_template(
        joined, chat_template=k.ours.chat_template, add_generation_prompt=True, return_dict=False
    )
    assert list(k.ours.prompt(turns).ids) == expected


def test_a_model_without_template_takes_strings_as_they_are() -> None:
    k = kit("qwen2_vl")
    bare = InputProcessor(k.config, k.ours.tokenizer, k.ours.image_processor)
    assert bare.decode(bare.prompt("Once upon").ids) == "Once upon"
    prompt = bare.prompt("Once upon", [IMAGE])
    assert bare.tokenizer.decode(prompt.ids).startswith("<|vision_start|><|image_pad|>")
    assert_same_prompt(bare.text_only(prompt), bare.prompt("\nOnce upon"))
    with pytest.raises(InputError, match="no chat template"):
        bare.prompt(user("Hello"))


def test_content_that_is_a_string_is_not_lost_in_templates_that_drop_it() -> None:
    assert "selectattr" in LLAVA_TEMPLATE
    k = kit("llava")
    turns = [
        *user({"type": "image", "image": IMAGE}, "Who?"),
        {"role": "assistant", "content": "A cat."},
        *user("Why?"),
    ]
    text = k.ours.decode(k.ours.prompt(turns).ids)
    assert text.endswith("Who? ASSISTANT: A cat. USER: Why? ASSISTANT:")


def test_a_template_that_drops_the_strings_of_one_role_gets_lists() -> None:
    template = (
        "{% for m in messages %}{% if m['content'] is not string %}{{ m['content'][0]['text'] }} "
        "{% elif m['role'] == 'user' %}{{ m['content'] }} {% endif %}{% endfor %}"
    )
    processor = InputProcessor(kit("llama").config, kit("llama").ours.tokenizer, chat_template=template)
    turns = [{"role": role, "content": words} for role, words in (("user", "Who?"), ("assistant", "A cat."))]
    assert processor.decode(processor.prompt(turns).ids) == "Who? A cat. "


def test_thoughts_that_a_template_drops_stay_dropped() -> None:
    k = kit("qwen2_vl")
    template = (
        "{% for m in messages %}{% if m['content'] is string %}{{ m['content'].split('</think>')[-1] }}"
        "{% else %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endif %}{% endfor %}"
    )
    processor = InputProcessor(k.config, k.ours.tokenizer, chat_template=template)
    turns = [*user("Hi."), {"role": "assistant", "content": "<think>Hm.</think>Hello."}]
    assert processor.decode(processor.prompt(turns).ids) == "Hi.Hello."


def test_the_answer_may_be_begun_or_not() -> None:
    k = kit("qwen2_vl")
    whole, turn = (k.ours.prompt("Hi", add_generation_prompt=b).ids for b in (True, False))
    assert whole[: len(turn)] == turn
    assert k.ours.tokenizer.decode(whole[len(turn) :]) == "<|im_start|>assistant\n"


def test_template_options_reach_the_template() -> None:
    k = kit("llama")
    template = "{{ messages[0]['content'] }}{% if loud %}!{% endif %}"
    processor = InputProcessor(k.config, k.ours.tokenizer, chat_template=template)
    loud = MediaOptions(template_options={"loud": True})
    assert processor.decode(processor.prompt("Hi", options=loud).ids) == "Hi!"


@pytest.mark.parametrize(
    ("name", "prompt", "images", "videos", "says"),
    [
        ("qwen2_vl", user("Hello"), [IMAGE], [], "1 image more than the messages have places for"),
        ("qwen2_vl", user({"type": "image"}), [], [], "a place for an image that none was given for"),
        ("qwen2_vl", user({"type": "video"}), [], [], "a place for a video that none was given for"),
        ("qwen2_vl", "Look: <|image_pad|>", [], [], "1 of <|image_pad|> for 0 images"),
        ("qwen2_vl", "Look: <|image_pad|>", [IMAGE], [], "2 of <|image_pad|> for 1 image, "),
        ("gemma3", "Look: <image_soft_token>", [IMAGE], [], "contains the placeholder <image_soft_token>"),
        ("gemma3", "Look: <image_soft_token>", [], [], "contains the placeholder <image_soft_token>"),
        ("llama", "Look", [IMAGE], [], "reads text only; leave out the images"),
        ("llama", user({"type": "image", "image": IMAGE}), [], [], "reads text only"),
        ("llama", "Look", [], [[IMAGE]], "reads text only; leave out the videos"),
        ("llava", "Look", [], [[IMAGE]], "takes images but no videos"),
        ("pixtral", "Look", [], [[IMAGE]], "takes images but no videos"),
        ("qwen2_vl", "Look", ["nothing.png"], [], "does not exist"),
        ("qwen2_vl", "Look", [Image.new("RGB", (2, 500))], [], "The image of 2x500 pixels cannot be prepared"),
        ("qwen2_vl", "Look", [], [[Image.new("RGB", (2, 500))]], "more than 200 times longer than wide"),
        ("qwen2_vl", "Look", "cat.png", [], "Images must come as a list, but one str was given"),
        ("qwen2_vl", "Look", IMAGE, [], "Images must come as a list, but one Image was given"),
        ("qwen2_vl", "Look", [], "film.mp4", "Videos must come as a list, but one str was given"),
        ("qwen2_vl", "Look", [], [IMAGE], "The video of type Image"),
        ("qwen2_vl", [], [], [], "list of messages is empty"),
        ("qwen2_vl", [{"content": "Hello"}], [], [], '"role"'),
        ("qwen2_vl", ["Hello"], [], [], '"role"'),
        ("qwen2_vl", [{"role": "user", "content": 3}], [], [], "of type int"),
        ("qwen2_vl", user({"type": "audio", "audio": "x"}), [], [], "A message part of type 'audio'"),
        ("qwen2_vl", user({"text": "Hello"}), [], [], "A message part of type None"),
        (
            "qwen2_vl",
            user({"type": "image", "max_pixels": 50176}),
            [IMAGE],
            [],
            "has max_pixels, which would be ignored",
        ),
        ("qwen2_vl", user({"type": "image", "fps": 2}), [IMAGE], [], "has fps, which would be ignored"),
        ("qwen2_vl", user({"type": "image", "image": IMAGE, "url": "a.png"}), [], [], "image has url, which would be"),
        (
            "qwen2_vl",
            user({"type": "video_url", "video_url": {"url": "film.mp4", "detail": "low", "fps": 2}}),
            [],
            [],
            "has video_url.fps, which would be ignored",
        ),
    ],
)
def test_what_does_not_match_is_refused_with_one_sentence(
    name: str, prompt: Any, images: list[Any], videos: list[Any], says: str
) -> None:
    with pytest.raises(InputError, match=r"^[A-Z0-9][^\n]*\.$") as error:
        kit(name).ours.prompt(prompt, images, videos)
    assert says in str(error.value)


def test_a_template_that_refuses_says_why() -> None:
    k = kit("llama")
    template = "{{ raise_exception('Roles must alternate') }}"
    processor = InputProcessor(k.config, k.ours.tokenizer, chat_template=template)
    with pytest.raises(InputError, match="refuses the messages \\(Roles must alternate\\)"):
        processor.prompt("Hi")


def test_a_template_that_writes_no_placeholder_is_found_out() -> None:
    k = kit("llava")
    processor = InputProcessor(
        k.config, k.ours.tokenizer, k.ours.image_processor, chat_template="{{ messages[0]['role'] }}"
    )
    with pytest.raises(InputError, match="0 of <image> for 1 image;"):
        processor.prompt("Hi", [IMAGE])


@pytest.mark.parametrize("name", VISUAL)
def test_answers_are_decoded_without_special_tokens(name: str) -> None:
    k = kit(name)
    ids = k.ours.tokenizer.encode("A cat.", add_special_tokens=False)
    assert k.ours.decode([*ids, k.ours.tokenizer.eos_token_id]) == "A cat."


@pytest.mark.parametrize("size", [(40, 30), (400, 500)], ids=str)
@pytest.mark.parametrize("name", VISUAL)
def test_every_image_becomes_one_newline(name: str, size: tuple[int, int]) -> None:
    k = kit(name)
    prompt = k.ours.prompt(
        user("Compare", {"type": "image"}, "with", {"type": "image"}, {"type": "image"}, "now."),
        [picture(*size), picture(64, 130), picture(28, 28)],
    )
    blind = k.ours.text_only(prompt)
    assert blind.media == ()
    special = set(k.ours.tokenizer.all_special_tokens) - {"<s>", "<|im_start|>", "<|im_end|>", "<end_of_utterance>"}
    text = k.ours.tokenizer.decode(blind.ids)
    assert not [token for token in special if token in text]
    template = k.ours.chat_template
    empty = {"gemma3": "\n\n\n\n\n", "gemma3n": "\n\n\n\n\n", "internvl": "\n\n"}.get(
        name, "\n"
    )  # what template and family write around
    if "selectattr" in template:
        assert text.count("\n") == 6
    else:
        assert f"Compare{empty}with{empty}{empty}now." in text


@pytest.mark.parametrize("name", [n for n in VIDEO if n not in ("internvl", "smolvlm", "gemma4")])
def test_every_video_becomes_one_newline_with_its_timestamps(name: str) -> None:
    k = kit(name)
    video = clip(8, 60, 45, 4.0)
    prompt = k.ours.prompt(user("Before", {"type": "video"}, {"type": "video"}, "after."), videos=[video, video])
    text = k.ours.tokenizer.decode(k.ours.text_only(prompt).ids)
    assert "seconds" not in text
    assert "<|vision" not in text
    assert "Before\n\nafter." in text or text.startswith("USER: \n\n\n\nBefore after.")


@pytest.mark.parametrize("name", VISUAL)
def test_text_without_media_stays_as_it_is(name: str) -> None:
    prompt = kit(name).ours.prompt("Only words.")
    assert kit(name).ours.text_only(prompt) == prompt
