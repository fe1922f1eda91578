"""lmms-eval and VLMEvalKit themselves, from their command lines, on tasks of the pocket world."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from saccade.pocket import draw
from saccade.vlm import load
from tools.pocket.evaluator_tasks import FIRST, write_lmms_tasks

LMMS = os.environ.get("SACCADE_LMMS_PYTHON", "")
"""An interpreter with lmms-eval and Saccade; docs/how-to/evaluators.md says how to install both."""
VLMEVALKIT = os.environ.get("SACCADE_VLMEVALKIT_PYTHON", "")
"""An interpreter with VLMEvalKit (`ms-vlmeval` on PyPI) and what Saccade needs."""
INSTALL = os.environ.get("SACCADE_INSTALL", "")
"""Set where the environments of the page may be made from a package index."""
ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
MOST = 48


def by(python: str, reason: str) -> Callable[[Any], Any]:
    """Marks of a test that runs an evaluator by an interpreter that has it."""
    skip = pytest.mark.skipif(not python, reason=f"{reason} does not name an interpreter that has it and Saccade")
    return lambda test: pytest.mark.slow(pytest.mark.timeout(1800)(skip(test)))


install = pytest.mark.skipif(not INSTALL, reason="SACCADE_INSTALL is not set, so nothing is installed")
lmms, vlmevalkit = by(LMMS, "SACCADE_LMMS_PYTHON"), by(VLMEVALKIT, "SACCADE_VLMEVALKIT_PYTHON")


def run(python: str, arguments: list[str], folder: Path, **more: str) -> str:
    """Run a program with this tree's sources and tools, and return what it prints."""
    places = f"{SOURCE}{os.pathsep}{ROOT}"  # the tasks' functions are among the tools
    environment = {**os.environ, "PYTHONPATH": places, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}
    done = subprocess.run([python, *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def expected(count: int) -> list[str]:
    vlm = load("pocket", method="plain", dtype="float32")
    samples = [draw(FIRST + number, "scene") for number in range(count)]
    return [vlm.generate(s.messages(), do_sample=False, max_new_tokens=MOST).text for s in samples]


def lmms_eval(folder: Path, *more: str, tasks: str, method: str) -> dict[str, Any]:
    """Run lmms-eval on some tasks and return its results, with the texts by task."""
    write_lmms_tasks(folder / "tasks", ["scene"], 4)
    model = ["--model", "saccade", "--model_args", f"target=pocket,method={method},dtype=float32,speed=out/speed.json"]
    place = ["--include_path", "tasks", "--tasks", tasks, "--output_path", "out", "--log_samples"]
    limits = ["--gen_kwargs", f"max_new_tokens={MOST}"]
    text = run(LMMS, ["-m", "lmms_eval", *model, *place, *limits, *more], folder)
    assert "Traceback" not in text, text
    (results,) = (folder / "out").rglob("*results.json")
    found: dict[str, Any] = json.loads(results.read_text())
    lines = {path.name: path.read_text().splitlines() for path in results.parent.glob("*samples*.jsonl")}
    found["texts"] = {
        name.partition("_samples_")[2].removesuffix(".jsonl"): [
            row["filtered_resps"] for row in sorted(map(json.loads, rows), key=lambda row: row["doc_id"])
        ]
        for name, rows in lines.items()
    }
    return found


@lmms
def test_lmms_eval_scores_the_answers_of_plain_decoding_and_reports_their_speed(tmp_path: Path) -> None:
    found = lmms_eval(tmp_path, "--batch_size", "2", tasks="saccade_scene", method="chain")
    assert found["texts"] == {"saccade_scene": expected(4)}
    assert 0.3 < found["results"]["saccade_scene"]["facts,none"] <= 1
    assert found["throughput"]["avg_tokens_per_target_pass"] > 1.5
    speed = json.loads((tmp_path / "out" / "speed.json").read_text())
    assert speed["tasks"]["saccade_scene"]["answers"] == 4
    assert speed["run"]["rows"] == 2
    assert speed["total"]["tokens_per_second"] == pytest.approx(found["throughput"]["avg_speed"], rel=1e-3)


@lmms
def test_lmms_eval_chooses_by_the_simple_models_losses(tmp_path: Path) -> None:
    names = "saccade_scene,saccade_scene_choice"
    found = lmms_eval(tmp_path, "--force_simple", tasks=names, method="plain")
    assert found["texts"]["saccade_scene"] == expected(4)
    assert found["results"]["saccade_scene_choice"]["acc,none"] == 1.0


@vlmevalkit
@pytest.mark.parametrize("rows", [1, 2])
def test_vlmevalkit_writes_the_answers_of_plain_decoding(rows: int, tmp_path: Path) -> None:
    lines = ["index\timage\tquestion\tanswer"]
    for number in range(4):
        sample, picture = draw(FIRST + number, "scene"), io.BytesIO()
        sample.image.save(picture, format="PNG")
        encoded = base64.b64encode(picture.getvalue()).decode()
        lines.append(f"{number}\t{encoded}\t{sample.question}\t{sample.answer}")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "saccade_scene.tsv").write_text("\n".join(lines) + "\n")
    model = {"class": "Saccade", "target": "pocket", "method": "chain", "dtype": "float32", "batch_size": rows}
    model |= {"max_new_tokens": MOST, "speed": "outputs/speed.json"}
    data = {"saccade_scene": {"class": "CustomVQADataset", "dataset": "saccade_scene"}}
    (tmp_path / "config.json").write_text(json.dumps({"model": {"saccade-pocket": model}, "data": data}))
    where = "import importlib.util; print(importlib.util.find_spec('vlmeval').submodule_search_locations[0])"
    script = Path(run(VLMEVALKIT, ["-c", where], tmp_path).splitlines()[0]) / "run.py"
    harness = Path(__file__).with_name("in_vlmevalkit.py")
    place = {"LMUData": str(tmp_path / "data"), "PRED_FORMAT": "tsv"}
    arguments = [str(harness), str(script), "--config", "config.json", "--mode", "infer"]
    run(VLMEVALKIT, arguments, tmp_path, **place)
    (table,) = (tmp_path / "outputs").rglob("saccade-pocket_saccade_scene.*")
    read = f"import pandas, json; print(json.dumps(list(pandas.read_csv({str(table)!r}, sep='\\t')['prediction'])))"
    assert json.loads(run(VLMEVALKIT, ["-c", read], tmp_path).splitlines()[-1]) == expected(4)
    speed = json.loads((tmp_path / "outputs" / "speed.json").read_text())
    assert speed["tasks"]["saccade_scene"]["answers"] == 4
    assert speed["total"]["tokens_per_pass"] > 1.5


@pytest.mark.slow
@pytest.mark.timeout(3600)
@install
@pytest.mark.parametrize(
    ("section", "variable"),
    [("VLMEvalKit", "VLMEVALKIT"), ("Without torchvision", "LMMS"), ("lmms-eval", "LMMS")],
)
def test_an_installation_as_the_page_says_runs_the_evaluator(section: str, variable: str, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "evaluators.md").read_text(encoding="utf-8")
    text = page.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    (commands,) = re.findall(r"```bash\n(pip install torch.*?)```", text, re.DOTALL)
    checkout, python = tmp_path / "checkout", tmp_path / "venv" / "bin" / "python"
    checkout.mkdir()
    for name in ("src", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        (checkout / name).symlink_to(ROOT / name) if name != "src" else shutil.copytree(SOURCE, checkout / name)
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    path = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "PYTHONPATH": ""}
    subprocess.run(["bash", "-euc", commands], cwd=checkout, env=path, check=True)
    tests = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-rs", __file__, "-k", f"test_{variable.lower()}"]
    environment = {**os.environ, "SACCADE_INSTALL": "", f"SACCADE_{variable}_PYTHON": str(python)}
    done = subprocess.run(tests, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "SKIPPED" not in done.stdout
