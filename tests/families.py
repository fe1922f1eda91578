"""Tiny random models of every supported family, with inputs as Hugging Face processors make them.

Every model has a few thousand to a hundred thousand weights, so that it is built in well under a second.
The weights are random but *sharp*: attention is peaked and logits spread, so that greedy tokens vary, depend
on every earlier token, on every position and on the image, and win by margins far above rounding.

    case = FAMILIES["qwen2_5_vl"]
    model = case.model()
    inputs = case.inputs("image", rows=3)           # left padded, as `generate` wants it
    expected = case.reference("image", rows=3)      # greedy tokens of `generate`, row by row
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from processes import once_per_run
from saccade.inputs.families.gemma import counts_frames
from saccade.target_model.adapter import decoder_and_head

VOCAB = 192
PAD, BOS, EOS = 0, 1, 2
FIRST_WORD, LAST_WORD = 8, VOCAB - 9  # ids outside are special: random models never prefer them
IMAGE, VIDEO = VOCAB - 1, VOCAB - 2
VISION_START, VISION_END = VOCAB - 3, VOCAB - 4
IMAGE_BREAK, IMAGE_END = VOCAB - 5, VOCAB - 6

MAX_NEW_TOKENS = 24

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Piece:
    """A stretch of one row's prompt: text, or one image or video with its placeholders."""

    ids: tuple[int, ...]  # placeholders expanded
    tensors: Mapping[str, Tensor]  # what a processor would return for this image or video; empty for text


Row = list[Piece]
Medium = Callable[[torch.Generator, int], Piece]  # (random source, which one of several sizes) -> piece
Collate = Callable[[list[Row]], Inputs]


def _words(generator: torch.Generator, count: int) -> Piece:
    ids = torch.randint(FIRST_WORD, LAST_WORD + 1, (count,), generator=generator)
    return Piece(tuple(ids.tolist()), {})


def _media(rows: list[Row], name: str) -> list[Tensor]:
    return [piece.tensors[name] for row in rows for piece in row if name in piece.tensors]


