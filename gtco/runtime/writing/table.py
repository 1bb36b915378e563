"""Writes the C table of a plan (types in csrc/plan.h) and the header beside the library."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path

from gtco.machine.isa import AARCH64, X86_64, Isa
from gtco.runtime.artifact import Artifact, variants_of
from gtco.runtime.gpu.plan import GpuArtifact
from gtco.runtime.plan import DTYPES, BufferRef, Cover, Step, TensorSpec, Variant
from gtco.support.errors import BuildError
from gtco.support.sizes import Range, by_other_sizes, sizes_text

CSRC = Path(__file__).parents[1] / "csrc"


CHECKED = {X86_64.name: "cpu/features.def", AARCH64.name: "cpu/features_arm.def"}


@cache
def known_features(isa: Isa = X86_64) -> frozenset[str]:
    """Names of the CPU features that the runtime can check, in LLVM's spelling."""
    text = (CSRC / CHECKED[isa.name]).read_text()
    return frozenset(re.findall(r'^FEATURE\("([^"]+)"', text, re.MULTILINE))


def normalize_features(names: Sequence[str], isa: Isa = X86_64) -> tuple[str, ...]:
    """Feature names in LLVM's spelling, sorted: ``+avx512_bf16`` (the spelling of gcc and the
    kernel) → ``avx512bf16``.

    Raises :class:`BuildError` for a name that the runtime cannot check when the model is opened.
    """
    spelling = {re.sub("[._-]", "", name): name for name in known_features(isa)} | {
        "bmi1": "bmi",
        "pni": "sse3",
    }
    result = set()
    for name in names:
        key = re.sub("[._-]", "", name.removeprefix("+").lower())
        if key not in spelling:
            raise BuildError(
                f"CPU feature {name!r} is not one that the runtime can check; add it to "
                f"{CSRC / CHECKED[isa.name]}"
            )
        result.add(spelling[key])
    return tuple(sorted(result))


def c_string(text: str) -> str:
    """A C string literal of the text's UTF-8 bytes."""
    plain = {byte: chr(byte) for byte in range(32, 127) if chr(byte) not in '"\\?'}
    return '"' + "".join(plain.get(byte, f"\\{byte:03o}") for byte in text.encode()) + '"'


def comment_text(text: str) -> str:
    """The text made safe for a C comment: printable ASCII without anything that ends or opens a
    comment, continues a line or is a trigraph. Other characters become \\x and their number.
    """
    return re.sub(r"[^ -~]|[*?\\]", lambda c: f"\\x{ord(c.group()):02x}", text)


def _tensors(kind: str, specs: Sequence[TensorSpec]) -> list[str]:
    lines, rows = [], []
    for number, spec in enumerate(specs):
        dims = ", ".join(str(d) if isinstance(d, int) else "-1" for d in spec.shape) or "0"
        symbols = (
            ", ".join("NULL" if isinstance(d, int) else c_string(d) for d in spec.shape) or "NULL"
        )
        lines.append(f"static const int64_t {kind}_{number}_dims[] = {{{dims}}};")
        lines.append(f"static const char* const {kind}_{number}_symbols[] = {{{symbols}}};")
        rows.append(
            f"  {{{c_string(spec.name)}, {DTYPES[spec.dtype][0]}, {len(spec.shape)}, "
            f"{kind}_{number}_dims, {kind}_{number}_symbols, {spec.nbytes}}},"
        )
    empty = "  {NULL, GTCO_FLOAT32, 0, NULL, NULL, 0},"
    return [*lines, f"static const gtco_tensor_info {kind}s[] = {{", *(rows or [empty]), "};", ""]


def _variants(variants: Sequence[Variant], cover: Cover | None) -> list[str]:
    """The table of the variants. The only one, of a model of one shape, has the tensors of the
    model itself.
    """
    lines, rows = [], []
    first_step = first_ref = 0
    for number, variant in enumerate(variants):
        names = "inputs, outputs"
        if len(variants) > 1 or cover:  # the only variant of a range is a part
            lines += _tensors(f"v{number}_input", variant.inputs)
            lines += _tensors(f"v{number}_output", variant.outputs)
            names = f"v{number}_inputs, v{number}_outputs"
        calls = variant.calls
        steps, refs = len(calls), sum(len(step.buffers) for step in calls)
        comment = f" /* {comment_text(str(variant))} */" if variant.sizes else ""
        rows.append(f"  {{{names}, {first_step}, {steps}, {first_ref}, {refs}}},{comment}")
        first_step, first_ref = first_step + steps, first_ref + refs
    table = ["static const gtco_variant variants[] = {", *rows, "};"]
    return [*lines, *table, *(_range(cover, variants) if cover else []), ""]


