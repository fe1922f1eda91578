"""Answers of every image-text-to-text architecture of transformers equal those of `generate`, or are refused."""

from __future__ import annotations

import pytest

from architectures import ARCHITECTURES, outcome


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_gives_the_tokens_of_generate_or_is_refused(name: str) -> None:
    result = outcome(ARCHITECTURES[name])
    assert result.tokens > 0 or result.status == "refused"
