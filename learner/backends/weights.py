"""The policy's weights as the learner reads them: whole, by state-dict name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from torch import Tensor

from learner.backends.models.lora import Find
from learner.backends.models.policy import PolicyModel
from learner.backends.parts.names import ADAPTER, MODEL
from learner.backends.parts.slices import Slice
from learner.backends.sent_runs import SentRun

# Of weights gathered at once: what rank 0's device holds of them in addition to its own part.
BUCKET_BYTES: Final = 32 << 20


class PolicyWeights:
    """The weights of a policy that this process holds whole."""

    # Names of weights that are gathered together; empty where nothing must be gathered.
    buckets: Sequence[Sequence[str]] = ()

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy

    def shapes(self) -> dict[str, Tensor]:
        """Return all weights on the meta device."""
        return self._policy.shapes()

    def live(self) -> Mapping[str, Tensor]:
        """Return the live tensors, adapters merged into them."""
        return self._policy.weights()

    def gather(self, bucket: int) -> dict[str, Tensor]:
        """Return the whole weights of a bucket; called by all ranks at the same time.

        Raises:
            TypeError: if every rank holds all weights.
        """
        raise TypeError(f"{type(self).__name__} gathers no bucket {bucket}")

    def slices(self) -> Iterator[Slice]:
        """Yield this rank's slices of what is trained: ``model.<name>`` or ``adapter.<name>``."""
        for name, tensor in self._named(self._policy.tensors().__getitem__).items():
            yield Slice.whole(name, tensor)

    def sent_runs(self, rank: int, size: int) -> Iterator[SentRun]:
        """Yield what a rank of ``size`` sends; together the ranks send everything once."""
        for piece in self.slices():
            yield SentRun.of(piece, rank, size)

    def _named(self, find: Find) -> dict[str, Tensor]:
        """Return the tensors that checkpoints hold by their names there, tied ones once."""
        if self._policy.adapters is not None:
            return {
                ADAPTER + name: tensor
                for name, tensor in self._policy.adapters.factors(find).items()
            }
        return {MODEL + name: find(name) for name in self.shapes()}

    def factors(self) -> dict[str, Tensor]:
        """Return the whole adapters by peft's names; collective if sharded."""
        adapters = self._policy.adapters
        if adapters is None:
            return {}
        return adapters.factors(self._policy.tensors().__getitem__)


class ShardedWeights(PolicyWeights):
    """The weights of a policy that ranks are about to divide; shapes are those of now."""

    def __init__(self, policy: PolicyModel) -> None:
        super().__init__(policy)
        self._shapes = policy.shapes()
        self.buckets = buckets_of(self._shapes)

    def shapes(self) -> dict[str, Tensor]:
        """Return all weights on the meta device."""
        return self._shapes


class GatheredWeights(Mapping[str, Tensor]):
    """Whole tensors by name; reading one gathers its bucket and drops the bucket before."""

    def __init__(
        self,
        names: Sequence[str],
        buckets: Sequence[Sequence[str]],
        gather: Callable[[int], dict[str, Tensor]],
    ) -> None:
        self._names = list(names)
        self._gather = gather
        self._bucket = {name: index for index, bucket in enumerate(buckets) for name in bucket}
        self._gathered: tuple[int, dict[str, Tensor]] = (-1, {})

    def __getitem__(self, name: str) -> Tensor:
        index = self._bucket[name]
        if self._gathered[0] != index:
            # Free the previous bucket first.
            self._gathered = (-1, {})
            self._gathered = (index, self._gather(index))
        return self._gathered[1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def buckets_of(shapes: Mapping[str, Tensor]) -> list[list[str]]:
    """Group neighbouring names into buckets of at most ``BUCKET_BYTES``."""
    buckets: list[list[str]] = []
    room = 0
    for name, tensor in shapes.items():
        if tensor.nbytes > room or not buckets:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(name)
        room -= tensor.nbytes
    return buckets
