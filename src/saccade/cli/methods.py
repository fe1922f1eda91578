"""Commands about methods, machine and checkpoints: `methods`, `predict`, `doctor`, `inspect` and `export`."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
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
        None, "Cost of a target pass over so many tokens, in plain steps; else 1.", metavar="COST:TOKENS,..."
    ),
    best: bool = option(False, "Predict for the best gamma up to 32, instead of a fixed one."),
    as_json: bool = option(False, "Print one JSON object.", "--json"),
) -> None:
    """Predict the speed-up of a draft chain from three numbers.

    Each target pass checks gamma draft tokens at once and emits those it accepts and one more. So the
    speed-up over plain decoding is tokens per pass (block efficiency) over the cost of a pass,
    `gamma * cost + verify cost`. A larger gamma drafts more but reaches its last tokens less often; past the
    best gamma it only costs. Break-even is the acceptance below which speculation slows decoding down.
    A pass over gamma draft tokens has gamma + 1 tokens; costs between those of --verify-cost are linear.

    The acceptance of a run is in `saccade generate --json` under `acceptance_by_depth`.

    Examples:

    - `saccade predict --acceptance 0.7 --cost 0.05`
    - `saccade predict --gamma 5 --acceptance 0.7 --cost 0.05 --verify-cost 1.03:6,1.2:16`
    - `saccade predict --acceptance 0.9 --cost 0.1 --best --json`
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


@spread
def inspect(
    path: str = typer.Argument(
        metavar="PATH", help="Folder or hub id of a head or a model; pocket is the built-in target."
    ),
    target: str | None = option(None, "Compare a head with this target's configuration.", "-t", metavar="PATH"),
    as_json: bool = option(False, "Print one JSON object.", "--json"),
) -> None:
    """Show what a folder holds: the layout of a head, the target it was made for, positions and norms.

    No model is run, and of the target only the configuration is read. With --target the exit code is 1 if the head
    does not fit.

    Examples:

    - `saccade inspect runs/eagle3/best`
    - `saccade inspect lucylyn/MSD-LLaVA1.5-7B -t llava-hf/llava-1.5-7b-hf`
    """
    from saccade.checkpoints import inspect_checkpoint
    from saccade.pocket import target_path

    pocket = str(target_path())
    content = inspect_checkpoint(pocket if path == "pocket" else path, pocket if target == "pocket" else target)
    if as_json:
        print(json.dumps({**asdict(content), "fits": content.fits}))
    else:
        screen.show(f"{content.path}: {content.holds} of the kind {content.kind}, layout of {content.layout}")
        screen.show(*(f"  {name:<15} {_text(value)}" for name, value in content.facts.items()))
        if content.checks:
            screen.show(f"compared with {target}")
        for check in content.checks:
            verdict = {True: "fits", False: "differs", None: "check"}[check.fits]
            note = f": {check.note}" if check.note else ""
            values = f"head {_text(check.head)}, target {_text(check.target)}"
            screen.show(f"  {check.what:<15} {values}  {verdict}{note}")
        if content.problem:
            screen.show(f"cannot be loaded: {content.problem}")
    if content.fits is False:
        raise typer.Exit(1)


