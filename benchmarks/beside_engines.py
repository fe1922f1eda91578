"""Saccade beside the engines that run models on a CPU: transformers, OpenVINO GenAI and llama.cpp, on the pocket pair.

All answer the same questions about pictures, prompt by prompt in turns; every engine is a process of its own that is
stopped while another one works. OpenVINO GenAI and llama.cpp are installed into an environment of their own (--peers)
and get prompts as embeddings, or as token ids of their own, so that target and draft model both see the pictures.
Processor time of an answer without that of one token's answer, medians over rounds; passes include the prompt's.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import platform
import re
import signal
import subprocess
import sys
import tempfile
import venv
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.engines.peer import END, Decoder
from benchmarks.pocket_pair import FIRST_SEED, Inputs, load, quiet, rotated, stock_inputs, table
from saccade.loading import load_processor
from saccade.pocket import draft_path, draw, target_path
from saccade.target_model.openvino_graph import missing
from tools.pocket.inflate import inflate
from tools.pocket.world.reasoning import FIRST_TASKS
from tools.results.catalogue import SHAPE

PEERS = ("openvino-genai==2026.4.1", "llama-cpp-python==0.3.36", "gguf==0.19.0")
WAYS = {"plain": "plain", "5": "draft of 5", "7": "draft of 7", "auto": "auto"}
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Engine:
    """A row of the table: number format of its weights, module and arguments of its process, and what it can do."""

    name: str
    kind: str
    module: str
    arguments: tuple[str, ...] = ()
    ways: tuple[str, ...] = ("plain", "5", "7")
    is_peer: bool = True


def ours(executor: str, kind: str, **options: Any) -> Engine:
    options |= {"dtype": "float32", "executor": executor}
    return Engine(f"Saccade ({executor})", kind, "here", ("saccade", json.dumps(options)), tuple(WAYS), is_peer=False)


EXECUTORS = ("lean",) if missing() else ("lean", "openvino")
BASELINE = Engine("transformers", "float32", "here", ("transformers",), ("plain",))
ENGINES = (
    BASELINE,
    *(ours(executor, "float32") for executor in (*EXECUTORS, "auto")),
    *(ours(executor, "int8", weights="int8") for executor in EXECUTORS),
    Engine("OpenVINO GenAI", "float32", "genai", ("f32",)),
    Engine("OpenVINO GenAI", "int8", "genai", ("int8",)),
    Engine("llama.cpp", "float32", "llama", ("f32",)),
    Engine("llama.cpp", "float16", "llama", ("f16",)),
    Engine("llama.cpp", "int8", "llama", ("q8_0",)),
)


class Process:
    """An engine at work, stopped whenever it is not asked."""

    def __init__(self, engine: Engine, peers: Path | None, folder: Path, threads: int) -> None:
        python = sys.executable if engine.module == "here" or not peers else str(peers / "bin" / "python")
        command = [python, "-m", f"benchmarks.engines.{engine.module}", str(folder), str(threads), *engine.arguments]
        self.log = folder / "log"
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log.open("a"),
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads)},
        )
        self.about: str = self._read()

    def ask(self, prompt: int, way: str, limit: int) -> Any:
        """An answer, with its processor and wall time."""
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)
        with suppress(BrokenPipeError):  # reported below
            print(json.dumps({"prompt": prompt, "way": way, "limit": limit}), file=self.process.stdin, flush=True)
        return self._read()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            log, code = self.log.read_text()[-2000:], self.process.wait()
            raise SystemExit(f"{' '.join(self.process.args)} has ended with {code}:\n{log}")  # type: ignore
        self.process.send_signal(signal.SIGSTOP)
        return json.loads(line)


def until_end(answer: dict[str, Any]) -> list[int]:
    """Tokens before that of the end."""
    tokens: list[int] = answer["tokens"]
    return tokens[: tokens.index(END)] if END in tokens else tokens


@dataclass(frozen=True)
class Turn:
    """A whole answer, without the time that its first token took."""

    tokens: int
    passes: int
    is_equal: bool  # to transformers' answer
    processor: float
    wall: float

    @classmethod
    def of(cls, first: dict[str, Any], whole: dict[str, Any], expected: list[int], limit: int) -> Turn:
        made, times = until_end(whole), [whole[name] - first[name] for name in ("processor", "wall")]
        return cls(min(len(made) + 1, limit), whole["passes"], made == expected, *times)


Turns = dict[int, list[Turn]]  # by prompt
Results = dict[tuple[int, Engine, str], Turns]  # by threads, engine and way


def per_token(turns: Turns, clock: str = "processor") -> float:
    """Milliseconds a token after the first."""
    seconds = sum(median(getattr(turn, clock) for turn in rounds) for rounds in turns.values())
    return 1000 * seconds / sum(rounds[-1].tokens - 1 for rounds in turns.values())


def cell(turns: Turns, threads: int) -> str:
    """Processor time, with more threads wall time too, and tokens per pass."""
    if not turns:
        return ""
    last = [rounds[-1] for rounds in turns.values()]
    wall = f" / {per_token(turns, 'wall'):.2f}" if threads > 1 else ""
    return f"{per_token(turns):.2f}{wall} ({sum(t.tokens for t in last) / sum(t.passes for t in last):.2f})"


def rows(results: Results) -> Iterator[list[str]]:
    """Cells by threads and engine; ratios are to the best peer of the same number format, plain and with any draft."""
    least = defaultdict[tuple[int, Engine, bool], float](lambda: inf)
    for (threads, engine, way), turns in results.items():
        key = threads, engine, way != "plain"
        least[key] = min(least[key], per_token(turns))
    for threads, engine in dict.fromkeys((threads, engine) for threads, engine, _ in results):
        found = [results.get((threads, engine, way), {}) for way in WAYS]
        ratios = []
        for drafted in (False, True):
            peers = [other for other in ENGINES if other.is_peer and other.kind == engine.kind]
            own, theirs = least[threads, engine, drafted], min((least[threads, e, drafted] for e in peers), default=inf)
            ratios.append(f"{own / theirs:.2f}" if max(own, theirs) < inf else "")
        equal = [turn.is_equal for turns in found for rounds in turns.values() for turn in rounds]
        cells = [*(cell(turns, threads) for turns in found), *ratios, f"{sum(equal)} of {len(equal)}"]
        yield [str(threads), f"{engine.name}, {engine.kind}", *cells]


def measure(processes: dict[Engine, Process], options: argparse.Namespace, threads: int, results: Results) -> None:
    """Let everyone answer every prompt in every way; the first prompt is for warming up and not counted."""
    asked = [(engine, way) for engine in processes for way in engine.ways if way in options.ways or engine == BASELINE]
    for engine, way in asked:
        processes[engine].ask(0, way, 30)
    for turn in range(options.rounds * options.prompts):
        prompt = 1 + turn % options.prompts
        print(f"{threads} threads, turn {turn + 1} of {options.rounds * options.prompts}", file=sys.stderr)
        taken = {}
        for engine, way in rotated(asked, turn):
            first = processes[engine].ask(prompt, way, 1)
            taken[engine, way] = first, processes[engine].ask(prompt, way, options.tokens)
        expected = until_end(taken[BASELINE, "plain"][1])
        for (engine, way), (first, whole) in taken.items():
            turns = results.setdefault((threads, engine, way), defaultdict(list))
            turns[prompt].append(Turn.of(first, whole, expected, options.tokens))


def write_pair(folder: Path, target: Path, count: int) -> None:
    """Write the questions, the pair's decoders, and what both of these read of the prompts."""
    questions = [(FIRST_SEED + number, FIRST_TASKS[number % len(FIRST_TASKS)], "verbose") for number in range(count)]
    (folder / "questions.json").write_text(json.dumps({"target": str(target), "questions": questions}))
    processor = load_processor(str(target))
    prompts = [processor.prompt(draw(*question).messages()) for question in questions]
    for name, path in (("target", target), ("draft", draft_path())):
        model = load(path, "float32", "cpu")
        weights = model.model.language_model.state_dict() | {"lm_head.weight": model.lm_head.weight.detach()}
        arrays = {key: weight.numpy() for key, weight in weights.items()}
        read = [embedded(model, stock_inputs(model, [prompt])).numpy() for prompt in prompts]
        (folder / name).write_bytes(pickle.dumps(Decoder(model.config.text_config.to_dict(), arrays, read)))


