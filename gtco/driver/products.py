"""Compiles a library of products and convolutions of any size (Helix, Algorithm 3,
``OfflineCompile``): the kernels of an operator class once, and beside them the figures of the
machine by which one is chosen when sizes become known.
"""

from __future__ import annotations

import os
from pathlib import Path

from gtco.codegen.llvm import object_code
from gtco.machine.target import Target, cpu_target
from gtco.runtime.products_table import ProductsTable, TableKernel, write_products
from gtco.runtime.writing.table import normalize_features
from gtco.search.calibration.profile import machine_table
from gtco.search.calibration.rates import RateTable
from gtco.tensor.nest.open import FEEDS, FewColumns, OpenNest, few_columns, nests
from gtco.tensor.nest.open_filtering import FILTERS
from gtco.tensor.nest.open_kernels import open_kernel


def compile_products(
    path: str | os.PathLike[str], target: str = "native", rates: RateTable | None = None
) -> Path:
    """Writes the library of float32 products and convolutions to ``path`` (ending in .so), with its
    C header beside it. :class:`gtco.runtime.products.Products` and
    :class:`gtco.runtime.convolutions.Convolutions` open it.

    ``rates``: the machine's; None means those measured here, or the target's constants. Raises
    :class:`BuildError` if there is no C compiler or the files cannot be written.
    """
    machine = cpu_target(target)
    if rates is None:
        rates = (machine_table(machine).rates if machine.here else None) or RateTable(machine)
    kernels = nests(machine)
    few = few_columns(machine)
    functions = [open_kernel(nest, f"gtco_{nest.name}") for nest in kernels]
    functions += [open_kernel(nest, f"gtco_{nest.name}") for nest in few]
    table = products_table(kernels, few, machine, rates)
    code = [object_code(functions, machine)]
    return write_products(table, code, path, machine.isa)


def products_table(
    kernels: tuple[OpenNest, ...], few: tuple[FewColumns, ...], target: Target, rates: RateTable
) -> ProductsTable:
    """What the C code chooses by."""
    level = {one.name: one for one in rates.target.memory}
    l1, l2, memory = level["L1"], level["L2"], level["DRAM"]
    l3 = level.get("L3", l2)
    return ProductsTable(
        kernels=tuple(
            TableKernel(
                f"gtco_{nest.name}",
                nest.row.rows,
                nest.row.vectors,
                FEEDS.index(nest.feed),
                tuple(rates.rate(nest.row.kernel_of(r + 1)) for r in range(nest.row.rows)),
            )
            for nest in kernels
        )
        + tuple(
            TableKernel(f"gtco_{nest.name}", nest.rows, 0, 0, (), nest.columns) for nest in few
        ),
        lanes=target.lanes,
        l1=l1.capacity,
        l2=l2.capacity,
        l3=l3.capacity,
        l2_rate=l2.bandwidth,
        l3_rate=l3.bandwidth,
        read_rate=memory.bandwidth,
        memory_rate=rates.handover(memory),
        handed_rate=rates.handover(l3, target.elsewhere),
        fma_rate=max(rates.rate(nest.row.kernel) for nest in kernels),
        store_rate=rates.rate("store"),
        launch=rates.launch,
        filters={taps: FILTERS[taps].weight_matrix for taps in FILTERS},
        features=normalize_features(target.required(False), target.isa),
    )
