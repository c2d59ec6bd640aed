"""Compile the Triton kernels without a GPU and count registers, spilled bytes and shared memory.

    python -m tests.kernels.triton_compiled [--write] [--capabilities 8.0,9.0] [--cases "scalar, 128"]

Prints a line for each kernel, configuration and compute capability; `--write` stores the table that `tests/kernels/test_aot_triton.py` compares
with. The configurations are those that `linear_memory` and its gradients launch for the calls in `CASES`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.triton import launch
from tests.kernels import triton_cases_attention, triton_cases_slots, triton_token_ops

TABLE = Path(__file__).with_name("triton_registers.json")
SHARED = {"8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}
"""KiB of shared memory that a program may use, by compute capability."""

# The packages of kernels that share bodies and tables of tilings.
_MEMORIES = (
    "pallas_kernels.linear_attention.",
    "pallas_kernels.delta_rule.",
    "pallas_kernels.dplr.",
)


class Case(NamedTuple):
    """A call of `linear_memory` whose kernels are compiled.

    Attributes:
        arguments: words that name optional arguments: "log_decay", with "channel" for one per key channel, "value_log_decay", "bonus",
            "segment_ids"; "constant" for a decay that is not differentiated; and "undecayed" for keys that read the undecayed memory.
        key_dim: number of key channels, K.
        value_dim: number of value channels, V.
        dtype: dtype of q, k and v.
        op: the op's name.
        length: number of tokens of each row, T; with `LONG`, in parts, only kernels that rows of one part do not launch are compiled.
        heads: number of heads.
    """

    arguments: str
    key_dim: int
    value_dim: int
    dtype: str = "bfloat16"
    op: str = "linear_memory"
    length: int = 256
    heads: int = 4


LONG = 8192
_METHODS = {
    "none": ("linear_memory", ""),
    "constant": ("linear_memory", "constant"),
    "scalar": ("linear_memory", "log_decay segment_ids"),
    "channel": ("linear_memory", "channel log_decay segment_ids"),
    "bonus": ("linear_memory", "channel log_decay bonus segment_ids"),
    "value": ("linear_memory", "value_log_decay"),
    "delta": ("delta_memory", ""),
    "delta scalar": ("delta_memory", "log_decay segment_ids"),
    "undecayed": ("delta_memory", "log_decay segment_ids undecayed"),
    "delta channel": ("delta_memory", "channel log_decay segment_ids"),
    "dplr": ("dplr_memory", "channel log_decay segment_ids"),
}
"""The op and the arguments of calls that are compiled with 256 channels, and in float32 by products in tf32."""

CASES: dict[str, Any] = {
    "none, 64": Case("", 64, 64),
    "constant, 64": Case("constant", 64, 64),
    "constant, 128": Case("constant segment_ids", 128, 128),
    "scalar, 64": Case("log_decay", 64, 64),
    "scalar, 128": Case("log_decay segment_ids", 128, 128),
    "scalar, float16": Case("log_decay", 128, 128, "float16"),
    "channel, 64": Case("channel log_decay", 64, 64),
    "channel, 128": Case("channel log_decay segment_ids", 128, 128),
    "channel, float16": Case("channel log_decay", 128, 128, "float16"),
    "bonus, 64": Case("channel log_decay bonus", 64, 64),
    "bonus, 128": Case("channel log_decay bonus segment_ids", 128, 128),
    "value, 128": Case("value_log_decay", 128, 128),
    "delta, 64": Case("", 64, 64, op="delta_memory"),
    "delta scalar, 64": Case("log_decay", 64, 64, op="delta_memory"),
    "delta scalar, 128": Case("log_decay segment_ids", 128, 128, op="delta_memory"),
    "delta scalar, float16": Case("log_decay", 128, 128, "float16", op="delta_memory"),
    "delta scalar, 512": Case("log_decay", 256, 512, op="delta_memory"),
    "undecayed, 64": Case("log_decay undecayed", 64, 64, op="delta_memory"),
    "undecayed, 128": Case("log_decay segment_ids undecayed", 128, 128, op="delta_memory"),
    "undecayed, float16": Case("log_decay undecayed", 128, 128, "float16", op="delta_memory"),
    "undecayed, 512": Case("log_decay undecayed", 256, 512, op="delta_memory"),  # Comba
    "delta channel, 64": Case("channel log_decay", 64, 64, op="delta_memory"),
    "delta channel, 128": Case("channel log_decay segment_ids", 128, 128, op="delta_memory"),
    "delta channel, 256": Case("channel log_decay segment_ids", 256, 256, op="delta_memory"),
    "delta channel, float16": Case("channel log_decay", 128, 128, "float16", op="delta_memory"),
    "dplr, 64": Case("channel log_decay", 64, 64, op="dplr_memory"),
    "dplr, 128": Case("channel log_decay segment_ids", 128, 128, op="dplr_memory"),
    "dplr, float16": Case("channel log_decay", 128, 128, "float16", op="dplr_memory"),
    **{
        f"{name}, {dtype} {channels}": Case(arguments, channels, channels, dtype, op)
        for name, (op, arguments) in _METHODS.items()
        for dtype, sizes in {"bfloat16": (256,), "float32": (64, 128, 256)}.items()
        for channels in sizes
    },
    **{
        f"{name}, parts, {dtype} {channels}": Case(
            _METHODS[name][1], channels, channels, dtype, _METHODS[name][0], LONG, heads
        )
        for name in ("delta", "delta scalar", "undecayed", "delta channel", "dplr")
        for dtype in ("bfloat16", "float16", "float32")
        for channels, heads in {64: 4, 128: 4, 256: 1}.items()
    },
    **triton_cases_attention.COMPILED,
    **triton_cases_slots.COMPILED,
    **triton_token_ops.COMPILED,
}


class Configuration(NamedTuple):
    """One kernel as it is compiled: its name, the types of its parameters, its constants, and the numbers of warps and of stages.

    Attributes:
        name: the kernel's name in its module.
        types: Triton's types of the parameters that are not constants, in order.
        constants: the constant parameters and their values.
        warps: number of warps of a program.
        stages: number of iterations of a loop whose loads are in flight.
        module: the module of the kernel.
        shared_loads: as for `launch.call`.
        limit: the argument `registers` of `launch.call`.
    """

    name: str
    types: tuple[str, ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int
    module: str
    shared_loads: bool = False
    limit: int = 0

    @property
    def label(self) -> str:
        """The configuration in words, as the key of the table."""
        given = dict(self.constants)
        if not self.module.startswith(_MEMORIES):
            dtype = {"*fp32": "fp32", "*bf16": "bf16", "*fp16": "fp16"}.get(self.types[0], "")
            options = [
                n.lower() if x is True else f"{n}={x}"
                for n, x in given.items()
                if x is not False and n.isupper()  # The others are numbers of a call.
            ]
            limit = [f"registers={self.limit}"] if self.limit else []
            return " ".join([self.name, dtype, *options, f"warps={self.warps}", *limit])
        low = "fp16" if "*fp16" in self.types else "tf32"  # of both the products are in tf32
        words = [self.name, "bf16" if str(given.get("LOW", "bf16")).endswith("bf16") else low]
        words += [f"{n}={given[n]}" for n in ("K", "V", "BK", "BV") if n in given]
        flags = ("CHANNELS", "DECAY", "GRADIENT", "DOCUMENTS", "EXCLUSIVE", "REVERSE", "ONLY_QUERY", "EXACT", "DECAYED", "UNDECAYED", "LOW_RANK", "TRANSPOSED", "SCORES", "PLAIN", "UPDATE")  # fmt: skip
        words += [n.lower() for n in flags if given.get(n)]
        if self.name == "scan" and self.types[0] == "*fp32" != self.types[1]:
            words.append("exact")  # x is not rounded before its decay
        return " ".join([*words, f"warps={self.warps}", f"stages={self.stages}"])


def configurations(case: Case | Callable[[], Any]) -> list[Configuration]:
    """Return the kernels that a call of an op and the gradients of all its inputs launch, each once. The case is a call of
    an op of memories, or a function that traces a program.
    """
    found: dict[Configuration, None] = {}
    types = {"float32": "*fp32", "float16": "*fp16", "bfloat16": "*bf16", "int32": "*i32"}

    def record(
        kernel,
        inputs,
        outputs,
        *,
        programs,
        warps,
        stages,
        in_place="",
        shared_loads=False,
        registers=0,
        captured=False,
        **constants,
    ):
        del programs
        unused = inputs[1 if in_place else 0]
        inputs = [unused if x is None else x for x in inputs]
        if captured:  # Numbers are constants of the code.
            numbers = {n: x for n, x in zip(kernel.arg_names, inputs, strict=False) if isinstance(x, (int, float))}  # fmt: skip
            constants |= numbers
            inputs = [x for x in inputs if not isinstance(x, (int, float))]
        names = [
            ("i32" if isinstance(x, int) else "fp32") if isinstance(x, (int, float)) else types[jnp.dtype(x.dtype).name]
            for x in (*inputs, *outputs.values())
        ]  # fmt: skip
        entry = tuple(sorted(constants.items()))
        key = (
            kernel.fn.__name__,
            tuple(names),
            entry,
            warps,
            stages,
            kernel.fn.__module__,
            shared_loads,
            registers,
        )
        found[Configuration(*key)] = None
        changed = {in_place: inputs[0]} if in_place else {}
        return {n: jnp.zeros(x.shape, x.dtype) for n, x in outputs.items()} | changed

    original = launch.call
    launch.call = record
    try:
        jax.clear_caches()
        trace_memory(case) if isinstance(case, Case) else case()
    finally:
        launch.call = original
        jax.clear_caches()
    if isinstance(case, Case) and case.length == LONG:
        own = [c for c in found if c.name == "link_parts" or dict(c.constants).get("UPDATE")]
        assert {c.name for c in own} == {"delta_scan", "delta_scan_backward", "link_parts"}
        return own
    return list(found)


def trace_memory(case: Case) -> None:
    """Trace a call of the case's op and the gradients of all its inputs."""
    from lsm_jax import ops

    struct, given, rows = jax.ShapeDtypeStruct, case.arguments.split(), (2, case.length)
    heads = case.heads
    inputs = {n: struct((*rows, heads, case.key_dim), jnp.dtype(case.dtype)) for n in "qk"}
    inputs["v"] = struct((*rows, heads, case.value_dim), jnp.dtype(case.dtype))
    if "log_decay" in given:
        channels = [case.key_dim] * ("channel" in given)
        inputs["log_decay"] = struct((*rows, heads, *channels), jnp.float32)
    if "value_log_decay" in given:
        inputs["value_log_decay"] = struct((*rows, heads, case.value_dim), jnp.float32)
    if "bonus" in given:
        inputs["bonus"] = struct((heads, case.key_dim), jnp.float32)
    if case.op == "delta_memory":
        inputs["beta"] = struct((*rows, heads), jnp.float32)
    if case.op == "dplr_memory":
        inputs |= dict(a=inputs["k"], b=inputs["k"])
    options: dict[str, Any] = dict(erase="undecayed") if "undecayed" in given else {}
    if "constant" in given:
        options["log_decay"] = jnp.full(heads, -0.1)
    op = functools.partial(getattr(ops, case.op), implementation="triton", **options)
    ids = struct(rows, jnp.int32) if "segment_ids" in given else None

    def both(x, ids):
        output, pull = jax.vjp(lambda x: op(**x, segment_ids=ids)[0], x)
        return pull(output)

    with products_of(case.dtype):
        jax.eval_shape(both, inputs, ids)


