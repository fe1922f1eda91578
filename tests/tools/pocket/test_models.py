"""Models grow without changing their function and train as their class computes, in a loop that resumes."""

from functools import partial
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import nn
from workshop_kit import KINDS, batch_of_tasks, tiny_model

from saccade.inputs.processor import InputProcessor
from saccade.pocket import draw
from tools.pocket.batches import IMAGE, Batch, batch_of, prompt_ids
from tools.pocket.loop import batches, train
from tools.pocket.models import PocketModel, embed, grow
from tools.pocket.recipe import Schedule
from tools.pocket.tower import align_projector


@torch.no_grad()
def _trained_on(model: PocketModel, batch: Batch) -> torch.Tensor:
    hidden = model.model.language_model(inputs_embeds=embed(model, batch)).last_hidden_state
    logits: torch.Tensor = model.lm_head(hidden)
    return logits


@torch.no_grad()
def test_growth_leaves_the_logits_bitwise_alone(tokenizer: Tokenizer) -> None:
    shallow = tiny_model()
    deep = grow(shallow, 6).eval()
    batch = batch_of_tasks(tokenizer, "scene")
    assert deep.config.text_config.num_hidden_layers == 6
    assert torch.equal(_trained_on(shallow, batch), _trained_on(deep, batch))


@torch.no_grad()
@pytest.mark.parametrize("task", KINDS)
def test_training_forward_equals_the_models_own_on_processed_inputs(
    tokenizer: Tokenizer, processor: InputProcessor, task: str
) -> None:
    model, sample = tiny_model(), draw(3, task)
    prompt = processor.prompt(sample.messages())
    ids, _ = prompt_ids(tokenizer, sample)
    assert list(prompt.ids) == ids
    batch = batch_of(tokenizer, [sample], [[]])
    tensors: dict[str, torch.Tensor] = {}
    for media in prompt.media:
        for name, tensor in media.tensors.items():
            tensors[name] = torch.cat([tensors[name], tensor]) if name in tensors else tensor
    if sample.images:
        tensors["batch_num_images"] = torch.tensor([len(sample.images)])
    theirs = model(input_ids=batch.ids[:, : len(ids)], **tensors).logits
    torch.testing.assert_close(_trained_on(model, batch)[:, : len(ids)], theirs)


@torch.no_grad()
def test_an_aligned_projector_speaks_at_the_volume_of_words(tokenizer: Tokenizer) -> None:
    # A random tower has little to tell: its patches must still come in as loud as words, not fifty times so.
    model = tiny_model()
    align_projector(model, tokenizer, seed=0)
    batch = batch_of_tasks(tokenizer, "chart")
    patches = embed(model, batch)[batch.ids == IMAGE].norm(dim=-1).mean()
    words = model.get_input_embeddings().weight.norm(dim=-1).mean()
    assert 0.2 < patches / words < 2


pytestmark = pytest.mark.formats


def test_the_rate_warms_up_stays_and_falls() -> None:
    schedule = Schedule(steps=100, batch=1, rate=1.0, warmup=10, final=0.1, decay=0.5)
    assert schedule.rate_at(0) == pytest.approx(0.1)
    assert schedule.rate_at(9) == schedule.rate_at(50) == 1.0
    assert schedule.rate_at(75) == pytest.approx(0.55)
    assert schedule.rate_at(100) == pytest.approx(0.1)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device beside which two cores are free for workers."""
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    return torch.device("cuda")


MAKE = partial(draw, task="chart")  # so that workers import the world and PyTorch alone


@pytest.mark.slow  # every worker is a new interpreter
def test_workers_make_the_batches_of_this_process_and_end_when_no_more_are_wanted(gpu: torch.device) -> None:
    here, ahead = batches(MAKE, 5, 30, torch.device("cpu")), iter(batches(MAKE, 5, 10**9, gpu))
    for number, expected in enumerate(here, 5):
        made = next(ahead)
        assert made == expected == draw(number, "chart")
        assert made.image.tobytes() == expected.image.tobytes()
    del ahead  # would wait without end if the workers continued


class Toy(nn.Module):
    """A model with one matrix inside layers and weights outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[0](inputs).tanh()).square().mean()


def _numbered(number: int) -> tuple[int, torch.Tensor]:
    return number, torch.randn(8, 4, generator=torch.Generator().manual_seed(number))


def _toy_run(folder: Path, broken_at: int | None = None) -> dict[str, torch.Tensor]:
    model = Toy()

    def loss(batch: tuple[int, torch.Tensor]) -> torch.Tensor:
        if batch[0] == broken_at:
            raise KeyboardInterrupt
        return model(batch[1])

    schedule = Schedule(steps=6, batch=8, rate=0.01, warmup=2, parts=2)
    train("toy", model, _numbered, loss, schedule, folder, checkpoint_seconds=0.0)
    return model.state_dict()


def test_a_stage_resumes_exactly_from_checkpoints_in_the_format_of_earlier_runs(tmp_path: Path) -> None:
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    with pytest.raises(KeyboardInterrupt):
        _toy_run(broken, broken_at=9)  # in the second batch of step 5
    checkpoint = torch.load(broken / "toy.checkpoint.pt", weights_only=True)
    assert checkpoint.keys() == {"model", "optimisers", "step", "seconds"}
    assert checkpoint["step"] == 4
    assert [part.keys() for part in checkpoint["optimisers"]] == [{"state", "param_groups"}] * 2
    assert not (broken / "toy.pt").exists()
    resumed, unbroken = _toy_run(broken), _toy_run(whole)
    assert all(torch.equal(resumed[name], unbroken[name]) for name in unbroken)
    assert torch.load(broken / "toy.pt", weights_only=True).keys() == {"model", "step", "seconds"}
    assert sorted(path.name for path in broken.iterdir()) == ["toy.pt"]
