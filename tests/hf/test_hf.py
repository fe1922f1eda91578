"""`generate` gives the same with speculation as without, in everything but time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, PreTrainedTokenizerFast, StoppingCriteria
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin
from transformers.generation.streamers import BaseStreamer

import harness
import saccade.hf
import saccade.hf.speculation as speculation_module
from families import BOS, EOS, FAMILIES, FIRST_WORD, LAST_WORD, PAD, VOCAB, Inputs
from processes import exit_code_of, run_anew
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.policy import Chain
from saccade.errors import MethodError
from saccade.hf import Speculation, speculate
from saccade.target_model.adapter import Target

NAMES = ("llama", "llava", "qwen2_5_vl", "gemma3")
NEW = 20


@cache
def model(name: str) -> Any:
    return FAMILIES[name].model()


@cache
def speculation(name: str, method: str = "chain") -> Speculation:
    options = {"dynamic-tree": {"top": 3, "max_depth": 4, "total": 12}, "chain": {"gamma": 4}}.get(method, {})
    drafter = FAMILIES[name].draft_model() if method in ("chain", "static-tree", "dynamic-tree") else None
    return speculate(drafter, method, **options)


def inputs_of(name: str, rows: int, kind: str | None = None) -> Inputs:
    return FAMILIES[name].inputs(kind or FAMILIES[name].kinds[0], rows)


def common(name: str, row: int = 0) -> list[int]:
    """Tokens of the unconstrained answer: options that forbid or reward these change something."""
    return FAMILIES[name].reference(FAMILIES[name].kinds[0], rows=row + 1)[row]


def both(name: str, inputs: Inputs, method: str = "chain", **options: Any) -> tuple[Any, Any]:
    """What `generate` gives by itself, and what it gives with speculation."""
    options = {"max_new_tokens": NEW, "do_sample": False, **options}
    theirs = model(name).generate(**inputs, **options)
    ours = model(name).generate(**inputs, **options, custom_generate=speculation(name, method))
    return theirs, ours


def new_tokens(name: str, inputs: Inputs, custom: Speculation | None, **options: Any) -> list[list[int]]:
    options = {"max_new_tokens": NEW, "do_sample": False, "custom_generate": custom, **options}
    sequences = model(name).generate(**inputs, **options)
    tokens: list[list[int]] = sequences[:, inputs["input_ids"].shape[1] :].tolist()
    return tokens


def assert_same(name: str, rows: int, method: str = "chain", **options: Any) -> torch.Tensor:
    theirs, ours = both(name, inputs_of(name, rows), method, **options)
    assert ours.dtype == theirs.dtype
    assert ours.tolist() == theirs.tolist()
    return ours


# --------------------------------------------------------------------------- greedy decoding


@pytest.mark.singly
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("method", ["plain", "chain", "static-tree", "dynamic-tree", "prompt-lookup"])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_sequences_equal_generate(name: str, method: str, rows: int) -> None:
    assert_same(name, rows, method)
    if method not in ("plain", "prompt-lookup"):
        assert all(output.stats.accepted_tokens > 0 for output in speculation(name, method).outputs)


OPTIONS: dict[str, Any] = {
    **harness.OPTIONS,
    "max_length": lambda a: {"max_new_tokens": None, "max_length": 50},
    "prefix_allowed_tokens_fn": lambda a: {
        "prefix_allowed_tokens_fn": lambda batch, ids: [
            w for w in range(FIRST_WORD, LAST_WORD + 1) if (w + int(ids[-1]) + batch + len(ids)) % 3
        ]
    },
    "generation_config": lambda a: {
        "max_new_tokens": None,
        "do_sample": None,
        "generation_config": GenerationConfig(max_new_tokens=9, repetition_penalty=1.4, do_sample=False),
    },
}


@pytest.mark.singly
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_options_act_as_in_generate_also_on_padded_batches(name: str, option: str, rows: int) -> None:
    assert_same(name, rows, "dynamic-tree", **OPTIONS[option](common(name)))


@pytest.mark.parametrize("name", NAMES)
def test_rows_that_ended_are_padded_as_in_generate(name: str) -> None:
    ends = [common(name, row)[4 + 6 * row] for row in range(3)]
    sequences = assert_same(name, 3, eos_token_id=ends, pad_token_id=PAD)
    new = sequences[:, inputs_of(name, 3)["input_ids"].shape[1] :]
    assert (new == PAD).any()
    assert (new != PAD).any()


# --------------------------------------------------------------------------- stopping, and the caller's own code


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """One word per id, ``w17`` for id 17."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = {f"w{i}": i for i in range(VOCAB) if i != 3}
    names["abcdef"] = 3  # StopStringCriteria finds out with this word how tokens are joined
    words = Tokenizer(models.WordLevel(names, unk_token="abcdef"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token=f"w{BOS}", eos_token=f"w{EOS}")


@pytest.mark.parametrize("eos", [EOS, None])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_stop_strings_end_rows_where_generate_ends_them(name: str, rows: int, eos: int | None) -> None:
    """Without an end-of-sequence token `generate` lets stopped rows run on until all have stopped."""
    stop = [f"w{common(name, row)[5 + 4 * row]}" for row in range(rows)]
    sequences = assert_same(name, rows, stop_strings=stop, tokenizer=tokenizer(), eos_token_id=eos)
    assert sequences.shape[1] < inputs_of(name, rows)["input_ids"].shape[1] + NEW


class ForbidAt(LogitsProcessor):
    """Forbids a token at one place of the padded sequence."""

    stateless = True

    def __init__(self, length: int, token: int) -> None:
        self.length, self.token = length, token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] != self.length:
            return scores
        return scores.index_fill(1, torch.tensor([self.token]), float("-inf"))