def _range(cover: Cover, variants: Sequence[Variant]) -> list[str]:
    sizes, prices = (", ".join(map(str, row)) for row in (cover.sizes, cover.nanoseconds))
    tensors = (*variants[0].inputs, *variants[0].outputs)
    axes = ["-1" if (axis := cover.axes[t.name]) is None else str(axis) for t in tensors]
    rows = []
    of_each = [variant.sizes for variant in variants]
    for others, (first, *more) in by_other_sizes(of_each, cover.symbol):
        comment = f" /* {comment_text(sizes_text(others))} */" if others else ""
        at = f" + {first}" if first else ""
        rows.append(f"  {{{first}, {1 + len(more)}, cover_sizes{at}, cover_prices{at}}},{comment}")
    of = cover.sizes_of
    return [
        f"static const int64_t cover_sizes[] = {{{sizes}}}, cover_prices[] = {{{prices}}};",
        f"static const int32_t range_axes[] = {{{', '.join(axes) or '-1'}}};",
        "static const gtco_cover covers[] = {",
        *rows,
        "};",
        f"static const gtco_range range = {{{c_string(cover.symbol)}, {of.low}, {of.high}, "
        f"{of.step}, range_axes, covers, {len(rows)}}};",
    ]


def _named_ranges(ranges: Mapping[str, Range]) -> list[str]:
    if not ranges:
        return []
    rows = [
        f"  {{{c_string(name)}, {of.low}, {of.high}, {of.step}}}," for name, of in ranges.items()
    ]
    return ["static const gtco_named_range named_ranges[] = {", *rows, "};", ""]


def _trampolines(steps: Sequence[Step]) -> list[str]:
    """One function per kernel, all with the same signature, because kernels differ in their number
    of buffers.
    """
    arity: dict[str, int] = {}
    lines = []
    for step in steps:
        if arity.setdefault(step.kernel, len(step.buffers)) != len(step.buffers):
            raise BuildError(
                f"kernel {step.kernel} is called with {arity[step.kernel]} and with "
                f"{len(step.buffers)} buffers; a kernel has one number of arguments"
            )
    for number, (symbol, count) in enumerate(arity.items()):
        # Named through asm, so that a kernel may have any name, that of a C function or keyword
        # included.
        lines.append(
            f"extern void kernel_{number}({'void*, ' * count}void*, int64_t, int64_t) "
            f"__asm__({c_string(symbol)});"
        )
        arguments = "".join(f"b[{i}], " for i in range(count))
        lines.append(
            f"static void call_{number}(void* const* b, void* w, int64_t t0, int64_t t1) "
            f"{{ (void)b; kernel_{number}({arguments}w, t0, t1); }}"
        )
    return [*lines, ""]


def plan_source(
    artifact: Artifact, weights_inside: bool, identity: bytes, closed: Collection[str] = ()
) -> str:
    """The C source that defines ``gtco_the_plan``. ``identity`` (32 bytes) ties the library to its
    weights file. ``closed`` are the kernels that call no code outside of the library.
    """
    variants = variants_of(artifact)
    steps: list[Step] = [step for variant in variants for step in variant.calls]
    numbers = {
        symbol: number for number, symbol in enumerate(dict.fromkeys(step.kernel for step in steps))
    }
    step_rows: list[str] = []
    refs: list[BufferRef] = []
    for step in steps:
        row = f"call_{numbers[step.kernel]}, {len(refs)}, {step.tasks}u, "
        step_rows.append(f"  {{{row}{int(step.kernel in closed)}}},")
        refs += step.buffers
    return plan_document(
        artifact,
        definitions=[
            *_trampolines(steps),
            "static const gtco_step steps[] = {",
            *(step_rows or ["  {NULL, 0, 0, 0},"]),
            "};",
        ],
        refs=refs,
        features=normalize_features(artifact.cpu_features, artifact.isa),
        numbers={
            "num_steps": len(steps),
            "threads": artifact.threads,
            "arena_bytes": max(variant.arena_bytes for variant in variants),
            "workspace_bytes": max([step.workspace for step in steps], default=0),
            "weights_bytes": artifact.weights_bytes,
        },
        weights_inside=weights_inside,
        identity=identity,
    )


