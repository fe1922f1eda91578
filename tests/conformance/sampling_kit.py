"""Sampling against exact enumeration: small vocabularies, all sequences, one chi-squared test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.generation import logits_process as hf

from assistants import spread
from saccade.draft.trees.dynamic import DynamicTree
from saccade.draft.trees.policy import Chain, StaticTree
from saccade.engine import Engine, Request
from saccade.inputs.families.family import Prompt
from saccade.output import Output
from saccade.target_model.token_blocks import ForwardOutput
from saccade.tree import DraftTree
from saccade.verify.rule import Rule

Process = Callable[[Tensor, Tensor], Tensor]
"""Logits processors: ``(ids [n, S], logits [n, V])`` to scores."""


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """Of Pearson's chi-squared test; sequences expected fewer than five times are counted together.

    0 when something was seen that cannot happen.
    """
    if counts[probabilities == 0].sum() > 0:
        return 0.0
    expected = probabilities.double() * counts.sum()
    rare = expected < 5
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    seen = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    used = expected > 0
    statistic = ((seen - expected)[used] ** 2 / expected[used]).sum()
    freedom = torch.tensor(float(used.sum() - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def histogram(sequences: Tensor, vocab: int) -> Tensor:
    """``[V ** L]`` counts of ``[n, L]`` sequences."""
    weights = vocab ** torch.arange(sequences.shape[1] - 1, -1, -1)
    return torch.bincount((sequences * weights).sum(-1), minlength=vocab ** sequences.shape[1])


@torch.no_grad()
def exact(model: Any, prompt: list[int], length: int, process: Process) -> Tensor:
    """``[V ** L]`` probability of every continuation of ``prompt`` under a causal model, by full forwards."""
    vocab = model.config.vocab_size
    ids, total = torch.tensor([prompt]), torch.ones(1, dtype=torch.float64)
    for _ in range(length):
        probabilities = process(ids, model(input_ids=ids).logits[:, -1]).double().softmax(-1)
        total = (total[:, None] * probabilities).flatten()
        ids = torch.cat([ids.repeat_interleave(vocab, 0), torch.arange(vocab).repeat(len(ids))[:, None]], 1)
    return total


# --------------------------------------------------------------------------- without any model


class Table:
    """A random language model of order ``depth``: every context has its own distribution.

    Args:
        sharpness: standard deviation of the logits.
        keep: how many tokens of each context have any probability.
    """

    def __init__(self, vocab: int, depth: int, seed: int, sharpness: float = 1.5, keep: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab = vocab
        self._logits = []
        for d in range(depth + 1):
            logits = sharpness * torch.randn(vocab**d, vocab, generator=generator)
            if keep is not None:
                logits[logits < logits.topk(keep, -1).values[:, -1:]] = float("-inf")
            self._logits.append(logits)

    def logits(self, contexts: Tensor) -> Tensor:
        """``[..., V]`` after contexts ``[..., d]``."""
        depth = contexts.shape[-1]
        weights = self.vocab ** torch.arange(depth - 1, -1, -1)
        return self._logits[depth][(contexts * weights).sum(-1)]

    def exact(self, length: int) -> Tensor:
        """``[V ** length]`` probability of every sequence."""
        total = torch.ones(1, dtype=torch.float64)
        for d in range(length):
            total = (total[:, None] * self._logits[d].double().softmax(-1)).flatten()
        return total


class ManyUniforms:
    """Stands in for `Uniforms` where there are too many rows for a generator each."""

    def __init__(self, rows: int) -> None:
        self._rows = rows

    def pop(self, count: int) -> Tensor:
        return torch.rand(self._rows, count)


@dataclass(frozen=True)
class Trial:
    """One verification pass for many rows, without any model."""

    target: Table  # gives p
    draft: Table  # gives q
    policy: Any
    proposer: Any
    rule: Rule
    uniforms: ManyUniforms  # of proposer and rule

    def sequences(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        """``[rows, length]`` tokens, and how many of each row were accepted drafts.

        What the pass leaves open is drawn from the target itself.
        """
        tree = self._grow(rows)
        levels, width = self.rule.uniforms(tree.max_depth, tree.max_children)
        numbers = self.uniforms.pop(levels * width).view(rows, levels, width)
        scores = self._scores(tree)
        verdict = self.rule.judge(range(rows), tree, scores, numbers, ForwardOutput(scores))
        accepted = tree.tokens.gather(1, verdict.path)[:, 1:]
        blank = torch.zeros(rows, length + 1, dtype=torch.long)
        blank[:, : accepted.shape[1]] = accepted
        blank.scatter_(1, verdict.count[:, None], verdict.token[:, None])
        for place in range(length):
            drawn = self.target.logits(blank[:, :place]).softmax(-1).multinomial(1)[:, 0]
            blank[:, place] = torch.where(place > verdict.count, drawn, blank[:, place])
        return blank[:, :length], verdict.count

    def _grow(self, rows: int) -> DraftTree:
        growth = self.policy.begin(range(rows), torch.zeros(rows, dtype=torch.long), self.proposer)
        empty = torch.zeros(rows, 1, 0, dtype=torch.long)
        frontier = growth.expand(self.draft.logits(empty))
        ran = torch.zeros(rows, 0, dtype=torch.long)
        while frontier is not None:
            ran = torch.cat([ran, frontier.tokens], 1)
            paths = _paths(ran, frontier.attention_mask, frontier.depth)
            frontier = growth.expand(self.draft.logits(paths))
        return growth.tree()

    def _scores(self, tree: DraftTree) -> Tensor:
        rows, size = tree.tokens.shape
        scores = torch.zeros(rows, size, self.target.vocab)
        for depth in range(tree.max_depth + 1):
            here = tree.depth.expand(rows, -1) == depth
            if here.any():
                paths = _paths(tree.tokens, tree.ancestors, depth + 1)[..., 1:]  # without the root
                scores = torch.where(here[..., None], self.target.logits(paths), scores)
        return scores


def p_of(setup: Trial, rows: int, length: int, seed: int = 0) -> float:
    """How likely the target draws the sequences of a trial."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sequences, accepted = setup.sequences(rows, length)
    assert accepted.float().mean() > 0
    return p_value(histogram(sequences, setup.target.vocab), setup.target.exact(length))


