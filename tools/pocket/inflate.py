"""Checkpoints as wide and deep as a big model's that compute exactly a small model's function.

For speed measurements without a big model's weights: each step costs as much as the big model's, while answers, and so
acceptance, are the small model's. For Llava-type models with a Llama language model:

- the small residual stream occupies the first columns of the wide one, all others are 0;
- RMS norms divide by the length of the wide stream: weight times sqrt(small / wide), epsilon times small / wide;
- a head grows `k` times in size by moving rotary dimension `j` to `k j`, which has the same frequency, and queries grow
  by sqrt(k), because attention divides by that much more;
- new heads, neurons and layers have one zero factor on every path to the stream and random numbers elsewhere, so that
  the hardware multiplies real numbers.

All scaling is by powers of two, which are exact in every number format, if width and head size grow by powers of 4.
What remains is the order of summation: in float32 the argmax was the same at every position tried; in bfloat16 at 99.1
to 99.7 % of them, with random weights at full width.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoConfig

from saccade.draft.heads.head import HeadConfig
from saccade.draft.heads.store import WEIGHTS, read_config, read_weights
from saccade.errors import ModelError

FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Number formats of written weights by name."""
INFLATABLE = ("eagle2", "hivis")  # kinds of heads that can be inflated
_HEAD_NORMS = ("embedding_norm.weight", "feature_norm.weight")
_MLP_RATIO = 11008 / 4096  # of Llama, for shapes given by width, layers and heads
_ROPE_BY_FREQUENCY = ("default", "linear", "llama3")  # frequencies that do not depend on the head size
_SPREAD = 0.02  # standard deviation of the numbers in new weights, as of fresh ones
_CARD = """# Inflated: {like}

The function of a small model ({small.layers} layers, width {small.width}) in a language model of {shape.layers} layers
and width {shape.width}: same answers, the cost of a big model. Written by `python -m tools.pocket inflate`. For
measurements of speed and acceptance only; the vocabulary of {vocabulary} tokens and the vision tower are those of the
small model.
"""


@dataclass(frozen=True)
class Shape:
    """The size of a Llama language model."""

    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int

    def check_room(self, small: Shape, folder: Path) -> None:
        """Raise `ModelError` for a smaller model, or head, that does not fit."""
        group = self.heads // self.kv_heads
        fits = {
            f"a width of {self.width}": self.width >= small.width,
            f"{self.layers} layers": self.layers >= small.layers,
            f"{self.kv_heads} key-value heads": self.kv_heads >= small.kv_heads,
            f"{group} heads per key-value head": group >= small.heads // small.kv_heads,
            f"heads of size {self.head_dim}": self.head_dim % small.head_dim == 0,
            f"{self.mlp} neurons": self.mlp >= small.mlp,
        }
        if lacking := [what for what, holds in fits.items() if not holds]:
            raise ModelError(
                f"{folder} does not fit into {lacking[0]}: it has width {small.width}, {small.layers} layers, "
                f"{small.heads} heads ({small.kv_heads} key-value) of size {small.head_dim} and {small.mlp} neurons; "
                "choose a larger shape, with heads a multiple of that size."
            )


SHAPES = {
    "llava-1.5-7b": Shape(4096, 32, 32, 32, 128, 11008),
    "qwen2.5-vl-32b": Shape(5120, 64, 40, 8, 128, 27648),
    "llava-ov-72b": Shape(8192, 80, 64, 8, 128, 29568),
}


