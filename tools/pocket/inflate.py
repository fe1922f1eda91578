"""Checkpoints as wide and deep as a big model's that compute exactly a small model's function.

For speed measurements without a big model's weights: each step costs as much as the big model's, while answers, and so
acceptance, are the small model's. For Llava-type models with a Llama language model:

- the small residual stream occupies the first columns of the wide one (`copies` times, see below), all others are 0;
- RMS norms divide by the length of the wide stream: weight times sqrt(live / width), epsilon times live / width;
- a head grows `k` times in size by moving rotary dimension `j` to `k j`, which has the same frequency, and queries grow
  by sqrt(k), because attention divides by that much more;
- new heads, neurons and layers have one zero factor on every path to the stream and random numbers elsewhere, so that
  the hardware multiplies real numbers.

All scaling is by powers of two, which are exact in every number format, if head sizes grow by a power of 4 and so does
the width for the chosen number of copies. What remains is the order of summation: in float32 the argmax was the same at
every position tried; in bfloat16 at 99.1 to 99.7 % of them, with random weights at full width.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isqrt, sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from saccade.draft.heads.head import HeadConfig
from saccade.draft.heads.store import WEIGHTS, read_config, read_weights
from saccade.errors import ModelError

FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Number formats of written weights by name."""


def _weights(folder: Path) -> tuple[dict[str, Tensor], str]:
    """Tensors of the small checkpoint by name, a tied output head included, and the prefix of its language model."""
    weights = {
        name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }
    if not weights:
        raise ModelError(f"{folder} has no safetensors files; give a folder that `from_pretrained` can load.")
    stems = [name.removesuffix("embed_tokens.weight") for name in weights if "embed_tokens.weight" in name]
    if len(stems) != 1:
        raise ModelError(f"{folder} has {len(stems)} embedding tables; expected one language model.")
    if not any(name.endswith("lm_head.weight") for name in weights):
        weights["lm_head.weight"] = weights[f"{stems[0]}embed_tokens.weight"]
    return weights, stems[0]


def _tensors(folder: Path, small: Shape, shape: Shape, widths: Widths, fill: Filler) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the wide checkpoint, one at a time."""
    weights, stem = _weights(folder)
    live, wide, rows = widths.live, widths.wide, rotary_rows(small, shape)

    def stream(rows: Tensor) -> Tensor:
        """Vectors `[..., d]` of the small stream as vectors of the wide one."""
        out = torch.zeros(*rows.shape[:-1], wide)
        out[..., :live] = rows.float().repeat(*[1] * (rows.dim() - 1), widths.copies)
        return out

    yield f"{stem}embed_tokens.weight", stream(weights[f"{stem}embed_tokens.weight"])
    head = next(name for name in weights if name.endswith("lm_head.weight"))
    logits = fill(len(weights[head]), wide)
    logits[:, :live] = 0
    logits[:, : widths.small] = weights[head].to(logits.dtype)
    yield head, logits
    yield f"{stem}norm.weight", widths.norm(weights[f"{stem}norm.weight"])

    places = [round(i * (shape.layers - 1) / max(small.layers - 1, 1)) for i in range(small.layers)]
    for number in range(shape.layers):
        layer: Callable[[str], Tensor] | None = None
        if number in places:
            old = f"{stem}layers.{places.index(number)}."
            layer = lambda name, old=old: weights[f"{old}{name}.weight"].float()  # noqa: E731
        for name, tensor in wide_layer(shape, widths, rows, fill, layer, zero_values=bool(number % 2)):
            yield f"{stem}layers.{number}.{name}.weight", tensor

    for name, weight in weights.items():
        if name.startswith(stem) or name == head:
            continue
        if name.endswith("multi_modal_projector.linear_1.weight"):
            first = fill(wide, weight.shape[1])
            first[: widths.small] = weight.to(first.dtype)
            yield name, first
        elif name.endswith("multi_modal_projector.linear_1.bias"):
            yield name, torch.nn.functional.pad(weight, (0, wide - widths.small))
        elif name.endswith("multi_modal_projector.linear_2.weight"):
            second = torch.zeros(wide, wide)
            second[:live, : widths.small] = weight.repeat(widths.copies, 1)
            yield name, second
        elif name.endswith(("multi_modal_projector.linear_2.bias", "image_newline")):
            yield name, stream(weight)
        else:
            yield name, weight


def _write(folder: Path, tensors: Iterator[tuple[str, Tensor]], dtype: torch.dtype, most: float) -> tuple[int, int]:
    """Write shards one after another; return the numbers of parameters and of bytes."""
    files: dict[str, str] = {}
    waiting: dict[str, Tensor] = {}
    size = parameters = total = shards = 0

    def flush() -> None:
        file = f"model-{shards:05d}.safetensors"
        save_file(waiting, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(waiting, file))
        waiting.clear()

    for name, tensor in tensors:
        tensor = (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        if waiting and size + tensor.nbytes > most:
            flush()
            size, shards = 0, shards + 1
        waiting[name] = tensor
        size, parameters, total = size + tensor.nbytes, parameters + tensor.numel(), total + tensor.nbytes
    flush()
    content = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")
    return parameters, total


_CARD = """# Inflated: {like}