def _pad_to(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Pads with zeros at the end of every dimension, as the image processors do."""
    out = tensor.new_zeros(shape)
    out[tuple(slice(0, n) for n in tensor.shape)] = tensor
    return out


def _pad_and_concatenate(tensors: list[Tensor]) -> Tensor:
    largest = [max(t.shape[i] for t in tensors) for i in range(1, tensors[0].dim())]
    return torch.cat([_pad_to(t, (t.shape[0], *largest)) for t in tensors])


def _concatenated(rows: list[Row]) -> Inputs:
    """Media of all rows one after another, padded to the largest where sizes differ."""
    names = dict.fromkeys(name for row in rows for piece in row for name in piece.tensors)
    return {name: _pad_and_concatenate(_media(rows, name)) for name in names}


def _by_row(rows: list[Row]) -> Inputs:
    """Media stacked per row, [B, most images, ...], rows with fewer padded with zeros (Idefics3)."""
    counts = [len(_media([row], "pixel_values")) for row in rows]
    return {
        name: torch.stack([_pad_to(part, (max(counts), *part.shape[1:])) for part in tensor.split(counts)])
        for name, tensor in _concatenated(rows).items()
    }


def _noise(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def _square_image(tokens: int, size: int, *, tiles: int = 1, wrapped: bool = False, masked: bool = False) -> Medium:
    """One square image (LLaVA, Gemma3, InternVL), masked for Idefics3; ``tiles`` of them for InternVL's second size."""

    def build(generator: torch.Generator, variant: int) -> Piece:
        count = 1 + variant % tiles
        ids = (IMAGE,) * (tokens * count)
        if wrapped:
            ids = (VISION_START, *ids, VISION_END)
        tensors = {"pixel_values": _noise(generator, count, 3, size, size)}
        if masked:
            tensors["pixel_attention_mask"] = torch.ones(1, size, size, dtype=torch.long)
        return Piece(ids, tensors)

    return build


def _pixtral_image(patch: int, merge: int) -> Medium:
    """Rows of patches, each row closed by a break token, the last one by an end token."""

    def build(generator: torch.Generator, variant: int) -> Piece:
        rows, columns = [(2, 3), (3, 2), (2, 2)][variant % 3]
        ids = [*[IMAGE] * columns, IMAGE_BREAK] * rows
        ids[-1] = IMAGE_END
        height, width = rows * patch * merge, columns * patch * merge
        return Piece(
            tuple(ids),
            {"pixel_values": _noise(generator, 1, 3, height, width), "image_sizes": torch.tensor([[height, width]])},
        )

    return build


ANYRES_TILE, ANYRES_SIDE = 16, 4  # pixels per tile side, patches per tile side
ANYRES_PINPOINTS = [[16, 32], [32, 16], [32, 32]]


def _anyres_tokens(height: int, width: int, grid: tuple[int, int]) -> int:
    """Patches left after unpadding, one newline per row of patches, and the base tile."""
    rows, columns = grid[0] * ANYRES_SIDE, grid[1] * ANYRES_SIDE
    if width / height > columns / rows:
        rows -= (rows - int(round(height * columns / width, 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * rows / height, 7))) // 2 * 2
    return ANYRES_SIDE**2 + rows * columns + rows


def _anyres_image(generator: torch.Generator, variant: int) -> Piece:
    """An image cut into tiles after one base tile (LLaVA-NeXT; LLaVA-OneVision with a single image)."""
    height, width, grid = [(10, 30, (1, 2)), (24, 14, (2, 1)), (16, 28, (1, 2))][variant % 3]
    tiles = 1 + grid[0] * grid[1]
    return Piece(
        (IMAGE,) * _anyres_tokens(height, width, grid),
        {
            "pixel_values": _noise(generator, 1, tiles, 3, ANYRES_TILE, ANYRES_TILE),
            "image_sizes": torch.tensor([[height, width]]),
        },
    )


def _anyres_base_image(generator: torch.Generator, variant: int) -> Piece:
    """LLaVA-OneVision does not cut images into tiles when a prompt has several."""
    tensors = _anyres_image(generator, variant).tensors
    base_tile = tensors["pixel_values"][:, :1]
    return Piece((IMAGE,) * (ANYRES_SIDE**2 + 1), {**tensors, "pixel_values": base_tile})


def _framed_video(newlines: int) -> Medium:
    """Three frames; Hugging Face stacks the videos of a batch, so they all have as many."""

    def build(generator: torch.Generator, variant: int) -> Piece:
        tokens = 3 * (ANYRES_SIDE // 2) ** 2 + newlines
        return Piece((VIDEO,) * tokens, {"pixel_values_videos": _noise(generator, 1, 3, 3, ANYRES_TILE, ANYRES_TILE)})

    return build


def _onevision_collate(rows: list[Row]) -> Inputs:
    inputs = _concatenated(rows)
    if "pixel_values" in inputs:
        inputs["batch_num_images"] = torch.tensor([len(_media([row], "pixel_values")) for row in rows])
    return inputs


QWEN_PATCH, QWEN_MERGE, QWEN_TEMPORAL = 4, 2, 2


def _qwen_image(generator: torch.Generator, variant: int) -> Piece:
    grid = [(1, 4, 6), (1, 6, 8), (1, 4, 4)][variant % 3]
    patches = math.prod(grid)
    values = _noise(generator, patches, 3 * QWEN_TEMPORAL * QWEN_PATCH**2)
    ids = (VISION_START, *(IMAGE,) * (patches // QWEN_MERGE**2), VISION_END)
    return Piece(ids, {"pixel_values": values, "image_grid_thw": torch.tensor([grid])})


def _qwen_video(*, seconds: bool = False, timestamps: bool = False) -> Medium:
    """Args:
    seconds: adds ``second_per_grid_ts`` (Qwen2.5-VL).
    timestamps: every temporal patch stands alone after a text timestamp (Qwen3-VL).
    """

    def build(generator: torch.Generator, variant: int) -> Piece:
        grid = [(2, 4, 6), (3, 4, 4), (2, 6, 4)][variant % 3]
        frames, patches = grid[0], math.prod(grid)
        values = _noise(generator, patches, 3 * QWEN_TEMPORAL * QWEN_PATCH**2)
        tokens = patches // QWEN_MERGE**2
        tensors = {"pixel_values_videos": values, "video_grid_thw": torch.tensor([grid])}
        if seconds:
            tensors["second_per_grid_ts"] = torch.tensor([[1.0, 0.5, 2.0][variant % 3]])
        if not timestamps:
            return Piece((VISION_START, *(VIDEO,) * tokens, VISION_END), tensors)
        ids: list[int] = []
        for _ in range(frames):
            stamp = _words(generator, 2).ids
            ids += [*stamp, VISION_START, *[VIDEO] * (tokens // frames), VISION_END]
        return Piece(tuple(ids), tensors)

    return build


@dataclass(frozen=True)
class FamilyCase:
    """One model family on the test bed."""

    name: str  # the key in ``FAMILIES``
    build: Callable[[int | None], PreTrainedModel]  # number of layers (None: the default) -> untrained model
    image: Medium | None = None  # one image with its placeholders; None for a language model
    several: Medium | None = None  # one image of several in a prompt, where that differs from ``image``
    video: Medium | None = None  # one video, where the family has video tokens
    collate: Collate = _concatenated  # joins the media of all rows
    types: str | None = None  # name of the token type tensor, where the family needs one
    salt: int = 0  # added to the seed of the weights; chosen so that ``generate`` never wins by a hair (test_bed)
    noise: float = 0.1  # of the draft model's weights

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of prompt that the family takes."""
        if self.image is None:
            return ("text",)
        return ("image", "images2", *(("video",) if self.video else ()), "text")

    @property
    def is_visual(self) -> bool:
        return self.image is not None

    def model(self, seed: int = 0, layers: int | None = None, eos: int | list[int] | None = None) -> PreTrainedModel:
        """Builds a fresh model: eval mode, fp32, sdpa, no end-of-sequence token unless asked for."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 * seed + self.salt)
            model = self.build(layers)
            _sharpen(model)
        model.generation_config = GenerationConfig(
            pad_token_id=PAD, bos_token_id=BOS, eos_token_id=eos, do_sample=False
        )
        return model.eval()

    def draft_model(self, noise: float | None = None) -> PreTrainedModel:
        """The target with noise on its weights: right in about 40-80 % of its greedy drafts."""
        return perturbed(self.model(), self.noise if noise is None else noise, 0)

    def text_draft_model(self) -> PreTrainedModel:
        """A language model that shares the vocabulary and cannot see."""
        return FAMILIES["llama"].model(1)

    def inputs(self, kind: str = "image", rows: int = 1) -> Inputs:
        """Keyword arguments for ``generate``; rows differ in length and are padded on the left."""
        return self._assemble([self._row(kind, row) for row in range(rows)])

    def row_inputs(self, kind: str, row: int) -> Inputs:
        """Row ``row`` of ``inputs(kind, rows)`` alone, without padding."""
        return self._assemble([self._row(kind, row)])

    def continued(self, kind: str, row: int, answer: Sequence[int], follow_up: str | None = None) -> Inputs:
        """A second turn for one row: the first prompt, ``answer``, and a new question of kind ``follow_up``."""
        question = self._row(follow_up or kind, row, 1)[1:]  # without the beginning-of-sequence token
        return self._assemble([[*self._row(kind, row), Piece(tuple(answer), {}), *question]])

    def reference(self, kind: str, rows: int = 1, n: int = MAX_NEW_TOKENS) -> list[list[int]]:
        """Greedy tokens of ``generate`` on ``model()``, row by row; computed once per run of the tests."""
        length = next(length for length in (MAX_NEW_TOKENS, 48) if n <= length)
        return [list(_cached_reference(self.name, kind, row, length)[:n]) for row in range(rows)]

    def _row(self, kind: str, row: int, seed: int = 0) -> Row:
        generator = torch.Generator().manual_seed(1000 * seed + 10 * row + _KIND_SEED[kind])
        pieces = [Piece((BOS,), {}), _words(generator, 3 + (5 * row) % 7)]
        if kind == "image":
            pieces.append(self.image(generator, row + seed))
        elif kind == "images2":
            image = self.several or self.image
            pieces += [image(generator, row + seed), _words(generator, 2), image(generator, row + seed + 1)]
        elif kind == "video":
            pieces.append(self.video(generator, row + seed))
        elif kind != "text":
            raise ValueError(f"There is no kind of prompt named {kind!r}; expected one of {self.kinds}.")
        return [*pieces, _words(generator, 4 + (3 * row) % 5)]

    def _assemble(self, rows: list[Row]) -> Inputs:
        ids = [[token for piece in row for token in piece.ids] for row in rows]
        longest = max(map(len, ids))
        inputs: Inputs = {
            "input_ids": torch.tensor([[PAD] * (longest - len(row)) + row for row in ids]),
            "attention_mask": torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids]),
        }
        if self.types is not None:
            inputs[self.types] = (inputs["input_ids"] == IMAGE).long() + 2 * (inputs["input_ids"] == VIDEO).long()
        return {**inputs, **self.collate(rows)}


_KIND_SEED = {"text": 1, "image": 2, "images2": 3, "video": 4}


@torch.no_grad()
def reference_greedy(
    model: PreTrainedModel, inputs: Inputs, n: int = MAX_NEW_TOKENS, **options: object
) -> list[list[int]]:
    """New tokens of Hugging Face ``generate`` for every row of ``inputs``.

    Exact only for one row: pass rows one by one to compare token by token.
    """
    reset_rope_deltas(model)
    prompt = inputs["input_ids"].shape[1]
    out = model.generate(**inputs, **{"max_new_tokens": n, "do_sample": False, **options})
    reset_rope_deltas(model)
    return out[:, prompt:].tolist()


def reset_rope_deltas(model: PreTrainedModel) -> None:
    """Qwen-VL models keep the last prompt's offset on the module, where it outlives the request."""
    if hasattr(model.base_model, "rope_deltas"):
        model.base_model.rope_deltas = None


@cache
def pristine(name: str) -> PreTrainedModel:
    """The family's target as the reference sees it. Never give it to code under test."""
    return {**FAMILIES, **UNKNOWN}[name].model()


@cache
def _cached_reference(name: str, kind: str, row: int, length: int) -> tuple[int, ...]:
    def generate() -> list[int]:
        case = {**FAMILIES, **UNKNOWN}[name]
        return reference_greedy(pristine(name), case.row_inputs(kind, row), length)[0]

    return tuple(once_per_run(f"reference-{name}-{kind}-{row}-{length}", generate))


def _sharpen(model: PreTrainedModel) -> None:
    """Draws weights anew, so that attention is peaked and logits spread (uses the global generator)."""
    head = decoder_and_head(model)[1].weight
    embedding = model.get_input_embeddings().weight
    scaled_embedding = "gemma" in model.config.get_text_config(decoder=True).model_type
    is_unscaled = model.config.model_type.startswith(("gemma3n", "gemma4"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter is head or parameter is embedding:
                continue
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
                if is_unscaled and "q_norm" in name:
                    parameter.mul_(0.4)
                continue
            fan_in = parameter[0].numel() if parameter.dim() != 3 else parameter.shape[-1]
            gain = 1.6 if any(part in name for part in ("q_proj", "k_proj")) else 1.0
            nn.init.normal_(parameter, std=gain / math.sqrt(fan_in))
        width = embedding.shape[1]
        nn.init.normal_(embedding, std=1 / math.sqrt(width) if scaled_embedding else 1.0)
        embedding[PAD] = 0
        nn.init.normal_(head, std=4 / math.sqrt(width))
        head[:FIRST_WORD] = 0
        head[LAST_WORD + 1 :] = 0


def perturbed(model: PreTrainedModel, noise: float, seed: int) -> PreTrainedModel:
    """A copy of ``model`` with Gaussian noise, relative to each weight matrix's own spread."""
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.dim() < 2:
                continue
            spread = parameter.std()
            parameter.add_(torch.randn(parameter.shape, generator=generator) * (noise * spread))
        head = decoder_and_head(copied)[1].weight
        head[:FIRST_WORD] = 0
        head[LAST_WORD + 1 :] = 0
    return copied


def _text(layers: int | None, **more: object) -> dict[str, object]:
    kinds = more.get("layer_types")
    if isinstance(kinds, list):
        layers = len(kinds) if layers is None else layers
        more["layer_types"] = (kinds * layers)[:layers]
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2 if layers is None else layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": None,
        "tie_word_embeddings": False,
        **more,
    }


def _vision(**more: object) -> dict[str, object]:
    return {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        **more,
    }


def _built(model_type: str, auto: str, config: Mapping[str, object]) -> PreTrainedModel:
    made = transformers.AutoConfig.for_model(model_type, **config)
    return getattr(transformers, auto).from_config(made, attn_implementation="sdpa")


def _language_model(model_type: str, **more: object) -> Callable[[int | None], PreTrainedModel]:
    return lambda layers: _built(model_type, "AutoModelForCausalLM", _text(layers, **more))


def _vision_language_model(
    model_type: str, *, text: Mapping[str, object], vision: Mapping[str, object], **more: object
) -> Callable[[int | None], PreTrainedModel]:
    config = {"vision_config": dict(vision), "image_token_id": IMAGE, "tie_word_embeddings": False, **more}
    return lambda layers: _built(
        model_type, "AutoModelForImageTextToText", {"text_config": _text(layers, **text), **copy.deepcopy(config)}
    )


def _gemma3(layers: int | None) -> PreTrainedModel:
    """Sliding and full layers mixed; the window is shorter than an image, which is attended both ways."""
    count = layers or 4
    return _vision_language_model(
        "gemma3",
        text={
            "model_type": "gemma3_text",
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 12,
            "layer_types": (["sliding_attention", "full_attention"] * count)[:count],
        },
        vision=_vision(model_type="siglip_vision_model", patch_size=2, vision_use_head=False),
        mm_tokens_per_image=16,
        boi_token_index=VISION_START,
        eoi_token_index=VISION_END,
    )(count)


def _gemma4_types(count: int) -> dict[str, object]:
    """Sliding and full layers, the last two of which attend to the entries of earlier ones."""
    types = (["sliding_attention", "full_attention"] * count)[-count:]
    shared = 2 if count > 3 else 0
    return {"sliding_window": 12, "layer_types": types, "num_kv_shared_layers": shared, "head_dim": 16}


_GEMMA4_MOST = 8
"""Visual tokens to which a picture is padded."""
_GEMMA4_IDS = {"video_token_id": VIDEO, "audio_token_id": VOCAB - 7, "audio_config": None}


def _gemma4_image(merge: int, patch: int, *, frames: int = 0) -> Medium:
    """Patches with their columns and rows, as many as a picture of any shape has, or frames after their times."""

    def build(generator: torch.Generator, variant: int) -> Piece:
        rows, columns = [(2, 3), (3, 2), (2, 2)][variant % 3]
        count, most, shown = rows * columns, _GEMMA4_MOST * merge**2, max(frames, 1)
        places = torch.cartesian_prod(torch.arange(rows * merge), torch.arange(columns * merge)).flip(1)
        at = places.new_full((shown, most, 2), -1)
        at[:, : len(places)] = places
        pixels = torch.zeros(shown, most, 3 * patch**2)
        pixels[:, : len(places)] = torch.rand((shown, len(places), 3 * patch**2), generator=generator)
        token, kind, key = (VIDEO, "video", "pixel_values_videos") if frames else (IMAGE, "image", "pixel_values")
        ids: list[int] = []
        for _ in range(shown):
            ids += [*_words(generator, 2 * bool(frames)).ids, VISION_START, *[token] * count, VISION_END]
        tensors = {key: pixels, f"{kind}_position_ids": at}
        if frames and counts_frames():
            tensors["num_frames_per_video"] = torch.tensor([frames])
        elif frames:
            tensors = {name: tensor[None] for name, tensor in tensors.items()}
        return Piece(tuple(ids), tensors)

    return build


def _gemma4(layers: int | None) -> PreTrainedModel:
    count = layers or 5
    per_layer = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "use_double_wide_mlp": True}
    return _vision_language_model(
        "gemma4",
        text={
            "model_type": "gemma4_text",
            "global_head_dim": 32,
            "use_bidirectional_attention": "vision",
            **per_layer,
            **_gemma4_types(count),
        },
        vision={
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 2,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        **_GEMMA4_IDS,
    )(count)


def _gemma4_unified(layers: int | None) -> PreTrainedModel:
    count = layers or 5
    return _vision_language_model(
        "gemma4_unified",
        text={"model_type": "gemma4_unified_text", "global_head_dim": 32, **_gemma4_types(count)},
        vision={
            "patch_size": 2,
            "pooling_kernel_size": 2,
            "mm_embed_dim": 32,
            "mm_posemb_size": 16,
            "output_proj_dims": 32,
        },
        **_GEMMA4_IDS,
    )(count)


def _gemma4_text(layers: int | None) -> PreTrainedModel:
    """Experts, and full layers of fewer heads whose values are their keys."""
    count = layers or 4
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    heads = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 32}
    types = {**_gemma4_types(count), "num_kv_shared_layers": 0}
    return _language_model("gemma4_text", hidden_size_per_layer_input=0, **experts, **heads, **types)(count)


class _Gemma3nTower(nn.Module):
    """A tower in place of timm's."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, config.hidden_size, 4, 4)

    def forward(self, pixel_values: Tensor, **_: object) -> BaseModelOutputWithPooling:
        return BaseModelOutputWithPooling(last_hidden_state=self.patches(pixel_values))


def _gemma3n(layers: int | None) -> PreTrainedModel:
    """Per-layer inputs, several residual streams, and wrappers of images with embeddings of their own."""
    count = layers or 5
    build, towers = transformers.AutoModel.from_config, {"gemma3n_vision": _Gemma3nTower, "gemma3n_audio": nn.Identity}
    norm = {"rms_norm_eps": 1e-6, "hidden_size": 32}
    with patch.object(
        transformers.AutoModel,
        "from_config",
        lambda config, **more: towers.get(config.model_type, lambda each: build(each, **more))(config),
    ):
        return _vision_language_model(
            "gemma3n",
            text={
                "model_type": "gemma3n_text",
                "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": VISION_END,
                "laurel_rank": 8,
                "altup_num_inputs": 2,
                **_gemma4_types(count),
            },
            vision={**norm, "vocab_offset": VISION_END, "vocab_size": 8},
            audio_config={**norm, "vocab_offset": VOCAB, "vocab_size": 8},
            vision_soft_tokens_per_image=16,
            audio_token_id=VOCAB - 7,
        )(count)


_QWEN_VISION = {
    "depth": 2,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": QWEN_PATCH,
    "spatial_merge_size": QWEN_MERGE,
    "temporal_patch_size": QWEN_TEMPORAL,
}
_QWEN_IDS = {"video_token_id": VIDEO, "vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_INTERLEAVED_MROPE = {**_MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
_QWEN3_VISION = {
    **_QWEN_VISION,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}

_CLIP = _vision(model_type="clip_vision_model")
_SIGLIP = _vision(model_type="siglip_vision_model", vision_use_head=False)
_PIXTRAL = _vision(model_type="pixtral", image_size=64, head_dim=16)

_MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 32,  # passed in the middle of most answers
    "llama_4_scaling_beta": 0.5,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

_LLAMA = {"model_type": "llama"}
_MISTRAL = {"model_type": "mistral", "sliding_window": None, "head_dim": 16}
_MINISTRAL = {"model_type": "ministral3", "head_dim": 16, "rope_parameters": _MINISTRAL_ROPE}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}

_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def _words_alone(name: str, salt: int = 0, **text: object) -> FamilyCase:
    return FamilyCase(name, _language_model(name, **text), salt=salt)


def _seeing(
    name: str,
    image: Medium,
    salt: int = 0,
    *,
    model_type: str = "",
    text: Mapping[str, object] = _LLAMA,
    vision: Mapping[str, object] = _CLIP,
    several: Medium | None = None,
    video: Medium | None = None,
    collate: Collate = _concatenated,
    types: str | None = None,
    **config: object,
) -> FamilyCase:
    build = _vision_language_model(model_type or name, text=text, vision=vision, **config)
    return FamilyCase(name, build, image, several, video, collate, types, salt)


def _qwen(
    name: str, video: Medium, salt: int, text: Mapping[str, object], vision: Mapping[str, object] = _QWEN3_VISION
) -> FamilyCase:
    types = "mm_token_type_ids"
    return _seeing(name, _qwen_image, salt, text=text, vision=vision, video=video, types=types, **_QWEN_IDS)


_IDEFICS_IMAGE = _square_image(4, 16, wrapped=True, masked=True)
_CASES = (
    _words_alone("llama", 1),
    _words_alone("qwen2", 50),
    _words_alone("qwen3", 101, head_dim=16),
    _words_alone("mistral", 150, sliding_window=16, head_dim=16),
    _seeing("llava", _square_image(16, 16), 200),
    _seeing(
        "llava_pixtral",
        _pixtral_image(4, 1),
        250,
        model_type="llava",
        text=_MISTRAL,
        vision=_PIXTRAL,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    ),
    _seeing("llava_next", _anyres_image, 300, image_grid_pinpoints=ANYRES_PINPOINTS),
    _seeing(
        "llava_onevision",
        _anyres_image,
        353,
        text={"model_type": "qwen2"},
        vision=_SIGLIP,
        several=_anyres_base_image,
        video=_framed_video(1),
        collate=_onevision_collate,
        video_token_id=VIDEO,
        image_grid_pinpoints=ANYRES_PINPOINTS,
    ),
    _qwen(
        "qwen2_vl",
        _qwen_video(),
        404,
        {"rope_parameters": _MROPE},
        {**_QWEN_VISION, "embed_dim": 32, "hidden_size": 64},
    ),
    _qwen(
        "qwen2_5_vl",
        _qwen_video(seconds=True),
        451,
        {"rope_parameters": _MROPE},
        {
            **_QWEN_VISION,
            "hidden_size": 32,
            "intermediate_size": 48,
            "out_hidden_size": 64,
            "window_size": 16,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
    ),
    _qwen("qwen3_vl", _qwen_video(timestamps=True), 515, {"rope_parameters": _INTERLEAVED_MROPE, "head_dim": 16}),
    _qwen(
        "qwen3_vl_moe",
        _qwen_video(timestamps=True),
        551,
        {"rope_parameters": _INTERLEAVED_MROPE, "head_dim": 16, **_EXPERTS},
    ),
    _qwen("qwen3_5", _qwen_video(timestamps=True), 1000, {"rope_parameters": _INTERLEAVED_MROPE, **_DELTA}),
    _qwen(
        "qwen3_5_moe",
        _qwen_video(timestamps=True),
        1051,
        {"rope_parameters": _INTERLEAVED_MROPE, **_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 32},
    ),
    _words_alone("qwen3_next", 1100, **_DELTA, **_EXPERTS, shared_expert_intermediate_size=32),
    _words_alone("lfm2", 1150, layer_types=["conv", "full_attention", "conv"]),
    _words_alone(
        "nemotron_h",
        1200,
        layer_types=["linear_attention", "moe", "full_attention", "linear_attention"],
        head_dim=16,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    ),
    _seeing("idefics3", _IDEFICS_IMAGE, 605, vision=_vision(), collate=_by_row, scale_factor=2),
    _seeing("smolvlm", _IDEFICS_IMAGE, 652, vision=_vision(), collate=_by_row, scale_factor=2),
    FamilyCase("gemma3", _gemma3, image=_square_image(16, 16, wrapped=True), types="token_type_ids", salt=710),
    FamilyCase("gemma3n", _gemma3n, image=_square_image(16, 16, wrapped=True), types="token_type_ids", salt=1251),
    FamilyCase(
        "gemma4",
        _gemma4,
        image=_gemma4_image(2, 2),
        video=_gemma4_image(2, 2, frames=3),
        types="mm_token_type_ids",
        salt=1301,
        noise=0.05,
    ),
    FamilyCase(
        "gemma4_unified",
        _gemma4_unified,
        image=_gemma4_image(1, 4),
        video=_gemma4_image(1, 4, frames=3),
        types="mm_token_type_ids",
        salt=1351,
        noise=0.05,
    ),
    FamilyCase("gemma4_text", _gemma4_text, salt=1400),
    _seeing("mistral3", _pixtral_image(4, 2), 751, text=_MISTRAL, vision=_PIXTRAL, spatial_merge_size=2),
    _words_alone("ministral3", 850, head_dim=16, rope_parameters=_MINISTRAL_ROPE),
    _seeing(
        "mistral3_ministral3",
        _pixtral_image(4, 2),
        903,
        model_type="mistral3",
        text=_MINISTRAL,
        vision=_PIXTRAL,
        spatial_merge_size=2,
    ),
    _seeing(
        "internvl",
        _square_image(4, 16, tiles=2, wrapped=True),
        800,
        text={"model_type": "qwen2"},
        vision=_vision(image_size=[16, 16], patch_size=[4, 4]),
        image_seq_length=4,
    ),
)

_UNKNOWN = (
    _seeing(
        "llava_next_video",
        _anyres_image,
        950,
        video=_framed_video(0),
        video_token_id=VIDEO,
        image_grid_pinpoints=ANYRES_PINPOINTS,
    ),
)

_RECURRENT = {"model_type": "recurrent_gemma", "lru_width": 64, "attention_window_size": 16}
_REFUSED = (
    _words_alone("doge", keep_window_size=12),
    _seeing("llava_recurrent", _square_image(16, 16), model_type="llava", text=_RECURRENT),
)

FAMILIES: dict[str, FamilyCase] = {case.name: case for case in _CASES}
UNKNOWN: dict[str, FamilyCase] = {case.name: case for case in _UNKNOWN}
"""Architectures outside the tables, which are checked when they are loaded and pass."""
REFUSED: dict[str, FamilyCase] = {case.name: case for case in _REFUSED}
"""Architectures that cannot be verified on trees."""
VISUAL_FAMILIES = tuple(case.name for case in _CASES if case.is_visual)
TEXT_FAMILIES = tuple(case.name for case in _CASES if not case.is_visual)
HYBRIDS = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "lfm2", "nemotron_h")
"""Families with recurrent layers."""
STOCK = (*HYBRIDS, "gemma3n", "gemma4", "gemma4_unified", "gemma4_text")
"""Families that run on the stock modules and not in exact mode."""
