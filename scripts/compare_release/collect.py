"""Compute the results of one section of the comparison with a release, with the code of one source tree.

`python -m scripts.compare_release` starts this module in a process for each tree, with the tree first in PYTHONPATH and this
checkout's `scripts` after it. So the modules here are always this checkout's, but `lsm_jax` and `tests` are the tree's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from compare_release import kernels, runs


def digest(tree: Any) -> str:
    """Return the SHA-256 of all arrays of a pytree: their shapes, dtypes and bytes, in order."""
    import jax
    import numpy as np

    total = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(leaf)
        total.update(f"{array.shape} {array.dtype} ".encode() + array.tobytes())
    return total.hexdigest()[:24]


def collect_ops() -> Iterator[tuple[str, str]]:
    """Yield (name, SHA-256 of outputs, states and gradients) for every case of the table of ops, in every
    form, with a state and with packed documents.
    """
    import jax
    import jax.numpy as jnp

    from tests.ops.cases import CASES, make_inputs, make_state
    from tests.ops.test_ops import gradients, settings

    def to_float32(x):
        return x.astype(jnp.float32) if jnp.result_type(x) == jnp.float64 else x

    for case in CASES:
        for form in case.forms:
            for kind in ("documents", "segments"):
                with jax.enable_x64(True):
                    given = settings(kind, case)
                    state = given.pop("state")
                    if form in ("recurrent", None) and kind == "segments":
                        state, given = make_state(case), {}
                    inputs, state = jax.tree.map(to_float32, (make_inputs(case), state))
                result = gradients(case, form, inputs, state, **given)
                yield f"{case.name} {form} {kind}", digest(result)


def collect_mixers() -> Iterator[tuple[str, str]]:
    """Yield (name, SHA-256 of outputs, states and gradients) for every method's mixer at a small width, and
    for Mixture-of-Memories with each inner mixer.
    """
    import jax
    import jax.numpy as jnp

    from lsm_jax import mixers
    from tests.mixers import mom_cases
    from tests.mixers.conftest import Small

    ids = jnp.asarray([[1] * 4 + [2] * 5 + [0], [3] * 2 + [0] + [3] * 3 + [7] * 4])
    for name, method in mixers.METHODS.items():
        small = Small(method, stirred=True)
        gradients, (y, state) = small.gradient(small.mixer, small.x)
        yield f"{name} gradients", digest(gradients)
        yield f"{name} output", digest(y)
        yield f"{name} state", digest(state)
        yield f"{name} documents", digest(small(segment_ids=ids))
        y, state = small(small.x[:, :-1], state=small.state())
        yield f"{name} prefill", digest((y, state))
        yield f"{name} decoding", digest(small(small.x[:, -1:], state=state))
    for name in mom_cases.INNER:
        mixer = mom_cases.made(name)
        yield f"mom of {name}", digest(mom_cases.gradient(mixer, mom_cases.X))
        ids = jnp.asarray([[1] * 5 + [2] * 6, [1] * 3 + [0] * 2 + [2] * 6])
        yield (
            f"mom of {name} documents",
            digest(mom_cases.call(mixer, mom_cases.X, segment_ids=ids)),
        )
        jax.clear_caches()


def main() -> None:
    """Compute the results of the section that the command line names, and write them to a file: a JSON
    object of strings by name.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section")
    parser.add_argument(
        "--tree", type=Path, required=True, help="root of the tree that is imported"
    )
    parser.add_argument("--folder", type=Path, required=True, help="folder of the comparison")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    args = parser.parse_args()
    text = runs.write_text(args.folder / "text")
    new = args.output.parent
    collectors: dict[str, Callable[[], Iterator[tuple[str, str]]]] = {
        "ops": collect_ops,
        "mixers": collect_mixers,
        "kernels": kernels.collect_kernels,
        "runs": lambda: runs.collect_runs(args.tree, new / "runs", text),
        "resume": lambda: runs.collect_resume(
            args.tree, args.folder / "reference/runs", new / "resumed", text
        ),
    }
    rows: dict[str, str] = {}
    for name, value in collectors[args.section]():
        rows[name] = value
        if sys.stderr.isatty():
            progress = f"{args.section}: {len(rows)} {name[:90]:90s}"
            print(f"\r{progress}", end="", file=sys.stderr, flush=True)
    args.output.write_text(json.dumps(rows, indent=0))


if __name__ == "__main__":
    main()