The function of a small model ({small.layers} layers, width {small.width}) in a language model of {shape.layers} layers
and width {shape.width}: same answers, the cost of a big model. Written by `python -m tools.pocket inflate`. For
measurements of speed and acceptance only; the vocabulary of {vocabulary} tokens and the vision tower are those of the
small model.
"""


def check_folders(source: Path, out: Path) -> None:
    """Refuse to derive a checkpoint from what is none, or in a folder that has something."""
    if not (source / "config.json").is_file():
        raise ModelError(f"{source} is not a model folder: it has no config.json.")
    if out.exists() and any(out.iterdir()):
        raise ModelError(f"{out} is not empty; choose a new folder.")


def finish(source: Path, out: Path, card: str) -> None:
    """Copy the files of a derived checkpoint that are the source's, and write its card."""
    for path in source.iterdir():
        weights = path.suffix in (".safetensors", ".bin") or path.name.endswith(".index.json")
        if path.is_file() and not weights and path.name not in ("config.json", "README.md"):
            shutil.copy2(path, out / path.name)
    (out / "README.md").write_text(card)


def inflate(
    source: Path, out: Path, like: str, *, dtype: str = "bfloat16", shard_gb: float = 4.0, seed: int = 0
) -> str:
    """Write a checkpoint of shape `like` that computes the function of the one in `source`."""
    shape = parse_shape(like)
    if dtype not in FORMATS:
        raise ModelError(f"Unknown dtype {dtype!r}; choose {', '.join(FORMATS)}.")
    check_folders(source, out)
    config = AutoConfig.from_pretrained(source)
    check(source, config)
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
    widths = Widths(small.width, shape.width)
    rounding = "scaled by powers of two only" if widths.exact(small.head_dim, shape.head_dim) else "scaling rounds"
    out.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(source, small, shape, widths, Filler(seed, FORMATS[dtype]))
    parameters, size = _write(out, tensors, FORMATS[dtype], shard_gb * 1e9)
    text.rms_norm_eps *= widths.live / widths.wide
    text.hidden_size, text.intermediate_size = shape.width, shape.mlp
    text.num_hidden_layers, text.head_dim = shape.layers, shape.head_dim
    text.num_attention_heads, text.num_key_value_heads = shape.heads, shape.kv_heads
    if getattr(text, "layer_types", None):
        text.layer_types = ["full_attention"] * shape.layers
    text.tie_word_embeddings = config.tie_word_embeddings = False
    config.dtype = text.dtype = dtype
    config.save_pretrained(out)
    finish(source, out, _CARD.format(like=like, small=small, shape=shape, vocabulary=text.vocab_size))
    return f"{parameters / 1e6:,.0f} M parameters, {size / 1e9:.2f} GB, {rounding}."


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
_MLP_RATIO = 11008 / 4096  # of Llama, for shapes given by width, layers and heads
_MOST_COPIES = 8
_ROPE_BY_FREQUENCY = ("default", "linear", "llama3")  # frequencies that do not depend on the head size


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


def copies_of(small: int, wide: int) -> int:
    """See `Widths.copies`."""
    for copies in range(1, _MOST_COPIES + 1):
        ratio, rest = divmod(wide, copies * small)
        if ratio and not rest and ratio.bit_count() == 1 and ratio.bit_length() % 2:  # 1, 4, 16, 64, ...
            return copies
    return 1


