"""The table of methods (published mixers): what a method's entry describes, and functions that find a method by its
config or its name and build its mixer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from flax import nnx

from lsm_jax.mixers import checks
from lsm_jax.mixers.base import Mixer
from lsm_jax.names import did_you_mean

ONLINE_NOTE = "the gradient depends on the memory: updates do not compose"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """The description of one method (a published mixer): its paper, op, formulas, config and module; one row of the
    table of methods.

    Attributes:
        name: the name in presets and configs.
        paper: the reference of its publication.
        op: the function of `lsm_jax.ops` that computes it.
        gate: the factor of the memory at each token, as text.
        write: the term that is added to the memory, as text.
        read: how the output is computed from the memory, as text.
        state: the amount of numbers that one sequence carries from token to token, as a formula: K and V are
            the key and value channels of a head, N the numbers per channel.
        forms: the forms of the op; empty if it has none.
        config: the dataclass of its config.
        module: the class of its layer, a `Mixer`.
        feedforward: the feedforward of its published block, a name in `lsm_jax.feedforward.FEEDFORWARDS`;
            None if it has none.
        in_loop: whether a training step compiles its layers as a loop unless the config says otherwise, since it takes minutes to compile
            them one after the other.
        fusions_tuned: whether XLA may compile each fusion in several ways on a GPU and take the fastest; where it may not, one of these ways
            takes minutes.
        note: further text for the table, such as the reason why it lacks a form.
    """

    name: str
    paper: str
    op: str
    gate: str
    write: str
    read: str
    state: str
    forms: tuple[str, ...] = checks.FORMS
    config: type
    module: Any
    feedforward: str | None = "swiglu"
    in_loop: bool = False
    fusions_tuned: bool = True
    note: str = ""


METHODS: dict[str, Method] = {}
"""Every method by name, in the order of the README's table."""

WRAPPERS: dict[str, Method] = {}
"""Mixers around other mixers, and mixers without a memory: not rows of the table, but mixers everywhere else."""


def register(method: Method, *, wrapper: bool = False) -> None:
    """Add a method to the table, for use in configs, models, training and decoding.

    A method needs one file, inside or outside of this package: a config dataclass with `for_width`,
    `validate` and `flops_per_token`, a `Mixer` with `write`, `read`, `finish` and `init_memory`, and

        METHOD = Method(name="toy", ..., config=ToyConfig, module=Toy)

    A file of this package is listed in `lsm_jax/mixers/__init__.py`; for another, `mixers.register(METHOD)` must be
    called before a model or a run with this method is made or loaded. Where the same file is run again, as config files
    are, its method replaces that of before.

    Args:
        method: the row to add.
        wrapper: whether the method wraps other mixers or has no memory; it is then added to `WRAPPERS` instead of `METHODS`.

    Raises:
        ValueError: a method of this name or with this config class exists already, from another file.
    """
    table, registered = WRAPPERS if wrapper else METHODS, METHODS | WRAPPERS
    if not _is_same_file_again(table.get(method.name), method):
        if method.name in registered:
            raise ValueError(
                f"method={method.name!r} exists already; registered are {', '.join(registered)}"
            )
        for other in registered.values():
            if other.config is method.config:
                raise ValueError(
                    f"method={method.name!r}: config={method.config.__name__} is the config of method {other.name!r}; "
                    "accepted is a class of its own"
                )
    table[method.name] = method


def _is_same_file_again(before: Method | None, method: Method) -> bool:
    """Return whether a file that defined and registered a method was run once more and made its classes anew."""
    if before is None or before.config is method.config:
        return False
    return bool(_files(before.module) & _files(method.module))


def _files(module: type) -> set[str]:
    """Return the paths of the files in which the functions of a class were written, without those that flax adds."""
    functions = (getattr(value, "__func__", value) for value in vars(module).values())
    return {
        f.__code__.co_filename
        for f in functions
        if hasattr(f, "__code__") and f.__module__ == module.__module__
    }


def method_of(config: Any) -> Method:
    """Return the registered method of a config.

    Raises:
        ValueError: no method has a config of this type.
    """
    registered = (*METHODS.values(), *WRAPPERS.values())
    for method in registered:
        if type(config) is method.config:
            return method
    known = ", ".join(m.config.__name__ for m in registered)
    raise ValueError(f"mixer={config!r} is no mixer's config; accepted are {known}")


def get_method(name: str) -> Method:
    """Return the method (a published mixer) that is registered under `name`, such as "gla".

    Raises:
        ValueError: there is none; the message lists the names that exist.
    """
    registered = METHODS | WRAPPERS
    if name not in registered:
        near = did_you_mean(name, registered)
        raise ValueError(
            f"method={name!r} does not exist; accepted are {', '.join(registered)}{near}"
        )
    return registered[name]


def build(
    config: Any,
    hidden_size: int,
    *,
    rngs: nnx.Rngs | None = None,
    init_std: float = 0.02,
    layer: jax.Array | int = 0,
    num_layers: int = 1,
    loss_layers: int | None = None,
) -> Mixer:
    """Build the mixer that a config describes, for a model of width `hidden_size`.

    Args:
        config: of a type in `METHODS` or `WRAPPERS`, or a method's name: "gla" is the published proportions at this width,
            `GLAConfig.for_width(hidden_size)`.
        hidden_size: channels of the residual stream.
        rngs: source of the initial parameters; None is `nnx.Rngs(0)`.
        init_std: standard deviation of projections, except where the method has its own.
        layer: the layer's index in the model, for methods whose initial parameters depend on it.
        num_layers: the model's depth, for the same.
        loss_layers: the number of layers over which a loss that the mixer reports is averaged; None is `num_layers`.
    """
    if isinstance(config, str):
        config = get_method(config).config.for_width(hidden_size)
    rngs = nnx.Rngs(0) if rngs is None else rngs
    module = method_of(config).module
    depth: dict[str, Any] = dict(layer=layer, num_layers=num_layers) if module.uses_depth else {}
    if module.has_losses:
        depth["loss_layers"] = loss_layers
    return module(config, hidden_size, rngs=rngs, init_std=init_std, **depth)
