"""Which positions tokens can have at most."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from saccade.errors import InputError
from saccade.target_model.traits import ModelLimits

POSITIONS = torch.tensor([[7, 8, 9, 10, 11]])


def test_positions_end_with_the_context() -> None:
    assert ModelLimits(10, None).clamp_positions(POSITIONS, [7]).tolist() == [[7, 8, 9, 9, 9]]
    assert torch.equal(ModelLimits(None, None).clamp_positions(POSITIONS, [7]), POSITIONS)


def test_m_rope_positions_that_are_ahead_of_the_tokens_are_left_alone() -> None:
    """A video's positions follow its seconds, which may be more than its tokens."""
    limits, both = ModelLimits(10, None), POSITIONS.expand(2, -1)
    assert limits.clamp_positions(both, [7, 7], torch.tensor([[2], [-4]])).tolist() == [
        [7, 8, 9, 10, 11],
        [7, 8, 9, 9, 9],
    ]


def test_positions_end_at_the_turn_only_before_it() -> None:
    limits = ModelLimits(100, 10)
    assert limits.clamp_positions(POSITIONS, [7, 3]).tolist() == [[7, 8, 9, 9, 9]]
    assert torch.equal(limits.clamp_positions(POSITIONS, [3, 10]), POSITIONS)


def test_a_longrope_is_found_also_where_layer_types_have_embeddings_of_their_own() -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 40}
    default = {"rope_type": "default", "rope_theta": 1e4}
    config = LlamaConfig()
    assert ModelLimits.of(config).longrope_threshold is None
    config.rope_parameters = {"full_attention": rope, "sliding_attention": default}
    assert ModelLimits.of(config).longrope_threshold == 40


def test_a_row_of_a_batch_that_is_too_long_is_refused() -> None:
    with pytest.raises(InputError, match="needs 12 tokens but this model's context is 10"):
        ModelLimits(10, None).check_rows([3, 7], [7, 5])
