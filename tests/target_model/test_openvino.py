"""OpenVINO graphs: what is theirs alone. The tests marked `executors` run on them as on the other executors."""

from __future__ import annotations

import gc
import subprocess
import sys
from typing import Any

import pytest
import torch

from families import FAMILIES, FamilyCase
from harness import answer, course, running_on
from saccade import cpu, vlm
from saccade.draft.model import ModelDrafter
from saccade.draft.trees.policy import ConfidentChain
from saccade.engine import Engine, Request
from saccade.errors import InputError, ModelError, SaccadeWarning
from saccade.inputs.families import split
from saccade.inputs.families.family import Prompt
from saccade.loading import adapt
from saccade.model_spec import ModelSpec
from saccade.options import INT8
from saccade.target_model import executor as executors
from saccade.target_model import openvino, openvino_graph
from saccade.target_model.adapter import Target
from saccade.target_model.cache import QUANTUM
from saccade.target_model.context import Context
from saccade.target_model.executor import Ahead
from saccade.target_model.int8 import int8_of
from saccade.target_model.lean import LeanExecutor
from saccade.target_model.token_blocks import TokenBlock
from saccade.tree import ancestors_of

pytest.importorskip("openvino", reason="needs openvino: pip install saccade[openvino]")

EXECUTORS = ("openvino", "lean")


def targets(family: str = "llama", **options: Any) -> tuple[Target, Target]:
    """The same model on OpenVINO and on the lean decoder."""
    made = tuple(Target(FAMILIES[family].model(), name, **options) for name in EXECUTORS)
    assert tuple(each.executor.name for each in made) == EXECUTORS
    return made  # type: ignore[return-value]


def context(model: Target, case: FamilyCase, rows: int = 3) -> Context:
    made = Context(model, rows)
    kind = "image" if "image" in case.kinds else "text"
    for row, prompt in enumerate(split(model.config, case.inputs(kind, rows=rows))):
        made.cache.reserve(row, len(prompt) + 40)
        made.load(row, prompt)
    return made


def equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen2_vl", "qwen3_vl", "mistral3"])
def test_levels_of_a_tree_of_which_later_ones_hide_earlier_nodes_run_as_on_the_lean_decoder(family: str) -> None:
    case, levels = FAMILIES[family], ([0], [0, 0], [1, 2, 2], [3, 4, 5])  # parents, of which 0 is the root
    parents = torch.tensor([[0, *(parent for level in levels for parent in level)]])
    above, tokens = ancestors_of(parents, len(levels)), torch.arange(7, 7 + parents.shape[1])
    contexts = [context(model, case) for model in targets(family)]
    for each in contexts:
        each.requirements.add_layers(0, 1)
    ran = 1
    for number, level in enumerate(levels):
        nodes = slice(ran, ran + len(level))
        ran += len(level)
        depth = torch.tensor([[number for number, each in enumerate(levels[: number + 1]) for _ in each]])
        mask = None if number == 0 else above[:, nodes, 1:ran]
        new = tokens[nodes].expand(3, -1) + torch.arange(3)[:, None]
        ours, theirs = (each.forward([0, 1, 2], new, mask, depth) for each in contexts)
        equal(ours.logits, theirs.logits)
        for layer, state in theirs.hidden.items():
            equal(ours.hidden[layer], state)
    for each in contexts:
        each.commit([0, 1, 2], [[0, 2, 5], [0], []], [[7, 9, 12], [8], []])
    for row in range(3):
        for entries, expected in zip(*(each.cache.export(row) for each in contexts), strict=True):
            equal(entries[0], expected[0])
            equal(entries[1], expected[1])