def _paths(tokens: Tensor, allow: Tensor | None, depth: int) -> Tensor:
    """``[B, W, depth]`` tokens of the entries that each of W sees, in order; None for a chain's last one."""
    if allow is None:
        return tokens[:, None]
    allow = allow.expand(tokens.shape[0], -1, -1)
    places = allow.int().argsort(dim=-1, descending=True, stable=True)[..., :depth]
    return tokens[:, None].expand(-1, allow.shape[1], -1).gather(2, places)


# --------------------------------------------------------------------------- with models of five tokens

LIKELY = 1e-5
"""Seeds are fixed, so a right implementation passes always; it would need another seed in one of a hundred thousand
cases after a change of the order in which random numbers are drawn."""
UNLIKELY = 1e-9
"""A planted mistake has to fall below this."""

SMALL, NEW = 5, 4
"""Tokens of the model, and of an answer."""
PROMPT = [1, 3, 2, 4, 1, 3]
ROWS = 256
"""Answers of a sample: enough that settings are told apart (`test_the_histogram_tells_settings_apart`)."""


TREES: dict[str, Any] = {
    "chain": Chain(2),
    "static": StaticTree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]),
    "dynamic": DynamicTree(top=2, max_depth=2, total=4),
}


def small_hybrid(seed: int) -> Qwen3_5ForCausalLM:
    """A gated delta net and an attending layer over the same tokens."""
    config = Qwen3_5TextConfig(
        vocab_size=SMALL,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    return spread(Qwen3_5ForCausalLM, config, seed)


def small_model(seed: int, vocab: int = SMALL, layers: int = 1) -> LlamaForCausalLM:
    """One layer or more over a handful of tokens, with logits that differ by about one."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=None,
    )
    return spread(LlamaForCausalLM, config, seed)


def processed(**options: Any) -> Process:
    processors = hf.LogitsProcessorList()
    if "repetition_penalty" in options:
        processors.append(hf.RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    if "temperature" in options:
        processors.append(hf.TemperatureLogitsWarper(options["temperature"]))
    if options.get("top_k"):
        processors.append(hf.TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        processors.append(hf.TopPLogitsWarper(options["top_p"]))
    return lambda ids, logits: processors(ids, logits)


OPTIONS: dict[str, dict[str, Any]] = {
    "as_it_is": {"top_k": 0},
    "temperature": {"top_k": 0, "temperature": 0.6},
    "top_p": {"top_k": 0, "temperature": 1.3, "top_p": 0.8},
    "top_k": {"top_k": 3},
    "repetition_penalty": {"top_k": 0, "repetition_penalty": 1.6, "temperature": 0.8},
}


def sampled(engine: Engine, **options: Any) -> list[Output]:
    """`ROWS` answers to `PROMPT`, each of its own seed."""
    requests = [Request(Prompt(tuple(PROMPT)), seed=row) for row in range(ROWS)]
    outputs: list[Output] = engine.generate(requests, do_sample=True, max_new_tokens=NEW, **options)
    return outputs


def accepted(outputs: Sequence[Output]) -> int:
    """Accepted draft tokens of all answers."""
    return sum(output.stats.accepted_tokens for output in outputs)


def p_of_answers(outputs: Sequence[Output], model: Any, **options: Any) -> float:
    """How likely the target draws such answers under these options."""
    counts = histogram(torch.tensor([output.tokens for output in outputs]), SMALL)
    return p_value(counts, exact(model, PROMPT, NEW, processed(**options)))


def assert_follows(method: Engine, option: str, least: int = 0) -> list[Output]:
    """Sample under a setting of `OPTIONS`: the target's distribution, with more accepted drafts than ``least``."""
    outputs = sampled(method, **OPTIONS[option])
    assert accepted(outputs) > least
    assert p_of_answers(outputs, method.target.model, **OPTIONS[option]) > LIKELY
    return outputs
