"""The load generators of the field against the pocket model, as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.metadata import Distribution
from pathlib import Path

import pytest
import torch
from live_server import Live
from outside import environment, install, run

from saccade.pocket import target_path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
UNNEEDED = (
    "torch|triton|nvidia|flashinfer|quack|tilelang|tokenspeed|humming|fastsafetensors|instanttensor|pynvvideo|nvtx|mcp"
    "|numba|opentelemetry|ninja|depyf|apache-tvm|cuda|intel|setuptools"
)
"""Dependencies of vLLM that serve its engine alone, as a pattern of their names' beginnings."""
REQUESTS, TOKENS = 6, 24


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pocket's files without its weights."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for file in Path(target_path()).iterdir():
        if file.suffix in (".json", ".jinja"):
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module", params=["vllm", "guidellm", "aiperf"])
def client(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Program of a load generator in an environment of its own, from the package index."""
    name: str = request.param
    with environment() as folder:
        fixed = f"torch=={torch.__version__.partition('+')[0]}"
        if name == "vllm":
            install(folder, "--no-deps", "vllm")
            site = next(Path(folder).glob("lib/python*/site-packages/vllm-*.dist-info"))
            needed = [line for line in Distribution.at(site).requires or () if "extra ==" not in line]
            needed = [line for line in needed if not re.match(UNNEEDED, line, re.IGNORECASE)]
            install(folder, *needed, "numba", "setuptools<81", "pandas", "datasets", fixed)
        else:
            install(folder, {"guidellm": "guidellm[vision]"}.get(name, name), fixed)
        yield Path(folder, "bin", name)


def test_a_load_generator_runs_unchanged(client: Path, pocket: Live, tokenizer: Path, tmp_path: Path) -> None:
    {"vllm": of_vllm, "guidellm": of_guidellm, "aiperf": of_aiperf}[client.name](
        client, f"http://127.0.0.1:{pocket.port}", tokenizer, tmp_path
    )


def of_vllm(program: Path, url: str, tokenizer: Path, out: Path) -> None:
    lengths = {"prefix-len": 48, "suffix-len": 16, "num-prefixes": 2, "output-len": TOKENS}
    prefixes = [f"--prefix-repetition-{name}={value}" for name, value in lengths.items()]
    words = ["--random-input-len=32", f"--random-output-len={TOKENS}"]
    chat = ["--backend=openai-chat", "--endpoint=/v1/chat/completions"]
    media = ['--random-mm-limit-mm-per-prompt={"image":2,"video":1}']
    media += ["--random-mm-bucket-config={(96, 96, 1): 0.5, (64, 64, 4): 0.5}"]
    for dataset, more in (("random", words), ("prefix_repetition", prefixes), ("random-mm", [*words, *chat, *media])):
        common = ["--base-url", url, "--tokenizer", tokenizer, "--num-prompts", REQUESTS, "--ignore-eos"]
        saved = ["--save-result", f"--result-filename={out}/{dataset}.json"]
        printed = run(program, "bench", "serve", *common, *saved, "--dataset-name", dataset, *more)
        found = json.loads((out / f"{dataset}.json").read_text())
        assert (found["completed"], found["failed"], found["total_output_tokens"]) == (REQUESTS, 0, REQUESTS * TOKENS)
        rates, drafts = found["spec_decode_per_position_acceptance_rates"], found["spec_decode_num_drafts"]
        assert "Speculative Decoding" in printed
        assert round(sum(rates) * drafts) == found["spec_decode_accepted_tokens"] < found["spec_decode_draft_tokens"]


def of_guidellm(program: Path, url: str, tokenizer: Path, out: Path) -> None:
    text = f"kind=synthetic_text,prompt_tokens=32,output_tokens={TOKENS}"
    for name, data in (("text", [text]), ("image", [text, "kind=synthetic_image,width=96,height=96"])):
        words = [word for each in data for word in ("--data", each)]
        words += ["--backend", f"kind=openai_http,target={url}", "--tokenizer", f"kind=hf_auto,model={tokenizer}"]
        words += ["--profile", "kind=concurrent,streams=2", "--constraint", f"kind=max_requests,count={REQUESTS}"]
        run(program, "run", *words, "--output", f"kind=json,path={out}/{name}.json", "--disable-progress")
        metrics = json.loads((out / f"{name}.json").read_text())["benchmarks"][0]["metrics"]
        assert metrics["request_totals"]["successful"] == metrics["request_totals"]["total"] == REQUESTS
        assert metrics["output_token_count"]["successful"]["total_sum"] == REQUESTS * TOKENS


def of_aiperf(program: Path, url: str, tokenizer: Path, out: Path) -> None:
    sizes = ["--synthetic-input-tokens-mean=32", f"--output-tokens-mean={TOKENS}", "--extra-inputs=ignore_eos:true"]
    picture = ["--image-width-mean=96", "--image-height-mean=96", "--image-batch-size=1"]
    common = ["--model=pocket", f"--url={url}", "--endpoint-type=chat", "--streaming", f"--tokenizer={tokenizer}"]
    counts = ["--concurrency=2", f"--request-count={REQUESTS}", "--use-server-token-count", "--ui-type=none"]
    run(program, "profile", *common, *sizes, *picture, *counts, f"--artifact-dir={out}")
    found = json.loads((out / "profile_export_aiperf.json").read_text())
    assert (found["request_count"]["avg"], found["error_summary"]) == (REQUESTS, [])
    assert found["total_usage_completion_tokens"]["avg"] == REQUESTS * TOKENS
    steps, histogram = found["total_spec_decode_steps"]["avg"], found["pooled_spec_decode_acceptance_histogram"]
    assert sum(histogram.values()) == steps > 0
    assert sum(int(count) * number for count, number in histogram.items()) > 0
