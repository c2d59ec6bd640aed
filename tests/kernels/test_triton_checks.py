"""Tests of what Triton's kernels are tested with: the checks that `python -m benchmarks triton_kernels` runs on a card, and the cases of the
default tests in Triton's interpreter.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import registry, triton_hopper_cases
from benchmarks.__main__ import make_parser
from benchmarks.calls import attention, compare, memories
from benchmarks.cases import triton_kernels
from pallas_kernels.delta_rule.triton import passes
from pallas_kernels.triton import launch
from tests.kernels import (
    test_attention_triton,
    test_delta_rule_triton,
    test_linear_attention_triton,
    test_triton_token_ops,
    triton_cases_attention,
    triton_cases_slots,
)

ALL = dict(triton_hopper_cases.cases())
REFUSED = [name for name in ALL if name not in triton_hopper_cases.CHECKS]


def test_every_case_of_the_hopper_kernels_is_a_check_or_refused():
    """The checks are all cases of the tests of Hopper's kernels but 13, whose names cannot be mistaken for each other."""
    assert len(ALL) == len(list(triton_hopper_cases.cases()))
    assert set(triton_hopper_cases.CHECKS) | set(REFUSED) == set(ALL)
    assert len(REFUSED) == 13
    assert not [name for name in triton_kernels.CHECKS if "," in name]
    sizes = [len(part.CHECKS) for part in triton_kernels.PARTS]
    assert len(triton_kernels.CHECKS) == sum(sizes)


@pytest.mark.parametrize("name", REFUSED)
def test_a_case_that_is_no_check_is_refused_for_what_the_list_says(name, monkeypatch):
    monkeypatch.setattr(launch, "usable", lambda: True)
    monkeypatch.setattr(compare, "expected", lambda call: None)
    words = r"requires (V of 64, 128, 256 or 512, not (384|768)|a real memory with discretization='euler')"
    with pytest.raises(NotImplementedError, match=words):
        ALL[name].check()


def test_an_error_or_other_bits_are_not_good():
    good = dict(errors=dict(output=4e-3, d_q=9e-3), same_bits=True, not_causal=0)
    assert triton_kernels.judge(good)["good"]
    for wrong in (
        dict(errors=dict(output=6e-3)), dict(errors=dict(d_q=1.1e-2)), dict(errors=dict(d_q=float("nan"))),
        dict(same_bits=False), dict(not_causal=1),
    ):  # fmt: skip
        assert not triton_kernels.judge(good | wrong)["good"]


def test_outputs_beyond_the_capacity_must_be_nan_and_no_others(monkeypatch):
    """The check of attention beyond a state's capacity accepts XLA, whose outputs there are NaN, and neither numbers there nor a NaN elsewhere."""
    (((output, state), expected),) = attention.pieces("beyond-the-capacity", "xla")
    assert 0 < int(jnp.isnan(output).sum()) < output.size
    for actual, good in (
        (output, True), (jnp.nan_to_num(output), False), (output.at[:, 0].set(jnp.nan), False),
    ):  # fmt: skip
        results = [((actual, state), expected)]
        monkeypatch.setattr(attention, "pieces", lambda name, implementation, x=results: x)
        result = triton_hopper_cases.check("attention pieces beyond-the-capacity")
        assert triton_kernels.judge(result)["good"] == good, result


def test_a_gradient_of_one_number_a_head_is_compared_with_its_terms():
    """The error of such a gradient is relative to the sum of its terms' sizes in each chunk of 64 tokens, as if chunks were independent, and
    that of others to themselves: where the terms of one head cancel, its own size would be 0.
    """
    x = np.random.default_rng(0).normal(size=(2, 100, 2))
    x[1, :, 1] = -x[0, :, 1]
    arrays = dict(x=jnp.asarray(x, jnp.float32), decay=jnp.zeros(2))

    def run(implementation, arrays):
        return (arrays["x"] + arrays["x"] * arrays["decay"],)

    call = compare.Compared(run, arrays, (jnp.ones((2, 100, 2)),), by_head=("decay",))
    results, gradients = compare.expected(call)
    np.testing.assert_allclose(gradients["decay"], [x[..., 0].sum(), 0], atol=1e-4)
    chunks = np.stack([np.abs(x[:, :64]).sum(1), np.abs(x[:, 64:]).sum(1)])
    size = np.sqrt((chunks**2).sum((0, 1)))
    np.testing.assert_allclose(compare.sizes_of_sums(call)["decay"], size, rtol=1e-5)
    wrong = gradients | dict(decay=gradients["decay"] + 0.1, x=1.01 * gradients["x"])
    errors = compare.errors_of(call, (results, wrong))
    expected = 0.1 / np.sqrt(np.mean(size**2))
    np.testing.assert_allclose([errors["d_decay"], errors["d_x"]], [expected, 0.01], rtol=1e-3)


