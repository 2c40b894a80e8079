"""The built-in schemas: a dataclass for each choice of a group and each section; their enums."""

from ddp_trainer.config.data import *
from ddp_trainer.config.images import *
from ddp_trainer.config.loggers import *
from ddp_trainer.config.losses import *
from ddp_trainer.config.metrics import *
from ddp_trainer.config.models import *
from ddp_trainer.config.observers import *
from ddp_trainer.config.optimizers import *
from ddp_trainer.config.schedulers import *
from ddp_trainer.config.schema import *
from ddp_trainer.config.sync import *

del Config  # that of ddp_trainer also converts names, mappings and numbers
