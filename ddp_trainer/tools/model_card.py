"""The model card of an export, in Markdown."""

from collections.abc import Mapping

import yaml
from jinja2 import Environment, PackageLoader

from ddp_trainer.config.composition import to_builtins
from ddp_trainer.distributed.environment import installed_versions
from ddp_trainer.tools.trained_model import TrainedModel


def model_card(trained: TrainedModel, differences: Mapping[str, float], num_images: int) -> str:
    """Return the text of the model card.

    differences: by format, the largest difference of a probability from the checkpoint's, on
    `num_images` images.
    """
    templates = Environment(
        loader=PackageLoader("ddp_trainer.tools", "."), keep_trailing_newline=True
    )
    return templates.get_template("model_card.md.jinja").render(
        trained=trained,
        differences=differences,
        num_images=num_images,
        versions=installed_versions(),
        yaml=yaml.safe_dump(to_builtins(trained.config), sort_keys=False).strip(),
    )
