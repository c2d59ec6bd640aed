"""`selective_memory` (Mamba, S4D, GateLoop): its test cases, inputs and definition. Complex arrays are
given as real ones, which tests can change.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from lsm_jax import ops
from tests.ops.cases import Case, Family

CHANNELS, STATES = 3, 4


@dataclasses.dataclass(frozen=True)
class SelectiveCase(Case):
    """A test case of `selective_memory`, the memory with N states per channel.

    Its `arrays` may contain "decay" or "constant_decay" (Δ), "complex", "constant_b", "channel_b",
    "constant_c" and "D".

    Attributes:
        discretization: argument `discretization` of `selective_memory`.
    """

    discretization: str = "euler"

    @property
    def name(self) -> str:
        return f"{super().name}-{self.discretization}"

    @property
    def static(self) -> dict:
        return {"discretization": self.discretization}


CASES = [
    SelectiveCase("selective_memory", ("decay", "D")),
    SelectiveCase(
        "selective_memory", ("constant_decay", "complex", "constant_b", "constant_c"),
        discretization="zoh"),
    SelectiveCase("selective_memory", ("decay", "complex", "D"), discretization="zoh", core=True),
    SelectiveCase("selective_memory", ("decay", "complex", "channel_b"), discretization="none"),
    SelectiveCase("selective_memory", ("decay", "channel_b"), discretization="none"),
]  # fmt: skip


def _inputs(case, rng, shape, log_decay):
    """Draw random inputs of `selective_memory`; `v` is the op's input u, `q` is C, and names that end in _i
    are imaginary parts.
    """
    steps = (CHANNELS,) if "constant_decay" in case.arrays else (*shape, CHANNELS)
    b = (*shape, STATES)
    if "channel_b" in case.arrays:
        b = (*shape, CHANNELS, STATES)
    if "constant_b" in case.arrays:
        b = (CHANNELS, STATES)
    c = (CHANNELS, STATES) if "constant_c" in case.arrays else (*shape, STATES)
    u = rng.normal(size=(*shape, CHANNELS))
    # The gradient of a constant is a sum over tokens. It does not cancel: u is in phase with the weights of
    # `objective`.
    inputs = {"v": u + 2 * np.cos(0.3 + np.arange(u.size).reshape(u.shape))}
    # With "none", Δ is the log of the gate, and A the share of it that applies to each entry of the memory.
    inputs["decay"] = -log_decay(*steps)
    inputs["a"] = rng.uniform(0.2, 1, size=(CHANNELS, STATES))
    # Small with a constant step, whose third derivative is large, so that finite differences are accurate.
    size = 0.3 if "constant_decay" in case.arrays else 1.0
    inputs |= {"b": size * rng.normal(size=b), "q": size * rng.normal(size=c)}
    if "complex" in case.arrays:
        complex_names = ("decay", "b", "q") if case.discretization == "none" else ("a", "b", "q")
        inputs |= {f"{n}_i": rng.normal(size=inputs[n].shape) for n in complex_names}
    if "D" in case.arrays:
        inputs["skip"] = rng.normal(size=CHANNELS)
    if "q_i" in inputs:  # one array, since tests find the read side by its name
        inputs["q"] = np.stack([inputs["q"], inputs.pop("q_i")], axis=-1)
    return inputs


def _pack(case, inputs):
    def as_complex(name, sign=1.0):
        real = sign * inputs[name]
        if f"{name}_i" not in inputs:
            return real
        wide = jnp.promote_types(real.dtype, jnp.float32)
        return jax.lax.complex(real.astype(wide), inputs[f"{name}_i"].astype(wide))

    none = case.discretization == "none"
    c = inputs["q"]
    if "complex" in case.arrays:
        wide = c.astype(jnp.promote_types(c.dtype, jnp.float32))
        c = jax.lax.complex(wide[..., 0], wide[..., 1])
    arguments = dict(
        u=inputs["v"],
        delta=as_complex("decay", -1.0 if none else 1.0),
        A=as_complex("a", 1.0 if none else -1.0),
        B=as_complex("b"),
        C=c,
    )
    return arguments | ({"D": inputs["skip"]} if "skip" in inputs else {})


def _state(case, batch, *, capacity, **options):
    return ops.selective_state(
        batch, CHANNELS, STATES, is_complex="complex" in case.arrays, **options
    )


def _used(case, state):
    rng = np.random.default_rng(1)
    memory = rng.normal(size=state.memory.shape)
    if "complex" in case.arrays:
        memory = memory + 1j * rng.normal(size=state.memory.shape)
    return state._replace(memory=jnp.asarray(memory))


def _step(case, inputs, leaves, b, t, written):
    x = {n: np.asarray(a) for n, a in _pack(case, inputs).items()}

    def at(name):
        array = x[name] if x[name].ndim == 2 else x[name][b, t]
        return array if array.shape == (CHANNELS, STATES) else np.tile(array, (CHANNELS, 1))

    u, a = x["u"][b, t][:, None], x["A"]
    delta = (x["delta"] if x["delta"].ndim == 1 else x["delta"][b, t])[:, None]
    gain = {"euler": delta, "zoh": np.expm1(delta * a) / a, "none": 1.0}[case.discretization]
    if written:
        leaves[0] = np.exp(delta * a) * leaves[0] + gain * at("B") * u
    output = np.sum(at("C") * leaves[0], axis=1).real
    return output + x["D"] * u[:, 0] if "D" in x else output


FAMILIES = {
    "selective_memory": Family(
        ("u", "delta", "A", "B", "C"), _inputs, _state, _step, pack=_pack, used=_used
    )
}
