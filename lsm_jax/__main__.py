"""`python -m lsm_jax` is the command `lsm`."""

import sys

from lsm_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
