"""The models, built from their configs, and the loading, freezing and averaging of weights."""

from torch import nn

from ddp_trainer import registry
from ddp_trainer.config.models import ModelConfig
from ddp_trainer.models.fine_tuning import freeze, load_weights


def build_model(
    config: ModelConfig, *, image_shape: tuple[int, int, int], num_classes: int
) -> nn.Module:
    """Return the model that `config` chooses. image_shape: channels, height and width.

    Initial parameters are drawn from torch's global generator, which must have the same seed on all
    ranks. Raises ConfigError if the model does not accept images of this shape, or if model.weights
    or model.freeze does not fit the model.
    """
    model = registry.build(
        "model", config, image_shape=image_shape, num_classes=num_classes, returns=nn.Module
    )
    if config.weights is not None:
        load_weights(model, config.weights, num_classes=num_classes)
    freeze(model, config.freeze, num_classes=num_classes)
    return model
