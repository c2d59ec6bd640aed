"""The processes of `benchmarks.peers.fla`: they compile and time flash-linear-attention's operations under
PyTorch.

`python -m benchmarks.peers.fla_worker warm CASES BIAS FOLDER INDEX` compiles, `... time BIAS` measures, `... check` imports the peer.
None imports JAX.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.fla import CAPABILITY, NAME, SHARED_MEMORY, UNKNOWN
from benchmarks.peers.fla_models import MODELS, model_of, mom

_STEPS = 50  # of one token
_HEAD_DIM = 128  # of a normalised convolution: `pallas_kernels.short_convolution.cases.TIMED_HEAD_DIM`, whose package imports JAX
_TOKENS = 1024  # of the rows on which kernels are compiled
_WHOLE = 4  # processes that compile a model's kernels on all its tokens, too


def _bare_package(name: str) -> Any:
    """Import a Python package without running its `__init__`, and return it; None if it is not installed."""
    spec: Any = importlib.util.find_spec(name)
    if spec is None:
        return None
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations)
    return package


def _as_card(capability: str) -> None:
    """Show PyTorch, Triton and the peer a card of an older compute capability, with its shared memory: the peer then chooses the blocks
    that it has for that card, and Triton's search leaves out those that would not fit there.
    """
    import torch  # pyrefly: ignore[missing-import]
    from triton.runtime import driver  # pyrefly: ignore[missing-import]

    utils: Any = (
        driver.active.utils
    )  # before PyTorch is changed: the driver itself reads the card's capability from it
    major, minor = map(int, capability.split("."))
    torch.cuda.get_device_capability = lambda *device, **options: (major, minor)
    name = torch.cuda.get_device_name
    # The peer knows Hopper by this name, too.
    torch.cuda.get_device_name = lambda *device: name(*device).replace("NVIDIA H", f"sm_{major}{minor} on H")  # fmt: skip
    properties = utils.get_device_properties

    def limited(device: int) -> dict[str, Any]:
        known = properties(device)
        return known | dict(max_shared_mem=min(SHARED_MEMORY[capability], known["max_shared_mem"]))

    utils.get_device_properties = limited


def _operations() -> dict[str, Callable]:
    """Return flash-linear-attention's function for each operation that the benchmarks name; the functions
    take the inputs that `_calls` makes.
    """
    if CAPABILITY in os.environ:
        _as_card(os.environ[CAPABILITY])
    # Their `__init__` modules import CUDA extensions, and all layers and models.
    _bare_package("mamba_ssm")
    package = _bare_package("fla")
    package.__version__ = importlib.metadata.version(NAME)
    import fla.ops.common.chunk_o as chunk_o  # pyrefly: ignore[missing-import]

    # Older versions of Triton compute one backward wrongly, but only its speed matters here.
    chunk_o.TRITON_ABOVE_3_7_1 = True
    from fla import ops  # pyrefly: ignore[missing-module-attribute]
    from fla.modules.causal_conv1d import causal_conv1d  # pyrefly: ignore[missing-import]
    from fla.modules.norm.l2norm import l2norm  # pyrefly: ignore[missing-import]

    def convolution(x, weight, bias):
        return causal_conv1d(x, weight, bias, activation="silu", backend="triton")

    def normalised_convolution(x, weight, bias):
        y = convolution(x, weight, bias)[0]
        return (l2norm(y.view(*y.shape[:2], -1, _HEAD_DIM)).view(y.shape),)

    return {
        "no decay": lambda q, k, v: ops.chunk_linear_attn(q, k, v, normalize=False),
        "constant decay": lambda q, k, v: ops.chunk_retention(q, k, v),
        "scalar decay": lambda q, k, v, g: ops.chunk_simple_gla(q, k, v, g),
        "key decay": lambda q, k, v, g: ops.chunk_gla(q, k, v, g),
        "key decay and bonus": lambda q, k, v, g, u: ops.chunk_rwkv6(q, k, v, g, u),
        # Its one kernel with decays of value channels goes token by token.
        "value decay": lambda q, k, v, g: ops.fused_recurrent_gla(q, k, v, gv=g),
        "delta rule": lambda q, k, v, b: ops.chunk_delta_rule(q, k, v, b),
        "undecayed delta rule": lambda q, k, v, b, g: ops.chunk_comba(q, k, v, k, g, b),
        "gated delta rule": lambda q, k, v, b, g: ops.chunk_gated_delta_rule(q, k, v, g, b),
        "kda": lambda q, k, v, b, g: ops.chunk_kda(q, k, v, g, b),
        "rwkv7": lambda q, k, v, a, b, w: ops.chunk_rwkv7(q, w, k, v, a, b),
        "slot memory": lambda q, k, v, s, g: ops.chunk_gsa(q, k, v, s, g),
        "forgetting attention": lambda q, k, v, g: (ops.parallel_forgetting_attn(q, k, v, g),),
        "convolution": convolution,
        "normalised convolution": normalised_convolution,
        "one token with decay": lambda q, k, v, g, h: ops.fused_recurrent_gla(
            q, k, v, gk=g, initial_state=h, output_final_state=True
        ),
        "one token by delta rule": lambda q, k, v, b, g, h: ops.fused_recurrent_gated_delta_rule(
            q, k, v, g=g, beta=b, initial_state=h, output_final_state=True
        ),
        "mom": mom,
    } | dict.fromkeys(MODELS, model_of)


def _calls(call: Callable, op: str, shape: Sequence[int], bias: float) -> tuple[Callable, Callable]:
    """Return two functions that run one of the peer's operations on random inputs: forward, and forward and
    backward with the gradients of all inputs.

    The random inputs have the shapes and distributions of those in `benchmarks.cases.kernels`.
    """
    if op == "mom":
        return call(*shape)
    import torch  # pyrefly: ignore[missing-import]
    from torch.nn.functional import logsigmoid, normalize  # pyrefly: ignore[missing-import]

    batch, length, heads, dim = shape
    one_token = op.startswith("one token")
    length = 1 if one_token else length
    bf16 = dict(device="cuda", dtype=torch.bfloat16)
    q, k, v, do = (torch.randn(batch, length, heads, dim, **bf16) for _ in range(4))
    unit = normalize(k.float(), dim=-1).bfloat16()
    scalar, channel = (batch, length, heads), (batch, length, heads, dim)

    def gate(size, bias=3.0):
        return logsigmoid(torch.randn(*size, device="cuda") + bias)

    def memory():
        return torch.randn(batch, heads, dim, dim, device="cuda")

    beta = torch.rand(*scalar, **bf16)
    inputs = {
        "scalar decay": lambda: (q, k, v, gate(scalar)),
        "key decay": lambda: (q, k, v, gate(channel)),
        "value decay": lambda: (q, k, v, gate(channel)),
        "key decay and bonus": lambda: (
            (q, k, v, gate(channel).bfloat16(), torch.randn(heads, dim, **bf16))
        ),
        "delta rule": lambda: (q, unit, v, beta),
        "gated delta rule": lambda: (q, unit, v, beta, gate(scalar)),
        "undecayed delta rule": lambda: (q, unit, v, beta, gate(scalar)),
        "convolution": lambda: _convolved(q, do),
        "normalised convolution": lambda: _convolved(q, do),
        "one token with decay": lambda: (q, unit, v, gate(channel), memory()),
        "one token by delta rule": lambda: (q, unit, v, beta, gate(scalar), memory()),
        "kda": lambda: (q, unit, v, beta, gate(channel)),
        "rwkv7": lambda: (
            (q, k, v, -unit, unit * torch.rand_like(unit), -0.6 * torch.rand_like(unit))
        ),
        "slot memory": lambda: (q, k, v, *_slots(gate((*scalar, 64), 0.0) / 8)),
        "forgetting attention": lambda: (q, k, v, gate(scalar, bias)),
    }.get(op, lambda: (q, k, v))()
    if one_token:
        return (_steps(call, inputs),) * 2
    do = do.view(inputs[0].shape)
    for tensor in inputs:
        tensor.requires_grad_(True)

    def forward():
        return call(*inputs)[0]

    def both():
        for tensor in inputs:
            tensor.grad = None
        forward().backward(do)

    return forward, both


def _convolved(x: Any, like: Any) -> tuple[Any, Any, Any]:
    """Return the tokens [B, T, H * D], the weight of four tokens and the bias of a short convolution."""
    import torch  # pyrefly: ignore[missing-import]

    x = x.flatten(2)
    return x, torch.randn(x.shape[2], 4).to(like), torch.randn(x.shape[2]).to(like)


def _steps(call: Callable, inputs: tuple) -> Callable:
    """Return a function that runs `_STEPS` tokens, each from the memory of the one before, as a graph of CUDA, so that the host launches no
    single kernel.
    """
    import torch  # pyrefly: ignore[missing-import]

    *arrays, memory = inputs

    @torch.no_grad()
    def run():
        state = memory
        for _ in range(_STEPS):
            _, state = call(*arrays, state)
        return state

    run()  # compiles
    torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _slots(decay: Any) -> tuple[Any, Any]:
    """Return, for the peer's slot memory (GSA), the strengths with which slots are written, 1 - e^decay,
    and the slots' log decays.
    """
    return (1 - decay.exp()).bfloat16().detach(), decay.detach()


def _warm(cases: list, bias: float, claims: Path, index: int) -> None:
    """Compile, into Triton's cache, those Triton configurations of the peer's kernels that no other process
    compiles.

    A process claims a configuration by creating a file in the folder `claims`. `cases` are the measured
    operations and shapes, `bias` is the mean of the gates before the sigmoid, and `index` the process's
    number.
    """
    import torch  # pyrefly: ignore[missing-import]
    from triton.runtime.autotuner import Autotuner  # pyrefly: ignore[missing-import]

    def text_of(value):
        if isinstance(value, torch.Tensor):
            return str(value.dtype)
        return "" if callable(value) else str(value)

    def run(tuner, *args, **kwargs):
        tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
        configs = tuner.prune_configs(kwargs) if len(tuner.configs) > 1 else tuner.configs
        case = [tuner.base_fn.__module__, tuner.base_fn.__name__, *map(text_of, args)]
        case += [f"{name}={text_of(value)}" for name, value in sorted(kwargs.items())]
        for config in configs[index % len(configs) :] + configs[: index % len(configs)]:
            name = hashlib.sha1("|".join([*case, str(config)]).encode()).hexdigest()
            try:
                os.close(os.open(claims / name, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            try:
                tuner.fn.run(*args, **{**kwargs, **config.all_kwargs(), "warmup": True})
            except Exception:  # the search skips such a configuration too
                pass
        for config in configs:
            try:
                return tuner.fn.run(*args, **{**kwargs, **config.all_kwargs()})
            except Exception:  # too large for the card
                continue
        raise RuntimeError(
            f"none of the Triton configurations of the kernel {tuner.base_fn.__name__} runs on this GPU"
        )

    operations = _operations()
    Autotuner.run = run
    shapes = list(dict.fromkeys(shape for _, shape in cases))
    for shape in shapes:  # in order; each process begins with another operation of a shape
        ops = [op for op, at in cases if at == shape and op.removeprefix("model ") in operations]
        start = index % max(1, len(ops))
        for op in ops[start:] + ops[:start]:
            batch, length, *rest = map(int, shape.split("x"))
            try:
                if op.startswith("model "):
                    # Few tokens, so that there can be many processes; two rows, since Triton compiles another kernel for a number
                    # that is 1. Then all tokens in some processes: blocks of norms and token shifts depend on their number.
                    sizes = [(min(batch, 2), min(length, _TOKENS))]
                    if index < _WHOLE:
                        sizes.append((batch, length))
                    for rows, tokens in sizes:
                        # Two layers, since the peer's RWKV7 divides by their number less one.
                        model_of(op[6:], rows, tokens, num_hidden_layers=2)()
                else:
                    size = (batch, min(length, _TOKENS) if rest else length, *rest)
                    forward, both = _calls(operations[op], op, size, bias)
                    both()
                    with torch.no_grad():
                        forward()
                torch.cuda.synchronize()
            except Exception as error:
                print(f"{op} {shape}: {type(error).__name__} {error}"[:300], file=sys.stderr)


def _batches(call: Callable, batches: int = 7, calls: int = 20) -> float:
    """Return the median over `batches` batches of the milliseconds of a call, measured as
    `benchmarks.timing.batch_milliseconds` does.
    """
    import torch  # pyrefly: ignore[missing-import]

    times = []
    for _ in range(batches):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / calls)
    return 1e3 * sorted(times)[batches // 2]


def _check() -> None:
    """Import the peer, and print as JSON the file of the Triton that it uses."""
    import torch  # noqa: F401 # pyrefly: ignore[missing-import]
    import triton  # pyrefly: ignore[missing-import]

    _operations()
    print(json.dumps(dict(triton=triton.__file__)), flush=True)


def _time(bias: float) -> None:
    """Print one line of JSON once the peer is imported. Then read cases from stdin, one line of JSON each: operation, shape, and whether the
    blocks of the search before are used again. Time the peer on each and print its row as JSON.
    """
    import torch  # pyrefly: ignore[missing-import]
    from triton import testing  # pyrefly: ignore[missing-import]
    from triton.runtime.autotuner import Autotuner  # pyrefly: ignore[missing-import]

    operations, searched = _operations(), set()
    bench, search = testing.do_bench, Autotuner.run
    Autotuner.do_bench = property(lambda _: functools.partial(bench, warmup=5, rep=20))

    def run(tuner, *args, **kwargs):
        searched.add(tuner)
        return search(tuner, *args, **kwargs)

    Autotuner.run = run

    def median(call):
        first = bench(call, warmup=50, rep=200, return_mode="median")
        return round(min(first, _batches(call, calls=20 if first < 10 else 4)), 4)

    print(json.dumps(dict(started=True)), flush=True)
    for line in sys.stdin:
        op, shape, again = json.loads(line)
        row: dict[str, Any] = {}
        if op.removeprefix("model ") not in (MODELS if op.startswith("model ") else operations):
            print(json.dumps(dict(fla_error=UNKNOWN)), flush=True)
            continue
        try:
            # Models and layers of MoM train with the configurations that were selected first.
            if op != "mom" and not op.startswith("model ") and not again:
                for tuner in searched:
                    tuner.cache.clear()
            began = time.perf_counter()
            size = [int(n) for n in shape.split("x")]
            if op.startswith("model "):
                both = model_of(op[6:], *size)
                both()
                torch.cuda.synchronize()
                row["fla_search_seconds"] = round(time.perf_counter() - began, 1)
                torch.cuda.reset_peak_memory_stats()
                seconds = 1e-3 * _batches(both, batches=7, calls=2)
                row["fla_gradient_tokens_per_second"] = round(size[0] * size[1] / seconds)
                row["fla_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
                row["fla_parameters"], row["fla_remat"] = both.parameters, both.remat
            else:
                forward, both = _calls(operations[op], op, size, bias)
                both()
                with torch.no_grad():
                    forward()
                    torch.cuda.synchronize()
                    row["fla_search_seconds"] = round(time.perf_counter() - began, 1)
                    first = median(forward)
                one_token = op.startswith("one token")
                row["fla"] = [round(first / _STEPS, 5)] if one_token else [first, median(both)]
                del forward
            del both
        except Exception as error:
            row["fla_error"] = f"{type(error).__name__}: {error}"[:300]
        torch.cuda.empty_cache()
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    os.environ["FLA_CACHE_RESULTS"] = (
        "0"  # a selection made while other processes compile is not stored
    )
    if sys.argv[1] == "warm":
        _warm(json.loads(sys.argv[2]), float(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
    elif sys.argv[1] == "check":
        _check()
    else:
        _time(float(sys.argv[2]))
