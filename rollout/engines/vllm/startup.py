"""Starts vLLM: engine arguments, environment, and a one-line reason if it does not start."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from broker.errors import UserError
from rlearner_text.hub import model_folder
from rlearner_text.probe_text import probe_tokens
from rlearner_text.stored_form import View, stored_views
from rlearner_text.tokenizer import Tokenizer
from rollout.engines.args import VLLMArgs
from rollout.engines.base import EngineConfig
from rollout.engines.hf.engine_core import find_tokenizer
from rollout.engines.hf.model import end_tokens, fitting_context, load_model, one_line
from rollout.engines.hf.weights import HeldWeights
from rollout.engines.vllm.shared_weights import OWNER, SharedWeights

# in addition to generation: the probe of new weights, and one scoring request
SPARE_SEQUENCES: Final = 2
CPU_KV_CACHE_GIB: Final = 1.0
# As on one GPU. On the CPU vLLM would use another process, and both spin while the other computes:
# they take two cores, or slow each other to half speed.
IN_PROCESS: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
# the prefix cache matches whole blocks; vLLM's 128 tokens match no short conversation
CPU_BLOCK_TOKENS: Final = 32
_CAUSE: Final = re.compile(r"^(?:[\w.]+\.)?\w*(?:Error|Exception): .*\S", re.MULTILINE)
_MEMORY: Final = re.compile(r"memory|KV cache|cache blocks", re.IGNORECASE)
_LOWER: Final = (
    "lower rollout.max_context_tokens or rollout.max_running, raise rollout.engine_args.kv_cache_gib or "
    "gpu_memory_utilization, or spread the model over more GPUs by rollout.engine_args.tensor_parallel"
)


@dataclass
class RunningVLLM:
    """A running vLLM, and properties of its model.

    Attributes:
        llm: the AsyncLLM.
        shared: the weights by the learner's names.
        views: of them, by the names that vLLM loads, see ``rlearner_text.stored_form``.
        end_ids: tokens that end a generation.
        tokenizer: of the model; without one there are no stop strings and no guides.
        folder: holds vLLM's error log.
        text: token ids of ordinary text, past every switch of the model.
    """

    llm: Any
    shared: SharedWeights
    views: Mapping[str, list[View]]
    vocab_size: int
    end_ids: frozenset[int]
    tokenizer: Tokenizer | None
    folder: Path
    text: list[int]

    def close(self) -> None:
        """Stop vLLM's processes; blocks until they have exited."""
        handler = self.llm.output_handler
        self.llm.output_handler = None
        if handler is not None:  # before the processes exit, which it would report as an error
            handler.get_loop().call_soon_threadsafe(handler.cancel)
        self.llm.shutdown()
        # __del__ calls it again, with a traceback at interpreter exit
        self.llm.shutdown = lambda: None
        self.shared.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def check_installed() -> None:
    """Check that vLLM is installed.

    Raises:
        UserError: if it is not; names the extra.
    """
    if importlib.util.find_spec("vllm") is None:
        install = "pip install 'rlearner[vllm]' for GPUs, or make vllm-env for the CPU"
        raise UserError(f"engine vllm needs the package vllm: {install}")


