"""The shapes that models are inflated to, and what fits into them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.errors import ModelError


@dataclass(frozen=True)
class Shape:
    """The size of a Llama language model."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int


SHAPES = {
    "llava-1.5-7b": Shape(4096, 32, 32, 32, 128, 11008),
    "qwen2.5-vl-32b": Shape(5120, 64, 40, 8, 128, 27648),
    "llava-ov-72b": Shape(8192, 80, 64, 8, 128, 29568),
}
_MLP_RATIO = 11008 / 4096  # of shapes given by width, layers and heads: as in Llama
_MOST_COPIES = 8
_ROPE_BY_FREQUENCY = ("default", "linear", "llama3")  # whose speeds do not depend on the head's size


def parse_shape(like: str) -> Shape:
    """A shape by name, or from `WIDTHxLAYERSxHEADS`.

    Raises:
        ModelError: it is neither.
    """
    if like in SHAPES:
        return SHAPES[like]
    numbers = like.lower().split("x")
    if len(numbers) != 3 or not all(part.isdecimal() and int(part) > 0 for part in numbers):
        raise ModelError(
            f"There is no shape {like!r}; give {', '.join(SHAPES)}, or WIDTHxLAYERSxHEADS such as 1024x12x8."
        )
    width, layers, heads = map(int, numbers)
    if width % heads:
        raise ModelError(
            f"A width of {width} is no multiple of {heads} heads; choose another number of heads."
        )
    mlp = -(-round(width * _MLP_RATIO) // 64) * 64
    return Shape(width, layers, heads, heads, width // heads, mlp)


def copies_of(small: int, wide: int) -> int:
    """How many small streams lie side by side so that norms scale by a power of two; 1 when no number does it."""
    for copies in range(1, _MOST_COPIES + 1):
        ratio, rest = divmod(wide, copies * small)
        if ratio and not rest and ratio.bit_count() == 1 and ratio.bit_length() % 2:  # 1, 4, 16, 64, ...
            return copies
    return 1


def check(folder: Path, config: Any, shape: Shape) -> None:
    """Make sure that a model can be inflated to a shape.

    Args:
        folder: of the model, for messages.

    Raises:
        ModelError: it has another kind of language model, or does not fit.
    """
    text = getattr(config, "text_config", None)
    if text is None or text.model_type != "llama":
        kind = getattr(text, "model_type", config.model_type)
        raise ModelError(
            f"{folder} has a language model of type {kind!r}; only models with a Llama language model can be inflated."
        )
    if text.attention_bias or text.mlp_bias:
        raise ModelError(
            f"{folder} has biases in its layers; only Llama models without biases can be inflated."
        )
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _ROPE_BY_FREQUENCY:
        raise ModelError(
            f"{folder} has rotary positions of type {rope!r}; expected {', '.join(_ROPE_BY_FREQUENCY)}."
        )
    groups = text.num_attention_heads // text.num_key_value_heads
    fits = {
        f"a width of {shape.width}": shape.width >= text.hidden_size,
        f"{shape.layers} layers": shape.layers >= text.num_hidden_layers,
        f"{shape.kv_heads} key-value heads": shape.kv_heads >= text.num_key_value_heads,
        f"{shape.heads // shape.kv_heads} heads per key-value head": shape.heads // shape.kv_heads >= groups,
        f"heads of size {shape.head_dim}": shape.head_dim % text.head_dim == 0,
        f"{shape.mlp} neurons": shape.mlp >= text.intermediate_size,
    }
    for what, holds in fits.items():
        if not holds:
            raise ModelError(
                f"The small model does not fit into {what}: it has width {text.hidden_size}, "
                f"{text.num_hidden_layers} layers, {text.num_attention_heads} heads ({text.num_key_value_heads} "
                f"key-value) of size {text.head_dim} and {text.intermediate_size} neurons; choose a larger shape, "
                "with heads a multiple of that size."
            )