def products_of(dtype: str) -> Any:
    """Return the context in which the kernels accept q, k and v of a dtype: one that allows products in tf32 for float32."""
    return jax.default_matmul_precision("tensorfloat32" if dtype == "float32" else None)


def compiled(configuration: Configuration, capability: str) -> dict[str, int]:
    """Compile one kernel for a compute capability; return its registers per thread, spilled bytes (stores and loads), and bytes of shared
    memory.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(configuration.module), configuration.name)
    constants = dict(configuration.constants)
    given = iter(configuration.types)
    signature = {n: "constexpr" if n in constants else next(given) for n in kernel.arg_names}
    pointers = [n for n, (_, t) in enumerate(signature.items()) if t.startswith("*")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(n),): x for n, x in constants.items()},
        attrs={(n,): [["tt.divisibility", 16]] for n in pointers},
    )
    number = round(10 * float(capability))
    stages = launch.stages_of(configuration.stages, number, configuration.shared_loads)
    options = dict(num_warps=configuration.warps, num_stages=stages)
    options |= launch.compiler_options(configuration.limit)
    result = triton.compile(source, target=GPUTarget("cuda", number, 32), options=options)
    assert not overwritten_operands(result.asm["ttgir"]), configuration.label
    registers, spilled = registers_of(result.asm["ptx"], number)
    return dict(registers=registers, spilled=spilled, shared=result.metadata.shared)


def overwritten_operands(ttgir: str) -> list[str]:
    """Return the buffers of one tile, in Triton's code for a GPU, into which a loop copies the next tile while products that read the last
    one may be in flight.
    """
    if not re.search(r"warp_group_dot_wait .*pendings = [1-9]", ttgir):
        return []
    one = re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<1x", ttgir)
    slots = {n: b for b in one for n in re.findall(rf"(%\w+) = ttg\.memdesc_index {b}\[", ttgir)}
    for turned, slot in re.findall(r"(%\w+) = ttg\.memdesc_trans (%\w+)", ttgir):
        if slot in slots:
            slots[turned] = slots[slot]
    copied = re.findall(r"async_copy_global_to_local %\w+, (%\w+)", ttgir)
    products = re.findall(r"warp_group_dot (%\w+), (%\w+)", ttgir)
    read = {slots[x] for pair in products for x in pair if x in slots}
    return sorted(read & {slots[x] for x in copied if x in slots})


def registers_of(ptx: str, number: int) -> tuple[int, int]:
    """Return the registers per thread and the spilled bytes that the ptxas of Triton's wheel reports for PTX code."""
    import triton.backends.nvidia

    folder = Path(triton.backends.nvidia.__path__[0], "bin")
    program = folder / "ptxas-blackwell" if number >= 100 else folder / "ptxas"
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory, "kernel.ptx")
        file.write_text(ptx)
        architecture = f"sm_{number}{'a' if number >= 90 else ''}"
        command = [program if program.exists() else folder / "ptxas", "-v", f"--gpu-name={architecture}", file, "-o", f"{file}.cubin"]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    text = done.stderr + done.stdout
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    used = re.findall(r"Used (\d+) registers", text)
    return max(map(int, used)), sum(int(a) + int(b) for a, b in spills)