def embedded(model: Any, inputs: Inputs) -> torch.Tensor:
    """What the text decoder reads of a prompt, pictures included `[N, width]`."""
    read = list[torch.Tensor]()

    def note(_: Any, __: Any, given: dict[str, Any]) -> None:
        read.append(given["inputs_embeds"][0])

    with torch.inference_mode():
        hook = model.model.language_model.register_forward_pre_hook(note, with_kwargs=True)
        model(**inputs)
        hook.remove()
    return read[0]


def installed(folder: Path) -> Path:
    """Install the peers into an environment of their own, or take those that are there."""
    if not folder.exists():
        venv.create(folder, with_pip=True)
    subprocess.run([folder / "bin" / "pip", "install", "--quiet", *PEERS], check=True)
    return folder


def about_machine() -> str:
    """Processor and the instructions that matter."""
    text = Path("/proc/cpuinfo").read_text()
    names = re.findall(r"model name\s*: (.*)", text) or [platform.machine()]
    return f"{names[0]}, {os.cpu_count()} cores, {' '.join(name for name in FEATURES if name in text.split())}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--peers", type=Path, help="environment of the peers, which are installed there (default: ours alone)"
    )
    parser.add_argument("--prompts", type=int, default=6, help="prompts that count (default: 6)")
    parser.add_argument("--rounds", type=int, default=2, help="answers per prompt and way (default: 2)")
    parser.add_argument("--tokens", type=int, default=128, help="longest answer (default: 128)")
    parser.add_argument("--threads", type=int, nargs="+", default=(1, 2), help="CPU threads (default: 1 2)")
    parser.add_argument("--ways", nargs="+", default=tuple(WAYS), choices=WAYS, help="transformers' plain always runs")
    kinds = tuple(dict.fromkeys(engine.kind for engine in ENGINES))
    parser.add_argument("--kinds", nargs="+", default=kinds, choices=kinds, help="number formats of weights")
    parser.add_argument("--pair", default="pocket", choices=("pocket", "inflated"), help=f"inflated: target of {SHAPE}")
    options = parser.parse_args()
    quiet()
    if options.peers:
        installed(options.peers)
    engines = [
        engine
        for engine in ENGINES
        if engine == BASELINE or (engine.kind in options.kinds and (options.peers or not engine.is_peer))
    ]
    results: Results = {}
    with tempfile.TemporaryDirectory() as name:
        folder, target = Path(name), target_path()
        if options.pair == "inflated":
            target = folder / "inflated"
            inflate(target_path(), target, SHAPE, dtype="float32")
        write_pair(folder, target, options.prompts + 1)
        for threads in options.threads:
            with ExitStack() as stack:
                processes = {}
                for engine in engines:
                    processes[engine] = Process(engine, options.peers, folder, threads)
                    stack.callback(processes[engine].process.kill)
                measure(processes, options, threads, results)
                versions = list(dict.fromkeys(process.about for process in processes.values()))
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    print(f"{about_machine()}; revision {revision.stdout.strip()}; {'; '.join(versions)}")
    print(f"{options.pair} pair, {options.prompts} prompts x {options.rounds}, up to {options.tokens} tokens\n")
    head = ["threads", "engine", *WAYS.values(), "plain, x best peer", "drafted, x best peer", "equal answers"]
    print("\n".join(table(head, list(rows(results)))))
    unequal = [row[1] for row in rows(results) if "float32" in row[1] and len({*row[-1].split(" of ")}) > 1]
    if unequal:
        raise SystemExit(f"Answers that are not transformers': {'; '.join(unequal)}.")


if __name__ == "__main__":
    main()
