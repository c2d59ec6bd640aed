"""Published checkpoints into runs of this library."""

from lsm_jax.convert.checkpoint import Checkpoint
from lsm_jax.convert.fox import fox_config, fox_params, import_fox

__all__ = ["Checkpoint", "fox_config", "fox_params", "import_fox"]
