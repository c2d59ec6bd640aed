"""RWKV-7's released .pth files, and a small trained RWKV-7 that reverses numbers (trained/)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lsm_jax.convert import export, load_params, model_config
from lsm_jax.convert.checkpoint import Tensors
from lsm_jax.convert.families import FAMILIES, rwkv7_pth
from lsm_jax.convert.huggingface import open_source
from lsm_jax.convert.layout import layout_of
from lsm_jax.convert.load import load_tree
from lsm_jax.convert.rwkv_file import RWKVFile, fields_of
from lsm_jax.models import abstract

GOLDENS = Path(__file__).parent / "released_goldens"
TRAINED = Path(__file__).parent / "trained"


def test_the_pth_file_of_rwkv_has_the_parameters_of_the_golden():
    """The file has the tensors of fla-rwkv7 by their authors' names, and all but vectors are bfloat16."""
    source = open_source(GOLDENS / "rwkv7.pth")
    assert isinstance(source, RWKVFile)
    config, theirs = model_config(source), model_config(GOLDENS / "fla-rwkv7")
    mixer = dataclasses.replace(theirs.layers["L"].mixer, norm_eps=64e-5)
    assert config.layers["L"].mixer == mixer
    assert (config.num_layers, config.embedding_norm) == (2, True)
    params = load_params(source, config)
    rounded = load_params(GOLDENS / "fla-rwkv7", theirs)

    def same(path, ours, golden):
        if "first" not in jax.tree_util.keystr(path):  # layer 0 has no such tensors
            nearest = golden.astype(jnp.bfloat16).astype(jnp.float32)
            assert jnp.all((ours == nearest) | (ours == golden)), path

    jax.tree_util.tree_map_with_path(same, params, rounded)
    first = params["periods"]["blocks"][0]["mixer"]["first"]["down"]["kernel"]
    assert not np.any(first[0]) and np.any(first[1])
    with pytest.raises(ValueError, match="pth files are not written"):
        export(params, config, source, "nowhere")


def test_pth_files_that_call_functions_are_refused(tmp_path):
    import pickle
    import zipfile

    class Call:
        def __reduce__(self):
            return print, ("called",)

    path = tmp_path / "x.pth"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", pickle.dumps({"emb.weight": Call()}, protocol=2))
    with pytest.raises(ValueError, match="no .pth file of tensors: it has a .*print; accepted are"):
        open_source(path)
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be read: File is not a zip file"):
        open_source(path)


class Trained(Tensors):
    """The trained RWKV-7 of tests/convert/trained, with the names of RWKV-7's released files. In its authors' model a branch
    that they switched off stands beside each time mix: it is the constant `rosa*.o.bias`."""

    def __init__(self):
        arrays = dict(np.load(TRAINED / "rwkv7_reverse.npz"))
        named = {"emb.weight": arrays["e.weight"], "head.weight": arrays["o.weight"], "head.bias": arrays["o.bias"]}  # fmt: skip
        for old, new in (("lno", "ln_out"), *((f"ln{i + 1}{x}", f"blocks.{i}.ln{n}") for i in (0, 1) for x, n in (("a", 1), ("b", 2)))):  # fmt: skip
            named |= {f"{new}.{part}": arrays[f"{old}.{part}"] for part in ("weight", "bias")}
        for name, value in arrays.items():
            module, _, rest = name.partition(".")
            kind, layer = module[:-1], module[-1]
            if kind in ("rwkv", "ffn"):
                named[f"blocks.{int(layer) - 1}.{'att' if kind == 'rwkv' else 'ffn'}.{rest}"] = value  # fmt: skip
            if kind == "rosa" and rest == "rosa_qkv.emb":
                assert not np.any(value)
            if kind == "rosa" and rest == "o.bias":
                named[f"blocks.{int(layer) - 1}.att.output.bias"] = value
        self.arrays, self.folder = named, TRAINED
        self.shapes = {name: value.shape for name, value in named.items()}
        self.dtypes = dict.fromkeys(named, "F32")
        self.config = fields_of(self.shapes, TRAINED)

    def rows(self, name, start, stop):
        return self.arrays[name][start:stop]


def trained_model():
    source = Trained()
    family = FAMILIES[source.config["model_type"]]
    config = family.model(source)
    layer = config.layers["L"]
    mixer = dataclasses.replace(layer.mixer, output_bias=True)
    config.layers["L"] = dataclasses.replace(layer, mixer=mixer)
    config = dataclasses.replace(config, head_bias=True, dtype="float32", remat="none")
    values = family.values(source.config, TRAINED)

    def names(number):
        biases = {"head_bias": "head.bias"} if number < 0 else {"mixer.o_proj.bias": f"blocks.{number}.att.output.bias"}  # fmt: skip
        return {**rwkv7_pth.FAMILY.names(values, config, number), **biases}

    layout = layout_of(config, names)
    source.check(layout.shapes)
    # The file has 39,564 numbers. Two branches that are switched off have 4,352 each, of which only a bias of 32 is used; norms have 64.
    assert sum(int(np.prod(x)) for x in layout.shapes.values()) == 39_564 - 2 * (4_352 - 32 + 64)
    return nnx.merge(nnx.graphdef(abstract(config)), load_tree(source, layout.params, layout.place))


COMMA, END = 10, 11


@pytest.mark.slow
def test_a_trained_rwkv7_reverses_numbers():
    model = trained_model()
    rng, rows, masks = np.random.default_rng(0), [], []
    # As its authors test it: ten numbers of each length, in rows of 129 tokens.
    for digits in range(1, 61):
        for _ in range(10):
            number = rng.integers(0, 10, digits)
            number[0] = max(number[0], digits > 1)
            row = [*number, COMMA, *number[::-1]]
            rows.append(row + [END] * (129 - len(row)))
            masks.append([digits <= i <= 2 * digits for i in range(128)])
    rows, masks = np.array(rows), np.array(masks)
    logits = jax.jit(lambda m, t: m(t)[0])
    guesses = [np.argmax(logits(model, part[:, :-1]), -1) for part in np.split(rows, 4)]
    correct = (np.concatenate(guesses) == rows[:, 1:]) & masks
    assert masks.sum() == 18_900 and correct.sum() >= 18_890


def test_a_trained_rwkv7_decodes_60_digits_from_its_constant_state():
    model = trained_model()
    number = np.random.default_rng(1).integers(1, 10, 60)
    step = jax.jit(lambda m, t, s: m(t, state=s)[:2])
    state = model.init_state(1, 1)
    sizes = jax.tree.map(lambda x: x.shape, state)
    for token in [*number, COMMA]:
        logits, state = step(model, jnp.array([[token]]), state)
    decoded = []
    for _ in range(60):
        decoded.append(int(jnp.argmax(logits[0, -1])))
        logits, state = step(model, jnp.array([[decoded[-1]]]), state)
    assert decoded == list(number[::-1])
    assert int(jnp.argmax(logits[0, -1])) == END
    assert jax.tree.map(lambda x: x.shape, state) == sizes
