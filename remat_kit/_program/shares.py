"""What part of each operation of a partitioned program does one device do?

The module puts a number into the name stack of every equation of a program, at any depth, and
lowers the program. Shardy propagates the shardings to every value, as in
`remat_kit._program.sharding`. The numbers then say which equation each lowered operation comes
from, and so how the devices split its operands and results.

Example: four devices split the rows of ``x``. Each of them does a quarter of the product, and all
of the work on ``w``:

>>> import jax.numpy as jnp
>>> from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P
>>> mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))
>>> x = jax.ShapeDtypeStruct((16, 8), "float32", sharding=NamedSharding(mesh, P("data")))
>>> w = jax.ShapeDtypeStruct((8, 8), "float32", sharding=NamedSharding(mesh, P()))
>>> closed = jax.make_jaxpr(lambda x, w: jnp.sin(x @ w) + jnp.sum(w))(x, w)
>>> labelled = Labelled(closed)
>>> shares = labelled.shares(labelled.function, [x, w])
>>> [(e.primitive.name, shares.of((e,)).work) for e in closed.eqns if e.primitive.name != "add"]
[('dot_general', 0.25), ('sin', 0.25), ('reduce_sum', 1.0)]

Xia et al., Shardy, https://openxla.org/shardy.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jec

from remat_kit import _jax
from remat_kit._program import ops as _ops
from remat_kit._program import sharding as _sharding
from remat_kit._program.program import bodies
from remat_kit._program.sharding import Shape, ValueShard

Key = tuple[int, ...]  # the identities of the equations around one, and of itself


@dataclasses.dataclass(frozen=True)
class Share:
    """What one device does of an operation.

    Attributes:
        work: the part of its floating-point operations.
        operands, results: their shapes on one device.
        estimated: whether XLA's partitioner may split the operation in another way.
    """

    work: float
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    estimated: bool = False


@dataclasses.dataclass(frozen=True)
class Shares:
    """The shares of the equations of a program, at any depth.

    Attributes:
        found: the share of each equation, by the identities of the equations around it and its own.
        results: the shapes of the results of the lowered program on one device.
    """

    found: Mapping[Key, Share]
    results: Sequence[Shape]

    def of(self, eqns: Sequence[Any]) -> Share | None:
        """Return the share of an equation, given after those around it; None if it is unknown."""
        return self.found.get(tuple(map(id, eqns)))


class Labelled:
    """Programs whose equations have numbers in their name stacks.

    Args:
        programs: closed jaxprs.
    """

    def __init__(self, *programs: Any):
        self.programs = programs
        self.numbers: dict[Key, int] = {}
        self.eqns: list[Any] = []
        self.labelled = [self._jaxpr(closed, ()) for closed in programs]

    @property
    def function(self) -> Callable[..., list[Any]]:
        """The first program, as a function."""
        return jec.jaxpr_as_fun(self.labelled[0])

    def shares(
        self, function: Callable[..., Sequence[Any]], structs: Sequence[jax.ShapeDtypeStruct]
    ) -> Shares | None:
        """Return the shares of all equations, or None if the program is not partitioned.

        Args:
            function: calls the labelled programs; returns a list of arrays.
            structs: the shapes of its arguments, with their shardings.
        """
        lowered = _sharding.lowered_partitions(function, structs)
        if lowered is None:
            return None
        module, shapes = lowered
        operations = _jax.propagated_operations(module, _NUMBER)
        if operations is None:
            return None
        sizes = _jax.axis_sizes(module)
        texts = _jax.result_shardings(module)
        results = [
            _sharding.shard_of(shape, text, sizes).shape
            for shape, text in zip(shapes, texts, strict=True)
        ]
        groups: dict[int, list[_jax.PropagatedOperation]] = {}
        for operation in operations:
            groups.setdefault(int(_NUMBERS.findall(operation.stack)[-1]), []).append(operation)
        return Shares(self._shares(groups, sizes), results)

    def _jaxpr(self, jaxpr: Any, around: Key) -> Any:
        eqns = []
        for eqn in jaxpr.eqns:
            key = (*around, id(eqn))
            number = self.numbers.setdefault(key, len(self.numbers))
            if number == len(self.eqns):
                self.eqns.append(eqn)
            params = dict(eqn.params)
            for body in bodies(eqn) if _jax.hi_primitive(eqn) is None else ():
                if body.kind == "branch":
                    branches = eqn.params[body.key]
                    params[body.key] = tuple(self._jaxpr(b, key) for b in branches)
                else:
                    params[body.key] = self._jaxpr(body.jaxpr, key)
            eqns.append(_jax.with_inner_scope(eqn, f"{_NUMBER}{number}", params=params))
        outvars = getattr(jaxpr, "jaxpr", jaxpr).outvars
        return _jax.replace_body(jaxpr, eqns, outvars)

    def _shares(
        self, groups: Mapping[int, Sequence[_jax.PropagatedOperation]], sizes: Mapping[str, int]
    ) -> dict[Key, Share]:
        found: dict[Key, Share] = {}
        for key, number in reversed(self.numbers.items()):  # what is inside comes first
            eqn = self.eqns[number]
            if number in groups:
                found[key] = _share(eqn, groups[number], sizes)
            inner = [
                (float(_ops.flops(e)), found[own].work)
                for body in bodies(eqn)
                if _jax.hi_primitive(eqn) is None
                for e in body.jaxpr.eqns
                if (own := (*key, id(e))) in found
            ]
            total = sum(flops for flops, _ in inner)
            if total and key in found:
                work = sum(flops * work for flops, work in inner) / total
                found[key] = dataclasses.replace(found[key], work=work)
        return found


_NUMBER = "remat_kit_equation_"
_NUMBERS = re.compile(rf"{_NUMBER}(\d+)")


def _share(
    eqn: Any, operations: Sequence[_jax.PropagatedOperation], sizes: Mapping[str, int]
) -> Share:
    """Return the share of an equation from the operations that it was lowered to."""
    free = {name: n for name, n in sizes.items() if name not in operations[0].manual}
    exact = next((o for o in operations if o.kind == _KINDS.get(eqn.primitive.name)), None)
    known: dict[int, ValueShard] = {}

    def look(atoms: Sequence[Any], arrays: Sequence[tuple[Shape, str]]) -> None:
        by_shape = dict(reversed(arrays))
        pairs = zip(atoms, arrays, strict=True) if exact else ((v, None) for v in atoms)
        for atom, array in pairs:
            shape = tuple(getattr(atom.aval, "shape", ()))
            text = array[1] if array else by_shape.get(shape)
            if text is not None:
                known[id(atom)] = _sharding.shard_of(shape, text, free)

    chosen = [exact] if exact else operations
    look(eqn.invars, [a for o in chosen for a in o.operands])
    look(eqn.outvars, [a for o in reversed(chosen) for a in o.results])

    def part(atom: Any) -> float:
        whole = math.prod(getattr(atom.aval, "shape", ()))
        if id(atom) not in known or not whole:  # an array with a dimension of 0 needs no work
            return 1.0
        return math.prod(known[id(atom)].shape) / whole

    def shard(atom: Any) -> ValueShard | None:
        return known.get(id(atom))

    work = _sharding.work_share(eqn, shard, part, free)

    def shapes(atoms: Sequence[Any]) -> tuple[Shape, ...]:
        whole = ((id(v), tuple(getattr(v.aval, "shape", ()))) for v in atoms)
        return tuple(known[key].shape if key in known else shape for key, shape in whole)

    estimated = _sharding.may_be_split_otherwise(eqn, shard, work)
    return Share(work, shapes(eqn.invars), shapes(eqn.outvars), estimated)


_KINDS = {
    "dot_general": "stablehlo.dot_general",
    "conv_general_dilated": "stablehlo.convolution",
}
