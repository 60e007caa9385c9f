"""Examples for the end of each ``rlearner`` command's help."""

from __future__ import annotations

from typing import Final

EXAMPLES: Final = {
    "rlearner": [
        "rlearner up configs/quickstart.yaml",
        "rlearner status runs/quick",
        "rlearner runs",
    ],
    "rlearner up": [
        "rlearner up configs/quickstart.yaml run.name=quick train.steps=50",
        "rlearner up runs/quick train.steps=100     # continues that run with its settings",
    ],
    "rlearner start": [
        "rlearner start configs/quickstart.yaml run.name=quick --broker nats://127.0.0.1:4222",
        "rlearner start configs/gsm8k.yaml --gpus 0-3 model.path=Qwen/Qwen3-0.6B",
        (
            "rlearner start configs/quickstart.yaml run.name=quick --metrics-port 9465 "
            "telemetry.traces=100"
        ),
    ],
    "rlearner check": [
        "rlearner check configs/quickstart.yaml train.max_staleness=2",
        "rlearner check runs/quick train.steps=100",
    ],
    "rlearner settings": ["rlearner settings staleness", "rlearner settings learning_rate"],
    "rlearner new": [
        "rlearner new lakes     # then: cd lakes && rlearner up lakes.yaml",
        "rlearner new sums --kind qa",
        "rlearner new shop --kind tools",
        "rlearner new shells --kind terminal",
    ],
    "rlearner tasks build": [
        "rlearner tasks build image.tar     # of podman save --format oci-archive, or docker save",
        "rlearner tasks build tasks/fix-build/environment",
    ],
    "rlearner doctor": ["rlearner doctor", "rlearner doctor configs/code.yaml --json"],
    "rlearner plan": [
        (
            "rlearner plan configs/gsm8k.yaml --gpus 8 --gpu-memory 80 model.path=Qwen/Qwen3-8B "
            "model.dtype=bfloat16"
        ),
        "rlearner plan configs/gsm8k.yaml --gpus 16 --hosts 2 --write plan rollout.engine=vllm",
    ],
    "rlearner units": [
        "rlearner units configs/quickstart.yaml run.name=lake",
        (
            "rlearner units configs/gsm8k.yaml --gpus 16 --hosts train=10.0.0.1,gen1=10.0.0.2 "
            "--host gen1 --write gen1"
        ),
    ],
    "rlearner completion": [
        'rlearner completion zsh     # use it: eval "$(rlearner completion)" in ~/.bashrc'
    ],
    "rlearner sft": [
        "rlearner sft configs/sft.yaml model.path=Qwen/Qwen3-0.6B data.train=conversations.jsonl"
    ],
    "rlearner dpo": [
        "rlearner dpo configs/dpo.yaml model.path=Qwen/Qwen3-0.6B data.train=pairs.jsonl"
    ],
    "rlearner distill": [
        "rlearner distill configs/distill.yaml model.path=Qwen/Qwen3-0.6B data.train=prompts.jsonl"
    ],
    "rlearner rm": [
        "rlearner rm configs/rm.yaml model.path=Qwen/Qwen3-0.6B data.train=pairs.jsonl"
    ],
    "rlearner eval": [
        "rlearner eval runs/quick/checkpoints/step-000040 configs/quickstart.yaml eval.tasks=512"
    ],
    "rlearner audit": ["rlearner audit quick", "rlearner audit runs/quick --json"],
    "rlearner trace": ["rlearner trace quick 17"],
    "rlearner show": ["rlearner show quick 17 --episode 0 --tokens"],
    "rlearner replay": [
        "rlearner replay quick --from 20 --to 40",
        "rlearner replay quick --from 0 --to 40 algorithm=gspo --out runs/quick-gspo",
    ],
    "rlearner rescore": [
        "rlearner rescore quick reward.length.weight=0.5",
        "rlearner rescore math 'domains.math.rewards=[{name: math_answer}]' --out new.jsonl",
    ],
    "rlearner tasks": ["rlearner tasks try tasks --image '*=host'"],
    "rlearner tasks try": ["rlearner tasks try tasks --image 'python:*=host'"],
    "rlearner tasks swe": [
        "rlearner tasks swe rows.jsonl --mirrors mirrors --out tasks --image swe-python"
    ],
    "rlearner data": ["rlearner data sample train.jsonl --by level --n 500 --out small.jsonl"],
    "rlearner data sample": [
        "rlearner data sample train.jsonl --by level --n 500 --out small.jsonl",
        (
            "rlearner data sample train.jsonl --by difficulty --pass-rates runs/math --n 500 "
            "--out small.jsonl --equal"
        ),
    ],
    "rlearner export": [
        "rlearner export quick",
        "rlearner export quick --step 40 --out quick-40 --max-shard-gib 2",
    ],
    "rlearner status": ["rlearner status quick", "rlearner status runs/quick --json"],
    "rlearner advise": [
        "rlearner advise quick",
        "rlearner advise quick --simulate servers=8,hubs=2,max_staleness=3",
    ],
    "rlearner logs": [
        "rlearner logs quick -f",
        "rlearner logs quick --since 10m --level warning envhub rewardhub",
    ],
    "rlearner diff": [
        "rlearner diff quick quick-gspo",
        "rlearner diff runs/quick /data/runs/other --json",
    ],
    "rlearner exporter": [
        "rlearner exporter quick     # http://127.0.0.1:9464/metrics",
        (
            "rlearner exporter quick --broker nats://10.0.0.1:4222 --metrics-bind 0.0.0.0 "
            "--metrics-port 9500"
        ),
    ],
    "rlearner draw": ["rlearner draw quick"],
    "rlearner runs": ["rlearner runs", "rlearner runs /data/runs --json", "rlearner runs --prune"],
    "rlearner invite": ["rlearner invite envhub --run quick --expires 24h --out hub.token"],
    "rlearner invited": ["rlearner invited"],
    "rlearner renew": ["rlearner renew envhub-3f9a01 --expires 7d"],
    "rlearner revoke": ["rlearner revoke envhub-3f9a01"],
    "rlearner api-key": [
        "rlearner api-key create alice --expires 30d --requests-per-minute 60 --out alice.key"
    ],
    "rlearner api-key create": [
        "rlearner api-key create alice --expires 30d --requests-per-minute 60 --out alice.key",
        (
            "rlearner api-key create ci --expires 12h --tokens-per-minute 20000 --concurrent 4 "
            "--out ci.key"
        ),
    ],
    "rlearner api-key list": ["rlearner api-key list"],
    "rlearner api-key revoke": ["rlearner api-key revoke alice"],
    "rlearner checkpoint-now": [
        "rlearner checkpoint-now quick",
        "rlearner checkpoint-now quick --no-wait --json",
    ],
    "rlearner eval-now": ["rlearner eval-now quick"],
    "rlearner console": [
        "rlearner console",
        "rlearner console quick --actions",
        (
            "rlearner console --bind 10.0.0.5 --tls-cert c.crt --tls-key c.key "
            "--password-file c.password"
        ),
    ],
    "rlearner pause": ["rlearner pause quick --reason 'the disk is full'"],
    "rlearner resume": ["rlearner resume quick"],
    "rlearner drain": ["rlearner drain quick"],
    "rlearner stop": ["rlearner stop quick"],
}