def timed_cases(monkeypatch, *words: str):
    """Return the cases that the benchmark's options select, with no checks; the number of parts that they set ends with the test."""
    monkeypatch.setattr(passes, "count_parts", passes.count_parts)
    parser = make_parser(registry.get("triton_kernels"))
    return triton_kernels.cases(parser.parse_args(["--checks", "", *words]))


def test_times_in_a_given_number_of_parts_are_rows_of_their_own(monkeypatch):
    rows = timed_cases(monkeypatch, "--ops", "kda", "--shapes", "1x512x1x64", "--parts", "4")
    assert rows == [dict(op="kda", shape="1x512x1x64", capability="8.0", parts=4)]
    assert passes.count_parts(None, None, None, heads=1) == 4


def test_times_of_the_kernels_alone_have_no_other_rows(monkeypatch):
    words = "--ops", "kda", "--shapes", "1x512x1x64"
    both, own = timed_cases(monkeypatch, *words), timed_cases(monkeypatch, *words, "--own")
    assert [row["capability"] for row in both] == ["8.0", "any"]
    assert own == both[:1]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--parts", "3", "--ops", "kda"], "--parts 3: accepted are numbers whose product with 64 divides the tokens of 8x4096x16x128"),
        (["--parts", "0", "--ops", "kda"], "--parts 0: accepted are numbers"),
        (["--parts", "2", "--ops", "no decay"], "--parts: accepted with the ops delta rule, .*, not no decay"),
        (["--parts", "2", "--ops", "kda", "--peers", "fla"], "--parts: accepted without --peers"),
        (["--parts", "2", "--ops", "kda", "--checks", "kda"], '--parts: accepted with --checks ""'),
    ],
)  # fmt: skip
def test_a_number_of_parts_that_no_row_has_is_refused(words, message, monkeypatch):
    count = passes.count_parts
    with pytest.raises(registry.UsageError, match=message):
        timed_cases(monkeypatch, *words)
    assert passes.count_parts is count


def test_constant_decays_alone_have_one_number_a_head():
    for configuration in memories.CONFIGURATIONS:
        constant = "constant" in str(configuration[-1])
        call = memories.memory((*configuration[:3], 64, *configuration[4:]), 1)
        assert call.by_head == (("log_decay",) if constant else ())


@pytest.mark.parametrize(
    "module", [test_linear_attention_triton, test_delta_rule_triton, test_triton_token_ops]
)
def test_the_default_tests_have_every_dtype_of_a_kernel(module):
    """Each kind of decay or op that the default tests of Triton's interpreter have, they have in float32, float16 and bfloat16."""
    cases = [module.CASES[name] for name in module.FAST]
    found = {(_kind(case), case.dtype) for case in cases}
    dtypes = ("float32", "float16", "bfloat16")
    assert found == {(kind, dtype) for kind, _ in found for dtype in dtypes}


def _kind(case) -> tuple:
    """Return what says by which kernel a case is computed: its op and decay, of which a constant one is as one of each token."""
    fields = (getattr(case, field, None) for field in ("decay", "low_rank", "erase"))
    return type(case).__name__, *("token" if x == "constant" else x for x in fields)


@pytest.mark.parametrize("cases", [triton_cases_attention, triton_cases_slots])
def test_the_default_tests_of_attention_and_slots_have_every_dtype(cases):
    module = cases.__name__.rpartition(".")[2]
    found = {cases.CASES[name].dtype for name in test_attention_triton.FAST[module]}
    assert found == {"float32", "float16", "bfloat16"}
