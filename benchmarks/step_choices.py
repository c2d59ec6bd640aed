"""Apply what a case of the benchmark `model_step` chooses: a config's fields, and parts of the library in another form than by default."""

from __future__ import annotations

import ast
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.registry import UsageError
from lsm_jax.feedforward import rwkv7_channel_mix
from lsm_jax.mixers import mamba2, normed_product
from lsm_jax.mixers import rwkv7 as rwkv7_mixer
from lsm_jax.mixers.layers import recomputed
from lsm_jax.models import block, decoder, unstack
from lsm_jax.models import config as config_of_models
from lsm_jax.ops.convolution import backends as convolution
from lsm_jax.ops.rwkv7 import backends as rwkv7
from lsm_jax.training import TrainConfig
from pallas_kernels.delta_rule.hopper import chunk_backward as delta_chunks
from pallas_kernels.linear_attention.hopper import scalar_decay, scalar_scan

MATMUL = (*config_of_models.MATMUL, "fp8_head")  # fp8_head: the head in FP8, too
RWKV7_PARTS = ("before", "forward", "rows", "squares", "values")  # what `leave_out` knows


def apply(case: dict[str, Any], config: TrainConfig) -> None:
    """Set the config's fields as the case says, and replace parts of the library in this process, which measures one case.

    Args:
        case: the fields of the row that identify it.
        config: the training config of its variant; it is changed.
    """
    config.model.vocab_size, config.model.remat = case["vocab_size"], case["remat"]
    config.model.unroll_layers = case.get("unrolled")
    matmul = case.get("matmul", "default")
    config.model.matmul = matmul.removesuffix("_head")
    config.model.head_matmul = "fp8" if matmul == "fp8_head" else "default"
    if name := case.get("implementation"):
        use_implementation(config, name)
    set_fields(config, case.get("mixer", ""))
    if case.get("unit_length") == "xla":
        convolution.kernel_normalizes = lambda name, call: False
    if (norms := case.get("norms")) in ("xla", "product"):
        block.fuses_gradient = lambda x: False
    if norms == "backward":
        block.fuses_sum = lambda x: False
    if norms in ("xla", "stream"):
        for mixer in (mamba2, normed_product):
            mixer.fuses_product = lambda x, gate, group: False
    if part := case.get("rwkv7"):
        leave_out(part)
    if case.get("pairs") == "apart":
        scalar_decay.GRADIENTS_OF_PAIRS = False
    if case.get("pairs") == "roles":
        scalar_scan.ROLES = True
    if case.get("stacks") == "concatenated":
        unstack.LEAST_SIZE = math.inf
    if case.get("swiglu") == "apart":
        decoder.join_stacks = lambda periods, remat: periods
    if case.get("delta_chunks") == "kept":
        delta_chunks.fits_streamed = lambda depth, values: False
    if size := case.get("loss_chunk_size"):
        config.model.loss_chunk_size = size


def use_implementation(config: TrainConfig, name: str) -> None:
    """Select a backend by its name for the memories or the attention of all mixers of a model."""
    for layer in config.model.layers.values():
        mixer: Any = layer.mixer
        owner = mixer.op if hasattr(mixer, "op") else mixer
        owner.implementation = name


def set_fields(config: TrainConfig, text: str) -> None:
    """Set fields of the mixers in a model's pattern, such as "lower_bound=-5.0"; values are Python's literals.

    Raises:
        UsageError: the text is no list of FIELD=VALUE with commas between them, or a mixer of its pattern has no such field or does not accept the value.
    """
    try:
        call = ast.parse(f"dict({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("a field has no value")
        fields: dict[Any, Any] = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
        for letter in set(config.model.pattern):
            layer = config.model.layers[letter]
            layer.mixer = dataclasses.replace(layer.mixer, **fields)
            layer.mixer.validate(config.model.hidden_size)
    except (TypeError, ValueError, SyntaxError) as error:
        raise UsageError(f"--mixer {text}: accepted is FIELD=VALUE,...: {error}") from None


def leave_out(part: str) -> None:
    """Compute one part of RWKV7's elementwise work as it was before: `forward` the gates and outputs by XLA forward, `rows` the tokens before
    as an array with a gradient of its own, `squares` the squared ReLU from its saved argument, `values` the mixed values again in the
    backward pass; `before` all of them.
    """

    def within(name: str) -> bool:
        return part in (name, "before")

    if within("forward"):
        rwkv7.compute_gates = lambda interpret, arguments: rwkv7.xla.gates(**arguments)
        rwkv7.compute_output = lambda interpret, eps, given: rwkv7.xla.output(**given, eps=eps)
    if within("rows"):
        rwkv7_mixer.RWKV7.in_rows = staticmethod(lambda context: False)
    if within("squares"):
        square = recomputed(lambda x: jnp.square(jax.nn.relu(x)))
        rwkv7_channel_mix.squared_relu = square
    if within("values"):
        rwkv7_mixer.saved = lambda x: x
