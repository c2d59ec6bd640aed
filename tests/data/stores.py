"""Helpers of the data tests: small stores of tokenized documents, and small texts."""

import json

import numpy as np

from lsm_jax.data.writer import StoreWriter


def write_array(path, rows, *, vocab_size=50257, encoder="tiktoken-gpt2", **attributes):
    with StoreWriter(
        path,
        rows.shape[1],
        vocab_size=vocab_size,
        attributes={"encoder": encoder, **attributes},
    ) as writer:
        writer.add(rows)
    return path


def rewrite_with_chunks(path, rows, chunks, *, compressor="blosc", dtype="<u2"):
    """Store `rows`, token ids [documents, length], as the zarr array of a store, with the given chunk sizes,
    compressor and dtype, as another program could have written it.
    """
    import tensorstore as ts

    compressors = {
        "blosc": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0},
        "zlib": {"id": "zlib", "level": 1},
        None: None,
    }
    metadata = {
        "zarr_format": 2,
        "shape": list(rows.shape),
        "chunks": list(chunks),
        "dtype": dtype,
        "compressor": compressors[compressor],
        "fill_value": 0,
        "filters": None,
        "order": "C",
    }
    kvstore = {"driver": "file", "path": str(path)}
    store = ts.open({"driver": "zarr", "kvstore": kvstore, "metadata": metadata}, create=True)
    store.result().write(rows).result()
    (path / ".zattrs").write_text(json.dumps({"encoder": "tiktoken-gpt2"}))
    return path


def numbered(documents, length):
    """Return token ids [documents, length] that identify their place: 100 d + c in document d and column c."""
    return (100 * np.arange(documents)[:, None] + np.arange(length)[None]).astype(np.int64)


def write_texts(folder, texts):
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
    return folder


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def assert_resumes(make, steps=7):
    """Assert that a data iterator that resumes from the state of any step (stored as JSON) gives the same
    batches; return the batches.
    """
    iterator = make()
    states, batches = [], []
    for _ in range(steps):
        states.append(json.dumps(iterator.get_state()))
        batches.append(next(iterator))
    for step, state in enumerate(states):
        resumed = make()
        resumed.set_state(json.loads(state))
        for batch in batches[step:]:
            assert same(next(resumed), batch), step
    used = make()
    for _ in range(3):
        next(used)
    used.set_state(json.loads(states[1]))
    assert same(next(used), batches[1])
    return batches
