"""What speculation costs beside time: cache memory and target positions."""

from __future__ import annotations

from saccade.theory import domain


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, *, value_bytes: float = 2.0) -> float:
    """Bytes that one token holds in a KV cache: a key and a value per layer and KV head.

    LLaVA-1.5 7B in float16 (32 layers, 32 heads of 128): 512 KiB; Qwen2.5-VL 7B (28 layers, 4 KV heads of
    128): 56 KiB.

    Args:
        layers: that keep a cache.
        kv_heads: per layer (grouped-query attention has fewer than query heads).
        head_dim: numbers per head.
        value_bytes: 4 for float32, 2 for float16 and bfloat16, less for a quantised cache.

    Raises:
        ValueError: a count is below 1, or the size is not positive.
    """
    numbers = (
        2 * domain.count("number of layers", layers, 1) * domain.count("number of KV heads", kv_heads, 1)
    )
    return numbers * domain.count("head dimension", head_dim, 1) * domain.positive("value size", value_bytes)


def verified_per_token(nodes: int, accepted_length: float) -> float:
    """Target positions computed per token emitted; plain decoding has 1.

    Args:
        nodes: drafted per pass, the root not counted (gamma of a chain).
        accepted_length: accepted of them, expected or measured.

    Returns:
        ``(nodes + 1) / (accepted_length + 1)``

    Raises:
        ValueError: `nodes` is negative, or the accepted length is not between 0 and `nodes`.
    """
    domain.count("number of nodes", nodes)
    if not 0 <= accepted_length <= nodes:
        raise ValueError(f"The accepted length must lie between 0 and {nodes}, not {accepted_length}.")
    return (nodes + 1) / (accepted_length + 1)
