"""Tries what would make a run fit: settings with which it needs less, more or larger GPUs, choices
left open.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, product
from typing import Final

from broker.errors import UserError
from rlearner.plan.candidates import Workload, fits
from rlearner.plan.demands import SHARES
from rlearner.plan.facts import GIB, MOST_GPUS, Machine
from rlearner.plan.misfits import Misfit, find_misfit
from rlearner.plan.serving_memory import slot_bytes

LORA: Final = 16  # the rank that is tried
PREFILL: Final = 512  # tokens, and
RUNNING: Final = 16  # sequences: fewer make servers slow without saving much
MOST_PER_HOST: Final = 8
MOST_HOSTS: Final = 64  # times as many as given
MEMORIES: Final = (16, 24, 32, 40, 48, 80, 96, 141, 192, 288)  # GiB of GPUs that are sold

Reread = Callable[[Sequence[str]], Workload]


def advice(misfit: Misfit, work: Workload, machine: Machine, reread: Reread) -> str:
    """Return which changes, each tried, make a run fit; what is still too large if none does."""
    tries = list(_settings(work, machine)) if misfit.memory else []
    settings = _fewest(tries, machine, reread)
    more = list(_more_gpus(misfit, machine))
    found = [f"with {' '.join(settings)}"] if settings else []
    if (enough := next((one for one in more if fits(work, one)), None)) is not None:
        found.append(f"with {_options(enough)}")
    else:
        larger = (
            replace(machine, memory=memory * GIB)
            for memory in MEMORIES
            if memory * GIB > machine.memory
        )
        found += [f"with --gpu-memory {one.memory / GIB:g}" for one in larger if fits(work, one)][
            :1
        ]
        both = (
            (one for one in more if _all_that_fit(tries, one, reread)) if not settings else iter(())
        )
        found += [
            f"with {_options(one)} {' '.join(_fewest(tries, one, reread))}"
            for one in islice(both, 1)
        ]
    if keys := _keys_to_remove(work, machine):
        found.append(f"without {' and '.join(keys)}")
    if found:
        return (
            "" if settings or not tries else "no setting alone helps; "
        ) + f"it fits {', or '.join(found)}"
    left = _left(tries, machine, reread)
    return "no setting helps" + (f": with {left}" if left and misfit.text not in left else "")


def _settings(work: Workload, machine: Machine) -> Iterator[str]:
    """Yield settings with which a run needs less memory, those first that change it least."""
    train = work.demands.train
    serve = work.demands.serve
    longest = work.demands.longest
    if train.slice_tokens > longest:
        yield f"train.micro_batch_tokens={longest}"
    if serve is not None:
        key = f"rollout.engine_args.{SHARES[serve.engine][0]}" if serve.engine in SHARES else ""
        share = math.floor(100 * machine.available / machine.memory) / 100
        if key and serve.share < share:
            yield f"{key}={share:g}"
        if serve.kv_gib is not None and serve.kv_gib * GIB < (
            slot := slot_bytes(work.model, serve.context)
        ):
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
        yield "model.dtype=bfloat16"
    if serve is not None and serve.engine == "hf":
        yield "rollout.engine=vllm"
    if not train.lora_parameters:
        yield f"train.lora.rank={LORA}"


def _fewest(tries: Sequence[str], machine: Machine, reread: Reread) -> list[str]:
    """Return the mildest setting with which the run fits, else a set that none can be left out of;
    empty if none.
    """
    for one in tries:
        if _fit([one], machine, reread):
            return [one]
    kept = _all_that_fit(tries, machine, reread)
    for one in reversed(kept):
        if _fit(fewer := [other for other in kept if other != one], machine, reread):
            kept = fewer
    return kept


def _all_that_fit(tries: Sequence[str], machine: Machine, reread: Reread) -> list[str]:
    """Return all settings, or all but one that needs more of some parts, with which the run fits;
    empty if none.
    """
    for left_out in ("", "rollout.engine=vllm", f"train.lora.rank={LORA}"):
        kept = [one for one in tries if one != left_out]
        if kept and _fit(kept, machine, reread):
            return kept
    return []


def _fit(settings: Sequence[str], machine: Machine, reread: Reread) -> bool:
    with suppress(UserError):  # not allowed together with the others
        return fits(reread(settings), machine)
    return False


def _left(tries: Sequence[str], machine: Machine, reread: Reread) -> str:
    """Return all settings together and what is too large with them; empty without any."""
    with suppress(UserError):
        return f"{' '.join(tries)}, {find_misfit(reread(tries), machine).text}" if tries else ""
    return ""


def _more_gpus(misfit: Misfit, machine: Machine) -> Iterator[Machine]:
    """Yield machines with more GPUs on each host, then with more hosts."""
    hosts = machine.hosts
    per_host = machine.per_host
    most = max(per_host, MOST_PER_HOST, math.ceil(misfit.gpus / hosts))
    yield from (
        Machine(each * hosts, machine.memory, hosts) for each in range(per_host + 1, most + 1)
    )
    for each, power in product(sorted({per_host, most}), range(1, MOST_HOSTS.bit_length())):
        if misfit.gpus <= (gpus := each * hosts * 2**power) <= MOST_GPUS:
            yield Machine(gpus, machine.memory, hosts * 2**power)


def _options(machine: Machine) -> str:
    return f"--gpus {machine.gpus}" + (f" --hosts {machine.hosts}" if machine.hosts > 1 else "")


def _keys_to_remove(work: Workload, machine: Machine) -> list[str]:
    """Return a choice without which the run fits, else several that must all be left open; empty if
    none.
    """
    fixed = list(work.demands.fixed)
    for key in fixed:
        if fits(work.without(key), machine):
            return [key]
    if not fits(work.without(*fixed), machine):
        return []
    kept = fixed
    for one in fixed:
        if fits(work.without(*(fewer := [key for key in kept if key != one])), machine):
            kept = fewer
    return kept
