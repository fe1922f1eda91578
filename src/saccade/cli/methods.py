"""`saccade methods`, the list of methods and their options, and `saccade predict`, the expected speed-up of a chain."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import typer

from saccade.cli import completion, screen
from saccade.cli.option_groups import option, spread
from saccade.errors import InputError


@spread
def methods(
    name: str | None = typer.Argument(
        None, metavar="[NAME]", autocompletion=completion.methods, help="Show every option of this method."
    ),
    as_json: bool = option(False, "Print one JSON object.", "--json"),
) -> None:
    """List the methods with summary, losslessness, needed drafter and source.

    With a name: every option of --set NAME=VALUE with default, range and meaning. Drafter, tree, rule and pruning
    combine freely; an answer is lossy exactly when its rule is. --drafter takes a draft model or the folder of a
    trained head; `saccade bench` takes more heads with --head.
    """
    from saccade.methods import METHODS, get
    from saccade.methods.settings import about, table

    chosen = METHODS if name is None else {name: get(name)}
    rows = [] if name is None else table(METHODS[name].settings)
    if as_json:
        fields = ("summary", "source", "lossless", "needs")
        listed: dict[str, Any] = {
            key: {**{field: getattr(method, field) for field in fields}, "options": dict(method.options)}
            for key, method in chosen.items()
        }
        if name is not None:
            listed = listed[name]
            listed["about"] = [
                {"name": each, "default": default, "range": limits.range, "meaning": limits.meaning, "with": brings}
                for brings, options in rows
                for each, default, limits in options
            ]
        print(json.dumps(listed))
        return
    for key, method in chosen.items():
        kind = "lossless" if method.lossless else "LOSSY"
        screen.out().print(f"[bold]{key}[/bold]  {kind}, needs {method.needs}", soft_wrap=True)
        screen.show(f"    {method.summary}")
        if method.options and name is None:
            screen.show("    options: " + " ".join(f"{k}={v}" for k, v in method.options.items()))
        if method.source:
            screen.show(f"    source:  {method.source}")
    for brings, options in rows:
        screen.show(f"    with {brings}: {about(brings)}" if brings else "    options:")
        for each, default, limits in options:
            accepted = f" ({limits.range})" if limits.range else ""
            screen.show(f"        {each}={default}  {limits.meaning}{accepted}")


@spread
def predict(
    acceptance: float = option(..., "Probability, 0 to 1, that the target accepts one more draft token.", "-a"),
    cost: float = option(..., "One drafter step, as a share of one plain target step (T_q / T_p).", "-c"),
    gamma: int | None = option(None, "Draft tokens per target pass; 5 by default.", "-g"),
    verify_cost: str | None = option(
        None,
        "Cost of a target pass over so many tokens, in plain target steps. The pass for gamma draft tokens has "
        "gamma + 1. Linear between the points; 1 throughout when left out.",
        metavar="COST:TOKENS,...",
    ),
    best: bool = option(False, "Predict for the best gamma up to 32, instead of a given one (for 1 if none pays)."),
    as_json: bool = option(False, "Print one JSON object.", "--json"),
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
        p = theory.predict(acceptance, 5 if gamma is None else gamma, cost, verify_cost=curve)
    except ValueError as problem:
        raise InputError(str(problem)) from None
    if as_json:
        print(json.dumps(asdict(p)))
        return
    level = f"none    gamma {p.gamma} is slower even if every draft token is accepted"
    if p.break_even is not None:
        level = f"{p.break_even:<6.2f}  acceptance from which gamma {p.gamma} pays"
    faster = "none    plain decoding is faster than any draft"
    if p.best.gamma:
        faster = f"{p.best.gamma:<6}  speed-up {p.best.speedup:.2f}x"
    verification = f"{p.verify_cost:g} per verification"
    screen.show(
        f"gamma {p.gamma}, acceptance {p.acceptance:g}, cost {p.draft_cost:g} per draft token, {verification}",
        f"  accepted length   {p.accepted_length:<6.2f}  draft tokens per target pass",
        f"  block efficiency  {p.block_efficiency:<6.2f}  tokens per target pass",
        f"  speed-up          {p.speedup:<6.2f}  times plain decoding",
        f"  target work       {p.verified_per_token:<6.2f}  positions computed per token, plain decoding has 1",
        f"  break-even        {level}",
        f"  best gamma        {faster}",
    )