class StopAt(StoppingCriteria):
    """Stops every row at one length of the padded sequence."""

    stateless = True

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_own_processors_and_criteria_count_the_padding(name: str, rows: int) -> None:
    prompt = inputs_of(name, rows)["input_ids"].shape[1]
    token = common(name, rows - 1)[6]
    options = {"logits_processor": [ForbidAt(prompt + 6, token)], "stopping_criteria": [StopAt(prompt + 13)]}
    sequences = assert_same(name, rows, **options)
    assert sequences.shape[1] == prompt + 13
    assert sequences[-1, prompt + 6] != token


# --------------------------------------------------------------------------- what comes back


@pytest.mark.parametrize("rows", [1, 3])
def test_a_dictionary_has_scores_and_logits_on_request(rows: int) -> None:
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    theirs, ours = both("gemma3", inputs_of("gemma3", rows), **options, repetition_penalty=1.2)
    assert isinstance(ours, GenerateDecoderOnlyOutput)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert len(ours.scores) == len(ours.logits) == NEW
    for name in ("scores", "logits"):  # fp32 forwards of one or of several tokens differ by about 1e-5
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-3)


def test_scores_behind_the_end_of_a_row_are_zero() -> None:
    options = {"return_dict_in_generate": True, "output_scores": True, "eos_token_id": common("llama")[3]}
    _, ours = both("llama", inputs_of("llama", 3), **options)
    assert not any(step[0].any() for step in ours.scores[4:])
    assert all(step[0].any() for step in ours.scores[:4])


class Listener(BaseStreamer):
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.heard.append(value.tolist())

    def end(self) -> None:
        self.heard.append("end")


