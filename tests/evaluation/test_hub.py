"""The hub of data sets: one that does not answer is one line at once."""

from __future__ import annotations

import time
import types

import pytest

from lsm_jax.evaluation.suites.local import local_datasets

pytest.importorskip("datasets")


@pytest.mark.parametrize("setting", [False, True])
def test_a_hub_that_does_not_answer_is_one_line_at_once(monkeypatch, setting):
    import datasets
    import huggingface_hub

    def no_network(*_, **__):
        raise OSError(101, "Network is unreachable")

    session = types.SimpleNamespace(head=no_network)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: session)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", setting)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", setting)
    problem = (
        "HF_HUB_OFFLINE is set" if setting else r"cannot be reached \(Network is unreachable\)"
    )
    began = time.monotonic()
    with local_datasets(None) as names:
        for _ in range(2):
            with pytest.raises(ConnectionError, match=f"{problem}.*--lm_eval.data=FOLDER") as error:
                datasets.load_dataset("nobody/nothing")
    assert time.monotonic() - began < 5 and "\n" not in str(error.value)
    assert names == ["nobody/nothing"] * 2
    assert huggingface_hub.constants.HF_HUB_OFFLINE is datasets.config.HF_HUB_OFFLINE is setting