def parse_shape(like: str) -> Shape:
    """A shape by name, or from `WIDTHxLAYERSxHEADS`."""
    if like in SHAPES:
        return SHAPES[like]
    numbers = like.lower().split("x")
    if len(numbers) != 3 or not all(part.isdecimal() and int(part) > 0 for part in numbers):
        raise ModelError(f"Unknown shape {like!r}; give {', '.join(SHAPES)}, or WIDTHxLAYERSxHEADS such as 1024x12x8.")
    width, layers, heads = map(int, numbers)
    if width % heads:
        raise ModelError(f"The width {width} is not a multiple of {heads} heads; choose another number of heads.")
    mlp = -(-round(width * _MLP_RATIO) // 64) * 64
    return Shape(width, layers, heads, heads, width // heads, mlp)


def inflate(source: Path, out: Path, like: str, *, dtype: str = "bfloat16", seed: int = 0) -> str:
    """Write a checkpoint of shape `like` that computes the function of the one in `source`."""
    shape = parse_shape(like)
    if dtype not in FORMATS:
        raise ModelError(f"Unknown dtype {dtype!r}; choose {', '.join(FORMATS)}.")
    if not (source / "config.json").is_file():
        raise ModelError(f"{source} is not a model folder: it has no config.json.")
    if out.exists() and any(out.iterdir()):
        raise ModelError(f"{out} is not empty; choose a new folder.")
    config = AutoConfig.from_pretrained(source)
    _check(source, config)
    text = config.text_config
    small = Shape(
        width=text.hidden_size,
        layers=text.num_hidden_layers,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=text.head_dim,
        mlp=text.intermediate_size,
    )
    shape.check_room(small, source)
    widening = Widening(small, shape, FORMATS[dtype], seed)
    tensors = {
        name: (tensor.to(FORMATS[dtype]) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in _model_tensors(source, widening)
    }
    out.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(tensors, out)
    text.rms_norm_eps *= small.width / shape.width
    text.hidden_size, text.intermediate_size = shape.width, shape.mlp
    text.num_hidden_layers, text.head_dim = shape.layers, shape.head_dim
    text.num_attention_heads, text.num_key_value_heads = shape.heads, shape.kv_heads
    if getattr(text, "layer_types", None):
        text.layer_types = ["full_attention"] * shape.layers
    text.tie_word_embeddings = config.tie_word_embeddings = False
    config.dtype = text.dtype = dtype
    config.save_pretrained(out)
    for path in source.iterdir():
        has_weights = path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json")
        if path.is_file() and not has_weights and path.name not in ("config.json", "README.md"):
            shutil.copy2(path, out / path.name)
    (out / "README.md").write_text(_CARD.format(like=like, small=small, shape=shape, vocabulary=text.vocab_size))
    parameters = sum(tensor.numel() for tensor in tensors.values())
    rounding = "scaled by powers of two only" if widening.is_exact else "scaling rounds"
    return f"{parameters / 1e6:,.0f} M parameters, {rounding}."


def _check(folder: Path, config: Any) -> None:
    """Raise `ModelError` for a model that has no Llama language model, or one of another form."""
    text = getattr(config, "text_config", None)
    if text is None or text.model_type != "llama":
        kind = getattr(text, "model_type", config.model_type)
        raise ModelError(
            f"{folder} has a language model of type {kind!r}; only models with a Llama language model can be inflated."
        )
    if text.attention_bias or text.mlp_bias:
        raise ModelError(f"{folder} has biases in its layers; only Llama models without biases can be inflated.")
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _ROPE_BY_FREQUENCY:
        raise ModelError(f"{folder} has rotary positions of type {rope!r}; expected {', '.join(_ROPE_BY_FREQUENCY)}.")


class Widening:
    """Weights of a wide model from those of a small one; see above."""

    def __init__(self, small: Shape, shape: Shape, dtype: torch.dtype, seed: int) -> None:
        self.small, self.shape, self._dtype = small, shape, dtype
        self._generator = torch.Generator().manual_seed(seed)
        times, half = shape.head_dim // small.head_dim, small.head_dim // 2
        turning = torch.cat([torch.arange(half) * times, shape.head_dim // 2 + torch.arange(half) * times])
        group, wide_group = small.heads // small.kv_heads, shape.heads // shape.kv_heads
        places = [(i // group) * wide_group + i % group for i in range(small.heads)]

        def rows(starts: Sequence[int], inside: Tensor) -> Tensor:
            return torch.cat([start * shape.head_dim + inside for start in starts])

        # rows of the wide projections that belong to the heads of the small layer
        self._queries, self._keys = rows(places, turning), rows(range(small.kv_heads), turning)
        self._values = rows(range(small.kv_heads), torch.arange(small.head_dim))
        self._outputs = rows(places, torch.arange(small.head_dim))
        self._query_heads = rows(places, torch.arange(shape.head_dim))
        self._query_scale = sqrt(times)

    @property
    def is_exact(self) -> bool:
        """Whether all scaling is by powers of two."""
        ratios = (self.shape.width / self.small.width, self.shape.head_dim / self.small.head_dim)
        return all(sqrt(ratio).is_integer() and int(sqrt(ratio)).bit_count() == 1 for ratio in ratios)

    def fill(self, rows: int, columns: int) -> Tensor:
        """A random matrix `[rows, columns]`."""
        return (torch.randn(rows, columns, generator=self._generator) * _SPREAD).to(self._dtype)

    def stream(self, rows: Tensor) -> Tensor:
        """Vectors `[..., d]` of the small stream as vectors of the wide one."""
        return pad(rows, (0, self.shape.width - self.small.width))

    def norm(self, weight: Tensor) -> Tensor:
        """Weight `[wide]` of an RMS norm; its epsilon is set in the configuration."""
        scaled = weight.float() * sqrt(self.small.width / self.shape.width)
        return pad(scaled, (0, self.shape.width - self.small.width), value=1.0)

    def reading(self, matrix: Tensor, where: Tensor | slice, weight: Tensor) -> Tensor:
        """`matrix` with rows that read the small stream; its other columns meet only zeros."""
        matrix[where, : self.small.width] = weight.to(matrix.dtype)
        return matrix

    def layer(self, small: Callable[[str], Tensor] | None) -> Iterator[tuple[str, Tensor]]:
        """Weights of a wide layer by name, one at a time: of one that adds nothing without a small one."""
        shape, d = self.shape, self.small.width
        wide, queries, keys = shape.width, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        query, key, value = self.fill(queries, wide), self.fill(keys, wide), self.fill(keys, wide)
        output = torch.zeros(wide, queries)
        gate, up, down = self.fill(shape.mlp, wide), self.fill(shape.mlp, wide), self.fill(wide, shape.mlp)
        first_norm, second_norm = torch.ones(wide), torch.ones(wide)  # of one tensor one name would be stored
        if small is None:
            down.zero_()
        else:
            query[self._query_heads] = 0  # the other dimensions of the keys meet zeros
            self.reading(query, self._queries, small("self_attn.q_proj") * self._query_scale)
            self.reading(key, self._keys, small("self_attn.k_proj"))
            self.reading(value, self._values, small("self_attn.v_proj"))
            output[:d, self._outputs] = small("self_attn.o_proj").float()
            neurons = len(small("mlp.gate_proj"))
            self.reading(gate, slice(0, neurons), small("mlp.gate_proj"))
            gate[neurons:] = 0  # silu(0) is 0, so new neurons add nothing
            self.reading(up, slice(0, neurons), small("mlp.up_proj"))
            down[:, :neurons] = 0
            down[:d, :neurons] = small("mlp.down_proj").to(down.dtype)
            first_norm = self.norm(small("input_layernorm"))
            second_norm = self.norm(small("post_attention_layernorm"))
        yield from (("self_attn.q_proj", query), ("self_attn.k_proj", key), ("self_attn.v_proj", value))
        yield from (("self_attn.o_proj", output), ("mlp.gate_proj", gate), ("mlp.up_proj", up))
        yield from (("mlp.down_proj", down), ("input_layernorm", first_norm), ("post_attention_layernorm", second_norm))


def _model_tensors(folder: Path, widening: Widening) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the wide checkpoint by name, a tied output head included."""
    weights = {
        name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }
    stems = [name.removesuffix("embed_tokens.weight") for name in weights if "embed_tokens.weight" in name]
    if len(stems) != 1:
        raise ModelError(
            f"{folder} has {len(stems)} embedding tables in safetensors files; give a folder with one language model."
        )
    (stem,) = stems
    small, shape = widening.small, widening.shape
    embeddings = weights[f"{stem}embed_tokens.weight"]
    head = next((name for name in weights if name.endswith("lm_head.weight")), "lm_head.weight")
    yield f"{stem}embed_tokens.weight", widening.stream(embeddings)
    logits = widening.fill(len(embeddings), shape.width)
    yield head, widening.reading(logits, slice(None), weights.get(head, embeddings))
    yield f"{stem}norm.weight", widening.norm(weights[f"{stem}norm.weight"])

    places = [round(i * (shape.layers - 1) / max(small.layers - 1, 1)) for i in range(small.layers)]
    for number in range(shape.layers):
        layer: Callable[[str], Tensor] | None = None
        if number in places:
            old = f"{stem}layers.{places.index(number)}."
            layer = lambda name, old=old: weights[f"{old}{name}.weight"].float()  # noqa: E731
        for name, tensor in widening.layer(layer):
            yield f"{stem}layers.{number}.{name}.weight", tensor

    for name, weight in weights.items():
        if name.startswith(stem) or name == head:
            continue
        if name.endswith("multi_modal_projector.linear_1.weight"):
            first = widening.fill(shape.width, weight.shape[1])
            first[: small.width] = weight.to(first.dtype)
            yield name, first
        elif name.endswith("multi_modal_projector.linear_2.weight"):
            rest = shape.width - small.width
            yield name, pad(weight, (0, rest, 0, rest))
        elif name.endswith(("multi_modal_projector.linear_1.bias", "linear_2.bias", "image_newline")):
            yield name, widening.stream(weight)
        else:
            yield name, weight


def inflate_head(head: Path, out: Path, like: str, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> None:
    """Write a head for the inflated target that drafts what `head` drafts for the small one.

    Its blocks have the wide target's shape, MLP included, as published heads have their target's.
    """
    config, small, shape = checked(head, like)
    tensors = _head_tensors(read_weights(head, [WEIGHTS]), Widening(small, shape, dtype, seed))
    wide = replace(
        config,
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        layers=(shape.layers,),
        target_layers=shape.layers,
        norm_eps=config.norm_eps * small.width / shape.width,
    )
    out.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.to(dtype).contiguous() for name, tensor in tensors}
    save_file(weights, out / WEIGHTS, metadata={"format": "pt"})
    (out / "config.json").write_text(wide.to_json())


def checked(folder: Path, like: str) -> tuple[HeadConfig, Shape, Shape]:
    """A head's configuration, its shape, and one that it can be inflated to."""
    config, shape = read_config(folder), parse_shape(like)
    if config.kind not in INFLATABLE:
        raise ModelError(f"{folder} holds a {config.kind} head; only {' and '.join(INFLATABLE)} heads can be inflated.")
    odd = config.qk_norm or config.qkv_bias or config.layers != (config.target_layers,)
    norms = ("block", "all") if config.kind == "hivis" else ("all",)
    if odd or config.options["norms"] not in norms or config.options.get("features", "target") != "target":
        raise ModelError(
            f"{folder} holds a head with norms, biases or inputs of its own; only heads in the form that `saccade "
            "train` gives them for the pocket target can be inflated."
        )
    small = Shape(config.hidden_size, 1, config.heads, config.kv_heads, config.head_dim, config.intermediate_size)
    shape.check_room(small, folder)
    return config, small, shape


def _head_tensors(weights: dict[str, Tensor], widening: Widening) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the wide head by name."""
    small, wide = widening.small.width, widening.shape.width
    blocks = sorted({name.rsplit("self_attn.", 1)[0] for name in weights if "self_attn." in name})
    for block in blocks:

        def layer(name: str, block: str = block) -> Tensor:
            return weights[f"{block}{name}.weight"]

        for name, tensor in widening.layer(layer):
            yield f"{block}{name}.weight", tensor
    for name, weight in weights.items():
        if name.startswith(tuple(blocks)):
            continue
        if name in _HEAD_NORMS:
            yield name, widening.norm(weight)
        elif name == "residuals":
            yield name, widening.stream(weight)
        else:
            parts = []
            for part in weight.split(small, 1):  # of [d, n d], over n inputs side by side
                matrix = widening.fill(wide, wide)
                matrix[:, :small] = 0  # all other columns meet zeros
                parts.append(widening.reading(matrix, slice(0, small), part))
            yield name, torch.cat(parts, 1)
