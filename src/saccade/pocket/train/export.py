"""Stage 7: finished models as Hugging Face folders in bfloat16, with a model card of what was measured."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    GenerationConfig,
    LlavaForConditionalGeneration,
)

from saccade.pocket.evaluate import measure, table
from saccade.pocket.train.batches import FIRST_TRAINING_SEED
from saccade.pocket.train.chat import BEGIN, END, PAD
from saccade.pocket.train.files import replace_folder
from saccade.pocket.train.models import CONTEXT
from saccade.pocket.train.processor import make_processor
from saccade.pocket.train.recipe import Recipe


@dataclass(frozen=True)
class Provenance:
    """How a model came about, for its card: a title, one sentence on the training, and where it ran."""

    title: str
    training: str
    hardware: str


_CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: image-text-to-text
---
# {title}

A small vision-language model of Saccade's pocket world: it describes generated 96 x 96 pictures (scenes, bar
charts, receipts) and nothing else. It exists so that speculative decoding can be tried and tested
without a download; do not expect anything of it outside that world.

- Shape: `LlavaForConditionalGeneration`, Llama {layers} x {width}, CLIP tower
  {tower_layers} x {tower_width}, {parameters:.1f} M parameters, bfloat16.
- Data: `saccade.pocket.draw`, training seeds from {first_seed} on, recipe seed {seed}. No outside data.
- Training: {training}
- Hardware: {hardware}.
- Again from nothing: `python -m saccade.pocket.train --out DIR`. Same data and schedule; the weights differ a
  little from run to run, as stages end by the clock.

## Accuracy

Greedy answers in the dense grammar on {samples} fresh pictures per task. *chance* marks the same answers
against another picture's facts; *shuffled image* asks about one picture while showing another.

{table}
"""


def write_folder(model: LlavaForConditionalGeneration, tokenizer: Tokenizer, folder: Path) -> None:
    """Everything that `from_pretrained` needs: configuration, weights, tokenizer, processor, template."""
    narrow = copy.deepcopy(model).to(device="cpu", dtype=torch.bfloat16)
    narrow.generation_config = GenerationConfig(
        do_sample=False, bos_token_id=BEGIN, eos_token_id=END, pad_token_id=PAD
    )
    narrow.save_pretrained(folder)
    make_processor(tokenizer, CONTEXT).save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    kept = json.loads(settings.read_text())
    for name in ("backend", "extra_special_tokens"):  # of no use, and older readers stumble over them
        kept.pop(name, None)
    kept["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings.write_text(json.dumps(kept, indent=2) + "\n")


def card(folder: Path, recipe: Recipe, provenance: Provenance, device: torch.device) -> str:
    """The model card of a written folder, with freshly measured accuracy."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    rows = measure(model, AutoProcessor.from_pretrained(folder), recipe.evaluation_samples)
    text, vision = model.config.text_config, model.config.vision_config
    return _CARD.format(
        title=provenance.title,
        training=provenance.training,
        hardware=provenance.hardware,
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        tower_layers=vision.num_hidden_layers,
        tower_width=vision.hidden_size,
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        first_seed=FIRST_TRAINING_SEED,
        seed=recipe.seed,
        samples=recipe.evaluation_samples,
        table=table(rows),
    )


def export(
    model: LlavaForConditionalGeneration,
    tokenizer: Tokenizer,
    folder: Path,
    recipe: Recipe,
    provenance: Provenance,
) -> None:
    """Put a finished, measured model folder in the place of `folder`."""

    def write(part: Path) -> None:
        write_folder(model, tokenizer, part)
        (part / "README.md").write_text(card(part, recipe, provenance, model.device))

    replace_folder(folder, write)
