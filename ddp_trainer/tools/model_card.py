"""The model card of an export, in Markdown."""

from collections.abc import Mapping

import yaml
from jinja2 import Environment, PackageLoader

from ddp_trainer.config.composition import to_builtins
from ddp_trainer.tools.trained_model import TrainedModel


def model_card(
    trained: TrainedModel,
    differences: Mapping[str, float],
    *,
    num_images: int,
    inside: bool,
    versions: Mapping[str, str],
) -> str:
    """Return the text of the model card.

    differences: by format, the largest difference of a probability from the checkpoint's, on
    `num_images` images. inside: whether the exported files normalize the images themselves.
    """
    preprocessing = trained.preprocessing
    loss, top1, count = trained.evaluation
    templates = Environment(
        loader=PackageLoader("ddp_trainer.tools", "."), keep_trailing_newline=True
    )
    return templates.get_template("model_card.md.jinja").render(
        trained=trained,
        config=trained.config,
        class_names=trained.class_names,
        split=trained.config.data.eval_split,
        loss=loss,
        top1=top1,
        count=count,
        shape=preprocessing.image_shape,
        mean=preprocessing.mean,
        std=preprocessing.std,
        crop=preprocessing.center_crop,
        differences=differences,
        num_images=num_images,
        inside=inside,
        versions=versions,
        yaml=yaml.safe_dump(to_builtins(trained.config), sort_keys=False).strip(),
    )
