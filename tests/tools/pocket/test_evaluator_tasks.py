"""Tasks of the pocket world for evaluators: their data, their functions, and the command that writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import ImageChops

from saccade.errors import InputError
from saccade.pocket import draw
from tools.pocket import evaluator_tasks as pocket_tasks


def docs_of(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name / "samples.jsonl").read_text().splitlines()]


def test_task_files_name_functions_and_fields_that_exist_and_right_answers_score_one(tmp_path: Path) -> None:
    written = pocket_tasks.write_lmms_tasks(tmp_path, ["scene"], count=4)
    assert [path.name for path in written] == ["saccade_scene.yaml", "saccade_scene_choice.yaml"]
    docs = docs_of(tmp_path, "scene")
    for path in written:
        lines = path.read_text().splitlines()
        functions = [line.rpartition(".")[2] for line in lines if "!function tools.pocket.evaluator_tasks." in line]
        fields = [line.split(": ")[1] for line in lines if line.startswith("doc_to") and "!function" not in line]
        assert functions
        assert fields
        assert all(hasattr(pocket_tasks, name) for name in functions)
        assert all(field in docs[0] for field in fields)
    assert [pocket_tasks.process_results(doc, [doc["answer"]])["facts"] for doc in docs] == [1.0] * 4
    assert pocket_tasks.process_results(docs[0], [docs[1]["answer"]])["facts"] < 1
    for doc in docs:
        assert doc["choices"][doc["label"]] == doc["answer"]
        assert len(set(doc["choices"])) == pocket_tasks.CHOICES
        pairs = [(0.1 if n == doc["label"] else 0.5, False) for n in range(4)]
        assert pocket_tasks.process_choices(doc, pairs) == {"acc": 1.0}
        assert pocket_tasks.process_choices(doc, [str(pair) for pair in pairs]) == {"acc": 1.0}
        assert pocket_tasks.process_choices(doc, [(-loss, hit) for loss, hit in pairs]) == {"acc": 0.0}


def test_pictures_survive_as_files_and_stand_before_the_question(tmp_path: Path) -> None:
    pocket_tasks.write_lmms_tasks(tmp_path, ["difference"], count=4, seed=3)
    doc = docs_of(tmp_path, "difference")[1]
    sample = draw(pocket_tasks.FIRST + 4, "difference")
    for ours, theirs in zip(sample.images, pocket_tasks.doc_to_visual(doc), strict=True):
        assert ImageChops.difference(ours, theirs).getbbox() is None
    ((message,),) = [pocket_tasks.doc_to_messages(doc)]
    assert [part["type"] for part in message["content"]] == ["image", "image", "text"]


def test_pictures_go_between_the_words_that_mark_them(tmp_path: Path) -> None:
    pocket_tasks.write_lmms_tasks(tmp_path, ["story"], count=4)
    doc = docs_of(tmp_path, "story")[0]
    (message,) = pocket_tasks.doc_to_messages(doc)
    kinds = [part["type"] for part in message["content"]]
    assert kinds.count("image") == len(doc["media"])
    assert kinds.index("text") < kinds.index("image") or kinds[:2] == ["image", "text"]
    assert "<image>" not in "".join(part.get("text", "") for part in message["content"])


def test_tasks_without_a_form_are_refused(tmp_path: Path) -> None:
    for name, words in (("followup", "earlier turns"), ("nonsense", "no pocket task")):
        with pytest.raises(InputError, match=words):
            pocket_tasks.write_lmms_tasks(tmp_path, [name], 4)
    with pytest.raises(InputError, match="at least 4"):
        pocket_tasks.write_lmms_tasks(tmp_path, ["scene"], 3)