@pytest.mark.parametrize("eos", [None, "first"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_streamer_gets_the_columns_of_generate(rows: int, eos: str | None) -> None:
    listeners = Listener(), Listener()
    options = {"max_new_tokens": NEW, "eos_token_id": common("llava")[7] if eos else None}
    inputs = inputs_of("llava", rows)
    model("llava").generate(**inputs, streamer=listeners[0], **options)
    model("llava").generate(**inputs, streamer=listeners[1], **options, custom_generate=speculation("llava"))
    assert listeners[1].heard == listeners[0].heard


# --------------------------------------------------------------------------- sampling


def sample(seed: int, **options: Any) -> list[list[int]]:
    torch.manual_seed(seed)
    name = "qwen2_5_vl"
    return new_tokens(name, inputs_of(name, 1), speculation(name), do_sample=True, **options)


def test_samples_follow_the_global_seed() -> None:
    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert len({tuple(row) for row in sample(3, num_return_sequences=4)}) == 4


def test_greedy_decoding_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    both("llama", inputs_of("llama", 1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_every_returned_sequence_sees_its_own_pictures(name: str) -> None:
    """Sampling among one token is greedy decoding; rows have two pictures each."""
    options = {"do_sample": True, "top_k": 1, "num_return_sequences": 2}
    tokens = new_tokens(name, inputs_of(name, 2, "images2"), speculation(name), **options)
    assert tokens == [a for a in FAMILIES[name].reference("images2", rows=2, n=NEW) for _ in range(2)]


def test_every_returned_sequence_is_constrained_by_its_own_number() -> None:
    def one_word(row: int, ids: torch.Tensor) -> list[int]:
        return [FIRST_WORD + row]

    options = {"do_sample": True, "num_return_sequences": 2, "prefix_allowed_tokens_fn": one_word}
    expected = [[FIRST_WORD + row] * NEW for row in range(4)]
    for custom in (None, speculation("llama")):
        assert new_tokens("llama", inputs_of("llama", 2), custom, **options) == expected


# --------------------------------------------------------------------------- drafters


def test_a_text_only_drafter_gets_the_prompt_without_placeholders() -> None:
    case = FAMILIES["qwen2_5_vl"]
    blind = speculate(case.text_draft_model(), gamma=3)
    assert new_tokens("qwen2_5_vl", inputs_of("qwen2_5_vl", 3), blind) == case.reference("image", rows=3, n=NEW)


def test_a_drafter_of_another_image_form_needs_inputs_of_its_own() -> None:
    theirs = FAMILIES["llava_next"]
    other = speculate(theirs.model(), gamma=3)
    inputs = inputs_of("llava", 3)
    with pytest.raises(ValueError, match="assistant_inputs"):
        new_tokens("llava", inputs, other)
    tokens = new_tokens("llava", inputs, other, assistant_inputs=theirs.inputs("image", 3))
    assert tokens == FAMILIES["llava"].reference("image", rows=3, n=NEW)


def test_a_ready_made_drafter_is_taken_as_it_is() -> None:
    drafter = ModelDrafter(Target(FAMILIES["llama"].draft_model()), Chain(2))
    own = speculate(drafter)
    assert new_tokens("llama", inputs_of("llama", 1), own)[0] == common("llama")[:NEW]
    stats = own.outputs[0].stats  # two guesses a pass, that included which ends the prompt; fewer where room ends
    assert 2 * stats.target_passes - 2 <= stats.drafted_tokens <= 2 * (stats.target_passes + 1)


def test_models_are_adapted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    adapt = speculation_module.adapt
    monkeypatch.setattr(speculation_module, "adapt", lambda m, **more: seen.append(m) or adapt(m, **more))
    drafter = FAMILIES["llama"].draft_model()
    own = speculate(drafter)
    for _ in range(3):
        new_tokens("llama", inputs_of("llama", 1), own, max_new_tokens=2)
    assert seen == [drafter, model("llama")]


def test_the_model_can_be_trained_afterwards() -> None:
    target = FAMILIES["llama"].model()
    target.generate(**inputs_of("llama", 1), max_new_tokens=3, custom_generate=speculate())
    target(**inputs_of("llama", 1)).logits.sum().backward()
    assert target.model.layers[0].self_attn.q_proj.weight.grad.any()


def test_other_callables_are_called_as_before() -> None:
    seen: dict[str, Any] = {}

    def other(model: Any, input_ids: torch.Tensor, extra: int = 0, **arguments: Any) -> torch.Tensor:
        seen.update(arguments, extra=extra)
        return input_ids

    model("llava").generate(**inputs_of("llava", 1), max_new_tokens=3, custom_generate=other, extra=7)
    assert seen["extra"] == 7
    assert "logits_processor" in seen
    assert "visuals" not in seen


# --------------------------------------------------------------------------- the patch of GenerationMixin


def patched_method() -> Any:
    return GenerationMixin._extract_generation_mode_kwargs


@pytest.fixture
def stock() -> Iterator[Any]:
    """The stock method of `GenerationMixin`, in force as before any use of `saccade.hf`."""
    saccade.hf.unpatch()
    yield patched_method()
    saccade.hf.patch()  # which the other tests' callables need


def test_importing_patches_nothing() -> None:
    code = (
        "from transformers import GenerationMixin as m; stock = m._extract_generation_mode_kwargs; import saccade.hf; "
        "assert m._extract_generation_mode_kwargs is stock; saccade.hf.speculate(); "
        "assert m._extract_generation_mode_kwargs is not stock"
    )
    saccade.hf.unpatch()
    code_of_exit = exit_code_of(lambda: run_anew(code))
    saccade.hf.patch()
    assert code_of_exit == 0


def test_the_first_use_patches_and_a_call_restores(stock: Any) -> None:
    own = speculate()
    assert patched_method() is not stock
    saccade.hf.patch()  # once is enough, and once undone is undone
    saccade.hf.unpatch()
    assert patched_method() is stock
    with pytest.raises(ValueError, match=r"not patched any more; call saccade\.hf\.patch\(\)"):
        model("llama").generate(**inputs_of("llama", 1), max_new_tokens=2, custom_generate=own)
    saccade.hf.patch()
    model("llama").generate(**inputs_of("llama", 1), max_new_tokens=2, custom_generate=own)


def test_a_block_restores_what_was_there_before(stock: Any) -> None:
    with saccade.hf.patched():
        own = speculate(FAMILIES["llama"].draft_model())
        with saccade.hf.patched():
            pass
        model("llama").generate(**inputs_of("llama", 1), max_new_tokens=2, custom_generate=own)
    assert patched_method() is stock


def test_the_patch_of_another_library_is_not_lost(stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as theirs:
        saccade.hf.patch()
        theirs.setattr(GenerationMixin, "_extract_generation_mode_kwargs", lambda *given: {})
        with pytest.raises(ValueError, match="patched again by another library; undo that patch"):
            saccade.hf.unpatch()
    saccade.hf.unpatch()
    assert patched_method() is stock


# --------------------------------------------------------------------------- refusals


def cache_with_content() -> Any:
    return model("llama")(**inputs_of("llama", 1), use_cache=True).past_key_values


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams=2 is not supported"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5 is not supported"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens=3 is not supported"),
        ({"assistant_early_exit": 1}, "assistant_early_exit=1 is not supported"),
        ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions is not available"),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states is not available"),
        ({"inputs_embeds": torch.zeros(1, 5, 64)}, "Embeddings as inputs"),
        ({"past_key_values": cache_with_content}, "past_key_values must be empty"),
        ({"assistant_model": lambda: model("llama")}, "speculate"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_refused_in_a_sentence(options: dict[str, Any], message: str) -> None:
    options = {name: value() if callable(value) else value for name, value in options.items()}
    inputs = {**inputs_of("llama", 1), **options}
    with pytest.raises(ValueError, match=message):
        model("llama").generate(**inputs, max_new_tokens=4, custom_generate=speculation("llama"))


@pytest.mark.parametrize(("name", "missing"), [("qwen2_5_vl", "mm_token_type_ids"), ("gemma3", "token_type_ids")])
def test_pictures_without_token_types_are_refused(name: str, missing: str) -> None:
    inputs = inputs_of(name, 1)
    del inputs[missing]
    with pytest.raises(ValueError, match=missing):
        model(name).generate(**inputs, max_new_tokens=4, custom_generate=speculation(name))


def test_assistant_inputs_are_refused_where_nobody_reads_them() -> None:
    inputs = inputs_of("llama", 1)
    with pytest.raises(ValueError, match="assistant_inputs"):
        new_tokens("llama", inputs, speculate(), assistant_inputs=inputs)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: speculate("path/to/model"), "is not a trained head; give the folder or hub id of one, or a loaded"),
        (lambda: speculate(ModelDrafter(Target(model("llama")), Chain(2)), "chain"), "ready-made drafter"),
        (lambda: speculate(None, "eagle2"), "needs a trained eagle2 head; give its folder with drafter="),
        (
            lambda: speculate(model("llama"), gama=3),
            r"no option gama \(did you mean gamma\?\); its options are: draft_with, tree, gamma",
        ),
        (
            lambda: speculate(model("llama"), assistant_model=model("llama")),
            "drafter and assistant_model are two names",
        ),
        (lambda: speculate(model("llama"), "spd"), "rewrites the draft model's prompt and needs its processor"),
        (lambda: speculate(model("llama"), "tabed"), "use saccade.load"),
    ],
)
def test_what_does_not_go_with_the_method_is_refused_at_once(build: Any, message: str) -> None:
    with pytest.raises(MethodError, match=message):
        build()
