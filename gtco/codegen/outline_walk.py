"""The walk through a kernel's TIR. :mod:`gtco.codegen.generalize` finds an outline by it, and puts
variables in the place of numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

INDEX_TYPES = ("int32", "int64")
SERIAL = 0  # tirx.ForKind
REGISTERS = "local"  # the scope of arrays that LLVM keeps in registers
DIVISIONS = ("prim.FloorDiv", "prim.FloorMod", "prim.Div", "prim.Mod")
_IGNORED = {"span"}  # fields that mean nothing


def _bits(value: float) -> int:
    """Of a float32, as an integer."""
    return int(struct.unpack("<i", struct.pack("<f", value))[0])


@dataclass
class Walk:
    """A walk through a kernel's nodes, as TVM's JSON has them. It collects tokens and numbers, and
    it rebuilds the tree where numbers are ``replaced`` by variables.
    """

    graph: dict[str, Any]
    tokens: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    # Variables, by the place of the number that they replace
    replaced: Mapping[int, int] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)  # variables, by their node
    in_registers: set[int] = field(default_factory=set)  # variables that index registers
    dtypes: dict[int, str] = field(default_factory=dict)  # dtypes, by the node of their type

    def __post_init__(self) -> None:
        self.nodes: list[dict[str, Any]] = self.graph["nodes"]
        self._find_register_indices()

    # what stands in a node ------------------------------------------------------------------------
    def data(self, index: int) -> Any:
        return self.nodes[index].get("data")

    def children(self, index: int) -> list[int]:
        found: list[int] = self.data(index)
        return found

    def add(self, kind: str, data: Any) -> int:
        self.nodes.append({"type": kind, "data": data})
        return len(self.nodes) - 1

    def variable(self, name: str, dtype: str) -> int:
        missing = next(n for n, node in enumerate(self.nodes) if node["type"] == "None")
        type_ = self.add("ir.PrimType", {"span": missing, "dtype": dtype})
        text = self.add("ffi.String", name)
        return self.add("ir.Var", {"span": missing, "ty": type_, "name": text})

    def dtype(self, index: int) -> str:
        """Of an expression; "" if it is not a number."""
        place = self.nodes[index]["data"]["ty"]
        found = self.dtypes.get(place)
        if found is None:
            type_ = self.nodes[place]
            found = str(type_["data"]["dtype"]) if type_["type"] == "ir.PrimType" else ""
            self.dtypes[place] = found
        return found

    def value(self, index: int) -> Any:
        """Of an immediate. TVM's JSON shares the nodes of its integers, too."""
        found = self.data(index)["value"]
        if self.nodes[index]["type"] == "ir.IntImm":
            return self.data(found)
        return found

    def scope(self, buffer: int) -> str:
        type_ = self.data(self.data(buffer)["ty"])
        return str(self.data(type_["storage_scope"])) if "storage_scope" in type_ else ""

    def _find_register_indices(self) -> None:
        values = {
            node["data"]["var"]: node["data"]["value"]
            for node in self.nodes
            if node["type"] == "tirx.Bind"
        }
        todo = [
            node["data"]["indices"]
            for node in self.nodes
            if node["type"] in ("ir.TensorLoad", "tirx.BufferStore")
            and self.scope(node["data"]["source" if "source" in node["data"] else "buffer"])
            == REGISTERS
        ]
        done: set[int] = set()
        while todo:
            index = todo.pop()
            if index in done:
                continue
            done.add(index)
            node = self.nodes[index]
            if node["type"] == "ir.Var":
                self.in_registers.add(index)
                if index in values:
                    todo.append(values[index])
            elif node["type"] == "ffi.Array":
                todo += node["data"]
            elif node["type"].startswith("prim."):
                todo += [node["data"][name] for name in OPERANDS if name in node["data"]]

    # the walk -------------------------------------------------------------------------------------
    def function(self) -> int:
        """Walks the whole kernel, and gives its body's node."""
        root = self.data(self.graph["root_index"])
        for param in self.children(root["params"]):
            self.visit(param, False)
        self.whole(root["attrs"])
        return self.visit(root["body"], False)

    def whole(self, index: int) -> None:
        """Takes a node into the outline with everything in it."""
        node = self.nodes[index]
        self.tokens.append(node["type"])
        data = self.data(index)
        match node["type"]:
            case "ir.Var":
                self.visit(index, False)
            case "ffi.Array" | "ffi.Map":
                for child in data:
                    self.whole(child)
            case _ if isinstance(data, dict):
                for name, child in data.items():
                    if name in _IGNORED:
                        continue
                    self.tokens.append(name)
                    plain = name in PLAIN.get(node["type"], ()) or isinstance(child, bool)
                    if plain or not isinstance(child, int):
                        self.tokens.append(repr(child))
                    else:
                        self.whole(child)
            case _:
                self.tokens.append(repr(data))

    def visit(self, index: int, free: bool) -> int:
        """Walks a node. ``free``: its numbers may become arguments. Gives the node in its place."""
        visit = _visit(self.nodes[index]["type"])
        if visit is not None:
            return visit(self, index, free)
        self.whole(index)
        return index

    def changed(self, index: int, **fields: int) -> int:
        """The node with other children."""
        if not self.replaced:
            return index
        data = self.data(index)
        if all(data[name] == child for name, child in fields.items()):
            return index
        return self.add(self.nodes[index]["type"], {**data, **fields})

    def many(self, index: int, free: bool) -> int:
        before = self.children(index)
        after = [self.visit(child, free) for child in before]
        return index if after == before else self.add(self.nodes[index]["type"], after)

    def _ir_var(self, index: int, free: bool) -> int:
        known = self.seen.get(index)
        if known is None:
            self.seen[index] = len(self.seen)
            type_ = self.nodes[self.data(index)["ty"]]
            if type_["type"] == "tirx.BufferType":  # its shape says nothing to LLVM
                self.tokens.append(f"buffer {self.dtype_of_buffer(index)} {self.scope(index)}")
            else:
                self.whole(self.data(index)["ty"])
        self.tokens.append(f"v{self.seen[index]}")
        return index

    def dtype_of_buffer(self, index: int) -> str:
        return str(self.data(self.data(self.data(index)["ty"])["dtype"])["dtype"])

    def _ir_intimm(self, index: int, free: bool) -> int:
        dtype, value = self.dtype(index), self.value(index)
        if not free or dtype not in INDEX_TYPES:
            self.tokens.append(f"{dtype} {value}")
            return index
        return self._number(index, dtype, value)

    def _number(self, index: int, dtype: str, value: int) -> int:
        self.tokens.append(f"{dtype} #")
        self.numbers.append(value)
        variable = self.replaced.get(len(self.numbers) - 1)
        if variable is None:
            return index
        if self.dtype(variable) == dtype:
            return variable
        return self._cast(variable, self.data(index)["ty"], self.data(index)["span"])

    def _cast(self, value: int, type_: int, span: int) -> int:
        return self.add("prim.Cast", {"span": span, "ty": type_, "value": value})

    def _ir_floatimm(self, index: int, free: bool) -> int:
        dtype, value = self.dtype(index), self.value(index)
        if not free or dtype != "float32":
            self.tokens.append(f"{dtype} {value!r}")
            return index
        self.tokens.append("float32 #")
        self.numbers.append(_bits(value))
        variable = self.replaced.get(len(self.numbers) - 1)
        return index if variable is None else self._reinterpreted(index, variable)

    def _reinterpreted(self, index: int, variable: int) -> int:
        """The bits in a variable as a float32, whose node is ``index``."""
        data = self.data(index)
        if self.dtype(variable) != "int32":
            narrow = self.add("ir.PrimType", {"span": data["span"], "dtype": "int32"})
            variable = self._cast(variable, narrow, data["span"])
        call = {
            "span": data["span"],
            "ty": data["ty"],
            "op": self.add("ir.Op", "tirx.reinterpret"),
            "args": self.add("ffi.Array", [variable]),
            "attrs": data["span"],
            "ty_args": self.add("ffi.Array", []),
        }
        return self.add("ir.Call", call)

    def _expression(self, index: int, free: bool) -> int:
        node = self.nodes[index]
        data, kind, dtype = node["data"], node["type"], self.dtype(index)
        self.tokens.append(f"{kind} {dtype}")
        divides = kind in DIVISIONS and "x" in dtype
        operands, others = _fields(kind, tuple(data))
        fields = {
            name: self.visit(data[name], free and not (divides and name == "b"))
            for name in operands
        }
        for name in others:
            self.tokens.append(name)
            self.whole(data[name])
        return self.changed(index, **fields)

    def _prim_ramp(self, index: int, free: bool) -> int:
        data = self.data(index)
        self.tokens.append(f"ramp {self.dtype(index)}")
        base = self.visit(data["base"], free)
        self.whole(data["stride"])
        return self.changed(index, base=base)

    def _prim_shuffle(self, index: int, free: bool) -> int:
        data = self.data(index)
        self.tokens.append(f"shuffle {self.dtype(index)}")
        vectors = self.many(data["vectors"], free)
        self.whole(data["indices"])
        return self.changed(index, vectors=vectors)

    def _ir_tensorload(self, index: int, free: bool) -> int:
        data = self.data(index)
        self.tokens.append("load")
        self.visit(data["source"], False)
        inside = self.scope(data["source"]) == REGISTERS
        return self.changed(index, indices=self.many(data["indices"], not inside))

    def _tirx_bufferstore(self, index: int, free: bool) -> int:
        data = self.data(index)
        self.tokens.append("store")
        self.visit(data["buffer"], False)
        inside = self.scope(data["buffer"]) == REGISTERS
        indices = self.many(data["indices"], not inside)
        return self.changed(index, indices=indices, value=self.visit(data["value"], True))

    def _ir_call(self, index: int, free: bool) -> int:
        data = self.data(index)
        self.tokens.append(f"call {self.dtype(index)}")
        self.whole(data["op"])
        name = self.data(data["op"]) if self.nodes[data["op"]]["type"] == "ir.Op" else ""
        before = self.children(data["args"])
        self.tokens.append(str(len(before)))
        # a number that is itself an argument may be an immediate of an instruction
        after = [
            self.visit(
                child,
                name in FREE_CALLS or self.nodes[child]["type"] not in IMMEDIATES,
            )
            for child in before
        ]
        self.whole(data["attrs"])
        if after == before:
            return index
        return self.changed(index, args=self.add("ffi.Array", after))

    def _tirx_bind(self, index: int, free: bool) -> int:
        data = self.data(index)
        self.tokens.append("bind")
        self.visit(data["var"], False)
        value = self.visit(data["value"], data["var"] not in self.in_registers)
        return self.changed(index, value=value)

    def _tirx_for(self, index: int, free: bool) -> int:
        data = self.data(index)
        self.tokens.append(f"for {data['kind']}")
        self.visit(data["loop_var"], False)
        runs = data["kind"] == SERIAL and data["loop_var"] not in self.in_registers
        least = self.visit(data["min"], runs)
        extent = self.visit(data["extent"], runs)
        self.whole(data["thread_binding"])
        self.whole(data["annotations"])
        self.whole(data["step"])
        return self.changed(index, min=least, extent=extent, body=self.visit(data["body"], False))

    def _tirx_seqstmt(self, index: int, free: bool) -> int:
        self.tokens.append(f"seq {len(self.children(self.data(index)['seq']))}")
        return self.changed(index, seq=self.many(self.data(index)["seq"], False))

    def _tirx_evaluate(self, index: int, free: bool) -> int:
        self.tokens.append("evaluate")
        return self.changed(index, value=self.visit(self.data(index)["value"], False))

    def _tirx_ifthenelse(self, index: int, free: bool) -> int:
        data = self.data(index)
        self.tokens.append("if")
        fields = {"condition": self.visit(data["condition"], True)}
        for name in ("then_case", "else_case"):
            fields[name] = self.visit(data[name], False)
        return self.changed(index, **fields)

    def _tirx_declbuffer(self, index: int, free: bool) -> int:
        data = self.data(index)
        self.tokens.append("declare")
        self.visit(data["buffer"], False)
        self.visit(data["data"], False)
        return index

    def _tirx_allocbuffer(self, index: int, free: bool) -> int:
        data = self.data(index)
        self.tokens.append("allocate")
        self.whole(self.data(data["buffer"])["ty"])
        self.visit(data["buffer"], False)
        self.whole(data["annotations"])
        return index


@cache
def _visit(kind: str) -> Callable[[Walk, int, bool], int] | None:
    """What walks a node of this type, if its numbers may become arguments."""
    expression = Walk._expression if kind.startswith("prim.") else None
    return getattr(Walk, "_" + kind.replace(".", "_").lower(), expression)


@cache
def _fields(kind: str, names: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Of the fields of an expression its operands, and those that belong to the outline, such as
    lanes.
    """
    operands = [name for name in OPERANDS if name in names]
    return operands, sorted({*names} - {*operands, "span", "ty"})


# operands of expressions, by the names of their fields
OPERANDS = ("condition", "true_value", "false_value", "a", "b", "value", "body")
IMMEDIATES = ("ir.IntImm", "prim.Broadcast")
FREE_CALLS = ("tirx.if_then_else", "tirx.likely")
# fields that are numbers themselves, and no places of nodes
PLAIN = {
    "ir.PrimType": ("dtype",),
    "ir.FloatImm": ("value",),
    "tirx.BufferType": ("data_alignment", "offset_factor"),
    "tirx.For": ("kind",),
    "relax.FuncType": ("purity",),
    "prim.Broadcast": (),
}
