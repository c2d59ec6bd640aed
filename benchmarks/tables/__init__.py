"""The results tables of the documentation, each generated from stored rows (docs/*.jsonl, docs/results/*.jsonl).

`TABLES` has them by name. A markdown page contains a table between the marks `<!-- table: NAME -->` and
`<!-- end of table -->`; `benchmarks/report.py` writes it there. To add a table, add a `Table` to a module here.
"""

from __future__ import annotations

from benchmarks.tables import (
    evidence,
    evidence_claims,
    jla,
    kernel_versions,
    kernels,
    liger,
    linear_moe,
    mom,
    readme,
    recall,
    released,
    step_profile,
    training,
    training_steps,
    triton,
)
from benchmarks.tables.table import Column, Row, Table

__all__ = ["TABLES", "Column", "Row", "Table"]

_all = [
    table
    for module in (
        kernels,
        kernel_versions,
        training_steps,
        step_profile,
        jla,
        training,
        triton,
        linear_moe,
        mom,
        liger,
        recall,
        released,
        evidence,
        evidence_claims,
        readme,
    )
    for table in module.TABLES
]
TABLES: dict[str, Table] = {table.name: table for table in _all}
assert len(TABLES) == len(_all), "two tables have one name"
