"""JSON of a schema on trees of guesses: the same answers as plain decoding under the same matcher."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache, reduce
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from kit import engine, prompts
from random_trees import NaiveTree, draft_tree
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from transformers.generation import LogitsProcessor, LogitsProcessorList

from families import FAMILIES, FIRST_WORD, VOCAB, reference_greedy
from saccade.engine import Request
from saccade.errors import InputError
from saccade.grammar import MOST_BLANKS, LLGuidance, Place, Rollback, XGrammar, json_schema
from saccade.verify.rule import Processing, RowProcessing

CASE = FAMILIES["llama"]
END = FIRST_WORD
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 6}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
NEW = 40


class Brackets(Rollback):
    """Balanced brackets of two kinds, by a stack that is rolled back."""

    PAIRS: ClassVar = {20: 21, 30: 31}

    def matcher(self) -> list[list[int]]:
        return [[]]  # stacks after every token

    def accept(self, matcher: list[list[int]], token: int) -> bool:
        stack = matcher[-1]
        if token in self.PAIRS:
            matcher.append([*stack, token])
        elif stack and token == self.PAIRS[stack[-1]]:
            matcher.append(stack[:-1])
        else:
            return False
        return True

    def rollback(self, matcher: list[list[int]], count: int) -> None:
        del matcher[-count:]

    def packed(self, matcher: list[list[int]]) -> bytes:
        stack = matcher[-1]
        mask = np.zeros(VOCAB, np.bool_)
        mask[[*self.PAIRS, *([self.PAIRS[stack[-1]]] if stack else [END])]] = True
        return np.packbits(mask, bitorder="little").tobytes()


def allowed(own: Rollback, matcher: Any) -> Tensor:
    """Tokens ``[V]`` that a grammar allows next."""
    bits = np.frombuffer(own.packed(matcher), np.uint8)
    return torch.from_numpy(np.unpackbits(bits, count=VOCAB, bitorder="little").view(bool))


class OneByOne(LogitsProcessor):
    """A matcher as it is used in plain decoding: it takes in the last token of every call."""

    def __init__(self, grammar: Rollback) -> None:
        self.grammar, self.matcher = grammar, None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.matcher is None:
            self.matcher = self.grammar.matcher()
        else:
            assert self.grammar.accept(self.matcher, int(input_ids[0, -1]))
        return scores.masked_fill(~allowed(self.grammar, self.matcher), float("-inf"))


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Single characters, and some pieces of what such JSON looks like."""
    pieces = ['"a"', '": ', '{"', '", ', '"}', '"b', "12", "ab", *(chr(c) for c in range(32, 127))]
    names = {f"<{i}>": i for i in range(FIRST_WORD)} | {"</s>": END}
    names |= {piece: END + 1 + i for i, piece in enumerate(pieces)}
    names |= {f"<{i}>": i for i in range(len(names), VOCAB)}
    words = Tokenizer(models.BPE({**names}, [], unk_token="<0>"))
    words.decoder = decoders.ByteFallback()
    special = [n for n in names if n.startswith("<") and len(n) > 1]
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", additional_special_tokens=special)


def grammar(name: str) -> Rollback:
    if name == "brackets":
        return Brackets()
    return XGrammar(compiled_by_xgrammar()) if name == "xgrammar" else schema()


def schema(schema: Any = SCHEMA, **options: Any) -> Rollback:
    pytest.importorskip("llguidance", reason="llguidance is an extra: pip install saccade[grammar]")
    return json_schema(schema, tokenizer(), VOCAB, **options)


def compiled_by_xgrammar() -> Any:
    xgrammar = pytest.importorskip("xgrammar", reason="xgrammar is a package that users may compile grammars with")
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer(), vocab_size=VOCAB)
    compact = {"any_whitespace": False, "separators": (",", ":")}
    return xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA), **compact)


GRAMMAR = pytest.mark.parametrize("name", ["brackets", "xgrammar", "llguidance"])


def answers(name: str, rows: int = 3) -> list[list[int]]:
    sequences = []
    for row in range(rows):
        options = {"logits_processor": LogitsProcessorList([OneByOne(grammar(name))]), "eos_token_id": END}
        sequences += reference_greedy(CASE.model(), CASE.row_inputs("text", row), NEW, **options)
    return sequences


def run(name: str, policy: str, **options: Any) -> list[list[int]]:
    requests = [Request(prompt, seed=row) for row, prompt in enumerate(prompts()[:3])]
    options = {"eos_token_id": END, "max_new_tokens": NEW, "logits_processor": [grammar(name)], **options}
    return [output.tokens for output in engine(policy).generate(requests, **options)]


def legal_tree(own: Rollback, emitted: Sequence[int], source: torch.Generator) -> NaiveTree:
    """A tree of tokens that the grammar allows, three at each of the first nodes; the root is the last one said."""
    parents, tokens, paths = [0], [emitted[-1] if emitted else 5], [list(emitted)]
    for parent in range(5):
        matcher = own.matcher()
        assert all(own.accept(matcher, t) for t in paths[parent])
        mask = allowed(own, matcher)
        mask[END] = False
        words = mask.nonzero().flatten()
        for place in torch.randperm(len(words), generator=source)[:3]:
            parents.append(parent)
            tokens.append(int(words[place]))
            paths.append([*paths[parent], tokens[-1]])
    return NaiveTree(tuple(parents), tuple(tokens), (True,) * len(parents))


