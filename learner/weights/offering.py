"""Prepares weights for sending: selects the tensors, and probes them. Imports torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from msgspec import structs
from torch import Tensor

from broker.contract import wire
from broker.errors import ConfigError
from broker.jetstream.bus import Bus
from broker.runtime.presence import Roster
from broker.weights.adapter import factor_shapes
from broker.weights.carriers import reading_carrier, selected_carrier
from broker.weights.carriers.selection import AUTO, offered_carriers
from broker.weights.memory.cuda import CudaDevice
from broker.weights.memory.staging import plan_of
from broker.weights.plan import LayoutPlan
from broker.weights.probe import wrong_token
from broker.weights.protocol.session import TransferSettings
from broker.weights.sender.send import WeightSender
from learner.backends.base import Backend
from learner.backends.models.empty_model import build_empty
from learner.backends.section_checks import stripes_problem
from learner.backends.stripes import RankStripes
from learner.config import TrainSection
from learner.weights.addresses import weights_address
from learner.weights.probing import WeightProbe
from rlearner_text.config import ModelSection

log = logging.getLogger(__name__)


class WeightOffering:
    """Weights of a backend to send: all of them, or only the factors of trained adapters.

    Args:
        probe_ids: the tokens of the probes, see ``read_probe_ids``; empty: random ones.
        engine_dtype: ``rollout.dtype``.
        exact: ``rollout.exact``.

    Raises:
        ConfigError: if ``train.weights_backend`` needs the weights on a GPU and they are not.
    """

    def __init__(
        self,
        backend: Backend,
        train: TrainSection,
        dtype: str,
        probe_ids: Sequence[int] = (),
        *,
        engine_dtype: str | None = None,
        exact: bool = False,
    ) -> None:
        self._backend = backend
        self._train = train
        converted = (train.weights_dtype, engine_dtype)
        self._probe = WeightProbe(backend, dtype, converted, probe_ids, exact=exact)
        self._stripes: RankStripes | None = None
        # Of the sender.
        self.plan: LayoutPlan
        carrier = selected_carrier(train.weights_backend)
        place = f"weights on {backend.device.type}"
        if (
            carrier is not None
            and backend.device.type != "cuda"
            and (allowed := carrier.host_problem(place))
        ):
            raise ConfigError("train.weights_backend", carrier.name, allowed)
        # None: all weights are sent.
        self.adapter = backend.adapter()
        if self.adapter is not None:
            mine = {name: factor.shape for name, factor in backend.factors().items()}
            theirs = self._factor_shapes(self.adapter)
            # Servers derive names and shapes of factors from the model, and could not map these.
            if mine != {name: factor.shape for name, factor in theirs.items()}:
                log.warning(
                    "weights: servers cannot tell which weights the adapters change; "
                    "the whole model is sent"
                )
                self.adapter = None

    def sender(self, bus: Bus, roster: Roster, epoch: int) -> WeightSender:
        """Return a sender for the weights, staged on their device.

        Raises:
            ConfigError: if ``train.weights_interface`` is not an interface of this host with an
                address, or the backend cannot send in stripes and must.
        """
        train = self._train
        device = self._backend.device
        carriers = offered_carriers(train.weights_backend or AUTO, on_gpu=device.type == "cuda")
        reads_gpu = reading_carrier(on_gpu=True) in carriers
        if self.adapter is None:
            plan = plan_of(
                self._backend.shapes(), train.weights_bucket_mib, dtype=train.weights_dtype
            )
        else:
            plan = plan_of(self._factor_shapes(self.adapter), train.weights_bucket_mib)
        self.plan = plan
        self._stripes = None
        if self._wants_stripes():
            self._stripes = self._backend.stripes(plan)
        if self._stripes is None and train.weights_stripes == "always":
            raise ConfigError(
                "train.weights_stripes",
                "always",
                f"auto or never with train.backend {train.backend}",
            )
        return WeightSender(
            bus,
            plan,
            epoch=epoch,
            settings=TransferSettings(
                carriers,
                host=weights_address(
                    train.weights_interface, bus.link.url, self._backend.hosts_address
                ),
                port=train.weights_port,
                timeout_s=train.weights_timeout_s,
            ),
            roster=roster,
            device=device,
            delta_full_every=train.weights_full_every if train.weights_delta else None,
            adapter=self.adapter,
            memory=CudaDevice(device) if reads_gpu else None,
            stripes=self._stripes,
        )

    def _factor_shapes(self, adapter: wire.Adapter) -> dict[str, Tensor]:
        """Return what servers will find that the adapters consist of."""
        return factor_shapes(
            self._backend.shapes(), adapter.targets, adapter.rank, adapter.transposed
        )

    def _wants_stripes(self) -> bool:
        """Return whether all ranks should send: between nodes, where each has a link of its own."""
        train = self._train
        if train.weights_stripes != "auto":
            return train.weights_stripes == "always"
        return bool(self._backend.hosts_address) and not stripes_problem(train)

    def serve(self, sender: WeightSender) -> None:
        """Have the other ranks send their stripes; called in the training thread.

        Args:
            sender: it has started.
        """
        if self._stripes is not None:
            admitted = [sender.admit_rank(rank) for rank in range(1, len(self._stripes.plans))]
            self._stripes.serve(admitted, sender.settings)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the live tensors of the plan, by name."""
        if self.adapter is None:
            return self._backend.weights()
        return self._backend.factors()

    def probe(self) -> wire.Probe:
        """Return the probe for an offer of the weights."""
        return self._probe.make()

    def layout_difference(self, path: str, model: ModelSection) -> str:
        """Return the first tensor by which the offer differs from the model as servers load it.

        Args:
            path: of the model that servers load.
        """
        shapes = plain_shapes(path, model)
        train = self._train
        if self.adapter is None:
            plain = plan_of(shapes, train.weights_bucket_mib, dtype=train.weights_dtype)
        else:
            factors = factor_shapes(shapes, self.adapter.targets, self.adapter.rank)
            if not factors:
                return f"the model has no layer named {' or '.join(self.adapter.targets)}"
            plain = plan_of(factors, train.weights_bucket_mib)
        return first_difference(self.plan, plain)

    def logprobs_difference(self) -> str:
        """Return the token whose logprob differs most from plain attention's; empty if none."""
        probed = structs.replace(self.probe(), tolerance=self._probe.rounding)
        plain = self._backend.plain_logprobs(probed.token_ids.array())
        if plain is None:
            return ""
        if (token := wrong_token(probed, plain.numpy())) is None:
            return ""
        trained = probed.logprobs.array()[token]
        expected = float(plain[token])
        return (
            f"it trains token {token + 1} with logprob {trained:.6f}, "
            f"which is {expected:.6f} with plain attention"
        )


def plain_shapes(path: str, model: ModelSection) -> dict[str, Tensor]:
    """Return a model's parameters and persistent buffers by transformers' names, tied ones once."""
    module = build_empty(path, model)
    tensors: dict[str, Tensor] = dict(module.named_parameters())
    buffers = {name for name, _ in module.named_buffers()}
    state = module.state_dict()
    return tensors | {name: tensor for name, tensor in state.items() if name in buffers}


def first_difference(offered_plan: LayoutPlan, plain: LayoutPlan) -> str:
    """Return the first name or shape that differs; dtypes may."""
    offer, model = (
        {slot.spec.name: slot.spec for slot in plan.slots} for plan in (offered_plan, plain)
    )
    for name in sorted(offer.keys() | model.keys()):
        if name not in model:
            return f"{offer[name]} is in the offer, and not in the model"
        if name not in offer:
            return f"{model[name]} is in the model, and not in the offer"
        if model[name].shape != offer[name].shape:
            return f"{offer[name]} in the offer has shape {list(model[name].shape)} in the model"
    return ""