def open_llm(config: EngineConfig) -> RunningVLLM:
    """Load the model into shared memory, for names and updates, and into vLLM; blocks for about a
    minute.

    Raises:
        UserError: if vLLM is missing, the model cannot be loaded, or a setting does not fit it.
    """
    check_installed()
    records = logging.getLogRecordFactory()
    args = VLLMArgs.model_validate(config.section.engine_args)
    on_cpu = uses_cpu(config, args)
    folder = Path(tempfile.mkdtemp(prefix="rlearner-vllm-"))
    shared: SharedWeights | None = None
    try:
        model = load_model(config, torch.device("cpu"))
        check_heads(model.config.get_text_config(), args.tensor_parallel)
        context = fitting_context(model, config.section.max_context_tokens)
        tokenizer = find_tokenizer(config)
        ends = end_tokens(model) | frozenset(tokenizer.eos_token_ids if tokenizer else ())
        vocab_size = int(model.get_input_embeddings().num_embeddings)
        settings = model.config.get_text_config().to_dict()
        text = probe_tokens(tokenizer, settings, vocab_size=vocab_size, max_context=context)
        weights = HeldWeights(model).tensors()
        shared = SharedWeights(weights)
        views = stored_views(model, {name: tensor.to("meta") for name, tensor in weights.items()})
        del model, weights
        _environment(config, folder, on_cpu=on_cpu)
        llm = _open(
            engine_args(config, args, context, has_tokenizer=tokenizer is not None, on_cpu=on_cpu),
            folder,
        )
        return RunningVLLM(
            llm,
            shared,
            views,
            vocab_size=vocab_size,
            end_ids=ends,
            tokenizer=tokenizer,
            folder=folder,
            text=text,
        )
    except BaseException:
        if shared is not None:
            shared.close()
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        # vLLM's would add a field to every line of this process
        logging.setLogRecordFactory(records)


def uses_cpu(config: EngineConfig, args: VLLMArgs) -> bool:
    """Return whether the installed vLLM is the CPU build, and check that the settings fit.

    Raises:
        UserError: if GPUs or fp8 are requested of the CPU build.
    """
    from vllm.platforms import current_platform

    on_cpu = bool(current_platform.is_cpu())
    if on_cpu and config.device == "cuda":
        raise UserError(
            "GPUs are requested, but the installed vLLM is the CPU build; pip install 'rlearner[vllm]'"
        )
    if on_cpu and args.quantization:
        raise UserError(
            f"rollout.engine_args.quantization: {args.quantization!r} is not allowed on the CPU; use null"
        )
    if on_cpu and config.shares_device:
        raise UserError("--share-gpus: vLLM does not free its memory on a CPU; use engine hf")
    return on_cpu


def check_heads(text_config: Any, tensor_parallel: int) -> None:
    """Check that the attention heads can be split over the GPUs.

    Raises:
        UserError: if they cannot; names both numbers.
    """
    heads = getattr(text_config, "num_attention_heads", None)
    if heads and heads % tensor_parallel:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        allowed = f"the model's {heads} attention heads divide by {', '.join(map(str, fitting))}"
        raise UserError(
            f"rollout.engine_args.tensor_parallel: {tensor_parallel} is not allowed; {allowed}"
        )


def engine_args(
    config: EngineConfig, args: VLLMArgs, context: int, *, has_tokenizer: bool, on_cpu: bool
) -> dict[str, Any]:
    """Return the fields of vLLM's AsyncEngineArgs."""
    section = config.section
    sequences = section.max_running + SPARE_SEQUENCES
    kv_cache_gib = args.kv_cache_gib or (CPU_KV_CACHE_GIB if on_cpu else None)
    return {
        "model": model_folder(config.model_path, trust_remote_code=config.trust_remote_code),
        "load_format": "safetensors" if config.has_weights else "dummy",
        "skip_tokenizer_init": not has_tokenizer,
        "trust_remote_code": config.trust_remote_code,
        "dtype": config.dtype,
        "max_model_len": context,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": max(section.prefill_tokens, sequences, context if on_cpu else 0),
        # vLLM 0.32 on the CPU crashes on chunked prefill of a seeded request ("CPU Generator does
        # not use offset").
        "enable_chunked_prefill": not on_cpu,
        "enable_prefix_caching": section.prefix_cache,
        "tensor_parallel_size": args.tensor_parallel,
        "distributed_executor_backend": IN_PROCESS
        if on_cpu and args.tensor_parallel == 1
        else None,
        "gpu_memory_utilization": args.gpu_memory_utilization,
        "kv_cache_memory_bytes": None if kv_cache_gib is None else int(kv_cache_gib * 2**30),
        "block_size": CPU_BLOCK_TOKENS if on_cpu else None,
        "enforce_eager": on_cpu if args.enforce_eager is None else args.enforce_eager,
        "quantization": args.quantization,
        "enable_sleep_mode": config.shares_device,
        # of the sampling distribution, with temperature and filters
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,  # up to the whole vocabulary
        "generation_config": "vllm",  # the model's folder must not change the sampling
        "disable_log_stats": True,
        "enable_log_requests": False,
        **args.extra,
    }


