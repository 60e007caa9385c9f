"""The learner's configuration sections, for its modules and for plug-ins."""

from broker.settings.schema.algorithm import (
    AggregationMode,
    AlgorithmSection,
    CriticSection,
    RejectionSection,
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
from broker.settings.schema.teaching import DistillationSection, TeacherSection
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
    "DistillationSection",
    "EvalSection",
    "FailuresSection",
    "LoraSection",
    "MegatronSection",
    "OptimizationSection",
    "RejectionSection",
    "RewardNormalization",
    "SamplesSection",
    "TeacherSection",
    "TrackersSection",
    "TrainSection",
    "WarmStartSection",
    "kl_in_reward",
    "num_updates",
]
