"""Writes a library of products and convolutions of any size: its kernels, the C table by which one
is chosen (types in csrc/products/table.h), and the header beside it.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gtco.machine.isa import Isa
from gtco.runtime.publish import publish, staging, write_error
from gtco.runtime.writing import c_objects
from gtco.runtime.writing.cross import compiler_for, flags_for
from gtco.runtime.writing.elf_object import closed
from gtco.runtime.writing.linking import LINK_FLAGS
from gtco.runtime.writing.table import CSRC, c_string
from gtco.support.errors import BuildError
from gtco.support.toolchain import run_compiler

# It stands beside the kernels (csrc/kernels_begin.c), as the wrappers of a model's steps do.
TASKS = """\
void gtco_product_tasks(void* const* b, void* w, int64_t begin, int64_t end) {
  ((gtco_product_kernel)b[4])(b[0], b[1], b[2], b[3], w, begin, end);
}
"""
SOURCES = (
    "kernels_begin.c memory.c kernels_end.c products/products.c products/choose.c products/cut.c "
    "products/convolutions.c thread_pool.c restart.c cpu/check.c cpu/count.c cpu/features.c "
    "cpu/features_arm.c"
).split()
EXPORTS = (
    "gtco_products_open gtco_products_close gtco_products_packed_bytes gtco_products_pack "
    "gtco_products_workspace_bytes gtco_products_set gtco_products_set_config gtco_products_run "
    "gtco_products_choose gtco_products_candidates gtco_products_kernel_name gtco_products_error "
    "gtco_convolutions_packed_bytes gtco_convolutions_pack gtco_convolutions_set "
    "gtco_convolutions_set_config gtco_convolutions_choose gtco_convolutions_candidates "
    "gtco_convolutions_output"
).split()


@dataclass(frozen=True)
class TableKernel:
    """A kernel: its symbol, the rows and vectors of its tile, the number of its feed in
    :data:`gtco.tensor.nest.open.FEEDS`, and the vector operations a second of tiles of 1, 2, ...
    rows. One of so many ``columns``, with vectors along
    k, has no vectors of columns and no rates.
    """

    symbol: str
    rows: int
    vectors: int
    feed: int
    rates: tuple[float, ...]
    columns: int = 0


@dataclass(frozen=True)
class ProductsTable:
    """What the C code chooses by. Bytes of caches; bytes a second; vectors a second; seconds
    (csrc/products/table.h). ``filters``: G of minimal filtering by the window's width; ``closed``:
    no kernel calls code outside of the library.
    """

    kernels: tuple[TableKernel, ...]
    lanes: int
    l1: float
    l2: float
    l3: float
    l2_rate: float
    l3_rate: float
    read_rate: float
    memory_rate: float
    handed_rate: float
    fma_rate: float
    store_rate: float
    launch: float
    filters: Mapping[int, Sequence[Sequence[float]]]
    features: tuple[str, ...]

    closed: bool = False

    def source(self) -> str:
        """As C."""
        lines = ['#include "products/table.h"', ""]
        rows = []
        for number, kernel in enumerate(self.kernels):
            rates = ", ".join(f"{rate:.6g}" for rate in kernel.rates or (0.0,))
            lines.append(
                f"void {kernel.symbol}(const void*, const void*, const void*, void*, void*, "
                "int64_t, int64_t);"
            )
            lines.append(f"static const double rates_{number}[] = {{{rates}}};")
            rows.append(
                f"  {{{kernel.symbol}, {c_string(kernel.symbol)}, {kernel.rows}, {kernel.vectors}, "
                f"{kernel.feed}, {kernel.columns}, rates_{number}}},"
            )
        filters = [
            f"const double gtco_the_filters_{taps}[] = "
            f"{{{', '.join(f'{value!r}' for row in matrix for value in row)}}};"
            for taps, matrix in self.filters.items()
        ]
        features = [c_string(name) for name in self.features]
        figures = ", ".join(
            f"{value:.6g}"
            for value in (
                self.l1, self.l2, self.l3, self.l2_rate, self.l3_rate, self.read_rate,
                self.memory_rate, self.handed_rate, self.fma_rate, self.store_rate, self.launch,
            )
        )  # fmt: skip
        return "\n".join(
            [
                *lines,
                "const gtco_product_nest gtco_the_nests[] = {",
                *rows,
                "};",
                *filters,
                f"const char* const gtco_the_features[] = {{{', '.join([*features, '0'])}}};",
                "const gtco_product_machine gtco_the_machine = "
                f"{{{self.lanes}, {len(self.kernels)}, {len(features)}, {figures}}};",
                f"const int gtco_the_kernels_are_closed = {int(self.closed)};",
                TASKS,
            ]
        )


def write_products(
    table: ProductsTable,
    kernels: Sequence[bytes],
    path: str | os.PathLike[str],
    isa: Isa,
) -> Path:
    """Writes the library ``path`` (ending in .so) and the header beside it, or none of them.
    ``kernels`` are the objects of the table's kernels. Raises :class:`BuildError` if the C compiler
    is missing or fails, or a file cannot be written.
    """
    target = Path(path).absolute()
    if target.suffix != ".so":
        raise BuildError(f"{target} must end in .so; write to {target.name}.so for example")
    with staging(target) as staged:
        try:
            _link(table, kernels, staged, target.name, compiler_for(isa), isa)
        except OSError as error:
            needed = 3 * sum(map(len, kernels)) + (4 << 20)
            raise write_error(target, error, needed) from error
        publish(staged, target)
    return target


def _link(
    table: ProductsTable,
    kernels: Sequence[bytes],
    staged: Path,
    name: str,
    compiler: str,
    isa: Isa,
) -> None:
    folder = staged / "build"
    folder.mkdir()
    objects = []
    for number, code in enumerate(kernels):
        objects.append(f"kernels_{number}.o")
        (folder / objects[-1]).write_bytes(code)
    symbols = {kernel.symbol for kernel in table.kernels}
    alone = symbols <= closed(kernels)
    (folder / "table.c").write_text(replace(table, closed=alone).source())
    exported = " ".join(f"{one};" for one in EXPORTS)
    (folder / "exports.map").write_text(f"{{ global: {exported} local: *; }};\n")
    first, *others = c_objects.write_objects(SOURCES, folder, compiler, isa)
    flags = [*c_objects.COMPILE_FLAGS, *flags_for(compiler, isa), f"-I{CSRC}", *LINK_FLAGS]
    command = [compiler, *flags, first, "table.c", *objects, *others, "-lm", "-o", "products.so"]
    run_compiler(command, folder)
    os.rename(folder / "products.so", staged / name)
    shutil.copyfile(CSRC / "products" / "gtco_products.h", staged / Path(name).with_suffix(".h"))
    shutil.rmtree(folder)
