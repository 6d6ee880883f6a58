"""Bytes that a compiled step reads: from the compiled text, and inside kernels of our own from what they load.

The compiler's analysis does not see into custom calls. A kernel is counted by its jaxpr: each load from the card's
memory, times the steps of the loops around it, times warpgroups, times the grid. A tile that a kernel fetches twice is
counted twice.
"""

import math
import re
from collections.abc import Iterator

import jax
import numpy as np

KERNEL = "mpmd_map"
_BYTES = {"f32": 4, "s32": 4, "u32": 4, "f16": 2, "bf16": 2, "s8": 1, "u8": 1, "pred": 1, "s16": 2, "s64": 8, "u64": 8}
_ARRAY = re.compile(r"\b(" + "|".join(_BYTES) + r")\[([\d,]*)\]")
_FREE = ("get-tuple-element", "parameter", "tuple", "bitcast", "constant", "while", "conditional", "call", "iota")
_PARTS = ("gather", "dynamic-slice")
_WHERE_NEEDED = ("bitcast", "reduce", "convert", "add", "multiply")


def kernel_loads(jaxpr) -> int:
    """Bytes that the kernels of a program load from the card's memory, loops of unknown length counted once."""
    return _loads(jaxpr, {})


def _loads(jaxpr, known: dict) -> int:
    """The same with some scalars known, such as a warpgroup's number, so that what it does not do is not counted."""
    total, known = 0, dict(known)

    def value(v):
        return v.val if hasattr(v, "val") else known.get(v)

    def inside(sub, operands):
        found = [value(v) for v in operands]
        return {v: x for v, x in zip(sub.invars[-len(operands) :], found) if x is not None} if operands else {}

    for eqn in jaxpr.eqns:
        name, params = eqn.primitive.name, eqn.params
        if name in ("load", "get"):
            total += _bytes_of(eqn.outvars[0]) * _is_far(eqn.invars[0])
        elif name == "inline_mgpu_p":  # where it returns something it has read what it was given
            total += sum(map(_bytes_of, eqn.outvars)) * any(map(_is_far, eqn.invars))
        elif name == "axis_index" and params["axis_name"] in known:
            known[eqn.outvars[0]] = known[params["axis_name"]]
        elif name == "cond":
            index, branches = value(eqn.invars[0]), [b.jaxpr for b in params["branches"]]
            taken = branches if index is None else [branches[min(max(int(index), 0), len(branches) - 1)]]
            names = {k: v for k, v in known.items() if isinstance(k, str)}
            total += max(_loads(b, names | inside(b, eqn.invars[1:])) for b in taken)
        elif name == KERNEL:
            (mesh,) = params["meshes"]
            for thread in range(mesh.num_threads or 1):
                total += math.prod(mesh.grid) * sum(_loads(sub, {mesh.thread_name: thread}) for sub in _inner(eqn))
        elif subs := list(_inner(eqn)):
            names = {k: v for k, v in known.items() if isinstance(k, str)}
            times = params["length"] if name == "scan" else 1
            given = [inside(sub, eqn.invars) if name == "jit" else {} for sub in subs]
            total += times * sum(_loads(sub, names | more) for sub, more in zip(subs, given, strict=True))
        elif eqn.invars and [v.aval.shape for v in eqn.outvars] == [()] and None not in map(value, eqn.invars):
            known[eqn.outvars[0]] = np.asarray(eqn.primitive.bind(*map(value, eqn.invars), **params))
    return total


def _is_far(v) -> bool:
    """Whether it is a reference to the card's memory."""
    return str(getattr(v.aval, "memory_space", "")) == "gmem"


def _bytes_of(v) -> int:
    return math.prod(v.aval.shape) * v.aval.dtype.itemsize


def _inner(eqn) -> Iterator:
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            sub = getattr(item, "jaxpr", item)
            if hasattr(sub, "eqns"):
                yield sub


def kernels_of_loop(function, args) -> int:
    """`kernel_loads` of the body of a program's outermost loop."""
    jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    bodies = [eqn.params["body_jaxpr"].jaxpr for eqn in jaxpr.eqns if eqn.primitive.name == "while"]
    assert len(bodies) == 1, "not one loop"
    return kernel_loads(bodies[0])


def array_bytes(text: str) -> int:
    """Bytes of all array types in an HLO type."""
    return sum(_BYTES[kind] * math.prod(int(n) for n in dims.split(",") if n) for kind, dims in _ARRAY.findall(text))