@pytest.mark.parametrize("family", ["llama", "qwen2_vl"])
def test_several_rows_run_ahead_in_one_graph_as_token_by_token(family: str) -> None:
    ours, theirs = (context(model, FAMILIES[family]) for model in targets(family))
    tokens, steps, vocab = [[5], [6, 7, 8], [9, 10]], 4, 90
    first = ours.run_ahead(Ahead([0, 1, 2], tokens, steps, vocab))
    assert first is not None
    again = ours.run_ahead(Ahead([0, 1, 2], first[-1].argmax(-1)[:, None].tolist(), 2, vocab))
    assert again is not None
    assert theirs.run_ahead(Ahead([0], [[5]], 1, vocab)) is None
    for row, own in enumerate(tokens):
        new = own
        for logits in (*first[:, row], *again[:, row]):
            expected = theirs.forward([row], torch.tensor([new])).logits[0, -1, :vocab]
            equal(logits, expected)
            new = [int(expected.argmax())]
    assert ours.cache.pending == theirs.cache.pending


def test_tokens_that_ran_ahead_are_not_taken_for_those_of_an_earlier_step() -> None:
    ours, theirs = (context(model, FAMILIES["llama"]) for model in targets())
    for each in (ours, theirs):
        each.forward([0], torch.tensor([[5, 6, 7]]))
        each.commit([0], [range(3)], [[5, 6, 7]])
    logits = ours.run_ahead(Ahead([0], [[9]], 3, 90))
    assert logits is not None
    for token in (9, *logits[:2, 0].argmax(-1).tolist()):
        theirs.forward([0], torch.tensor([[token]]))
    shown, depth = torch.tensor([[[True, False, True, True]]]), torch.tensor([[0, 1, 2, 2]])
    equal(*(each.forward([0], torch.tensor([[52]]), shown, depth).logits for each in (ours, theirs)))


def test_nothing_runs_ahead_behind_entries_with_gaps_which_windows_count() -> None:
    made = Context(targets("mistral")[0], 1)
    made.load(0, Prompt(tuple(range(20, 30))), [3, 4])
    made.cache.reserve(0, 40)
    assert made.run_ahead(Ahead([0], [[5]], 2, 90)) is None


def hiding(context: Context) -> TokenBlock:
    """A token of row 0 from which the first of two pending ones is hidden, which are run here one after the other."""
    depth, shown = torch.tensor([[1, 1, 2]]), torch.tensor([[[False, True, True]]])
    for place in range(2):
        context.forward([0], torch.tensor([[50 + place]]), depth=depth[:, : place + 1])
    return context.block([0], torch.tensor([[52]]), shown, depth)


@pytest.mark.parametrize(
    ("family", "length", "in_graph"),
    [("llama", 30, True), ("llama", openvino._KEPT + 1, False), ("qwen3_vl", 0, False)],
)
def test_a_token_that_hides_pending_ones_runs_beside_any_prompt(family: str, length: int, in_graph: bool) -> None:
    logits = []
    for model in targets(family):
        made = context(model, FAMILIES[family], rows=2)
        prompt = split(model.config, FAMILIES[family].inputs("image" if not length else "text", rows=1))[0]
        prompt = prompt if not length else Prompt(tuple(10 + n % 90 for n in range(length)))
        made.empty(1)
        made.cache.reserve(1, len(prompt))
        beside = made.prefill(1, prompt).block(len(prompt))
        blocks = [hiding(made), beside]
        assert type(model.executor) is LeanExecutor or model.executor._takes(made.cache, blocks) == in_graph
        logits.append([output.logits for output in model.forward(made.cache, blocks)])
    for ours, theirs in zip(*logits, strict=True):
        equal(ours, theirs)


def test_pending_tokens_of_the_lean_decoder_are_not_taken_for_those_of_an_earlier_step() -> None:
    logits = []
    for model in targets("mistral"):
        window, made = model.traits.masks.window, Context(model, 2)
        assert window is not None
        for row, length in enumerate((4, window + 5)):
            made.cache.reserve(row, length + 40)
            made.load(row, Prompt(tuple(range(20, 20 + length))))
        hiding(made)
        made.cache.drop([0])
        block = hiding(made)
        made.cache.drop([0])
        made.forward([0, 1], torch.tensor([[60, 61], [60, 61]]), depth=torch.tensor([[1, 1]]))
        logits.append(model.forward(made.cache, [block])[0].logits)
    equal(*logits)


