"""The form, the backends and the chunk size of a mixer's op, as one config for all mixers."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from lsm_jax.mixers import checks


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class OpConfig:
    """The config of how an op is computed: its form, its backends and its chunk size.

    No field changes results except by rounding.

    Attributes:
        form: "recurrent", "chunk" or "associative", if the op has it.
        implementation: a backend's name, or several in order of preference: a tuple, or one string with
            commas between the names, as command lines have it. None lets the op select.
        chunk_size: tokens of a chunk, a power of two; None lets the op select.
    """

    form: str = "chunk"
    implementation: str | tuple[str, ...] | None = None
    chunk_size: int | None = None

    def names(self) -> tuple[str, ...]:
        """Return the names of the backends that `implementation` names, the preferred one first; empty if it is None."""
        given = self.implementation
        if given is None:
            return ()
        return tuple(given.split(",")) if isinstance(given, str) else given

    def arguments(self) -> dict[str, Any]:
        """Return the op's keyword arguments that this config sets, by name: `form`, `implementation` (its backends) and
        `chunk_size`.
        """
        names = self.names()
        implementation = names if len(names) > 1 else next(iter(names), None)
        return dict(form=self.form, implementation=implementation, chunk_size=self.chunk_size)

    def validate(self, holder: str, forms: tuple[str, ...] = checks.FORMS) -> None:
        """Raise ValueError if the form, the backends' names or the chunk size of this config are not
        accepted; the op checks whether such backends exist.

        Args:
            holder: class name of the mixer's config that contains this one, for messages.
            forms: the names of the forms that the op has.
        """
        name = f"{holder}.op"
        checks.fields(self, name)
        checks.one_of(name, "form", self.form, forms)
        given = self.implementation
        if given is not None and not (
            self.names() and all(isinstance(n, str) and n.strip() for n in self.names())
        ):
            raise ValueError(
                f"{name}.implementation={given!r}: accepted are None, a name, or names in order of preference"
            )
        size = self.chunk_size
        if size is not None and (size < 1 or size & (size - 1)):
            raise ValueError(f"{name}.chunk_size={size}: accepted are None and powers of two")


@dataclasses.dataclass(kw_only=True, unsafe_hash=True)
class RecurrentConfig:
    """The base class of the configs of mixers whose memory has a fixed size, whatever the number of tokens.

    Attributes:
        op: the form, the backends and the chunk size of the mixer's op; each config has a copy, so that
            `dataclasses.replace` returns independent configs.
    """

    op: OpConfig = dataclasses.field(default_factory=OpConfig)

    def __post_init__(self) -> None:
        self.op = copy.copy(self.op)

    def validate_fields(self, forms: tuple[str, ...] = checks.FORMS) -> None:
        """Raise ValueError unless every field has the type of its annotation and `op` is accepted; the first
        check of `validate`.
        """
        checks.fields(self)
        self.op.validate(type(self).__name__, forms)
