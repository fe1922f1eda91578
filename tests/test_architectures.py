"""Answers of every image-text-to-text architecture of transformers equal those of `generate`, or are refused."""

from __future__ import annotations

import pytest

from architectures import NAMES, PAGE, rows


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_does_as_the_table_says(name: str) -> None:
    (row,) = rows([name])
    assert row in PAGE.read_text(encoding="utf-8")
