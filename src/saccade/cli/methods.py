"""Commands about methods, pairs, machine and checkpoints: `methods`, `predict`, `premises`, `doctor`, `inspect`, ..."""

from __future__ import annotations

import json
import platform
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from saccade.cli import screen
from saccade.cli.option_groups import PairOptions, method_names, option, place_of
from saccade.errors import InputError, SaccadeError
from saccade.wording import count, listed, parse_value

if TYPE_CHECKING:
    from saccade.draft.heads.head import Head
    from saccade.vlm import VLM


def methods(
    name: str | None = typer.Argument(
        None, metavar="[NAME]", autocompletion=method_names, help="Show every option of this method."
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
    if as_json:
        fields = ("summary", "source", "lossless", "needs", "options")
        listed = {key: {field: getattr(method, field) for field in fields} for key, method in chosen.items()}
        print(json.dumps(listed if name is None else listed[name], default=dict))
        return
    for key, method in chosen.items():
        kind = "lossless" if method.lossless else "LOSSY"
        screen.show(f"{key}  {kind}, needs {method.needs}", f"    {method.summary}")
        if method.options and name is None:
            screen.show("    options: " + " ".join(f"{k}={v}" for k, v in method.options.items()))
        if method.source:
            screen.show(f"    source:  {method.source}")
    for brings, options in [] if name is None else table(METHODS[name].settings):
        screen.show(f"    with {brings}: {about(brings)}" if brings else "    options:")
        for each, default, limits in options:
            accepted = f" ({limits.range})" if limits.range else ""
            screen.show(f"        {each}={default}  {limits.meaning}{accepted}")


def predict(
    acceptance: float | None = option(
        None, "Probability, 0 to 1, that the target accepts one more draft token.", "-a", min=0, max=1
    ),
    cost: float | None = option(
        None, "A drafter step as a share of a plain target step (T_q / T_p).", "-c", min=0, max=1e6
    ),
    verify: str | None = option(
        None,
        "A target pass over gamma + 1 tokens as a share of one over a single token, or a run that measured it.",
        "-v",
        metavar="NUMBER|FOLDER",
    ),
    gamma: int = option(5, "Draft tokens per target pass.", "-g", min=1),
    target: str | None = option(None, "Compute the costs from config.json: of this target,", "-t", metavar="PATH"),
    drafter: str | None = option(None, "and of this model, head or kind of head.", "-d", metavar="PATH"),
) -> None:
    """Predict the speed-up of a draft chain: tokens per target pass, over the cost of its drafts and the pass.

    With a target and a drafter, folders or hub ids of which config.json alone is read, costs are in proportion to the
    weights that a step reads, as on a GPU with one row. Break-even is the acceptance below which speculation slows
    decoding down. The acceptance of a run is in `saccade generate --json` under `acceptance_by_depth`.

    Examples:

    - `saccade predict -a 0.8 -c 0.05 -v 1.6`
    - `saccade predict -a 0.8 -c 0.05 -v runs/quick`
    - `saccade predict -t Qwen/Qwen2.5-VL-7B-Instruct -d Rayzl/qwen2.5-vl-7b-eagle3-sgl`
    - `saccade predict -t Qwen/Qwen2.5-VL-7B-Instruct -d hivis -a 0.7`
    """
    from saccade import theory

    if (target is None) != (drafter is None) or (target is None) != (cost is not None):
        raise InputError("Give either --cost, or --target and --drafter, from which it is computed.")
    if target is None and acceptance is None:
        raise InputError("No acceptance is given; add --acceptance, such as 0.7.")
    about, verify_cost = dict[str, Any](), theory.FREE
    drafts: dict[str, Any] = {}
    if target and drafter:
        from saccade.memory_plan import PairSize
        from saccade.pocket import draft_path

        screen.quiet_libraries()
        pair = PairSize.of(place_of(target), str(draft_path()) if drafter == "pocket" else drafter)
        cost, verify_cost = pair.cost, pair.verify_cost
        drafts = {"longest": pair.longest, "one_pass": pair.one_pass}
        sizes = {"target": (pair.target.weights, pair.target.step()), "drafter": (pair.weights, pair.step)}
        for name, (weights, step) in sizes.items():
            about[name] = f"{weights / 1e6:,.0f} million weights; a step reads {step / 1e9:.3g} GB"
        about["cost ratio"] = cost
    if verify is not None:
        verify_cost = theory.cost_curve(_measured(verify, gamma + 1))
    assert cost is not None
    chances = [0.5, 0.6, 0.7, 0.8, 0.9] if acceptance is None else [acceptance]
    found = [theory.predict(chance, gamma, cost, verify_cost=verify_cost, **drafts) for chance in chances]
    if about:
        about |= {"verify cost": found[0].verify_cost, "break even": found[0].break_even}
        screen.facts(f"{target} drafted by {drafter}; costs by the weights that a step reads", about)
    if acceptance is not None:
        values = {name.replace("_", " "): value for name, value in asdict(found[0]).items()}
        screen.facts("a chain of draft tokens", values)
        return
    columns = ["acceptance", "tokens/pass", f"speed-up, gamma {gamma}", "best gamma", "its speed-up"]
    rows = [
        [each.acceptance, each.block_efficiency, each.speedup, each.best.gamma, each.best.speedup] for each in found
    ]
    screen.table(columns, [[cell if isinstance(cell, int) else f"{cell:.2f}" for cell in row] for row in rows])


def _measured(verify: str, tokens: int) -> dict[int, float]:
    """Return costs of passes by their tokens: a number for this many, or those of a run of `saccade bench`."""
    number = parse_value(verify)
    if isinstance(number, int | float):
        if not 0 < number < 1e6:
            raise InputError(f"--verify takes a number above 0, such as 1.6, not {verify}.")
        return {tokens: float(number)}
    from saccade.bench.cost import Costs
    from saccade.bench.records import read

    costs = Costs.of(read(Path(verify)).header.costs)
    if costs is None:
        raise InputError(f"The run in {verify} measured no costs of passes; give a number, such as 1.6.")
    return {n: seconds / costs.target[1] for n, seconds in costs.target.items()}


def premises(
    *,
    prompts: str = option(
        "scene,chart,receipt,line,video",
        "Pocket tasks, .jsonl files and data sets, as of `saccade bench`.",
        metavar="A,B,C",
    ),
    per_task: int = option(8, "Prompts of each.", "--count", min=1),
    max_new_tokens: int = option(128, "Longest answer.", "-n", min=3),
    seed: int = option(0, "Seed of the pocket's pictures.", min=0),
    as_json: bool = option(False, "Print one JSON object.", "--json"),
    models: PairOptions,
) -> None:
    """Measure on a pair what five papers rest on, and say which method to expect to win, before training anything.

    The target answers every prompt once, and the draft VLM reads the answers. Each premise is printed with its numbers
    and the rule: sizes of visual and text inputs, and who attends to visual tokens (HiViS), whether the drafter's
    entropy lasts (SAGE), what depends on the pictures (LVSpec), whether views take turns (TABED), and what a drafter's
    step costs (DREAM). No verdict is given on fewer than 12 answers.

    The target must take pictures; the built-in pair is the default. Without a draft VLM, HiViS alone is judged.

    Examples:

    - `saccade premises --count 4`
    - `saccade premises -t Qwen/Qwen2.5-VL-32B-Instruct -d Qwen/Qwen2.5-VL-3B-Instruct --prompts textvqa,mine.jsonl`
    """
    from saccade.bench.premises import PAPERS, measure
    from saccade.bench.questions import gather
    from saccade.bench.suites import parse
    from saccade.pocket import WORLD

    names = dict.fromkeys(name.strip() for name in prompts.split(",") if name.strip())
    sources = {name: "task" if name in WORLD else "file" if name.endswith(".jsonl") else "dataset" for name in names}
    tasks = [{"name": name, source: name} for name, source in sources.items()]
    suite = parse({"tasks": tasks, "methods": ["plain"], "per_task": per_task, "seed": seed}, "premises", "--prompts")
    asked = [question for group in gather(suite)[0].values() for question in group]
    vlm = screen.load_models(replace(models, target=models.target or "pocket"))
    if not vlm.target.family.visual_ids:
        raise InputError("The target takes no pictures, which the premises are about; give a VLM with --target.")
    with screen.progress("prompts") as update:
        found, answers = measure(vlm, asked, max_new_tokens, _fresh_heads(vlm, ("hivis", "dream")), update)
    if as_json:
        methods = {
            name: {**PAPERS[name]._asdict(), "expected": expected, "measured": numbers}
            for name, (numbers, expected) in found.items()
        }
        print(json.dumps({"answers": answers, "methods": methods}, default=lambda e: [e.value, e.low, e.high]))
        return
    by_expectation = defaultdict[str, list[str]](list)
    for name, (numbers, expected) in found.items():
        paper = PAPERS[name]
        screen.facts(f"{name}: {paper.premise}", numbers)
        screen.show(f"  Over {paper.over}: {expected}.", f"  Rule: {paper.rule}.", "")
        by_expectation[expected].append(name)
    words = (f"{listed(methods)} {expected}" for expected, methods in by_expectation.items())
    screen.show(f"From {count(answers, 'answer')}: {'; '.join(words)}.")


def _fresh_heads(vlm: VLM, kinds: Sequence[str]) -> dict[str, Head]:
    """Untrained heads, whose steps cost as much as trained ones'."""
    from saccade.train.recipe import read_recipe
    from saccade.train.warm_start import new_head

    heads = {}
    for kind in kinds:
        try:
            heads[kind] = new_head(vlm.target, read_recipe(kind)).eval().to(vlm.target.dtype)
        except SaccadeError as problem:
            screen.warn(f"{kind}: {problem}")
    return heads


def inspect(
    path: str = typer.Argument(metavar="PATH", help="Folder or hub id of a head or a model, or pocket."),
    target: str | None = option(None, "Compare a head with this target's configuration.", "-t", metavar="PATH"),
    as_json: bool = option(False, "Print one JSON object.", "--json"),
) -> None:
    """Show what a folder holds: the layout of a head, the target it was made for, positions and norms.

    No model is run, and of the target only the configuration is read. With --target the exit code is 1 if the head
    (or assistant) does not fit.

    Examples:

    - `saccade inspect runs/eagle3/best`
    - `saccade inspect lucylyn/MSD-LLaVA1.5-7B -t llava-hf/llava-1.5-7b-hf`
    """
    from saccade.checkpoints import inspect_checkpoint

    content = inspect_checkpoint(place_of(path), target and place_of(target))
    if as_json:
        print(json.dumps({**asdict(content), "fits": content.fits}))
    else:
        screen.facts(
            f"{content.path}: {content.holds} of the kind {content.kind}, layout of {content.layout}", content.facts
        )
        checks = {}
        for check in content.checks:
            verdict = {True: "fits", False: "differs", None: "check"}[check.fits] + (check.note and f" ({check.note})")
            checks[check.what] = {content.holds: check.head, "target": check.target, verdict: ""}
        if checks:
            screen.facts(f"compared with {target}", checks)
        if content.problem:
            screen.show(f"cannot be loaded: {content.problem}")
    if content.fits is False:
        raise typer.Exit(1)


def export(
    head: str = typer.Argument(metavar="HEAD", help="Folder or hub id of a head."),
    to: str = option(..., "`speculators` (vLLM), `eagle` or `sglang`.", metavar="LAYOUT"),
    out: Path = option(..., "New folder to write.", "-o", metavar="FOLDER"),
    target: str = option(..., "The model that the head was trained for.", "-t", metavar="PATH"),
    dtype: str = option("auto", "Of the written weights: float32, bfloat16, float16, or auto: as stored."),
) -> None:
    """Write a head in the layout of speculators (vLLM), EAGLE or SGLang, with a model card.

    EAGLE-3 heads can be written in the layout of speculators, those that EAGLE and SGLang read alike in theirs too,
    EAGLE and MSD heads without norms of their inputs in EAGLE's. A layout that cannot hold a head is refused. The
    folder is loaded again before the command ends. The target's LM head and embedding are copied where the layout
    needs them.

    Examples:

    - `saccade export runs/eagle3/best --to speculators -t meta-llama/Llama-3.1-8B-Instruct -o eagle3-speculator`
    - `saccade export MSD-LLaVA1.5-7B --to eagle -t llava-hf/llava-1.5-7b-hf --dtype float16 -o msd-again`
    """
    import torch

    from saccade.checkpoints import export_head
    from saccade.checkpoints.exporting import check_export
    from saccade.draft.heads.store import kind_at, load_head
    from saccade.loading import adapt, check_dtype, load_model, path_of

    screen.quiet_libraries()
    check_export(out, to)
    kind_at(path_of(head))  # refuses a head that is not there before the target is loaded
    precision = check_dtype(dtype)
    place = path_of(place_of(target))
    owner = adapt(load_model(place))
    loaded = load_head(path_of(head), owner, precision if isinstance(precision, torch.dtype) else None)
    export_head(loaded, owner, out, to, target_name=place)
    load_head(out, owner)
    print(f"{out}: the {loaded.kind} head in the layout of {to}; it loads here again.")


def doctor(as_json: bool = option(False, "Print one JSON object.", "--json")) -> None:
    """Show installed packages, devices, and the model families that are tested.

    Families are tested on a CPU, by tiny models of their architecture; `video` needs PyAV for files.
    """
    import torch
    from transformers import CONFIG_MAPPING

    from saccade import cpu
    from saccade.target_model.openvino_graph import missing
    from saccade.target_model.traits import TESTED

    extras = _extras()
    fast = [name for name in ("bfloat16", "float16") if cpu.computes_in(getattr(torch, name))]
    cores = f"{count(cpu.usable_cores(), 'core')}, {cpu.idle_cores()} idle"
    threads = f"{count(torch.get_num_threads(), 'thread')}, {torch.backends.cpu.get_cpu_capability()}"
    by = "OpenVINO or lean torch" if not missing() else "lean torch"
    devices = [f"cpu, {cores}, {threads}, fast in {' and '.join(['float32', *fast])}, decoders by {by}"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(f"cuda:{index}, {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    if torch.backends.mps.is_available():
        devices.append("mps")
    versions = {each.name.lower().replace("_", "-"): each.version for each in metadata.distributions()}
    packages = {name: versions.get(name.lower().replace("_", "-")) for name in ("saccade", *extras)}
    families = {
        kind: {"name": name, "tested_on": "cpu" if kind in CONFIG_MAPPING else None} for kind, name in TESTED.items()
    }
    system = {"python": platform.python_version(), "platform": platform.platform()}
    if as_json:
        report = {**system, "packages": packages, "devices": devices, "families": families}
        print(json.dumps(report))
        return
    for name, extra in extras.items():
        packages[name] = packages[name] or f"not installed; run `pip install saccade[{extra}]`"
    screen.facts(f"python {system['python']} on {system['platform']}", packages)
    screen.show("devices", *(f"  {device}" for device in devices))
    words = {"cpu": "tested on a CPU", None: "needs a newer transformers"}
    tested = {str(family["name"]): words[family["tested_on"]] for family in families.values()}
    screen.facts("families (any other decoder of transformers is checked at load)", tested)


def _extras() -> dict[str, str]:
    """Return the packages that Saccade uses, with the extra that brings each; empty for those that it always needs."""
    extras = dict[str, str]()
    for line in metadata.requires("saccade") or []:
        extra = re.search(r"extra == ['\"](\w+)", line)
        name = re.split(r"[^\w-]", line)[0]
        if name != "saccade" and (extra is None or extra[1] not in ("dev", "docs", "browser")):
            extras.setdefault(name, extra[1] if extra else "")
    return extras
