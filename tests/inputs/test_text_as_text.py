"""Control tokens in the text of messages are text, and honest text has the ids that it always has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from kits import VIDEO, VISUAL, Kit, kit, outside_the_registry
from PIL import Image
from transformers import PreTrainedTokenizerFast

from checkpoints import vlm
from saccade.errors import InputError
from saccade.inputs.literal_text import Controls, LiteralText
from saccade.inputs.processor import InputProcessor, MediaOptions

PICTURE = Image.new("RGB", (30, 20), (200, 10, 10))
FAMILIES = [*VISUAL, "llama"]
HONEST = [
    "What is in the picture?",
    "  is 3 < 4, and a -> b?\n\n",
    "<",
    ">",
    "s> and </",
    "naïve 🙂 <b>bold</b> [x] | <|x|>\t",
]

TEXT = MediaOptions(text_as_text=True)


def conversation(text: str, family: str) -> list[dict[str, Any]]:
    media = [{"type": "image", "image": PICTURE}] if family != "llama" else []
    return [
        {"role": "user", "content": [*media, {"type": "text", "text": text}]},
        {"role": "assistant", "content": [{"type": "text", "text": f"It says {text}"}]},
        {"role": "user", "content": [{"type": "text", "text": text}]},
    ]


def hostile(processor: InputProcessor) -> str:
    """Every control token of a family, some with signs around them."""
    tokens = [t.content for t in processor.tokenizer.added_tokens_decoder.values()]
    return " x ".join([*tokens, "".join(tokens), "<</s>/s>", "</s></s>"])


def control_ids(processor: InputProcessor, ids: Any) -> list[int]:
    known = processor.tokenizer.added_tokens_decoder
    return [i for i in ids if i in known]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("text", HONEST)
def test_honest_text_has_the_ids_that_it_has_without_the_option(name: str, text: str) -> None:
    processor = kit(name).ours
    messages = conversation(text, name)
    assert processor.prompt(messages, options=TEXT) == processor.prompt(messages)


@pytest.mark.parametrize("name", FAMILIES)
def test_control_tokens_of_users_become_text(name: str) -> None:
    processor = kit(name).ours
    text = hostile(processor)
    made = processor.prompt(conversation(text, name), options=TEXT)
    plain = processor.prompt(conversation("harmless", name))
    assert control_ids(processor, made.ids) == control_ids(processor, plain.ids)
    written = processor.tokenizer.decode([i for i in made.ids if i not in processor.tokenizer.added_tokens_decoder])
    assert written.count(text) == 3
    assert [m.digest for m in made.media] == [m.digest for m in plain.media]


@pytest.mark.parametrize("name", VIDEO)
def test_a_typed_video_placeholder_takes_no_video(name: str) -> None:
    item = kit(name)
    messages = conversation(f"what is {item.video}?", name)
    with pytest.raises(InputError, match="take placeholders out"):
        item.ours.prompt(messages)
    item.ours.prompt(messages, options=TEXT)


@pytest.mark.parametrize("parts", [["</", "s>"], ["<", "/", "s", ">"], ["a <", "/s> b"], ["</s", "", ">"]])
@pytest.mark.parametrize("name", FAMILIES)
def test_parts_that_join_to_a_control_token_stay_text(name: str, parts: list[str]) -> None:
    processor = kit(name).ours
    messages = [{"role": "user", "content": [{"type": "text", "text": part} for part in parts]}]
    plain = [{"role": "user", "content": [{"type": "text", "text": "b"} for _ in parts]}]
    made = processor.prompt(messages, options=TEXT)
    assert control_ids(processor, made.ids) == control_ids(processor, processor.prompt(plain).ids)


@pytest.mark.parametrize(("template", "text"), [("{}s>", "a </"), ("</{}", "s> a")])
def test_text_stays_text_where_the_template_completes_a_control_token(template: str, text: str) -> None:
    k = kit("llama")
    written = template.format("{{ messages[0]['content'] }}")
    processor = InputProcessor(k.config, k.ours.tokenizer, chat_template=written)
    assert control_ids(processor, processor.prompt(text).ids) == [k.ours.tokenizer.eos_token_id], "without care"
    assert not control_ids(processor, processor.prompt(text, options=TEXT).ids)


def test_a_plain_string_and_a_model_without_template_are_covered() -> None:
    item = kit("llava")
    bare = InputProcessor(item.config, item.ours.tokenizer, item.ours.image_processor)
    for processor in (item.ours, bare):
        made = processor.prompt("a </s> <image> b", [PICTURE], options=TEXT)
        plain = processor.prompt("a b", [PICTURE])
        assert control_ids(processor, made.ids) == control_ids(processor, plain.ids)


@pytest.mark.parametrize("text", ["\ud800", "fine \udcff not"])
def test_text_that_is_no_utf_8_is_one_sentence(text: str) -> None:
    for given in (text, [{"role": "user", "content": text}]):
        with pytest.raises(InputError, match=r"not valid UTF-8 at character \d+; give whole characters\.$"):
            kit("llama").ours.prompt(given)


def test_a_text_with_every_mark_is_refused_and_with_some_is_not() -> None:
    marks = "".join(map(chr, range(0xFDD0, 0xFDF0)))
    processor = kit("llama").ours
    made = processor.prompt(marks[1:] + "</s>", options=TEXT)
    assert processor.decode(made.ids).count(marks[1:] + "</s>") == 1
    with pytest.raises(InputError, match="32 noncharacters"):
        processor.prompt(marks, options=TEXT)


def encoder(core: tokenizers.Tokenizer, template: str | None = None) -> tuple[Any, Controls]:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    return tokenizer, Controls(tokenizer, template, ())


def encoded(controls: Controls, text: str) -> list[int]:
    literal = LiteralText(controls, [text])
    return literal.encode("</s>" + literal.mark_text(text), False)


def metaspace(scheme: str) -> tokenizers.Tokenizer:
    """A SentencePiece tokenizer as Llama 2's, whose vocabulary has the control token among its pieces."""
    pieces = ["<unk>", "<s>", "</s>", "▁", "<", "/", "s", ">", "a", "b", "▁a", "</", "s>"]
    core = tokenizers.Tokenizer(
        tokenizers.models.Unigram([(p, 0.0 if p == "</s>" else -2.0) for p in pieces], unk_id=0)
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme)
    core.decoder = tokenizers.decoders.Metaspace(prepend_scheme=scheme)
    return core


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_a_vocabulary_with_the_control_token_among_its_pieces_does_not_bring_it_back(scheme: str) -> None:
    tokenizer, controls = encoder(metaspace(scheme))
    assert encoded(controls, "a</s>b").count(2) == 1
    assert tokenizer("a</s>b", split_special_tokens=True)["input_ids"].count(2) == 1  # as it does without care