def main() -> None:
    """Compile the kernels and print, or store, the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write",
        action="store_true",
        help="store the table; with --cases or --kernels, its other rows stay",
    )
    parser.add_argument("--capabilities", default=",".join(launch.CAPABILITIES))
    parser.add_argument("--cases", default=";".join(CASES), help="names of CASES, between ;")
    parser.add_argument("--kernels", default="", help="names of kernels, between commas")
    arguments = parser.parse_args()
    wanted: dict[Configuration, None] = {}
    for name in arguments.cases.split(";"):
        wanted |= dict.fromkeys(configurations(CASES[name]))
    only = arguments.kernels.split(",") if arguments.kernels else None
    rows: dict[str, dict[str, list[int]]] = {}
    for configuration in wanted:
        if only and configuration.name not in only:
            continue
        for capability in arguments.capabilities.split(","):
            counts = compiled(configuration, capability)
            row = rows.setdefault(configuration.label, {})
            known = row.get(capability, [0] * len(counts))
            row[capability] = [max(x) for x in zip(counts.values(), known, strict=True)]
            print(capability, configuration.label, counts, flush=True)
    if arguments.write:
        some = only or arguments.cases != parser.get_default("cases")
        table = (json.loads(TABLE.read_text()) if some else {}) | rows
        lines = (f"{json.dumps(n)}: {json.dumps(table[n])}" for n in sorted(table))
        TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