def check(folder: Path, config: Any) -> None:
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


_SPREAD = 0.02  # standard deviation of the numbers in new weights, as of fresh ones


@dataclass(frozen=True)
class Widths:
    """Residual streams: `copies` times the small one in the first columns of the wide one."""

    small: int
    wide: int

    @property
    def copies(self) -> int:
        """Number of copies of the small stream for which norms scale by a power of two; 1 if there is none."""
        return copies_of(self.small, self.wide)

    @property
    def live(self) -> int:
        """Number of columns that are not always zero."""
        return self.copies * self.small

    def norm(self, weight: Tensor) -> Tensor:
        """Weight `[wide]` of an RMS norm; its epsilon is set in the configuration."""
        out = torch.ones(self.wide)
        out[: self.live] = (weight.float() * sqrt(self.live / self.wide)).repeat(self.copies)
        return out

    def exact(self, head: int, wide_head: int) -> bool:
        """Whether all scaling is by powers of two."""

        def power_of_four(ratio: float) -> bool:
            whole = int(ratio)
            return whole == ratio and whole.bit_count() == 1 and isqrt(whole) ** 2 == whole

        return power_of_four(self.wide / self.live) and power_of_four(wide_head / head)


class Filler:
    """Random matrices at the speed of copying, from a changing offset of one pool of normal numbers."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._pool = (torch.randn(2_000_003, generator=generator) * _SPREAD).to(dtype)
        self._offset = 0

    def __call__(self, rows: int, columns: int) -> Tensor:
        """A matrix `[rows, columns]`."""
        count, size = rows * columns, len(self._pool)
        out = torch.empty(count, dtype=self._pool.dtype)
        done = 0
        while done < count:
            part = min(size - self._offset, count - done)
            out[done : done + part] = self._pool[self._offset : self._offset + part]
            done, self._offset = done + part, (self._offset + part) % size
        return out.view(rows, columns)


@dataclass(frozen=True)
class Rows:
    """Rows of the wide projections that belong to the heads of the small layer, and rows of those whole heads."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    outputs: Tensor
    query_heads: Tensor
    query_scale: float


