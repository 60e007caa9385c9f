"""The learner's configuration sections, for its modules and for plug-ins."""

from broker.settings.schema.algorithm import (
    AggregationMode,
    AlgorithmSection,
    CriticSection,
    RewardNormalization,
    kl_in_reward,
    num_updates,
)
from broker.settings.schema.evaluation import EvalSection, WarmStartSection
from broker.settings.schema.records import (
    CheckpointSection,
    FailuresSection,
    SamplesSection,
    TrackersSection,
)
from broker.settings.schema.training import (
    Beta,
    DeepspeedSection,
    LoraSection,
    MegatronSection,
    OptimizationSection,
    TrainSection,
)

__all__ = [
    "AggregationMode",
    "AlgorithmSection",
    "Beta",
    "CheckpointSection",
    "CriticSection",
    "DeepspeedSection",
    "EvalSection",
    "FailuresSection",
    "LoraSection",
    "MegatronSection",
    "OptimizationSection",
    "RewardNormalization",
    "SamplesSection",
    "TrackersSection",
    "TrainSection",
    "WarmStartSection",
    "kl_in_reward",
    "num_updates",
]
