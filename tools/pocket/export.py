"""Trained models as Hugging Face folders in bfloat16, with model cards of measured accuracy."""

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig

import saccade
from saccade.files import write_folder
from saccade.pocket.sample import WORLD
from tools.pocket.accuracy import measure, table
from tools.pocket.batches import FIRST_TRAINING_SEED
from tools.pocket.models import CONTEXT, PocketModel
from tools.pocket.processor import BEGIN, END, PAD, write_processor
from tools.pocket.recipe import Recipe


@dataclass(frozen=True)
class Provenance:
    """Title, one sentence on the training, and hardware, for a model card."""

    title: str
    training: str
    hardware: str


_CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: image-text-to-text
---
# {title}

A small vision-language model for Saccade's pocket world of generated 96 x 96 pictures and videos
({tasks}). It exists so that speculative decoding can be tried
and tested without a download, and is of no use outside that world.

- Shape: `LlavaOnevisionForConditionalGeneration`, Llama {layers} x {width}, CLIP tower
  {tower_layers} x {tower_width}, {parameters:.1f} M parameters, bfloat16.
- Data: `saccade.pocket.draw`, training seeds from {first_seed} on, recipe seed {seed}. No outside data.
- Training: {training}
- Hardware: {hardware}.
- To reproduce: `python -m tools.pocket train --out DIR`.

## Accuracy

Greedy answers in the dense grammar on {samples} fresh samples per task (`python -m tools.pocket eval`). *chance* scores
the same answers against another sample's facts; *shuffled image* shows another picture with every fourth question.

{table}
"""


def write_checkpoint(model: PocketModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write all that `from_pretrained` needs: configuration, weights, tokenizer, processor, template."""
    narrow = copy.deepcopy(model).to(device="cpu", dtype=torch.bfloat16)
    for part in (narrow.config.text_config, narrow.config.vision_config):
        part.dtype = torch.bfloat16  # a model loaded in float32 has that there
    narrow.generation_config = GenerationConfig(do_sample=False, bos_token_id=BEGIN, eos_token_id=END, pad_token_id=PAD)
    narrow.save_pretrained(folder)
    write_processor(tokenizer, folder, CONTEXT)


def _report(done: int, of: int) -> None:
    if done % 320 == 0 or done == of:
        print(f"[export] scored {done} of {of} answers", flush=True)


def card(folder: Path, recipe: Recipe, provenance: Provenance, drafter: Path | None = None) -> str:
    """Model card of a written folder, with accuracy measured now."""
    place = "cuda" if torch.cuda.is_available() else None
    vlm = saccade.load(folder, drafter, method="chain" if drafter else "plain", device_map=place)
    tasks = list(recipe.evaluation_tasks or WORLD)
    rows = measure(vlm, tasks, recipe.evaluation_samples, progress=_report)
    model = vlm.target.model
    text, vision = model.config.text_config, model.config.vision_config
    return _CARD.format(
        title=provenance.title,
        tasks=", ".join(WORLD),
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
    model: PocketModel,
    tokenizer: Tokenizer,
    folder: Path,
    recipe: Recipe,
    provenance: Provenance,
    drafter: Path | None = None,
) -> None:
    """Write a finished model folder with its card in the place of `folder`; `drafter` as in `card`."""

    def write(part: Path) -> None:
        write_checkpoint(model, tokenizer, part)
        (part / "README.md").write_text(card(part, recipe, provenance, drafter))

    write_folder(folder, write)
