"""Weights as a model's files hold them: names of the files, and views without a copy for servers
that read these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from part_models import SETTINGS, WITH_VISION, save_parts
from safetensors.torch import load_file

from rlearner_text.hub import stored_names
from rlearner_text.stored_form import as_stored, stored_views, use_conversions


def opened(path: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


@pytest.mark.parametrize("name", sorted(SETTINGS | WITH_VISION))
def test_servers_get_the_tensors_of_the_files(name: str, tmp_path: Path) -> None:
    path = save_parts(name, tmp_path / "model")
    files = load_file(tmp_path / "model" / "model.safetensors")
    weights = dict(opened(path).named_parameters()) | dict(opened(path).named_buffers())
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(path)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = model.state_dict()
    kept = use_conversions(model, stored_names(Path(path)), list(state))
    weights = {key: weights[key].detach() for key in state if key in weights}
    views = stored_views(model, {key: tensor.to("meta") for key, tensor in weights.items()})
    found = dict(as_stored(weights.items(), views))
    assert found.keys() - {"lm_head.weight"} == files.keys() - set(kept) - {"lm_head.weight"}
    for key in found.keys() & files.keys():
        assert torch.equal(found[key], files[key]), key
    assert (kept == []) == (name != "qwen3_5")
    has_experts = "experts.0" in " ".join(files)
    assert has_experts == any("experts" in key for key in views)


def test_updates_reach_the_views() -> None:
    weight = torch.arange(24.0).reshape(2, 4, 3)
    views = {"experts": [("0.up", [2, 3], [3, 1], 6), ("1.up", [2, 3], [3, 1], 18)]}
    found = dict(as_stored([("experts", weight), ("norm", torch.ones(2))], views))
    weight += 1
    assert torch.equal(found["0.up"], weight[0, 2:])
    assert torch.equal(found["1.up"], weight[1, 2:])
    assert found["norm"].tolist() == [1, 1]
    part = torch.zeros(48)[24:].view(2, 4, 3)  # as in a buffer with other weights before it
    assert dict(as_stored([("experts", part)], views))["1.up"].storage_offset() == 24 + 18
