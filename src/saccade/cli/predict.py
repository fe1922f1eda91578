"""`saccade predict`: the expected speed-up, before anything is run."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

from saccade.errors import InputError

_DEFAULT_GAMMA = 5


def predict(
    acceptance: Annotated[
        float,
        typer.Option("--acceptance", "-a", help="Probability, 0 to 1, that the target accepts one more draft token."),
    ],
    cost: Annotated[
        float,
        typer.Option("--cost", "-c", help="One drafter step, as a share of one plain target step (T_q / T_p)."),
    ],
    gamma: Annotated[
        int | None,
        typer.Option("--gamma", "-g", help=f"Draft tokens per target pass; {_DEFAULT_GAMMA} by default."),
    ] = None,
    verify_cost: Annotated[
        str | None,
        typer.Option(
            "--verify-cost",
            metavar="COST:TOKENS,...",
            help="Cost of a target pass over so many tokens, in plain target steps. The pass for gamma draft "
            "tokens has gamma + 1. Linear between the points; 1 throughout when left out.",
        ),
    ] = None,
    best: Annotated[
        bool,
        typer.Option(
            "--best", help="Predict for the best gamma up to 32, instead of a given one (for 1 if none pays)."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Predict the speed-up of a draft chain from three numbers.

    Each target pass checks gamma draft tokens at once and emits those it accepts and one more. So the
    speed-up over plain decoding is tokens per pass (block efficiency) over the cost of a pass,
    `gamma * cost + verify cost`. A larger gamma drafts more but reaches its last tokens less often; past the
    best gamma it only costs. Break-even is the acceptance below which speculation slows decoding down.

    The acceptance of a run is in `saccade generate --json` under `acceptance_by_depth`.

    Examples:

    `saccade predict --acceptance 0.7 --cost 0.05`

    `saccade predict --gamma 5 --acceptance 0.7 --cost 0.05 --verify-cost 1.03:6,1.2:16`

    `saccade predict --acceptance 0.9 --cost 0.1 --best --json`
    """
    from saccade import theory
    from saccade.cli.screen import out

    if best and gamma is not None:
        raise InputError("--best chooses gamma itself: give --gamma or --best, not both.")
    points: dict[int, float] = {}
    for pair in verify_cost.split(",") if verify_cost else []:
        price, _, tokens = pair.partition(":")
        try:
            points[int(tokens)] = float(price)
        except ValueError:
            raise InputError(f"--verify-cost takes COST:TOKENS pairs, such as 1.03:6,1.2:16, not {pair!r}.") from None
    try:
        curve = theory.cost_curve(points)
        if best:
            gamma = max(1, theory.best_gamma(acceptance, cost, verify_cost=curve).gamma)
        p = theory.predict(acceptance, _DEFAULT_GAMMA if gamma is None else gamma, cost, verify_cost=curve)
    except ValueError as problem:
        raise InputError(str(problem)) from None
    if as_json:
        print(json.dumps(asdict(p)))
        return
    faster = f"{p.best.gamma:<6}  speed-up {p.best.speedup:.2f}x"
    level = f"none    gamma {p.gamma} is slower even if every draft token is accepted"
    if p.break_even is not None:
        level = f"{p.break_even:<6.2f}  acceptance from which gamma {p.gamma} pays"
    console = out()
    console.print(
        f"gamma {p.gamma}, acceptance {p.acceptance:g}, cost {p.draft_cost:g} per draft token, "
        f"{p.verify_cost:g} per verification",
        soft_wrap=True,
    )
    for name, value in (
        ("accepted length", f"{p.accepted_length:<6.2f}  draft tokens per target pass"),
        ("block efficiency", f"{p.block_efficiency:<6.2f}  tokens per target pass"),
        ("speed-up", f"{p.speedup:<6.2f}  times plain decoding"),
        ("target work", f"{p.verified_per_token:<6.2f}  positions computed per token, plain decoding has 1"),
        ("break-even", level),
        ("best gamma", faster if p.best.gamma else "none    plain decoding is faster than any draft"),
    ):
        console.print(f"  {name:<17} {value}", markup=False, soft_wrap=True)
