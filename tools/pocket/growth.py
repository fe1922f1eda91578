"""Making a trained language model deeper without changing what it computes.

Every layer is followed by copies of itself whose output projections are zero, so that they add nothing to
the residual stream until training moves them (stacking with zero-initialised outputs, as in LLaMA Pro,
arXiv:2401.02415, section 3.2).
"""

import copy

import torch

from tools.pocket.models import PocketModel

_SILENCED = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
_LAYERS = ".language_model.layers."


def grow(model: PocketModel, layers: int) -> PocketModel:
    """A model with `layers` language layers and the logits of `model`.

    Raises:
        ValueError: `layers` is no multiple of the layers that are there.
    """
    here = model.config.text_config.num_hidden_layers
    times, rest = divmod(layers, here)
    if rest or times < 1:
        raise ValueError(f"{here} layers can grow to a multiple of {here}, not to {layers}.")
    config = copy.deepcopy(model.config)
    config.text_config.num_hidden_layers = layers
    if getattr(config.text_config, "layer_types", None):
        config.text_config.layer_types = ["full_attention"] * layers
    deep = PocketModel(config)
    old, new = model.state_dict(), deep.state_dict()
    for name in new:
        if _LAYERS not in name:
            new[name] = old[name].clone()
            continue
        stem, tail = name.split(_LAYERS)
        number, part = tail.split(".", 1)
        source = old[f"{stem}{_LAYERS}{int(number) // times}.{part}"]
        silent = int(number) % times > 0 and part in _SILENCED
        new[name] = torch.zeros_like(source) if silent else source.clone()
    deep.load_state_dict(new)
    return deep.to(model.device)
