"""The command `lsm`: training, evaluation, data, conversion and planning, and what is known about methods and devices.

`lsm --help` lists the commands. This package imports JAX only when a command needs it.
"""

from lsm_jax.cli.main import main

__all__ = ["main"]
