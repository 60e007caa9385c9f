"""Tries what would make a run fit: leaner settings, more or larger GPUs, fewer fixed choices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import Final

from broker.errors import UserError
from rlearner.plan.candidates import Workload, fits_machine
from rlearner.plan.demands import SHARES
from rlearner.plan.facts import GIB, MOST_GPUS, Machine
from rlearner.plan.misfits import Misfit, find_misfit
from rlearner.plan.serving_memory import slot_bytes

# The rank that is tried.
LORA: Final = 16
# Fewer tokens or sequences make servers slow without saving much.
PREFILL: Final = 512
RUNNING: Final = 16
MOST_PER_HOST: Final = 8
# Times as many as given.
MOST_HOSTS: Final = 64
# GiB of GPUs that are sold.
MEMORIES: Final = (16, 24, 32, 40, 48, 80, 96, 141, 192, 288)

Reread = Callable[[Sequence[str]], Workload]


def describe_remedies(misfit: Misfit, work: Workload, machine: Machine, reread: Reread) -> str:
    """Return which changes, each tried, make a run fit; what is still too large if none does."""
    candidates = list(_leaner_settings(work, machine)) if misfit.memory else []
    settings = _fewest_settings(candidates, machine, reread)
    machines = list(_larger_machines(misfit, machine))
    remedies = [f"with {' '.join(settings)}"] if settings else []
    if (larger := next((more for more in machines if fits_machine(work, more)), None)) is not None:
        remedies.append(f"with {_machine_options(larger)}")
    else:
        for gib in MEMORIES:
            bigger = replace(machine, memory=gib * GIB)
            if bigger.memory > machine.memory and fits_machine(work, bigger):
                remedies.append(f"with --gpu-memory {gib:g}")
                break
        for more in machines if not settings else ():
            if _all_that_fit(candidates, more, reread):
                fewest = " ".join(_fewest_settings(candidates, more, reread))
                remedies.append(f"with {_machine_options(more)} {fewest}")
                break
    if keys := _keys_to_remove(work, machine):
        remedies.append(f"without {' and '.join(keys)}")
    if remedies:
        text = f"it fits {', or '.join(remedies)}"
        return text if settings or not candidates else f"no setting alone helps; {text}"
    problem = _remaining_problem(candidates, machine, reread)
    if problem and misfit.text not in problem:
        return f"no setting helps: with {problem}"
    return "no setting helps"


def _leaner_settings(work: Workload, machine: Machine) -> Iterator[str]:
    """Yield settings with which a run needs less memory, those first that change it least."""
    train = work.demands.train
    serve = work.demands.serve
    longest = work.demands.longest
    if train.slice_tokens > longest:
        yield f"train.micro_batch_tokens={longest}"
    if serve is not None:
        share = math.floor(100 * machine.available / machine.memory) / 100
        if serve.engine in SHARES and serve.share < share:
            yield f"rollout.engine_args.{SHARES[serve.engine][0]}={share:g}"
        slot = slot_bytes(work.model.converted(serve.itemsize), serve.context)
        if serve.kv_gib is not None and serve.kv_gib * GIB < slot:
            yield f"rollout.engine_args.kv_cache_gib={math.ceil(10 * slot / GIB) / 10:g}"
        for name, value, least in (
            ("prefill_tokens", serve.prefill, PREFILL),
            ("max_running", serve.running, RUNNING),
            ("max_context_tokens", serve.context, longest),
        ):
            if value > least:
                yield f"rollout.{name}={least}"
    if not train.activation_offload:
        yield "train.activation_offload=true"
    if work.model.itemsize > 2:
        if serve is not None and serve.itemsize not in (1, 2):
            yield "rollout.dtype=bfloat16"
        yield "model.dtype=bfloat16"
    if serve is not None and serve.engine == "hf":
        yield "rollout.engine=vllm"
    if not train.lora_parameters:
        yield f"train.lora.rank={LORA}"


def _fewest_settings(candidates: Sequence[str], machine: Machine, reread: Reread) -> list[str]:
    """Return the mildest setting with which the run fits, else a minimal set, else none."""
    for setting in candidates:
        if _fits_with([setting], machine, reread):
            return [setting]
    settings = _all_that_fit(candidates, machine, reread)
    # The last ones change the run most.
    for setting in reversed(settings):
        fewer = [name for name in settings if name != setting]
        if _fits_with(fewer, machine, reread):
            settings = fewer
    return settings


def _all_that_fit(candidates: Sequence[str], machine: Machine, reread: Reread) -> list[str]:
    """Return all settings, or all but one, with which the run fits; empty if none.

    With vLLM or LoRA some parts need more memory, so each may be left out.
    """
    for excluded in ("", "rollout.engine=vllm", f"train.lora.rank={LORA}"):
        settings = [setting for setting in candidates if setting != excluded]
        if settings and _fits_with(settings, machine, reread):
            return settings
    return []


def _fits_with(settings: Sequence[str], machine: Machine, reread: Reread) -> bool:
    with suppress(UserError):  # not allowed together with the others
        return fits_machine(reread(settings), machine)
    return False


def _remaining_problem(candidates: Sequence[str], machine: Machine, reread: Reread) -> str:
    """Return all settings together and what is too large with them; empty without any."""
    if candidates:
        with suppress(UserError):
            misfit = find_misfit(reread(candidates), machine)
            return f"{' '.join(candidates)}, {misfit.text}"
    return ""


def _larger_machines(misfit: Misfit, machine: Machine) -> Iterator[Machine]:
    """Yield machines with more GPUs on each host, then with more hosts."""
    hosts = machine.hosts
    per_host = machine.per_host
    most = max(per_host, MOST_PER_HOST, math.ceil(misfit.gpus / hosts))
    for number in range(per_host + 1, most + 1):
        yield Machine(number * hosts, machine.memory, hosts)
    for number, power in product(sorted({per_host, most}), range(1, MOST_HOSTS.bit_length())):
        gpus = number * hosts * 2**power
        if misfit.gpus <= gpus <= MOST_GPUS:
            yield Machine(gpus, machine.memory, hosts * 2**power)


def _machine_options(machine: Machine) -> str:
    options = f"--gpus {machine.gpus}"
    if machine.hosts > 1:
        options += f" --hosts {machine.hosts}"
    return options


def _keys_to_remove(work: Workload, machine: Machine) -> list[str]:
    """Return a choice without which the run fits, else several that must all go, else none."""
    fixed = list(work.demands.fixed)
    for key in fixed:
        if fits_machine(work.without(key), machine):
            return [key]
    if not fits_machine(work.without(*fixed), machine):
        return []
    keys = fixed
    for key in fixed:
        fewer = [name for name in keys if name != key]
        if fits_machine(work.without(*fewer), machine):
            keys = fewer
    return keys
