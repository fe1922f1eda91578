"""Greedy answers of vLLM with a speculator, run by an interpreter that has vLLM: MODEL HEAD PROMPTS OUTPUT."""

from __future__ import annotations

import json
import os
import sys

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1")


def main() -> None:
    from vllm import LLM, SamplingParams

    model, head, prompts, output = sys.argv[1:]
    speculation = {"model": head, "method": "eagle3", "num_speculative_tokens": 5}
    llm = LLM(
        model=model,
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        skip_tokenizer_init=True,
        disable_log_stats=False,
        speculative_config=speculation,
    )
    with open(prompts, encoding="utf-8") as file:
        given = [{"prompt_token_ids": ids} for ids in json.load(file)]
    settings = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, detokenize=False)
    answers = [list(done.outputs[0].token_ids) for done in llm.generate(given, settings, use_tqdm=False)]
    found = {metric.name: metric for metric in llm.get_metrics()}
    names = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    counts = {name: found[name].value for name in names}
    with open(output, "w", encoding="utf-8") as file:
        json.dump({"answers": answers, "counts": counts}, file)


if __name__ == "__main__":
    main()
