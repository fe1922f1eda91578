"""`python -m tools.pocket eval` marks a folder's model, with a draft model by name or by folder, or refuses."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from saccade import pocket
from saccade.errors import SaccadeError
from tools.pocket.__main__ import app


def _evaluate(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["eval", *arguments], catch_exceptions=False)


@pytest.mark.parametrize("drafter", ["pocket", pytest.param(str(pocket.draft_path()), marks=pytest.mark.slow)])
def test_a_folder_is_marked_with_a_draft_model_by_name_or_by_folder(drafter: str) -> None:
    few = ("--task", "knowledge", "-n", "2")
    ours = _evaluate(str(pocket.target_path()), "-d", drafter, *few)
    assert "| knowledge | fact |" in ours.stdout
    assert ours.stdout == _evaluate("target", *few).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-t", "pie"), "no pocket task 'pie'; the tasks are chart, "),
        (("--grammar", "loud", "-n", "2"), "no grammar 'loud'; it has dense, verbose"),
    ],
)
def test_tasks_and_grammars_that_do_not_exist_are_named(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(SaccadeError, match=message):
        _evaluate(*arguments)


def test_a_task_that_does_not_fit_the_model_is_left_out_or_refused_by_length(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    short = shutil.copytree(pocket.draft_path(), tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 2048
    (short / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(
        "tools.pocket.__main__.WORLD", {name: pocket.WORLD[name] for name in ("knowledge", "long-video")}
    )
    result = _evaluate(str(short), "-n", "2")
    assert "Task long-video is left out: The sequence needs" in result.output
    assert "| long-video |" not in result.stdout
    with pytest.raises(SaccadeError, match="context is 2048"):
        _evaluate(str(short), "-t", "long-video", "-n", "2")