def plan_document(
    artifact: Artifact | GpuArtifact,
    *,
    definitions: Sequence[str],
    refs: Sequence[BufferRef],
    features: Sequence[str],
    numbers: Mapping[str, int],
    weights_inside: bool,
    identity: bytes,
    steps: str = "steps",
) -> str:
    """C that defines ``gtco_the_plan``, for a CPU or a GPU. ``definitions`` come before it and
    define the names that ``steps`` uses; ``numbers`` are fields of it.
    """
    inputs, outputs, variants = artifact.inputs, artifact.outputs, variants_of(artifact)
    cover, ranges = artifact.cover, artifact.ranges
    feature_list = "".join(f"{c_string(name)}, " for name in features)
    ref_rows = [f"  {{GTCO_REF_{ref.kind.upper()}, {_place(ref)}}}," for ref in refs]
    counts = {
        "num_features": len(features),
        "num_inputs": len(inputs),
        "num_outputs": len(outputs),
        "num_variants": len(variants),
        "num_steps": numbers["num_steps"],
        "num_refs": len(ref_rows),
        **numbers,
    }
    named = []
    if ranges:
        named = [f"  .named_ranges = named_ranges, .num_named_ranges = {len(ranges)},"]
    lines = [
        "/* Generated by gtco. */",
        '#include "plan.h"',
        "",
        *_tensors("input", inputs),
        *_tensors("output", outputs),
        *_variants(variants, cover),
        *_named_ranges(ranges),
        *definitions,
        "static const gtco_ref refs[] = {",
        *(ref_rows or ["  {GTCO_REF_ARENA, 0, 0},"]),
        "};",
        f"static const char* const features[] = {{{feature_list}NULL}};",
        "extern const unsigned char gtco_the_weights[];",
        "",
        "const gtco_plan gtco_the_plan = {",
        f"  .name = {c_string(artifact.name)},",
        "  .features = features, .inputs = inputs, .outputs = outputs, .variants = variants,",
        f"  .steps = {steps}, .refs = refs, .range = {'&range' if cover else 'NULL'},",
        *named,
        *(f"  .{field} = {value}," for field, value in counts.items()),
        f"  .weights = {'gtco_the_weights' if weights_inside else 'NULL'},",
        f"  .id = {{{', '.join(map(str, identity))}}},",
        "};",
        "",
    ]
    return "\n".join(lines)


def _place(ref: BufferRef) -> str:
    """The tensor and the offset of a row of refs."""
    if ref.kind in ("input", "output"):
        return f"{ref.index}, {ref.offset}"
    return f"0, {ref.index}"


def header_source(artifact: Artifact | GpuArtifact, file_name: str) -> str:
    """NAME.h: the inputs and outputs of this model and the sizes of its variants, then the C
    interface. The header is complete in itself and can be copied alone.
    """
    name = artifact.name or file_name.removesuffix(".so")
    variants, cover = variants_of(artifact), artifact.cover

    def rows(specs: Sequence[TensorSpec]) -> list[str]:
        return [f" *   {n}  {comment_text(str(spec))}" for n, spec in enumerate(specs)] or [
            " *   none"
        ]

    # the sizes of a range are not rows of their own
    of = {name: str(sizes) for name, sizes in artifact.ranges.items()}
    if cover:
        of[cover.symbol] = str(cover.sizes_of)
    rest = [{k: n for k, n in variant.sizes.items() if k not in of} for variant in variants]
    whole = ", ".join(f"{name}={sizes}" for name, sizes in of.items())
    compiled_for = [
        ", ".join(filter(None, (whole, sizes_text(others))))
        for others, _ in by_other_sizes(rest, "")
    ]
    if len(variants) < 2 and not cover:
        compiled_for = []
    comment = [
        f"/* Model {comment_text(name)}, compiled by gtco to {comment_text(file_name)}.",
        " *",
        " * inputs",
        *rows(artifact.inputs),
        " *",
        " * outputs",
        *rows(artifact.outputs),
        *([" *", " * compiled for"] if len(variants) > 1 or cover else []),
        *(f" *   {comment_text(each)}" for each in compiled_for),
        " */",
        "",
    ]
    return "\n".join(comment) + (CSRC / "gtco_api.h").read_text()
