"""The model classes of a run: standard Hugging Face LLaVA, small."""

import torch
from torch import Tensor
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

from saccade.pocket.sample import IMAGE_SIZE, PATCH_SIZE
from saccade.pocket.train.batches import IGNORED
from saccade.pocket.train.chat import BEGIN, END, IMAGE, IMAGE_TOKENS, PAD
from saccade.pocket.train.recipe import LanguageShape, TowerShape

CONTEXT = 2048


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


def build(shape: LanguageShape, tower: TowerShape, vocabulary: int) -> LlavaForConditionalGeneration:
    """A LLaVA with fresh weights."""
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
    config = LlavaConfig(
        vision_config=tower_config(tower),
        text_config=text,
        image_token_index=IMAGE,
        image_seq_length=IMAGE_TOKENS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=False,
        **tokens,
    )
    # On a CPU, plain attention is three times as fast as the fused one at these sizes, backward pass included.
    config._attn_implementation = "sdpa" if torch.cuda.is_available() else "eager"
    return LlavaForConditionalGeneration(config)


def embed(
    model: LlavaForConditionalGeneration, ids: Tensor, pictures: Tensor | None, train_tower: bool = False
) -> Tensor:
    """Input embeddings `[B, N, d]` with the picture's features in the image slots, as LLaVA's forward does.

    Apart from that one it can leave the tower out of the gradient.
    """
    inputs: Tensor = model.get_input_embeddings()(ids)
    if pictures is None:
        return inputs
    with torch.set_grad_enabled(train_tower and torch.is_grad_enabled()):
        seen = model.model.vision_tower(pixel_values=pictures, output_hidden_states=True).hidden_states[-1]
    features = model.model.multi_modal_projector(seen[:, 1:]).to(inputs.dtype)  # [B, 64, d]
    return inputs.masked_scatter((ids == IMAGE).unsqueeze(-1), features)


def loss_of(
    model: LlavaForConditionalGeneration,
    ids: Tensor,
    targets: Tensor,
    pictures: Tensor | None,
    train_tower: bool = False,
    token_weights: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy over the answer tokens, each weighted by what it is (`token_weights`: `[V]`)."""
    inputs = embed(model, ids, pictures, train_tower)
    hidden = model.model.language_model(inputs_embeds=inputs).last_hidden_state
    learnt = targets[:, 1:] != IGNORED
    logits = model.lm_head(hidden[:, :-1][learnt])
    return torch.nn.functional.cross_entropy(logits.float(), targets[:, 1:][learnt], weight=token_weights)
