"""The project's own schemas: dataclasses with the keys of each choice, and of other sections.

`Config` also takes the name of a choice or a mapping. A schema has a type for each key, and other
schemas may extend it.
"""

from ddp_trainer.config.data import (
    Cifar10Config as Cifar10Config,
    DigitsConfig as DigitsConfig,
    FashionMnistConfig as FashionMnistConfig,
    ImageFilesConfig as ImageFilesConfig,
    ImageFolderConfig as ImageFolderConfig,
    ManifestConfig as ManifestConfig,
    SyntheticConfig as SyntheticConfig,
    TorchvisionDataConfig as TorchvisionDataConfig,
)
from ddp_trainer.config.images import (
    AugmentConfig as AugmentConfig,
    FileAugmentConfig as FileAugmentConfig,
)
from ddp_trainer.config.loggers import (
    JsonlConfig as JsonlConfig,
    MlflowConfig as MlflowConfig,
    TensorBoardConfig as TensorBoardConfig,
    WandbConfig as WandbConfig,
)
from ddp_trainer.config.losses import (
    BCEConfig as BCEConfig,
    CrossEntropyConfig as CrossEntropyConfig,
    FocalConfig as FocalConfig,
)
from ddp_trainer.config.metrics import (
    AUROCConfig as AUROCConfig,
    BalancedAccuracyConfig as BalancedAccuracyConfig,
    MacroF1Config as MacroF1Config,
    TopKConfig as TopKConfig,
)
from ddp_trainer.config.models import (
    LeNetConfig as LeNetConfig,
    ResNet18Config as ResNet18Config,
    TimmModelConfig as TimmModelConfig,
    TorchvisionModelConfig as TorchvisionModelConfig,
)
from ddp_trainer.config.observers import (
    EarlyStoppingConfig as EarlyStoppingConfig,
    ProfilerConfig as ProfilerConfig,
    ReportConfig as ReportConfig,
)
from ddp_trainer.config.optimizers import (
    AdamWConfig as AdamWConfig,
    LAMBConfig as LAMBConfig,
    LARSConfig as LARSConfig,
    SGDConfig as SGDConfig,
)
from ddp_trainer.config.schedulers import (
    ConstantConfig as ConstantConfig,
    CosineConfig as CosineConfig,
    OneCycleConfig as OneCycleConfig,
    StepConfig as StepConfig,
)
from ddp_trainer.config.schema import (
    CheckConfig as CheckConfig,
    CheckpointConfig as CheckpointConfig,
    EmaConfig as EmaConfig,
    RecoveryConfig as RecoveryConfig,
)
from ddp_trainer.config.sync import (
    AllReduceConfig as AllReduceConfig,
    DataParallelConfig as DataParallelConfig,
    DDPConfig as DDPConfig,
    LocalSGDConfig as LocalSGDConfig,
    NoSyncConfig as NoSyncConfig,
    ParameterServerConfig as ParameterServerConfig,
    ReplicasConfig as ReplicasConfig,
    RingConfig as RingConfig,
)