def rotary_rows(small: Shape, shape: Shape) -> Rows:
    """Rows by which every small head keeps its key-value head and its rotary frequencies."""
    size, times, half = small.head_dim, shape.head_dim // small.head_dim, small.head_dim // 2
    turning = torch.tensor([j * times for j in range(half)] + [shape.head_dim // 2 + j * times for j in range(half)])
    plain = torch.arange(size)
    group, wide_group = small.heads // small.kv_heads, shape.heads // shape.kv_heads
    places = [(i // group) * wide_group + i % group for i in range(small.heads)]

    def rows(starts: Sequence[int], inside: Tensor) -> Tensor:
        return torch.cat([start * shape.head_dim + inside for start in starts])

    return Rows(
        queries=rows(places, turning),
        keys=rows(range(small.kv_heads), turning),
        values=rows(range(small.kv_heads), plain),
        outputs=rows(places, plain),
        query_heads=rows(places, torch.arange(shape.head_dim)),
        query_scale=sqrt(times),
    )


def wide_layer(
    shape: Shape,
    widths: Widths,
    rows: Rows,
    fill: Filler,
    small: Callable[[str], Tensor] | None,
    zero_values: bool,
) -> Iterator[tuple[str, Tensor]]:
    """Weights of the wide layer by name, one at a time."""
    wide, live, d = widths.wide, widths.live, widths.small
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if small is None:
        yield "self_attn.q_proj", fill(queries, wide)
        yield "self_attn.k_proj", fill(keys, wide)
        for name, out, into, is_zero in (
            ("self_attn.v_proj", keys, wide, zero_values),
            ("self_attn.o_proj", wide, queries, not zero_values),
            ("mlp.gate_proj", shape.mlp, wide, zero_values),
            ("mlp.up_proj", shape.mlp, wide, False),
            ("mlp.down_proj", wide, shape.mlp, not zero_values),
        ):
            matrix = fill(out, into)
            yield name, matrix.zero_() if is_zero else matrix
        yield "input_layernorm", torch.ones(wide)
        yield "post_attention_layernorm", torch.ones(wide)
        return

    def reading(matrix: Tensor, where: Tensor | slice, weight: Tensor) -> Tensor:
        """`matrix` with rows that read the small stream; columns beyond the live ones meet only zeros."""
        matrix[where, :live] = 0
        matrix[where, :d] = weight.to(matrix.dtype)
        return matrix

    query = fill(queries, wide)
    query[rows.query_heads] = 0  # the other dimensions of the keys meet zeros
    yield "self_attn.q_proj", reading(query, rows.queries, small("self_attn.q_proj") * rows.query_scale)
    yield "self_attn.k_proj", reading(fill(keys, wide), rows.keys, small("self_attn.k_proj"))
    yield "self_attn.v_proj", reading(fill(keys, wide), rows.values, small("self_attn.v_proj"))
    output = torch.zeros(wide, queries)
    written = torch.zeros(wide, len(rows.outputs))
    written[:live] = small("self_attn.o_proj").repeat(widths.copies, 1)
    output[:, rows.outputs] = written
    yield "self_attn.o_proj", output
    neurons = len(small("mlp.gate_proj"))
    gate = reading(fill(shape.mlp, wide), slice(0, neurons), small("mlp.gate_proj"))
    gate[neurons:] = 0  # silu(0) is 0, so new neurons add nothing
    yield "mlp.gate_proj", gate
    yield "mlp.up_proj", reading(fill(shape.mlp, wide), slice(0, neurons), small("mlp.up_proj"))
    down = fill(wide, shape.mlp)
    down[:, :neurons] = 0
    down[:live, :neurons] = small("mlp.down_proj").repeat(widths.copies, 1).to(down.dtype)
    yield "mlp.down_proj", down
    yield "input_layernorm", widths.norm(small("input_layernorm"))
    yield "post_attention_layernorm", widths.norm(small("post_attention_layernorm"))


INFLATABLE = ("eagle2", "hivis")
_NORMS = ("embedding_norm.weight", "feature_norm.weight")


def inflate_head(head: Path, out: Path, like: str, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> None:
    """Write a head for the inflated target that drafts what `head` drafts for the small one.

    Its blocks have the wide target's shape, MLP included, as published heads have their target's.
    """
    config, small, shape = checked(head, like)
    widths = Widths(small.width, shape.width)
    tensors = _head_tensors(read_weights(head, [WEIGHTS]), small, shape, widths, Filler(seed, dtype))
    wide = replace(
        config,
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        layers=(shape.layers,),
        target_layers=shape.layers,
        norm_eps=config.norm_eps * widths.live / widths.wide,
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
    if odd or config.options.get("norms", "all") != "all" or config.options.get("features", "target") != "target":
        raise ModelError(
            f"{folder} holds a head with norms, biases or inputs of its own; only heads in the form that `saccade "
            "train` gives them for the pocket target can be inflated."
        )
    small = Shape(config.hidden_size, 1, config.heads, config.kv_heads, config.head_dim, config.intermediate_size)
    shape.check_room(small, folder)
    return config, small, shape


def _head_tensors(
    weights: dict[str, Tensor], small: Shape, shape: Shape, widths: Widths, fill: Filler
) -> Iterator[tuple[str, Tensor]]:
    """All tensors of the wide head by name."""
    rows = rotary_rows(small, shape)
    blocks = sorted({name.rsplit("self_attn.", 1)[0] for name in weights if "self_attn." in name})
    for block in blocks:

        def layer(name: str, block: str = block) -> Tensor:
            return weights[f"{block}{name}.weight"]

        for name, tensor in wide_layer(shape, widths, rows, fill, layer, zero_values=False):
            yield f"{block}{name}.weight", tensor
    for name, weight in weights.items():
        if name.startswith(tuple(blocks)):
            continue
        if name in _NORMS:
            yield name, widths.norm(weight)
        elif name == "residuals":
            yield name, torch.nn.functional.pad(weight.repeat(1, widths.copies), (0, widths.wide - widths.live))
        else:
            parts = []
            for part in weight.split(widths.small, 1):  # of [d, n d], over n inputs side by side
                wide = fill(widths.wide, widths.wide)
                wide[:, : widths.live] = 0  # all other columns meet zeros
                wide[: widths.live, : widths.small] = part.repeat(widths.copies, 1).to(wide.dtype)
                parts.append(wide)
            yield name, torch.cat(parts, 1)