def _environment(config: EngineConfig, folder: Path, *, on_cpu: bool) -> None:
    """Set vLLM's environment variables for this process and its workers, except those that the user
    has set.
    """
    # Forking a process with threads may hang, so vLLM's processes are spawned.
    defaults = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    # its workers are on this host; by default it would listen at the address that reaches the
    # Internet
    defaults |= {"VLLM_HOST_IP": "127.0.0.1", "VLLM_LOOPBACK_IP": "127.0.0.1"}
    if on_cpu:
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if config.section.num_threads:
            defaults["OMP_NUM_THREADS"] = str(config.section.num_threads)
    os.environ[OWNER] = str(os.getpid())
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    if "VLLM_LOGGING_CONFIG_PATH" not in os.environ or not os.path.exists(
        os.environ["VLLM_LOGGING_CONFIG_PATH"]
    ):
        path = folder / "logging.json"
        path.write_text(json.dumps(_logging(folder / "errors.log")))
        os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(path)


def _logging(errors: Path) -> dict[str, Any]:
    """Return a logging configuration: warnings to stderr, errors also to a file, to find why a
    start failed.
    """
    plain = {"format": "%(asctime)s %(levelname)s vllm %(processName)s %(message)s"}
    level = os.environ["VLLM_LOGGING_LEVEL"]
    to_file = {"formatter": "bare", "level": "ERROR", "filename": str(errors), "delay": True}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"plain": plain, "bare": {"format": "%(message)s"}},
        "handlers": {
            "stderr": {"class": "logging.StreamHandler", "formatter": "plain", "level": level},
            "errors": {"class": "logging.FileHandler", **to_file},
        },
        "loggers": {"vllm": {"handlers": ["stderr", "errors"], "level": level, "propagate": False}},
    }


def _open(fields: Mapping[str, Any], folder: Path) -> Any:
    """Start the AsyncLLM.

    Raises:
        UserError: if it does not start.
    """
    from vllm.config import StructuredOutputsConfig
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollout.engines.vllm.worker import BACKEND, EXTENSION

    try:
        # as in engine hf
        own: dict[str, Any] = {
            "structured_outputs_config": StructuredOutputsConfig(backend="guidance")
        }
        own |= {
            "worker_extension_cls": EXTENSION,
            "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        }
        arguments = AsyncEngineArgs(**(own | dict(fields)))
        return AsyncLLM.from_engine_args(arguments)
    except (
        ValueError,
        TypeError,
        RuntimeError,
        OSError,
        KeyError,
        AssertionError,
        NotImplementedError,
    ) as error:
        reason = startup_error(str(error), folder / "errors.log")
        raise UserError(f"engine vllm does not start with {fields['model']!r}: {reason}") from error


def startup_error(message: str, errors: Path) -> str:
    """Return in one line why vLLM did not start: the first error in its processes' log, else the
    one raised here.
    """
    logged = _CAUSE.search(errors.read_text(errors="replace")) if errors.is_file() else None
    line = logged[0].strip() if logged else one_line(ValueError(_pydantic(message)))
    line = line if len(line) <= 400 else line[:400] + " …"
    return f"{line}; {_LOWER}" if _MEMORY.search(line) else line


def _pydantic(message: str) -> str:
    """Return the message of a pydantic validation error: the text after 'Value error', else all of
    it.
    """
    match = re.search(r"Value error, (.+?)(?: \[type=|$)", message, re.MULTILINE)
    return match[1] if match else message
