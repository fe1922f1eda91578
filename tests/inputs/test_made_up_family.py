"""A family that no other file knows: one class, registered here, is all that prompts and generation need."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import pytest
import torch
from kits import tokenizer
from test_same_as_transformers import picture, user
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.modeling_llava import LlavaModel

from families import FamilyCase
from saccade.draft.ensemble.views import pooled
from saccade.draft.lookup import PromptLookup
from saccade.engine import Engine, Request
from saccade.errors import InputError
from saccade.inputs.families import FAMILIES, family_of, register, split
from saccade.inputs.families.family import Family, Features, Kind, Medium, PoolPoint, Prompt, Tensors
from saccade.inputs.processor import InputProcessor
from saccade.loading import adapt
from saccade.target_model.adapter import Target

SIDE, PATCH = 28, 7
TOKENS = (SIDE // PATCH) ** 2


class Glimpses(Family):
    """Every image twice, as it is and mirrored, after two tags: ``glimpses [n, 2, 3, H, W]``."""

    names = MappingProxyType({"glimpses": "Glimpses"})
    visual_keys = ("glimpses",)
    openers = ("<near>", "<far>")
    pool_point = PoolPoint("multi_modal_projector")

    def count(self, kind: Kind, tensors: Tensors) -> int:
        return tensors["glimpses"].shape[1] * TOKENS

    def prepare_images(self, run: Callable[[Any], Features], images: Sequence[Any]) -> list[Features]:
        squares = [run([image])["pixel_values"] for image in images]
        return [{"glimpses": torch.stack([square, square.flip(-1)], 1)} for square in squares]

    def expand_image(self, token: str, features: Features) -> str:
        return "".join(tag + token * TOKENS for tag in self.openers)

    def cut(self, tensors: Tensors, rows: Sequence[Sequence[int]]) -> Iterator[Medium]:
        for glimpses in tensors.get("glimpses", ()):
            yield self.medium("image", {"glimpses": glimpses[None]})

    def tiles(self, medium: Any) -> int:
        return 2


class GlimpsesConfig(LlavaConfig):
    model_type = "glimpses"


class _GlimpsesModel(LlavaModel):
    config_class = GlimpsesConfig

    def forward(self, *args: Any, glimpses: torch.Tensor | None = None, **given: Any) -> Any:
        if glimpses is not None:
            given["pixel_values"] = glimpses.flatten(0, 1)
        return super().forward(*args, **given)


class GlimpsesForGeneration(LlavaForConditionalGeneration):
    config_class = GlimpsesConfig

    def __init__(self, config: GlimpsesConfig) -> None:
        super().__init__(config)
        self.model = _GlimpsesModel(config)
        self.post_init()


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.inputs.families.FAMILIES", FAMILIES | {})
    register(Glimpses)


@cache
def words() -> Any:
    return tokenizer(["<image>", "<near>", "<far>"], bos=True)


@cache
def config() -> GlimpsesConfig:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return GlimpsesConfig(
        vision_config=CLIPVisionConfig(image_size=SIDE, patch_size=PATCH, **sizes),
        text_config=LlamaConfig(vocab_size=len(words()), eos_token_id=None, bos_token_id=None, **sizes),
        image_token_index=words().convert_tokens_to_ids("<image>"),
        tie_word_embeddings=False,
    )


@cache
def target() -> Target:
    return adapt(FamilyCase("glimpses", lambda _: GlimpsesForGeneration(config())).model())


def processor() -> InputProcessor:
    images = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    template = (
        "<s>{% for m in messages %}{% for p in m['content'] %}{% if p['type'] == 'image' %}<image>"
        "{% else %}{{ p['text'] }}{% endif %}{% endfor %}{% endfor %}"
    )
    return InputProcessor(config(), words(), images, chat_template=template)


def prompt() -> Prompt:
    question = user("Compare", {"type": "image"}, "with", {"type": "image"}, "now.")
    return processor().prompt(question, [picture(60, 40, 1), picture(40, 60, 2)])


@torch.no_grad()
def answer(given: Prompt, count: int) -> list[int]:
    """Greedy tokens of the stock model, every one from a forward pass over everything before it."""
    ids, media = list(given.ids), family_of(config()).join(given.media)
    for _ in range(count):
        logits = target().model(input_ids=torch.tensor([ids]), **media).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(given) :]


def test_a_picture_fills_the_placeholders_that_the_class_counts() -> None:
    made = prompt()
    assert [m.n_tokens for m in made.media] == [2 * TOKENS] * 2
    assert int(family_of(config()).visual_mask(made.ids).sum()) == 4 * TOKENS
    assert [last - first for first, last in family_of(config()).media_spans(made)] == [2 * TOKENS + 1] * 2
    tags = [words().convert_tokens_to_ids(tag) for tag in Glimpses.openers]
    assert [token for token in made.ids if token in tags] == tags * 2


def test_text_only_prompts_lose_the_tags_of_its_pictures() -> None:
    text = words().decode(processor().text_only(prompt()).ids)
    assert text == "<s>Compare\nwith\nnow."


def test_media_join_to_a_batch_and_split_again() -> None:
    made = prompt()
    batch = {"input_ids": torch.tensor([made.ids]), **family_of(config()).join(made.media)}
    assert batch["glimpses"].shape == (2, 2, 3, SIDE, SIDE)
    (again,) = split(config(), batch)
    assert again == made
    assert [m.digest for m in again.media] == [m.digest for m in made.media]
    with pytest.raises(InputError, match="more images than its placeholders"):
        split(config(), {**batch, "glimpses": batch["glimpses"].repeat(2, 1, 1, 1, 1)})
    assert family_of(config()).collate([made.media, made.media])["glimpses"].shape[0] == 4


@pytest.mark.parametrize("drafter", [None, PromptLookup()], ids=["plain", "lookup"])
def test_generation_is_that_of_the_stock_model(drafter: Any) -> None:
    made = prompt()
    expected = answer(made, 12)
    swapped = {"glimpses": family_of(config()).join(made.media)["glimpses"].flip(0)}
    (other,) = split(config(), {"input_ids": torch.tensor([made.ids]), **swapped})
    assert answer(other, 12) != expected, "the answer must depend on the pictures"
    outputs = Engine(target(), drafter).generate([Request(made), Request(other)], max_new_tokens=12)
    assert [list(output.tokens) for output in outputs] == [expected, answer(other, 12)]


def test_its_views_need_nothing_more() -> None:
    seen = pooled(target()).rewrite(prompt())
    assert [m.n_tokens for m in seen.media] == [2 * TOKENS // 4] * 2
    assert family_of(config()).signature != family_of(LlavaConfig()).signature
