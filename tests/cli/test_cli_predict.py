"""`saccade predict` prints what the theory says, and refuses in one sentence."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from saccade import theory
from saccade.cli.methods import predict
from saccade.errors import InputError

app = typer.Typer()
app.command()(predict)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_table_has_length_efficiency_speedup_break_even_and_best_gamma() -> None:
    table = run("--gamma", "5", "--acceptance", "0.7", "--cost", "0.05")
    rows = dict(line.strip().split("  ", 1) for line in table.splitlines()[1:])
    values = {name: rest.split()[0] for name, rest in rows.items()}
    assert values == {
        "accepted length": "1.94",
        "block efficiency": "2.94",
        "speed-up": "2.35",
        "target work": "2.04",
        "break-even": "0.20",
        "best gamma": "6",
    }


def test_json_is_the_prediction() -> None:
    found = json.loads(run("-a", "0.8", "-c", "0.1", "-g", "4", "--verify-cost", "1.1:5,1.6:9", "--json"))
    expected = theory.predict(0.8, 4, 0.1, verify_cost=theory.cost_curve({5: 1.1, 9: 1.6}))
    assert found["speedup"] == expected.speedup
    assert found["verify_cost"] == 1.1
    assert found["best"] == {"gamma": expected.best.gamma, "speedup": expected.best.speedup}


def test_best_predicts_for_the_best_gamma() -> None:
    found = json.loads(run("-a", "0.8", "-c", "0.05", "--best", "--json"))
    assert found["gamma"] == found["best"]["gamma"] == 8
    assert found["speedup"] == found["best"]["speedup"]


def test_a_drafter_that_never_pays_is_named() -> None:
    table = run("-a", "0.1", "-c", "1.2", "--best")
    assert "plain decoding is faster than any draft" in table
    assert "gamma 1 is slower even if every draft token is accepted" in table


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["-a", "1.1", "-c", "0.1"], "acceptance must lie between 0 and 1, not 1.1"),
        (["-a", "0.5", "-c", "-1"], "draft cost must be a finite number of at least 0"),
        (["-a", "0.5", "-c", "0.1", "-g", "0"], "gamma must be a whole number of at least 1, not 0"),
        (["-a", "0.5", "-c", "0.1", "-g", "3", "--best"], "give --gamma or --best, not both"),
        (["-a", "0.5", "-c", "0.1", "--verify-cost", "6=1.03"], "takes COST:TOKENS pairs"),
        (["-a", "0.5", "-c", "0.1", "--verify-cost", "2:1"], "one token costs 1 by definition"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_in_one_sentence(arguments: list[str], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert str(caught.value).count("\n") == 0
