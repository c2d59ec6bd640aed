"""Cache compiled programs between runs of this process and of those it starts, since all compile the same
few programs."""

from __future__ import annotations

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

_SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}


@pytest.fixture(scope="package", autouse=True)
def keep_compiled(tmp_path_factory):
    settings = _SETTINGS | {"jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled"))}
    before = {name: getattr(jax.config, name) for name in settings}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name.upper(), str(value))
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
