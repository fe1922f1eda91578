"""Fixtures of the workshop's tests: a tokenizer of toy size, and its processor."""

import pytest
from tokenizers import Tokenizer
from workshop_kit import tiny_model

from saccade.inputs.processor import InputProcessor
from saccade.loading import load_processor
from tools.pocket.recipe import quick_recipe
from tools.pocket.tokens import train_tokenizer, write_processor


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return train_tokenizer(quick_recipe())


@pytest.fixture(scope="session")
def processor(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> InputProcessor:
    folder = tmp_path_factory.mktemp("processor")
    tiny_model().config.save_pretrained(folder)
    write_processor(tokenizer, folder, 2048)
    return load_processor(str(folder))
