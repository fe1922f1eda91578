"""transformers' `generate` and Saccade, with pictures as their users give them.

`python -m benchmarks.engines.here FOLDER THREADS transformers` or `saccade` with options of `saccade.load` as JSON.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

import saccade
from benchmarks.engines.peer import Answer, serve
from benchmarks.pocket_pair import load, stock_inputs
from saccade.loading import load_processor
from saccade.pocket import draft_path, draw


def stock(target: Path, questions: list[Any]) -> Answer:
    processor, model = load_processor(str(target)), load(target, "float32", "cpu")
    inputs = [stock_inputs(model, [processor.prompt(question.messages())]) for question in questions]

    def answer(prompt: int, way: str, limit: int) -> tuple[list[int], int]:
        (ids,) = model.generate(**inputs[prompt], max_new_tokens=limit, do_sample=False).tolist()
        new = ids[inputs[prompt]["input_ids"].shape[1] :]
        return new, len(new)

    return answer


def ours(target: Path, questions: list[Any], threads: int, options: dict[str, Any]) -> Answer:
    loaded = saccade.load(target, draft_path(), threads=threads, **options)
    if (name := loaded.target.executor.name) != options["executor"] != "auto":
        raise SystemExit(f"The target runs on {name}, not on {options['executor']}.")

    @cache
    def using(way: str) -> saccade.VLM:
        return loaded.using("chain", gamma=int(way)) if way.isdecimal() else loaded.using(way)

    def answer(prompt: int, way: str, limit: int) -> tuple[list[int], int]:
        asked = questions[prompt]
        output = using(way if limit > 1 else "plain").generate(
            asked.question, images=[asked.image], max_new_tokens=limit
        )
        return output.tokens, output.stats.target_passes + 1

    return answer


def main() -> None:
    folder, threads, engine = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(threads)
    made = json.loads((folder / "questions.json").read_text())
    questions, target = [draw(*question) for question in made["questions"]], Path(made["target"])
    if engine == "transformers":
        serve(stock(target, questions), f"transformers {transformers.__version__}, torch {torch.__version__}")
    else:
        serve(ours(target, questions, threads, json.loads(sys.argv[4])), f"Saccade {saccade.__version__}")


if __name__ == "__main__":
    main()
