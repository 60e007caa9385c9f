"""The section ``policies``: who else plays, besides the policy that is trained."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, NonNegativeFloat, model_validator

from broker.settings.config import HttpUrl, ModelPath, PluginArguments, PluginMark, Section
from broker.settings.secret import SecretRef

# each decides what kind of player a policy is
_KINDS: Final = ("model_path", "base_url", "script")
# what only one kind reads
_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "model_path": ("engine", "engine_args", "dtype", "tokenizer"),
    "base_url": ("model", "api_key", "max_tokens", "system_prompt"),
    "script": ("args",),
}


class PolicySection(Section):
    """A player that is not trained: a model on rollout servers of its own, a model at an endpoint,
    or a script.
    """

    harmless = ("model", "dtype", "tokenizer", "temperature", "max_tokens", "system_prompt")

    # folder or hub name of weights that rollout servers of this policy serve: another model, or a
    # checkpoint of an earlier version; one of this, base_url and script
    model_path: ModelPath | None = None
    # of the servers that `rlearner up` starts, and of `rollout-server --policy`; null: as in
    # rollout
    engine: Annotated[str, PluginMark("engines", "rollout.engines:ENGINE_ARGS", "engine_args")] | (
        None
    ) = None
    # arguments of that engine, checked by its class
    engine_args: dict[str, Any] = Field(default_factory=dict)
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # null: that of model.dtype
    # same: its vocabulary must be the trained policy's; own: hubs load its tokenizer and template
    # from model_path
    tokenizer: Literal["same", "own"] = "same"
    # of an OpenAI-compatible endpoint, to which hubs send the seat's conversation
    base_url: HttpUrl | None = None
    model: str = ""  # as the endpoint names it
    api_key: SecretRef | None = None  # null: the endpoint needs none
    max_tokens: Annotated[int, Field(gt=0)] = 512  # of one answer of the endpoint
    # first message to the endpoint; empty: none
    system_prompt: str = ""
    # a name of the registry in envhub/players, or a dotted path or file path to a class
    script: Annotated[str, PluginMark("players", "envhub.players:PLAYERS", "args")] = ""
    # arguments of the script, checked by its class
    args: PluginArguments = Field(default_factory=dict)
    # of a model's sampling; null: that of the domain
    temperature: NonNegativeFloat | None = None

    @model_validator(mode="after")
    def _has_one_kind(self) -> Self:
        kinds = [name for name in _KINDS if getattr(self, name)]
        if len(kinds) != 1:
            raise ValueError(f"give one of {', '.join(_KINDS)}, not {', '.join(kinds) or 'none'}")
        for kind, names in _FIELDS.items():
            for name in names:
                if kind != kinds[0] and name in self.model_fields_set:
                    default = type(self).model_fields[name].get_default(call_default_factory=True)
                    if getattr(self, name) != default:
                        raise ValueError(f"{name} belongs to {kind}, and this has {kinds[0]}")
        if self.base_url is not None and not self.model:
            raise ValueError("base_url needs model, as the endpoint names it")
        return self
