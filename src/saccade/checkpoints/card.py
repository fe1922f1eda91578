"""Model card of an exported head."""

from __future__ import annotations

from saccade.draft.heads.eagle import Eagle3
from saccade.draft.heads.head import Head
from saccade.loading import is_on_hub

_RUN = {
    "speculators": """vllm serve {target} --speculative-config '{{"model": "THIS FOLDER", "num_speculative_tokens": 5, \
"method": "eagle3"}}'""",
    "eagle": "python -m eagle.application.webui --base-model-path {target} --ea-model-path THIS FOLDER",
    "sglang": "python -m sglang.launch_server --model-path {target} --speculative-algorithm EAGLE3 "
    "--speculative-draft-model-path THIS FOLDER --speculative-num-steps 5 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 6",
}


def model_card(head: Head, to: str, target_name: str) -> str:
    """Return the README.md of a head in another engine's layout."""
    config = head.config
    base = [f"base_model: {target_name}", "base_model_relation: adapter"] if is_on_hub(target_name) else []
    front = ["---", f"library_name: {to}", *base, "tags:", "- speculative-decoding", f"- {head.kind}", "---"]
    known = config.options["own_vocabulary"] if isinstance(head, Eagle3) else 0
    words = f"{known:,} of the target's {config.vocab_size:,}" if known else f"all {config.vocab_size:,} of the target"
    count = sum(weight.numel() for weight in head.parameters())
    positions = "the target's M-RoPE positions" if head.has_target_positions else "token indices, with pictures too"
    facts = [
        f"- Target: `{target_name}`, a {config.target_class} of {config.target_layers} layers and width "
        f"{config.hidden_size:,}. With any other target its drafts are rejected.",
        f"- Method: {head.kind}; it reads the inputs of the target's layers {', '.join(map(str, config.layers))}"
        + (
            " (the last number is the state behind the final norm)."
            if max(config.layers) == config.target_layers
            else "."
        ),
        f"- Shape: one block, MLP of {config.intermediate_size:,}, {count / 1e6:,.1f} M parameters.",
        f"- Tokens that it can draft: {words}.",
        f"- Positions: {positions}.",
        "- Inputs of visual tokens: the features that the target's decoder gets in their place.",
    ]
    what = (
        f"A drafter for speculative decoding, trained with Saccade and exported to the layout of {to}. It changes the "
        "speed of its target, not its answers."
    )
    again = "Saccade reads this folder: `saccade generate -t TARGET -d THIS FOLDER`; `saccade inspect` describes it."
    run = ["```", _RUN[to].format(target=target_name), "```"]
    return "\n".join([*front, f"# Draft head for {target_name}", "", what, "", *facts, "", *run, "", again, ""])