class Compiled:
    """The compiled text of one program, by computation."""

    def __init__(self, text: str):
        self.text = text
        self.computations: dict[str, list[tuple[str, str, str, list[str], str]]] = {}
        current = None
        for line in text.splitlines():
            if line and not line[0].isspace() and line.rstrip().endswith("{"):
                current = self.computations.setdefault(line.removeprefix("ENTRY ").split(" ", 1)[0].lstrip("%"), [])
            elif current is not None and (found := _INSTRUCTION.match(line)):
                name, kind, op, rest = found.groups()
                current.append((name, kind, op, re.findall(r"%([\w.\-]+)", rest.split("), ", 1)[0]), rest))

    def loop(self) -> str:
        """The body of the loop with the most kernels: the decode loop."""
        bodies = re.findall(r"body=%?([\w.\-]+)", self.text)
        return max(bodies, key=lambda body: len(self.computations[body]))

    def reads(self, body: str) -> int:
        """Bytes that the operations of a computation read, our kernels left out; inner loops once."""
        types = {name: kind for name, kind, *_ in self.computations[body]}
        total = 0
        for _, kind, op, operands, rest in self.computations[body]:
            if op in ("while", "conditional", "call"):
                inner = re.findall(r"(?:body|to_apply|calls)=%?([\w.\-]+)", rest)
                inner += [
                    n.strip(" %")
                    for group in re.findall(r"branch_computations=\{([^}]*)\}", rest)
                    for n in group.split(",")
                ]
                total += max((self.reads(name) for name in inner), default=0)
            if op in _FREE or (op == "custom-call" and "mosaic_gpu" in rest):
                continue
            if op in _PARTS:
                total += array_bytes(kind)
            elif op == "fusion":
                called = re.search(r"calls=%?([\w.\-]+)", rest)
                total += sum(self._read_of(called[1], i, array_bytes(types.get(o, ""))) for i, o in enumerate(operands))
            else:
                total += sum(array_bytes(types.get(o, "")) for o in operands)
        return total

    def _read_of(self, computation: str, index: int, whole: int) -> int:
        """Bytes that a fusion reads of its operand: parts where it only gathers or slices, none where it overwrites.

        What is sliced by an index, or gathered, counts as what comes out; what a fixed slice keeps, by the sectors that
        it touches. Numbers are computed where they are needed: of a sum of which a slice is taken, that part is read.
        """
        lines = self.computations[computation]
        kinds = {name: kind for name, kind, *_ in lines}
        users: dict[str, list] = {}
        for line in lines:
            for operand in set(line[3]):
                users.setdefault(operand, []).append(line)

        def share(name: str) -> float:
            """Of the value `name`, what its users read."""
            read, size = 0.0, max(1, array_bytes(kinds[name]))
            for other, kind, op, operands, _ in users.get(name, ()):
                if op in _PARTS and operands[0] == name:
                    read += array_bytes(kind) / size
                elif op == "slice":
                    read += _sectors(kind, kinds[name]) / size * (share(other) if users.get(other) else 1)
                elif op in _WHERE_NEEDED and users.get(other):
                    read += share(other)
                elif not (op in ("dynamic-update-slice", "scatter") and operands[0] == name):
                    return 1.0
            return min(read, 1.0)

        names = [name for name, _, op, _, rest in lines if op == "parameter" and rest.startswith(f"{index})")]
        return round(whole * min(1.0, sum(share(name) for name in names)))

    def dense_copies(self, sizes: set[int]) -> list[str]:
        """Operations that write floats, as many as one of the weight matrices has numbers."""
        found = []
        for lines in self.computations.values():
            for name, kind, op, *_ in lines:
                counts = [math.prod(int(n) for n in d.split(",") if n) for k, d in _ARRAY.findall(kind) if k[0] in "fb"]
                if op not in ("parameter", "get-tuple-element", "tuple", "while", "bitcast") and sizes & set(counts):
                    found.append(f"{name} = {kind} {op}")
        return found


def _sectors(part: str, whole: str) -> int:
    """Bytes of the 32-byte sectors that a slice of type `part` of an array of type `whole` lies in, at most."""
    minor = re.search(r"\{(\d+)", whole)
    (kind, dims), (_, all_dims) = _ARRAY.findall(part)[0], _ARRAY.findall(whole)[0]
    taken, size = [int(n) for n in dims.split(",") if n], _BYTES[kind]
    row = taken[int(minor[1])] if minor and taken else 1
    runs = math.prod(taken) // max(row, 1)
    return min(runs * max(row * size, 32), math.prod(int(n) for n in all_dims.split(",") if n) * size)


_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = (\([^=]*?\)|\S+) ([\w\-]+)\((.*)$")


def tree_bytes(tree) -> int:
    """Of all arrays of a tree of shapes."""
    return sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))
