"""The model card of an export, in Markdown."""

from collections.abc import Mapping

import yaml
from jinja2 import Environment, PackageLoader

from ddp_trainer.config.composition import to_builtins
from ddp_trainer.config.errors import printable
from ddp_trainer.distributed.environment import installed_versions
from ddp_trainer.tools.trained_model import TrainedModel


def model_card(trained: TrainedModel, differences: Mapping[str, float], num_images: int) -> str:
    """Return the text of the model card.

    differences: for each format, the largest difference between a probability of the file and that
    of the checkpoint, on `num_images` images; with 0 images, they were not compared.
    """
    templates = Environment(
        loader=PackageLoader("ddp_trainer.tools", "."), keep_trailing_newline=True
    )
    templates.filters["code"] = code
    return templates.get_template("model_card.md.jinja").render(
        trained=trained,
        differences=differences,
        num_images=num_images,
        versions=installed_versions(),
        yaml=yaml.safe_dump(to_builtins(trained.config), sort_keys=False).strip(),
    )


def code(text: str) -> str:
    """Return a text of a stranger as code of Markdown, in which nothing is a link or HTML."""
    fence = "`" * (1 + text.count("`"))
    space = " " * ("`" in text)
    return f"{fence}{space}{printable(text)}{space}{fence}"