def test_a_chain_that_is_drafted_in_parts_goes_on_where_a_window_ends() -> None:
    case, courses = FAMILIES["mistral"], []
    for drafts in map(Target, [case.draft_model()] * 2, EXECUTORS):
        long = Engine(Target(case.model(), "lean"), ModelDrafter(drafts, ConfidentChain(11, 1e-6)))
        asked = [Request(Prompt(ids)) for ids in ((20, 30, 40), (31, 50, 61, 70, 81, 52))]
        courses.append([*map(course, long.generate(asked, max_new_tokens=30))])
        courses[-1].append(course(answer(long, asked[0].prompt, 30)))
    assert courses[0] == courses[1]


def test_a_cache_that_moves_grows_and_is_replaced_keeps_its_entries() -> None:
    contexts = [context(model, FAMILIES["llama"], rows=2) for model in targets()]
    token = torch.tensor([[5]])
    for each in contexts:
        each.forget(0)  # a gap, which the growing row closes
        each.cache.reserve(1, 500)
    equal(*(each.forward([1], token).logits for each in contexts))
    first = contexts[0].target
    other = context(first, FAMILIES["llama"], rows=1)  # another cache on the same graphs
    other.forward([0], token)
    del other
    gc.collect()
    held = [name for bound in first.executor._bound.values() for name in bound.held]
    assert held
    assert not [name for name in held if "." in name], "its memory is not given up"
    equal(*(each.forward([1], token).logits for each in contexts))


def test_entries_beyond_a_sliding_window_run_on_the_lean_decoder() -> None:
    ours, theirs = targets("mistral")
    assert ours.traits.masks.window is not None
    prompt = TokenBlock([0], torch.arange(5, 5 + ours.traits.masks.window + 9)[None] % 90)
    logits = []
    for model in (ours, theirs):
        cache = model.new_cache(1)
        cache.reserve(0, 200)
        logits.append(model.forward(cache, [prompt])[0].logits)
    equal(*logits)


def test_a_window_counts_the_gaps_between_entries() -> None:
    """The entries are fewer than the window reaches, their positions more."""
    contexts = [Context(model, 1) for model in targets("mistral")]
    window = contexts[0].target.traits.masks.window
    assert window is not None
    for each in contexts:
        each.load(0, Prompt(tuple(range(20, 20 + window + 4))), [*range(3, 13)])
        each.cache.reserve(0, window)
    equal(*(each.forward([0], torch.tensor([[5]])).logits for each in contexts))


def test_a_norms_epsilon_counts_where_states_are_small() -> None:
    models = targets()
    for model in models:
        with torch.no_grad():
            model.embedding_weight.mul_(1e-3)
    equal(*(context(model, FAMILIES["llama"]).forward([0], torch.tensor([[5]])).logits for model in models))


def test_a_chain_that_runs_ahead_into_a_rows_next_blocks_sees_all_entries() -> None:
    contexts = [Context(model, 1) for model in targets()]
    for each in contexts:
        each.cache.reserve(0, 2 * openvino_graph.BLOCK)
        each.load(0, Prompt(tuple(range(20, 18 + openvino_graph.BLOCK))))
    with running_on(2):  # with as many rows as threads the operation does not read how long the longest row is
        ours = contexts[0].run_ahead(Ahead([0], [[5]], 6, 90))
    assert ours is not None
    new = 5
    for logits in ours[:, 0]:
        expected = contexts[1].forward([0], torch.tensor([[new]])).logits[0, -1, :90]
        equal(logits, expected)
        new = int(expected.argmax())


def test_weights_that_are_set_in_place_count() -> None:
    ours, theirs = targets()
    block = TokenBlock([0], torch.tensor([[5, 6, 7]]))

    def logits(model: Target) -> torch.Tensor:
        cache = model.new_cache(1)
        cache.reserve(0, 3)
        return model.forward(cache, [block])[0].logits

    before = logits(ours)
    for model in (ours, theirs):
        for name in ("norm", "layers.1.mlp.down_proj", "layers.0.self_attn.q_proj"):
            with torch.no_grad():
                model.decoder.get_submodule(name).weight.mul_(1.5)
    equal(logits(ours), logits(theirs))
    assert float((logits(ours) - before).abs().max()) > 0.1