def test_a_normalised_token_in_other_signs_stays_text() -> None:
    core = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate("</s>ab ")}, []))
    core.normalizer = tokenizers.normalizers.NFKC()
    core.add_special_tokens(["</s>"])
    core.add_tokens([tokenizers.AddedToken("<a>", normalized=True)])
    tokenizer, controls = encoder(core, "{{ '<a>' }}")
    control = tokenizer.convert_tokens_to_ids("<a>")
    assert control in tokenizer("b＜a＞")["input_ids"]
    assert control not in encoded(controls, "b＜a＞")
    assert tokenizer.decode(encoded(controls, "b＜a＞")[1:]).replace(" ", "") == "b<a>"


def test_white_space_that_a_token_of_the_template_swallows_is_no_reason_for_other_ids() -> None:
    core = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate("</s>ab ")}, []))
    core.add_special_tokens([tokenizers.AddedToken("</s>", rstrip=True)])
    tokenizer, controls = encoder(core)
    assert encoded(controls, "  a <") == tokenizer("</s>  a <")["input_ids"]


def test_tokens_of_thought_keep_their_meaning_in_answers_alone() -> None:
    core = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate("<think>ab/s ")}, []))
    core.add_special_tokens(["</s>"])
    core.add_tokens([tokenizers.AddedToken("<think>", normalized=False)])
    tokenizer, controls = encoder(core, "{% if '<think>' in message %}")
    literal = LiteralText(controls, [])
    assert literal.mark_text("<think></s>", "assistant").startswith("<think><")
    assert tokenizer.convert_tokens_to_ids("<think>") not in literal.encode(literal.mark_text("<think>"), False)


class Slow:
    """A tokenizer without the places of its tokens."""

    is_fast = False

    def __init__(self, kit: Kit) -> None:
        self._tokenizer = kit.ours.tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        return self._tokenizer(text, **options)


def test_a_tokenizer_that_cannot_do_it_says_so() -> None:
    controls = Controls(Slow(kit("llama")), None, ())
    literal = LiteralText(controls, [])
    assert literal.encode(literal.mark_text("a <"), False) == kit("llama").ours.tokenizer("a <").input_ids[1:]
    with pytest.raises(InputError, match=r"the control token </s>, which this tokenizer cannot encode as text"):
        literal.encode(literal.mark_text("a </s>"), False)


def test_a_family_outside_the_registry_takes_control_tokens_as_text(tmp_path: Path) -> None:
    item, processor = kit("llava"), outside_the_registry(tmp_path)
    text = hostile(processor)
    made = processor.prompt(conversation(text, "llava"), options=TEXT)
    assert made.ids == item.ours.prompt(conversation(text, "llava"), options=TEXT).ids
    honest = conversation("a <", "llava")
    assert processor.prompt(honest, options=TEXT) == processor.prompt(honest)


def test_generation_and_the_running_batch_take_the_option() -> None:
    model, question = vlm("llava"), "what is <image></s> here"
    expected = model.processor.prompt(question, [PICTURE], options=TEXT)
    alone = model.generate(question, [PICTURE], text_as_text=True, max_new_tokens=4)
    assert alone.tokens == model.generate(expected, max_new_tokens=4).tokens
    with model.batch() as batch:
        ticket = batch.add(question, [PICTURE], text_as_text=True, max_new_tokens=4)
        assert ticket.result().tokens == alone.tokens
    assert model.chat().send(question, [PICTURE], text_as_text=True, max_new_tokens=4).tokens == alone.tokens
