"""The configuration of one training job as frozen, typed, validated sections; independent of Ray, files and sweeps.

`service.config.experiment` composes the same sections into the experiment that a user writes.
"""

from trainables.config.data import ColorJitterConfig, DataConfig, DeviceAugmentConfig, PolicyConfig
from trainables.config.distill import DistillConfig, InitStageOptions, MethodOptions, init_epochs
from trainables.config.evaluation import EvalConfig
from trainables.config.job import (
    FEATURES_TAP,
    DataIdentity,
    EvaluateConfig,
    FillConfig,
    Measure,
    Precision,
    RunStore,
    SplitIdentity,
    TrainConfig,
    TrainingConfig,
)
from trainables.config.models import AssistantConfig, StudentConfig, TeacherConfig, TeacherOfSeveralConfig, WeightedConfig
from trainables.config.optim import LossOptimConfig, OptimConfig
from trainables.config.scale import ScaleConfig
from trainables.config.section import Count, Natural, NonNegative, Positive, Probability, Section

__all__ = [
    "FEATURES_TAP",
    "AssistantConfig",
    "ColorJitterConfig",
    "Count",
    "DataConfig",
    "DataIdentity",
    "DeviceAugmentConfig",
    "DistillConfig",
    "EvalConfig",
    "EvaluateConfig",
    "FillConfig",
    "InitStageOptions",
    "LossOptimConfig",
    "Measure",
    "MethodOptions",
    "Natural",
    "NonNegative",
    "OptimConfig",
    "PolicyConfig",
    "Positive",
    "Precision",
    "Probability",
    "RunStore",
    "ScaleConfig",
    "Section",
    "SplitIdentity",
    "StudentConfig",
    "TeacherConfig",
    "TeacherOfSeveralConfig",
    "TrainConfig",
    "TrainingConfig",
    "WeightedConfig",
    "init_epochs",
]