@pytest.mark.parametrize(
    "name", ["q_proj.weight", "v_proj.weight", "k_proj.bias", "up_proj.weight", "down_proj.weight"]
)
def test_a_single_number_that_is_set_in_place_counts(name: str) -> None:
    model = targets("qwen2")[0]
    layer = model.decoder.layers[0]
    places = [*layer.self_attn.named_parameters(), *layer.mlp.named_parameters()]
    weight = dict(places)[name]
    for place in (1, weight.numel() // 2 + 1, weight.numel() - 2):
        assert model.executor.is_current
        model.executor._bound["graph"] = None
        with torch.no_grad():
            weight.view(-1)[place] += 1
        assert model.executor.is_current
        assert not model.executor._bound


def test_int8_weights_are_the_same_numbers_on_every_executor_and_openvino_rounds_activations_too() -> None:
    case = FAMILIES["qwen2"]
    models = [Target(case.model(), name, weights=INT8) for name in ("openvino", "lean", "stock")]
    logits = [context(each, case).forward([0, 1, 2], torch.full((3, 2), 7)).logits for each in models]
    assert [each.executor.rounds for each in models] == [True, False, False]
    rounded = float((logits[0] - logits[2]).abs().max() / logits[2].std())
    assert rounded < 0.4
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()  # which torch 2.11 lacks
    if capabilities.get("avx512_vnni"):  # OpenVINO rounds activations where it has instructions for that
        assert rounded > 1e-5
    equal(logits[1], logits[2])
    stored = context(Target(case.model(), "lean"), case).forward([0, 1, 2], torch.full((3, 2), 7)).logits
    assert float((logits[0] - stored).abs().max()) > 1e-3
    for weight in (module.weight for module in models[0].decoder.modules() if isinstance(module, torch.nn.Linear)):
        steps, scale = int8_of(weight)
        assert steps.abs().amax() == 127
        torch.testing.assert_close(steps * scale, weight.float(), rtol=1e-6, atol=1e-7)


def test_int8_steps_are_those_of_every_outputs_own_scale() -> None:
    steps, scale = int8_of(torch.tensor([[1.27, -0.5, 0.014], [-12.7, 6.06, 0.0], [0.0, 0.0, 0.0]]))
    assert steps.tolist() == [[127, -50, 1], [-127, 61, 0], [0, 0, 0]]
    torch.testing.assert_close(scale[:2], torch.tensor([[0.01], [0.1]]))


def test_activations_are_rounded_for_one_token_as_for_several_whatever_layers_return() -> None:
    ours = [
        context(Target(FAMILIES["qwen2"].model(), "openvino", weights=INT8), FAMILIES["qwen2"], 1) for _ in range(2)
    ]
    tokens = torch.tensor([[5, 6, 7, 8]])
    for each in ours:
        each.requirements.add_layers(1)
    together = ours[0].forward([0], tokens)
    alone = []
    for token in tokens[0]:
        alone.append(ours[1].forward([0], token.view(1, 1)))
        ours[1].commit([0], [[0]], [[int(token)]])
    torch.testing.assert_close(torch.cat([each.logits for each in alone], 1), together.logits, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(
        torch.cat([each.hidden[1] for each in alone], 1), together.hidden[1], rtol=1e-6, atol=1e-5
    )


def test_a_single_token_is_doubled_where_activations_are_rounded_and_finds_a_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether OpenVINO rounds is up to the processor; what it gets is not."""
    put, shapes = openvino._Bound.put, list[tuple[int, ...]]()

    def seen(bound: Any, name: str, values: Any) -> None:
        if name == "x":
            shapes.append(values.shape)
        put(bound, name, values)

    monkeypatch.setattr(openvino._Bound, "put", seen)
    for weights, tokens, slots in ((INT8, 2, QUANTUM + 1), ("stored", 1, QUANTUM)):
        model = Target(FAMILIES["qwen2"].model(), "openvino", weights=weights)
        cache = model.new_cache(1)
        cache.reserve(0, QUANTUM)
        assert cache.capacity(0) >= slots
        shapes.clear()
        for count in (QUANTUM - 1, 1):
            model.forward(cache, [TokenBlock([0], torch.full((1, count), 5))])
        assert [shape[0] for shape in shapes] == [QUANTUM - 1, tokens]


@pytest.mark.parametrize(("ratio", "name"), [(0.5, "openvino"), (2.0, "lean")])
def test_by_default_the_faster_one_as_measured_runs(monkeypatch: pytest.MonkeyPatch, ratio: float, name: str) -> None:
    monkeypatch.delenv(executors.SWITCH, raising=False)
    monkeypatch.setattr(cpu, "remember", lambda what, measure: [ratio] if "OpenVINO" in what else measure())
    assert Target(FAMILIES["llama"].model()).executor.name == name


def test_the_default_is_measured_on_forwards_that_leave_no_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(executors.SWITCH, raising=False)
    ratios: dict[str, float] = {}

    def remember(what: str, measure: Any) -> list[float]:
        values = [float(value) for value in measure()]
        ratios[what] = values[0]
        return values

    monkeypatch.setattr(cpu, "remember", remember)
    chosen = Target(FAMILIES["llama"].model()).executor.name
    (ratio,) = (value for what, value in ratios.items() if "OpenVINO" in what)
    assert chosen == ("openvino" if ratio < openvino._GAIN else "lean")


def test_what_openvino_does_not_run_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    case = FAMILIES["llama"]
    with pytest.warns(SaccadeWarning, match="runs without OpenVINO: it runs models in float32 and bfloat16") as seen:
        assert Target(case.model().half(), "openvino").executor.name == "lean"
    assert len(seen) == 1
    with pytest.warns(SaccadeWarning, match="exact mode controls the order of sums"):
        Target(case.model(), "openvino", exact=True)
    monkeypatch.setattr(cpu, "available_memory", lambda: 1000)
    with pytest.warns(SaccadeWarning, match="too little memory"):
        Target(case.model(), "openvino")


def test_a_version_that_is_missing_or_unknown_is_refused_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openvino_graph, "version", lambda _: "2031.1.0")
    assert Target(FAMILIES["llama"].model(), "openvino").executor.name == "lean"
    with pytest.raises(ModelError, match=r"its version is 2031.1.0, not 2026.4"):
        vlm.check(ModelSpec("pocket", executor="openvino"))
    monkeypatch.setattr(openvino_graph, "find_spec", lambda _: None)
    with pytest.raises(ModelError, match="it is not installed; run"):
        vlm.check(ModelSpec("pocket", executor="openvino"))


def test_names_that_are_no_executor_or_no_kind_of_weights_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="executor must be one of auto, stock, lean, graphs, openvino, not 'fast'"):
        vlm.check(ModelSpec("pocket", executor="fast"))
    with pytest.raises(InputError, match="weights must be one of stored, int8, not 'int4'"):
        vlm.check(ModelSpec("pocket", weights="int4"))
    monkeypatch.setenv(executors.SWITCH, "quick")
    with pytest.raises(InputError, match=f"{executors.SWITCH} must be one of"):
        adapt(FAMILIES["llama"].model())


def test_weights_that_are_quantised_already_are_not_rounded() -> None:
    model = FAMILIES["llama"].model()
    layer = model.model.layers[0].mlp.down_proj
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ModelError, match="cannot be rounded to int8"):
        Target(model, weights=INT8)


def test_importing_openvino_brings_no_telemetry() -> None:
    code = "import sys; from saccade.target_model.openvino_graph import runtime; runtime(); "
    code += "print('openvino' in sys.modules, 'openvino_telemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "True False"
