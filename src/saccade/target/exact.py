"""Exact mode: a token's results are the same bits whatever runs beside it, in every number format.

Verification computes what plain decoding computes, but in passes of other shapes, in which the sums of products and of
attention round in another order; in bfloat16 that decides where two tokens nearly tie. In exact mode it cannot, because
nothing that a token's entries and logits depend on knows the pass:

- Products run in sizes of rows that agree bit for bit (`saccade.target.steady`).
- Attention sums do not round (`saccade.target.exact_attention`), so that the slots of the keys, masked ones between
  them and rows beside do not matter.
- All else is computed element by element, or within a token's vector.

By induction over layers and tokens, entries and logits are a function of a row's own tokens and pictures: the same for
every lossless method, batch size, size of prompt chunks and reused prefix.
"""

from __future__ import annotations

from typing import Any

import torch

from saccade.errors import ModelError
from saccade.target.exact_attention import MAX_DIM, MAX_KEYS, ExactAttention
from saccade.target.forward import TokenBlock
from saccade.target.lean import LeanDecoder, lean_decoder
from saccade.target.traits import ordinary_ids
from saccade.tree import ancestors_of

DEVICES = ("cpu", "cuda")
"""Kinds of devices with float64. The conformance tests run on CPUs."""
_CONTEXT = 2**17
"""Longest sequence of models whose configuration names none."""
_BEYOND = 1024
"""Most tokens of a tree that may exceed the context before they are cut."""
_PROMPT, _DEPTH, _WIDTH = 9, 5, 3
"""Prompt tokens, levels and tokens per level of the trees that are tried at load."""


def caveat(target: Any, lossless: bool) -> str:
    """What may make a greedy answer of a `Target` other than plain decoding's; empty for nothing and lossy methods."""
    if target.dtype.itemsize > 2 or target.exact or not lossless:
        return ""
    name = str(target.dtype).removeprefix("torch.")
    return (
        f"In {name}, draft tokens and other answers in a batch change the rounding, "
        "and with it an answer where two tokens nearly tie; exact mode (--exact) prevents that."
    )


def exact_decoder(target: Any) -> LeanDecoder:
    """Build the decoder of a `Target` in exact mode."""
    kind = target.device.type
    if kind not in DEVICES:
        raise ModelError(
            f"Exact mode computes sums in float64, which it expects of {' and '.join(DEVICES)} devices alone, not of "
            f"{kind}; load the model on the CPU, or leave exact out."
        )
    keys = (target.traits.context or _CONTEXT) + _BEYOND
    if keys > MAX_KEYS:
        raise ModelError(
            f"Exact mode sums over at most {MAX_KEYS - _BEYOND} tokens, but the model's context is "
            f"{target.traits.context}; lower max_position_embeddings in its configuration, or leave exact out."
        )
    decoder = None
    if target.traits.tested:
        decoder = lean_decoder(target.model, target.decoder, ExactAttention(keys, target.dtype))
    if decoder is None or decoder.head_dim > MAX_DIM:
        raise ModelError(
            f"Exact mode needs a decoder of the Llama, Mistral or Qwen architecture without experts, on one device and "
            f"without hooks; the decoder of {target.traits.text_type!r} here runs on modules whose sums it does not "
            "control; leave exact out, or choose float32, where differences are far rarer."
        )
    return decoder


@torch.inference_mode()
def is_exact(target: Any) -> bool:
    """Whether a tree's path gives the bits that its tokens give one by one, behind a prompt in other chunks."""
    ids = ordinary_ids(target.config, target.vocab_size, _PROMPT + _DEPTH * _WIDTH)
    prompt, nodes = ids[:_PROMPT], ids[_PROMPT:]
    path = [level * _WIDTH + level % _WIDTH for level in range(_DEPTH)]  # a root, and one of each level's tokens
    parents = [path[max(node // _WIDTH - 1, 0)] for node in range(len(nodes))]
    cache = target.new_cache(2)
    for row in range(2):
        cache.reserve(row, len(ids))

    def run(
        row: int, tokens: list[int], above: torch.Tensor | None = None, depth: torch.Tensor | None = None
    ) -> torch.Tensor:
        block = TokenBlock([row], torch.tensor([tokens], device=target.device), above, depth)
        logits: torch.Tensor = target.forward(cache, [block])[0].logits[0]
        return logits

    run(0, prompt)
    cache.commit([0], [range(_PROMPT)])
    above = ancestors_of(torch.tensor([parents], device=target.device), _DEPTH)
    depth = torch.tensor([[node // _WIDTH for node in range(len(nodes))]], device=target.device)
    drafted = run(0, nodes, above, depth)[path]
    cache.commit([0], [path])
    for part in (prompt[:4], prompt[4:]):
        run(1, part)
        cache.commit([1], [range(len(part))])
    plain = []
    for node in path:
        plain.append(run(1, [nodes[node]]))
        cache.commit([1], [[0]])
    ours, theirs = ([part for entry in cache.export(row) for part in entry] for row in range(2))
    return all(map(torch.equal, ours, theirs)) and torch.equal(drafted, torch.cat(plain))
