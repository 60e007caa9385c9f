"""TRL's GRPOTrainer on the work of ``bench.peers``, in a process of its own that takes steps when
it is told to.

    python -m bench.peers.trl_side FOLDER CASE MODE

It reads a number of steps from each line of stdin, takes them, and prints one JSON line: seconds,
tokens, samples and the distance of the weights from the first ones. MODE is ``static`` (one padded
batch), ``continuous`` (transformers' continuous batching) or ``vllm`` (colocated).
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Final

from bench.peers.workload import CASES, CLIP, GROUP, LR, SAMPLES, SEED

THREADS: Final = 2
OUT: Final = os.fdopen(os.dup(1), "w", buffering=1)


def main() -> None:
    folder = Path(sys.argv[1])
    case = next(one for one in CASES if one.name == sys.argv[2])
    mode = sys.argv[3]
    os.dup2(2, 1)  # libraries print, too
    warnings.simplefilter("ignore")
    import torch

    torch.set_num_threads(THREADS)
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    sys.path.insert(0, str(folder))
    from vowels import vowels  # type: ignore[import-not-found]

    seen = {"tokens": 0, "samples": 0}

    def reward(completions: list[Any], completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen["samples"] += len(completion_ids)
        seen["tokens"] += sum(map(len, completion_ids))
        return [vowels(one[0]["content"]) for one in completions]

    rows = [
        json.loads(line)["question"] for line in (folder / "prompts.jsonl").read_text().splitlines()
    ]
    prompts = Dataset.from_list([{"prompt": [{"role": "user", "content": row}]} for row in rows])
    arguments: dict[str, Any] = {
        "output_dir": str(folder / "trl"),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": int(os.environ.get("PEERS_BATCH", SAMPLES)),
        "gradient_accumulation_steps": SAMPLES // int(os.environ.get("PEERS_BATCH", SAMPLES)),
        "num_generations": GROUP,
        "max_completion_length": case.max_tokens,
        "temperature": 1.0,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "beta": 0.0,
        "epsilon": CLIP,
        "loss_type": "grpo",
        "max_grad_norm": 1.0,
        "gradient_checkpointing": False,
        "max_steps": 1_000_000,
        "logging_steps": 1_000_000,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": SEED,
        "dataloader_num_workers": 0,
    }
    if mode == "continuous":
        arguments["use_transformers_continuous_batching"] = True
    elif mode == "vllm":
        arguments |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_max_model_length": case.max_tokens + 48,
        }
    model = AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, attn_implementation="sdpa"
    )
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    first = [parameter.detach().clone() for parameter in model.parameters()]

    class Steps(TrainerCallback):  # type: ignore[misc]
        """Waits for a line before the first step of each order, and answers after the last."""

        left = 0
        began = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not self.left:
                line = sys.stdin.readline()
                if not line.strip():
                    os._exit(0)
                self.left = int(line)
                self.began = time.monotonic()
                seen.update(tokens=0, samples=0)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.left -= 1
            if not self.left:
                seconds = time.monotonic() - self.began
                moved = sum(
                    float((a - b).abs().sum())
                    for a, b in zip(first, model.parameters(), strict=True)
                )
                print(
                    json.dumps({"seconds": seconds, "moved": moved, **seen}), file=OUT, flush=True
                )

    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(**arguments),
        train_dataset=prompts,
        processing_class=tokenizer,
        callbacks=[Steps()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
