"""An adapter of the built-in target that answers in JSON: `python -m tools.pocket.json_answers --out DIR` trains it.

A receipt, chart or scene is answered with all of its facts, in one form by task (`form_of`). Adapters of the layers and
of the embeddings, in whose text JSON's marks are rare, learn in two runs; the target's own weights stay as they are.
"""

import argparse
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from tokenizers import Tokenizer

import saccade
from saccade.files import write_folder
from saccade.pocket import draw, target_path
from saccade.pocket.sample import Facts, Sample
from saccade.pocket.words import QUESTIONS
from saccade.train.optimiser import dtype_for
from tools.pocket.accuracy import FIRST_SEED
from tools.pocket.batches import FIRST_TRAINING_SEED, Batch, batch_of, neighbours
from tools.pocket.loop import train
from tools.pocket.models import PocketModel, prepare, training_loss
from tools.pocket.recipe import Schedule
from tools.pocket.tokens import pattern_weights

SHARES = {"chart": 0.3, "receipt": 0.3, "scene": 0.4}
_RUNS = (
    Schedule(steps=1000, batch=4, rate=5e-4, warmup=40, decisive=2.0),
    Schedule(steps=360, batch=4, rate=8e-4, warmup=20, decisive=3.0),
)
_POOL = 4  # batches of which one of similar length is taken
_TABLES = r".*(embed_tokens|lm_head)"
_ADAPTER = LoraConfig(
    r=16,
    lora_alpha=32,
    target_modules=r".*language_model\.layers\.\d+\..*_proj|.*language_model\.embed_tokens|lm_head",
    rank_pattern={_TABLES: 32},
    alpha_pattern={_TABLES: 64},
)
_FACT = re.compile(  # values, and marks that tell whether more follow
    r'(?<=:)"\w+"|\d+|[\]}](?=[,\]}])|(?<=[}"\d]),(?=[{"\d])'
)
_VALUE = re.compile(r'(?<=:)(?:"\w+"|\d+)')
_ENDINGS = (*("",) * 7, *(" Answer as JSON.",) * 16, *(" Reply in JSON.",) * 7)  # of questions


def form_of(task: str, facts: Facts) -> Mapping[str, Any]:
    """Return the facts of a picture in the form in which the adapter answers."""
    if task == "receipt":
        prices = zip(facts["goods"], facts["prices"], strict=True)
        return {"items": [{"name": name, "price": price} for name, price in prices], "total": facts["total"]}
    if task == "chart":
        bars = zip(facts["colours"], facts["values"], strict=True)
        return {"bars": [{"colour": colour, "value": value} for colour, value in bars]}
    names = ("size", "colour", "shape", "row", "column")
    return {"shapes": [{name: thing[name] for name in names} for thing in facts["things"]]}


def asked(sample: Sample, rng: Random) -> Sample:
    """Ask for a sample's facts in JSON, or only its question, and give the answer."""
    answer = json.dumps(form_of(sample.task, sample.facts), separators=(",", ":"))
    question = rng.choice(QUESTIONS[sample.task]) + rng.choice(_ENDINGS)
    return replace(sample, question=question, answer=answer)


@dataclass(frozen=True)
class JsonBatches:
    """Batches of a run by number, of one task each."""

    name: str
    schedule: Schedule
    tokenizer: Tokenizer

    def __call__(self, number: int) -> Batch:
        rng = Random(f"{self.name}/{number}")
        task = rng.choices(list(SHARES), list(SHARES.values()))[0]
        seeds = [rng.randrange(FIRST_TRAINING_SEED, 2**48) for _ in range(_POOL * self.schedule.batch)]
        pool = sorted((asked(draw(seed, task), rng) for seed in seeds), key=lambda sample: len(sample.answer))
        samples = neighbours(rng, pool, self.schedule.batch)
        answers = [self.tokenizer.encode(sample.answer).ids for sample in samples]
        weights = [pattern_weights(self.tokenizer, s.answer, _FACT, self.schedule.decisive) for s in samples]
        return batch_of(self.tokenizer, samples, answers, weights=weights)


def _write(adapted: PeftModel, folder: Path) -> None:
    adapted.peft_config["default"].base_model_name_or_path = "pocket"
    for name, weight in adapted.named_parameters():
        if ".lora_" in name:
            weight.data = weight.data.bfloat16()
    adapted.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink()  # PEFT's empty form of a card


def scores(folder: Path, count: int) -> str:
    """Shares of greedy answers without a grammar that are in form, of values that are right, and of right answers."""
    vlm = saccade.load("pocket", adapters={"json": folder}, method="chain").using(adapter="json")
    lines = ["| task | in form | values right | all right |", "|---|---|---|---|"]
    for task in SHARES:
        formed = right = whole = values = 0
        for seed in range(FIRST_SEED, FIRST_SEED + count):
            sample = asked(draw(seed, task), Random(seed))
            text, truth = vlm.generate(sample.question, images=[sample.image], max_new_tokens=400).text, sample.answer
            whole += text == truth
            formed += _is_json(text)
            true, stated = _VALUE.findall(truth), _VALUE.findall(text)
            values += len(true)
            right += sum(ours == theirs for ours, theirs in zip(stated, true, strict=False))
        lines.append(f"| {task} | {formed / count:.2f} | {right / values:.2f} | {whole / count:.2f} |")
    return "\n".join(lines)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def main() -> None:
    """Train, and write the folder `json`; or score one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--score", type=int, metavar="SAMPLES", help="of each task: read the adapter back instead")
    parser.add_argument("--steps", type=int, help="of each of the two runs instead of 1,000 and 360")
    options = parser.parse_args()
    if options.score:
        print(scores(options.out / "json", options.score))
        return
    tokenizer = Tokenizer.from_file(str(target_path() / "tokenizer.json"))
    torch.manual_seed(0)
    frozen = dtype_for(torch.device("cpu"))  # bfloat16 is what they are stored in
    target = PocketModel.from_pretrained(target_path(), dtype=frozen)
    adapted = get_peft_model(target, _ADAPTER)
    for module in target.modules():
        if isinstance(module, BaseTunerLayer):
            module.cast_input_dtype_enabled = False  # autocast does that; a step takes a fifth less with both
    loss = partial(training_loss, prepare(target))
    for number, usual in enumerate(_RUNS, 1):
        schedule = replace(usual, steps=options.steps or usual.steps)
        name = f"json{number}"
        train(name, target, JsonBatches(name, schedule, tokenizer), loss, schedule, options.out, 60.0)
    write_folder(options.out / "json", partial(_write, adapted))


if __name__ == "__main__":
    main()