@GRAMMAR
def test_every_branch_is_scored_as_by_a_matcher_of_its_own(name: str) -> None:
    """Step after step, each going on from a branch of the tree before."""
    own, source = grammar(name), torch.Generator().manual_seed(0)
    row = RowProcessing([own], {END})
    prompt, emitted = [3, 4, 5], list[int]()
    for _ in range(6):
        tree = legal_tree(own, emitted, source)
        logits = torch.randn(1, len(tree.tokens), VOCAB, generator=source)
        scores = Processing([row])(draft_tree([tree]), logits, [[*prompt, *emitted]])
        for node in range(len(tree.tokens)):
            matcher = own.matcher()
            assert all(own.accept(matcher, t) for t in [*emitted, *tree.below_root(node)])
            wanted = logits[0, node].masked_fill(~allowed(own, matcher), float("-inf"))
            assert torch.equal(scores[0, node], wanted)
        emitted += tree.below_root(len(tree.tokens) - 1 - len(emitted) % 3)


@pytest.mark.parametrize("policy", ["chain", "static"])
@GRAMMAR
def test_greedy_answers_are_those_of_plain_decoding(name: str, policy: str) -> None:
    assert run(name, policy) == answers(name)


def test_a_mask_behind_a_branch_is_not_that_of_another_branch() -> None:
    """Llguidance keeps its last mask, by the number of parts read and what the next one may be, through a rollback."""
    guidance = pytest.importorskip("llguidance", reason="llguidance is an extra: pip install saccade[grammar]")
    words = guidance.LLTokenizer("byte")
    options = {"whitespace_flexible": True}
    own = LLGuidance(words, guidance.LLMatcher.grammar_from_json_schema({**SCHEMA, "required": []}, defaults=options))

    def after(place: Place, text: str) -> Place:
        return reduce(Place.after, text.encode(), place)

    texts = ['{"a" ', '{ "a" ', '{"a": ', '{"a":1 ', '{"a":1,"b" ', '{"a": 1 ', '{"b": ', '{"b":"']
    for before in texts:
        for text in texts:
            start = own.start(())
            assert after(start, before).packed.any()
            place, alone = after(start, text), after(own.start(()), text)
            assert place.packed.tolist() == alone.packed.tolist(), f"{text!r} after {before!r}"
            assert place.run == alone.run


def test_an_answer_that_ended_is_json_of_the_schema() -> None:
    own = schema({**SCHEMA, "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]})
    for tokens in run("llguidance", "static", logits_processor=[own], max_new_tokens=60):
        assert tokens[-1] == END
        text = "".join(tokenizer().convert_ids_to_tokens(tokens[:-1]))
        assert json.loads(text)["a"] in (1, 2)


def spelled(own: Rollback, text: str) -> str | None:
    """The part of a text that a grammar allows, character by character, and END where the answer may end there."""
    state = own.start([])
    for place, character in enumerate(text):
        token = tokenizer().convert_tokens_to_ids(character)
        if own.scores(state, torch.zeros(VOCAB))[token].isneginf():
            return text[:place]
        state = own.advance(state, token)
    return text + "END" * bool(own.scores(state, torch.zeros(VOCAB))[END] == 0)


def test_json_is_compact_unless_white_space_is_allowed_which_is_bounded() -> None:
    loose = schema(whitespace=True)
    compact, spaced = '{"a":1,"b":"c d"}', '{ "a" : 1, "b": "c d"}'
    assert spelled(schema(), compact) == compact + "END"
    assert spelled(schema(), spaced) == "{"
    assert spelled(loose, spaced) == spaced + "END"
    assert spelled(loose, "{" + " " * 40) == "{" + " " * MOST_BLANKS


def test_an_object_of_five_hundred_optional_properties_is_followed() -> None:
    many = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(500)}}
    answer = '{"p3":1,"p77":2,"p499":3}'
    assert spelled(schema(many), answer) == answer + "END"


def test_the_limit_of_llguidance_is_named_before_the_first_token() -> None:
    many = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1100)}}
    with pytest.raises(InputError, match=r"items; max is 4100\): an object may have 1000 optional properties"):
        schema(many)


NOTHING = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}}


def test_a_ref_to_itself_is_refused_and_a_ref_with_an_end_followed() -> None:
    with pytest.raises(InputError, match="must lead to something else than itself"):
        schema({"$ref": "#"})
    with pytest.raises(InputError, match="must lead to something else than itself"):
        spelled(schema(NOTHING), '{"x":1')
    node = {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}}, "required": ["v"]}
    answer = '{"v":1,"next":{"v":2,"next":{"v":3}}}'
    assert spelled(schema(node), answer) == answer + "END"


def test_schemas_need_llguidance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("saccade.grammar.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"need llguidance; run `pip install 'saccade\[grammar\]'`"):
        json_schema(SCHEMA, tokenizer(), VOCAB)


def test_xgrammar_s_own_processor_is_taken_as_its_grammar() -> None:
    compiled = compiled_by_xgrammar()
    from xgrammar.contrib.hf import LogitsProcessor as Theirs

    assert run("xgrammar", "static", logits_processor=[Theirs(compiled)]) == answers("xgrammar")
    with pytest.raises(InputError, match="no grammar for row 2"):
        run("xgrammar", "static", logits_processor=[Theirs([compiled, compiled])])


def test_what_leaves_the_grammar_is_refused() -> None:
    own = Brackets()
    state = own.advance(own.advance(own.start([1, 2]), 20), 31)
    with pytest.raises(InputError, match="does not allow token 31 after 1 new tokens"):
        own.scores(state, torch.zeros(VOCAB))
