"""The model class of a run: the standard LLaVA-OneVision, small.

Of the standard classes it is the one that serves all that the world asks: one picture, several, and videos
(with a token of their own and 2 x 2 pooling of every frame), around a plain Llama.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
)

from saccade.pocket.labels import GRID, IMAGE_SIZE, PATCH_SIZE
from tools.pocket.batches import IGNORED, Batch
from tools.pocket.chat import BEGIN, END, IMAGE, PAD, VIDEO
from tools.pocket.recipe import LanguageShape, TowerShape

CONTEXT = 8192
"""Positions of the language models: a video of 256 frames takes 4,097, and no answer another 400."""
PocketModel: TypeAlias = LlavaOnevisionForConditionalGeneration


def tower_config(shape: TowerShape) -> CLIPVisionConfig:
    """The vision tower's configuration."""
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
    """A LLaVA-OneVision with fresh weights."""
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


def _seen(model: PocketModel, pixels: Tensor, train_tower: bool) -> Tensor:
    """Projected features of pictures: `[P, 64, d]`."""
    with torch.set_grad_enabled(train_tower and torch.is_grad_enabled()):
        tower = model.model.vision_tower(pixel_values=pixels, output_hidden_states=True)
    features: Tensor = model.model.multi_modal_projector(tower.hidden_states[-1][:, 1:])
    return features


def _pieces(model: PocketModel, batch: Batch, device: torch.device, train_tower: bool) -> list[Tensor]:
    """The features of every picture and video, in the order of the rows: `[tokens, d]` each."""
    newline = model.model.image_newline[None]
    pictures: list[list[Tensor]] = [[] for _ in range(len(batch.ids))]
    if batch.pictures is not None:
        features = iter(_seen(model, batch.pictures.to(device), train_tower))
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
        pooled = model.model.apply_pooling(_seen(model, batch.frames.to(device), train_tower))
        at = 0
        for row, count in enumerate(batch.lengths):
            if count:
                pictures[row] += [pooled[at : at + count].flatten(0, 1), newline.to(pooled.dtype)]
                at += count
    return [piece for row in pictures for piece in row]


def embed(model: PocketModel, batch: Batch, train_tower: bool = False) -> Tensor:
    """Input embeddings `[B, N, d]` with what is seen in its slots, as the class's own forward makes them.

    Apart from that one it can leave the tower out of the gradient, and sees a lone picture once where the
    class runs the tower on the same pixels twice.
    """
    ids = batch.ids.to(model.device)
    inputs: Tensor = model.get_input_embeddings()(ids)
    pieces = _pieces(model, batch, model.device, train_tower)
    if not pieces:
        return inputs
    slots = ((ids == IMAGE) | (ids == VIDEO)).unsqueeze(-1)
    return inputs.masked_scatter(slots, torch.cat(pieces).to(inputs.dtype))


def _placed(batch: Batch, inputs: Tensor) -> dict[str, Tensor]:
    """Positions for the language model, where they are not those of the rows.

    With a mask that hides nothing, because without one the class takes skipped positions for rows packed together.
    """
    if batch.positions is None:
        return {}
    return {
        "position_ids": batch.positions.to(inputs.device),
        "attention_mask": torch.ones(inputs.shape[:2], dtype=torch.long, device=inputs.device),
    }


def loss_of(
    model: PocketModel,
    batch: Batch,
    train_tower: bool = False,
    token_weights: Tensor | None = None,
    lesson: Callable[[Sequence[Tensor], Tensor, Batch], Tensor] | None = None,
) -> Tensor:
    """Mean cross-entropy over the answer tokens, each weighted by what it is (`token_weights`: `[V]`) and where.

    Args:
        lesson: a loss that is added, of the hidden states after every layer, the input embeddings (all
            `[B, N, d]`) and the batch.
    """
    inputs = embed(model, batch, train_tower)
    language = model.model.language_model
    caught: list[Tensor] = []
    listened = language.layers if lesson is not None else ()
    hooks = [
        layer.register_forward_hook(lambda _module, _inputs, output: caught.append(output))
        for layer in listened
    ]
    try:
        hidden = language(inputs_embeds=inputs, use_cache=False, **_placed(batch, inputs)).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    targets = batch.targets.to(model.device)
    learnt = targets[:, 1:] != IGNORED
    told = targets[:, 1:][learnt]
    logits = model.lm_head(hidden[:, :-1][learnt])
    losses = nn.functional.cross_entropy(logits.float(), told, reduction="none")
    weights = torch.ones_like(losses) if token_weights is None else token_weights[told]
    if batch.weights is not None:
        weights = weights * batch.weights.to(weights.device)[:, 1:][learnt]
    loss = (losses * weights).sum() / weights.sum()
    return loss if lesson is None else loss + lesson(caught, inputs, batch)
