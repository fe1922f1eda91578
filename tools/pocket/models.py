"""The model class of a run, the standard LLaVA-OneVision in small: building, growth and loss.

Of the standard classes it is the only one that serves all tasks of the world: one picture, several, and videos (with a
token of their own and 2 x 2 pooling of each frame), around a plain Llama.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
)

from saccade.pocket.labels import GRID, IMAGE_SIZE, PATCH_SIZE
from saccade.train.optimiser import fast_products
from tools.pocket.batches import BEGIN, END, IGNORED, IMAGE, PAD, VIDEO, Batch
from tools.pocket.recipe import LanguageShape, TowerShape

CONTEXT = 8192
"""Context length of the language models: a video of 256 frames takes 4,097 tokens, and answers take fewer than 400."""
PocketModel: TypeAlias = LlavaOnevisionForConditionalGeneration


def tower_config(shape: TowerShape) -> CLIPVisionConfig:
    """Configuration of the vision tower."""
    return CLIPVisionConfig(
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        projection_dim=shape.width,
    )


def build(shape: LanguageShape, tower: TowerShape, vocabulary: int) -> PocketModel:
    """A LLaVA-OneVision with random weights."""
    heads = shape.width // shape.head_dim
    tokens = {"bos_token_id": BEGIN, "eos_token_id": END, "pad_token_id": PAD}
    text = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=shape.head_dim,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        **tokens,
    )
    config = LlavaOnevisionConfig(
        vision_config=tower_config(tower),
        text_config=text,
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        vision_aspect_ratio="anyres_max_9",
        image_grid_pinpoints=[[IMAGE_SIZE, IMAGE_SIZE]],
        tie_word_embeddings=False,
        **tokens,
    )
    return PocketModel(config)


def _features(model: PocketModel, pixels: Tensor) -> Tensor:
    """Projected features of pictures: `[P, 64, d]`."""
    with torch.no_grad():  # the tower is frozen
        tower = model.model.vision_tower(pixel_values=pixels, output_hidden_states=True)
    features: Tensor = model.model.multi_modal_projector(tower.hidden_states[-1][:, 1:])
    return features


def _pieces(model: PocketModel, batch: Batch, device: torch.device) -> list[Tensor]:
    """Features of all pictures and videos, in the order of the rows: `[tokens, d]` each."""
    newline = model.model.image_newline[None]
    pictures: list[list[Tensor]] = [[] for _ in range(len(batch.ids))]
    if batch.pictures is not None:
        features = iter(_features(model, batch.pictures.to(device)))
        for row, count in enumerate(batch.counts):
            for _ in range(count):
                once = next(features)
                end = newline.to(once.dtype)
                if count == 1 and batch.tiled:
                    lines = torch.cat([once.view(GRID, GRID, -1), end[None].expand(GRID, 1, -1)], 1)
                    pictures[row] += [once, lines.flatten(0, 1)]
                else:
                    pictures[row] += [once, end]
    if batch.frames is not None:
        pooled = model.model.apply_pooling(_features(model, batch.frames.to(device)))
        at = 0
        for row, count in enumerate(batch.lengths):
            if count:
                pictures[row] += [pooled[at : at + count].flatten(0, 1), newline.to(pooled.dtype)]
                at += count
    return [piece for row in pictures for piece in row]


def embed(model: PocketModel, batch: Batch) -> Tensor:
    """Input embeddings `[B, N, d]` with visual features in their slots, equal to those of the class's own forward.

    Unlike that one, it leaves the tower out of the gradient, and encodes a single picture once, where the class runs
    the tower on the same pixels twice.
    """
    ids = batch.ids.to(model.device)
    inputs: Tensor = model.get_input_embeddings()(ids)
    pieces = _pieces(model, batch, model.device)
    if not pieces:
        return inputs
    slots = ((ids == IMAGE) | (ids == VIDEO)).unsqueeze(-1)
    return inputs.masked_scatter(slots, torch.cat(pieces).to(inputs.dtype))


@contextmanager
def outputs_of(modules: Iterable[nn.Module]) -> Iterator[list[Any]]:
    """A list that receives what modules return, in the order of their calls."""
    seen: list[Any] = []
    hooks = [module.register_forward_hook(lambda _module, _inputs, output: seen.append(output)) for module in modules]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def decode(model: PocketModel, inputs: Tensor, batch: Batch) -> Tensor:
    """States `[B, N, d]` of a batch's embeddings after the last norm."""
    placed = {}
    if batch.positions is not None:  # without a mask the class would treat skipped positions as packed sequences
        mask = torch.ones(inputs.shape[:2], dtype=torch.long, device=inputs.device)
        placed = {"position_ids": batch.positions.to(inputs.device), "attention_mask": mask}
    hidden: Tensor = model.model.language_model(inputs_embeds=inputs, use_cache=False, **placed).last_hidden_state
    return hidden


