"""`saccade pocket eval` marks a folder's model, with a draft model by name or by folder, or refuses in one sentence."""

import json
import shutil
from pathlib import Path

import pytest
from commands import Shell

from saccade.pocket import draft_path, target_path


@pytest.mark.parametrize("drafter", ["pocket", pytest.param(str(draft_path()), marks=pytest.mark.slow)])
def test_a_folder_is_marked_with_a_draft_model_by_name_or_by_folder(shell: Shell, drafter: str) -> None:
    asked = ("--task", "knowledge", "-n", "2")
    ours = shell("pocket", "eval", str(target_path()), "-d", drafter, *asked)
    assert ours.code == 0, ours.err
    assert "| knowledge | fact |" in ours.out
    assert ours.out == shell("pocket", "eval", "target", *asked).out


def test_tasks_and_grammars_that_do_not_exist_are_named(shell: Shell) -> None:
    assert "no pocket task 'pie'; the tasks are chart, " in shell("pocket", "eval", "-t", "pie").complaint
    message = "no grammar 'loud'; it has dense, verbose"
    assert message in shell("pocket", "eval", "--grammar", "loud", "-n", "2").complaint


def test_a_task_that_does_not_fit_the_model_is_left_out_or_refused_by_length(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from saccade import pocket

    short = shutil.copytree(draft_path(), tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = 2048
    (short / "config.json").write_text(json.dumps(config))
    few = {name: pocket.WORLD[name] for name in ("knowledge", "long-video")}
    monkeypatch.setattr(pocket, "WORLD", few)
    told = shell("pocket", "eval", str(short), "-n", "2")
    assert told.code == 0, told.err
    assert "Task long-video is left out: The sequence needs" in told.err
    assert "| long-video |" not in told.out
    refused = shell("pocket", "eval", str(short), "-t", "long-video", "-n", "2")
    assert refused.code == 2
    assert "context is 2048" in refused.err


@pytest.mark.parametrize("command", ["train", "inflate"])
def test_what_moved_to_the_tools_names_its_new_place(shell: Shell, command: str) -> None:
    assert f"run `python -m tools.pocket {command}`" in shell("pocket", command, "--out", "x").complaint
