"""Random LoRAs, as PEFT stores them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model


def random_lora(
    path: Path, model: Any, seed: int = 1, std: float = 0.1, beside: bool | str = False, **settings: Any
) -> Path:
    """A folder with a LoRA on all linear modules, or on others, that changes answers.

    ``beside``: as PEFT's ``save_embedding_layers``, whose own default is "auto".
    """
    settings = {"target_modules": "all-linear", "r": 4, "lora_alpha": 8, **settings}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = get_peft_model(copy.deepcopy(model), LoraConfig(**settings))
        for name, weight in made.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                torch.nn.init.normal_(weight, std=std)
    made.save_pretrained(path, save_embedding_layers=beside)
    return path