def loss_of(
    model: PocketModel,
    batch: Batch,
    token_weights: Tensor | None = None,
    lesson: Callable[[Sequence[Tensor], Tensor, Batch], Tensor] | None = None,
) -> Tensor:
    """Mean cross-entropy over the answer tokens, weighted by token (`token_weights`) and by place (`Batch.weights`)."""
    inputs = embed(model, batch)
    with outputs_of(model.model.language_model.layers if lesson is not None else ()) as states:
        hidden = decode(model, inputs, batch)
    targets = batch.targets.to(model.device)
    in_answer = targets[:, 1:] != IGNORED
    labels = targets[:, 1:][in_answer]
    logits = model.lm_head(hidden[:, :-1][in_answer])
    losses = nn.functional.cross_entropy(logits.float(), labels, reduction="none")
    weights = torch.ones_like(losses) if token_weights is None else token_weights[labels]
    if batch.weights is not None:
        weights = weights * batch.weights.to(weights.device)[:, 1:][in_answer]
    loss = (losses * weights).sum() / weights.sum()
    return loss if lesson is None else loss + lesson(states, inputs, batch)


def training_loss(model: PocketModel, batch: Batch, **more: Any) -> Tensor:
    """`loss_of`, its products in the device's fast format."""
    with fast_products(model.device):
        return loss_of(model, batch, **more)


def prepare(model: PocketModel) -> PocketModel:
    """Freeze the tower of a model that is trained, and let it attend without the fused kernel on a CPU."""
    model.model.vision_tower.requires_grad_(False)
    if model.device.type == "cpu":  # a step with the fused kernel takes a third longer in bfloat16
        model.model.language_model.set_attn_implementation("eager")
    return model


_ZEROED = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
_LAYERS = ".language_model.layers."


def grow(model: PocketModel, layers: int) -> PocketModel:
    """A model with `layers` language layers and the same logits as `model`.

    Each layer is followed by copies of itself with zeroed output projections, which add nothing to the residual stream
    until they are trained (stacking with zero-initialised outputs, as in LLaMA Pro, arXiv:2401.02415, section 3.2).
    """
    here = model.config.text_config.num_hidden_layers
    times, rest = divmod(layers, here)
    if rest or times < 1:
        raise ValueError(f"{here} layers can grow to a multiple of {here}, not to {layers}.")
    config = copy.deepcopy(model.config)
    config.text_config.num_hidden_layers = layers
    if getattr(config.text_config, "layer_types", None):
        config.text_config.layer_types = ["full_attention"] * layers
    deep = PocketModel(config)
    old, new = model.state_dict(), deep.state_dict()
    for name in new:
        if _LAYERS not in name:
            new[name] = old[name].clone()
            continue
        stem, tail = name.split(_LAYERS)
        number, part = tail.split(".", 1)
        source = old[f"{stem}{_LAYERS}{int(number) // times}.{part}"]
        zeroed = int(number) % times > 0 and part in _ZEROED
        new[name] = torch.zeros_like(source) if zeroed else source.clone()
    deep.load_state_dict(new)
    return deep.to(model.device)
