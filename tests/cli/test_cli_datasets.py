"""`saccade datasets` lists what is known by name, and shows one."""

from __future__ import annotations

from commands import Shell

from saccade.data import catalogue


def test_every_data_set_has_a_line_with_its_papers(shell: Shell) -> None:
    lines = shell("datasets").out.splitlines()
    assert len(lines) == len(catalogue.names()) + 1
    assert "textvqa  HiViS (@hivis), SAGE (@sage): questions about text in photographs" in lines
    assert "mmmu  no paper: college-level questions with up to seven pictures" in lines


def test_one_data_set_is_shown_as_a_paper_uses_it(shell: Shell) -> None:
    shown = shell("datasets", "pope@tabed").out
    for line in ("path: lmms-lab-encoder/POPE", "split: test", "images: image", "id: question_id", "count: 100"):
        assert f"  {line}\n" in shown
    assert "detailed explanation of your reasoning leading to the answer. {question}" in shown
    assert "max_new_tokens: 128" in shown
    assert "not compared with the hub" in shown


def test_an_unknown_data_set_is_refused(shell: Shell) -> None:
    assert "There is no data set 'vqa'" in shell("datasets", "vqa").complaint