def _text(value: object) -> str:
    """A value for a person."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(part)}" for name, part in value.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


@spread
def export(
    head: str = typer.Argument(metavar="HEAD", help="Folder or hub id of a head."),
    to: str = option(..., "`speculators` (vLLM), `eagle` or `sglang`.", metavar="LAYOUT"),
    out: Path = option(..., "New folder to write.", "-o", metavar="FOLDER"),
    target: str | None = option(None, "The model that the head was trained for.", "-t", metavar="PATH"),
    dtype: str = option("auto", "Of the written weights: float32, bfloat16, float16, or auto: as stored."),
) -> None:
    """Write a head in the layout of speculators (vLLM), EAGLE or SGLang, with a model card.

    EAGLE-3 heads can be written in every layout, EAGLE and MSD heads without norms of their inputs in EAGLE's. A
    layout that cannot hold a head is refused. The folder is loaded again before the command ends. The target's LM head
    and embedding are copied where the layout needs them.

    Examples:

    - `saccade export runs/eagle3/best --to speculators -t meta-llama/Llama-3.1-8B-Instruct -o eagle3-speculator`
    - `saccade export runs/eagle3/best --to sglang -t meta-llama/Llama-3.1-8B-Instruct -o eagle3-sglang`
    - `saccade export MSD-LLaVA1.5-7B --to eagle -t llava-hf/llava-1.5-7b-hf --dtype float16 -o msd-again`
    """
    import torch

    from saccade.checkpoints import export_head
    from saccade.checkpoints.exporting import check_export
    from saccade.draft.heads.store import kind_at, load_head
    from saccade.loading import adapt, check_dtype, load_model, path_of
    from saccade.pocket import target_path

    if target is None:
        raise InputError("Give the target that the head was trained for with --target.")
    screen.quiet_libraries()
    check_export(out, to)
    kind_at(path_of(head))  # refuses a head that is not there before the target is loaded
    precision = check_dtype(dtype)
    place = str(target_path()) if target == "pocket" else path_of(target)
    owner = adapt(load_model(place))
    loaded = load_head(path_of(head), owner, precision if isinstance(precision, torch.dtype) else None)
    export_head(loaded, owner, out, to, target_name=place)
    load_head(out, owner)
    print(f"{out}: the {loaded.kind} head in the layout of {to}; it loads here again.")


@spread
def doctor(as_json: bool = option(False, "Print one JSON object.", "--json")) -> None:
    """Show installed packages, devices, built-in models, and the model families that work here.

    A family works when the installed transformers has it; `video` needs PyAV for files.
    """
    report = examine()
    if as_json:
        print(json.dumps(report))
        return
    screen.show(f"python {report['python']} on {report['platform']}")
    extras = _extras()
    for name, version in report["packages"].items():
        extra = f"  (optional: pip install 'saccade[{extras[name]}]')" if extras.get(name) else ""
        screen.show(f"  {name:<17} {version or 'not installed'}{extra}")
    screen.show("devices", *(f"  {device}" for device in report["devices"]))
    screen.show("built-in models (`-t pocket`)", f"  {', '.join(report['pocket'])}")
    screen.show("families (any other decoder of transformers is checked at load)")
    for name, family in report["families"].items():
        state = "works" if family["works"] else "needs a newer transformers"
        screen.show(f"  {name:<16} {family['name']:<28} {state}")


def examine() -> dict[str, Any]:
    """Return everything that `saccade doctor` shows."""
    import torch
    from transformers import CONFIG_MAPPING

    from saccade import cpu
    from saccade.pocket import draft_path, head_paths, target_path
    from saccade.target_model.traits import TESTED
    from saccade.wording import count

    fast = [str(kind).removeprefix("torch.") for kind in (torch.bfloat16, torch.float16) if cpu.computes_in(kind)]
    formats = " and ".join(fast) if fast else "no 16-bit format, so that dtype=auto is float32"
    cores = f"{count(cpu.usable_cores(), 'core')}, {cpu.idle_cores()} idle"
    threads = f"{count(torch.get_num_threads(), 'thread')}, {torch.backends.cpu.get_cpu_capability()}"
    devices = [f"cpu, {cores}, {threads}, fast in {formats}"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(f"cuda:{index}, {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    if torch.backends.mps.is_available():
        devices.append("mps")
    models = [path.name for path in (target_path(), draft_path()) if path.is_dir()]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in ("saccade", *_extras())},
        "devices": devices,
        "pocket": models + [f"{kind} head" for kind in head_paths()],
        "families": {k: {"name": v, "works": k in CONFIG_MAPPING} for k, v in TESTED.items()},
    }


def _extras() -> dict[str, str]:
    """Return the packages that Saccade uses, with the extra that brings each; empty for those that it always needs."""
    extras = dict[str, str]()
    for line in metadata.requires("saccade") or []:
        extra = re.search(r"extra == ['\"](\w+)", line)
        name = re.split(r"[^\w-]", line)[0]
        if name != "saccade" and (extra is None or extra[1] not in ("dev", "docs", "browser")):
            extras.setdefault(name, extra[1] if extra else "")
    return extras


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
