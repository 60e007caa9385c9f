"""A weight that is not finite is refused in one line, whichever rank reads it."""

from pathlib import Path

import pytest
from backend_kit import kit, make
from safetensors.torch import load_file, save_file

from broker.errors import ConfigError


def test_weights_of_another_rank_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path = kit.save_model(tmp_path / "model", kv_heads=2)
    file = Path(path) / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    # Rank 1 has the last row.
    tensors[name][-1, 3] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError) as error:
        make("fsdp2", path)
    assert str(error.value) == (
        f"model.path: '{path}' is not allowed; a model of finite weights: {name} holds nan at "
        "[47, 3] (1 of its 1536 values are not finite)"
    )
