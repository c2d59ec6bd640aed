"""Convert pretrained transformers into gated recurrent models (Liger, arXiv 2503.01496), and export tuned models.

    base = Pretrained(path="Llama-3.2-1B")
    config = TrainConfig(name="liger", model=liger_model(base.config()), base=base, trainable=("lora",), ...)

`configs/liger.py` has the published recipe. `python -m lsm_jax.linearize.export` writes a tuned run in the format of its
pretrained model.
"""

from lsm_jax.linearize.pretrained import Pretrained
from lsm_jax.linearize.recipes import base_model, liger_model, lolcats_model, window_model
from lsm_jax.mixers import merge_adapters

__all__ = [
    "Pretrained",
    "base_model",
    "liger_model",
    "lolcats_model",
    "merge_adapters",
    "window_model",
]
