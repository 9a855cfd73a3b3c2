"""One walk of a jaxpr: where each value comes from, what it weighs and what it costs.

A `Program` is a jaxpr made flat: calls that only group equations are spliced in, and module
paths are complete. Everything that has to understand equations (applying a policy, the report,
the planner) starts from it, so the knowledge of what an equation means is here alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np

from remat_kit import _jax
from remat_kit._policy import Value

# Scopes that JAX adds around what it recomputes; they are no part of a module's path.
_REMAT_SCOPES = frozenset({"checkpoint", "rematted_computation", "remat", "remat2"})

Path = tuple[str, ...]


# -- one equation ---------------------------------------------------------------------------


def common_prefix(*paths: Sequence[str]) -> Path:
    """Return the components that all paths begin with."""
    shared: list[str] = []
    for column in zip(*paths, strict=False):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    return tuple(shared)


def join_scopes(groups: Sequence[Sequence[str]]) -> Path:
    """Merge the groups of a name stack into one module path.

    A transformation that replays a call writes the path once more (``jvp(Net)/jvp(Net)/up``);
    a group that repeats the beginning replaces it, another one goes on from there. The formula of
    an einsum (``bqhd,bkhd->bhqk``) is a scope of JAX's and no module.
    """
    path: list[str] = []
    for group in groups:
        clean = [s for s in group if s not in _REMAT_SCOPES and "->" not in s]
        common = len(common_prefix(path, clean))
        path = clean if common and common == len(path) else path + clean
    return tuple(path)


def module_path(eqn: Any, base: Path = ()) -> Path:
    """Return the module path of an equation inside a body whose own path is ``base``."""
    return join_scopes([base, *_jax.name_stack_groups(eqn)])


def roll_up(path: str) -> str:
    """Return a module path with the numbers of repeated blocks left out.

    >>> roll_up("GPT/block_11/mlp"), roll_up("GPT/layers/3/attn")
    ('GPT/block_*/mlp', 'GPT/layers/*/attn')
    """
    return re.sub(r"(?<=_)\d+(?=/|$)|(?<=/)\d+(?=/|$)", "*", path)


@functools.cache
def _library_folders() -> tuple[str, ...]:
    import flax

    folders = [os.path.dirname(flax.__file__), os.path.dirname(__file__)]
    return tuple(f + os.sep for f in folders)


@functools.lru_cache(maxsize=4096)
def is_library_file(name: str) -> bool:
    """Tell whether a source file is one of JAX, Flax, remat_kit or the standard library."""
    return _jax.is_jax_file(name) or name.startswith(_library_folders())


def source_of(eqn: Any) -> tuple[str, int]:
    """Return (file, line) of the innermost frame that is the user's, or ("", 0).

    Frames of JAX, Flax and remat_kit are passed over: `nn.Dense` inside a model is reported at
    the line of the model that called it.
    """
    first = ("", 0)
    for file, line, _ in _jax.user_frames(eqn):
        if not file.startswith(_library_folders()):
            return file, line
        first = first if first[1] else (file, line)
    return first


def short_path(file: str) -> str:
    """Return a file's path relative to the working directory, or to where packages are installed.

    >>> short_path(os.path.join(os.getcwd(), "models", "gpt.py"))
    'models/gpt.py'

    A cell of a notebook goes by the number it shows: ``In[3]``.
    """
    if cell := _CELL.fullmatch(file):
        return _cell(cell.group(1))
    for folder in (os.getcwd(), *_package_folders()):
        if file.startswith(folder + os.sep):
            return file[len(folder) + 1 :]
    return file


# Where ipykernel says that a cell is compiled from: a folder of its process, a hash of the text.
_CELL = re.compile(r".*[\\/]ipykernel_\d+[\\/](\d+\.py)")


def _cell(file: str) -> str:
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    compiler = getattr(shell, "compile", None)
    if compiler is not None and hasattr(compiler, "format_code_name"):
        # A program that was compiled by an earlier process has the names of that one's folder.
        here = os.path.join(tempfile.gettempdir(), f"ipykernel_{os.getpid()}", file)
        if (found := compiler.format_code_name(here)) is not None:
            return found[1]
    return "a cell"


@functools.cache
def _package_folders() -> tuple[str, ...]:
    return tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})


def nbytes(aval: Any) -> int:
    """Return the bytes of an array of this abstract value (0 for tokens and keys without size)."""
    shape, dtype = getattr(aval, "shape", None), getattr(aval, "dtype", None)
    if shape is None or dtype is None:
        return 0
    if jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        base = math.prod(jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype)).shape)
        return int(math.prod(shape)) * base * 4
    if dtype == jax.dtypes.float0:
        return 0
    bits = _bits(dtype)
    return (int(math.prod(shape)) * bits + 7) // 8


@functools.cache
def _bits(dtype: Any) -> int:
    if np.dtype(dtype).kind in "V" or "int4" in str(dtype) or "int2" in str(dtype):
        info = jax.numpy.iinfo if "int" in str(dtype) else jax.numpy.finfo
        return int(info(dtype).bits)
    return np.dtype(dtype).itemsize * 8


_FREE = frozenset(
    {
        *("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose", "rev", "split"),
        *("copy", "copy_p", "name", "convert_element_type", "bitcast_convert_type", "iota"),
        *("slice", "dynamic_slice", "dynamic_update_slice", "concatenate", "pad", "gather"),
        *("stop_gradient", "optimization_barrier", "reduce_precision", "device_put", "select_n"),
        *("random_wrap", "random_unwrap", "pvary", "sharding_constraint"),
    }
)


def flops(eqn: Any) -> float:
    """Return the floating-point operations of an equation.

    A matrix product or convolution counts a multiply and an add each as one operation, as XLA
    and the literature do; an elementwise operation one per output element, a reduction one per
    input element; data movement none; a loop its body times its length.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (lhs_contract, _), _ = params["dimension_numbers"]
        k = math.prod(eqn.invars[0].aval.shape[d] for d in lhs_contract)
        return 2.0 * k * math.prod(eqn.outvars[0].aval.shape)
    if name == "conv_general_dilated":
        return _conv_flops(eqn)
    inner = bodies(eqn)
    if inner:
        costs = [b.times * sum(flops(e) for e in b.jaxpr.eqns) for b in inner]
        return max(costs) if name == "cond" else sum(costs)
    if name in _FREE:
        return 0.0
    if name.startswith("scatter"):
        return 0.0 if name == "scatter" else float(_size(eqn.invars[2]))
    if name.startswith(("reduce", "cum", "arg")):
        return float(sum(_size(v) for v in eqn.invars))
    return float(sum(_size(v) for v in eqn.outvars))


def _size(atom: Any) -> int:
    return int(math.prod(getattr(atom.aval, "shape", ())))


def _conv_flops(eqn: Any) -> float:
    spec = eqn.params["dimension_numbers"]
    kernel = eqn.invars[1].aval.shape
    window = math.prod(kernel[d] for d in spec.rhs_spec[2:])
    out = math.prod(eqn.outvars[0].aval.shape)
    taps = 2.0 * out * kernel[spec.rhs_spec[1]] * window
    # A dilated input (the gradient of a strided convolution) is mostly zeros, which no backend
    # multiplies when it can help it.
    return taps / math.prod(eqn.params["lhs_dilation"] or (1,))


def moved_bytes(eqn: Any) -> float:
    """Return the bytes an equation reads and writes."""
    return float(sum(nbytes(v.aval) for v in (*eqn.invars, *eqn.outvars)))


@dataclasses.dataclass(frozen=True)
class Body:
    """A jaxpr inside an equation: ``times`` it runs and, per position, what feeds it.

    ``kind`` is "loop" (scan), "while", "branch" (cond), "call" (runs once with the equation's
    own inputs), or "rule" (the body of a function with its own derivative).
    """

    key: str
    jaxpr: Any
    kind: str
    times: float = 1.0


def bodies(eqn: Any) -> tuple[Body, ...]:
    """Return the jaxprs that an equation runs (derivative rules left out)."""
    name, params = eqn.primitive.name, eqn.params
    hi = _jax.hi_primitive(eqn)
    if hi is not None:
        inner = hi.params.get("jaxpr")
        return (Body("jaxpr", inner, "call"),) if inner is not None else ()
    if name == "scan":
        return (Body("jaxpr", params["jaxpr"], "loop", float(params["length"])),)
    if name == "while":
        # The trip count is not known to a jaxpr: one round is counted.
        return (
            Body("cond_jaxpr", params["cond_jaxpr"], "while"),
            Body("body_jaxpr", params["body_jaxpr"], "while"),
        )
    if name == "cond":
        return tuple(Body("branches", b, "branch") for b in params["branches"])
    if name == "custom_vjp_call":
        key = "call_jaxpr" if "call_jaxpr" in params else "fun_jaxpr"
        return (Body(key, params[key], "rule"),) if _jax.is_jaxpr(params.get(key)) else ()
    if name == "custom_jvp_call":
        return (Body("call_jaxpr", params["call_jaxpr"], "rule"),)
    if name in ("pallas_call", "custom_lin", "reduce") or name.startswith(("scatter", "reduce_")):
        return ()  # a kernel, a linear map, or how two scalars are combined
    return tuple(Body(k, v, "call") for k, v in params.items() if _jax.is_jaxpr(v))


def without_regions(jaxpr: Any) -> Any:
    """Return the same program with checkpoint regions that keep everything.

    Under ``jax_remat3`` a region's policy is out of reach, and nothing changes. Regions in the
    rules of functions with their own derivative stay as they are.
    """
    eqns = []
    for eqn in jaxpr.eqns:
        params = dict(eqn.params)
        if eqn.primitive.name in ("remat2", "remat", "checkpoint"):
            params["policy"] = jax.checkpoint_policies.everything_saveable
        if _jax.hi_primitive(eqn) is None:
            for body in bodies(eqn):
                if body.kind == "rule":
                    continue
                if body.kind == "branch":
                    params[body.key] = tuple(map(without_regions, eqn.params[body.key]))
                else:
                    params[body.key] = without_regions(body.jaxpr)
        eqns.append(eqn.replace(params=params))
    outvars = getattr(jaxpr, "jaxpr", jaxpr).outvars
    return _jax.replace_body(jaxpr, eqns, outvars)


def producers(eqn: Any, position: int = 0) -> list[Any]:
    """Return the equation and, for a call, those inside that make its output, outermost first.

    `jax.nn.relu` is a ``custom_jvp_call`` of a ``jit`` of ``max``: three equations, one value.
    """
    chain = [eqn]
    for body in bodies(eqn):
        if body.kind in ("call", "rule") and position < len(body.jaxpr.outvars):
            target = body.jaxpr.outvars[position]
            inner = next((e for e in body.jaxpr.eqns if target in e.outvars), None)
            if inner is not None:
                chain.extend(producers(inner, inner.outvars.index(target)))
    return chain


def primitive_name(eqn: Any) -> str:
    """Return the name of an equation's primitive, looking through high-level ones."""
    hi = _jax.hi_primitive(eqn)
    return eqn.primitive.name if hi is None else type(hi).__name__


def checkpoint_name_of(eqn: Any) -> str | None:
    """Return the name if the equation is a `jax.ad_checkpoint.checkpoint_name`."""
    if eqn.primitive.name == "name":
        return eqn.params["name"]
    hi = _jax.hi_primitive(eqn)
    if hi is not None and type(hi).__name__.startswith("CheckpointName"):
        return hi.params["name"]
    return None


def is_identity(eqn: Any) -> bool:
    """Tell whether an equation hands its input on: a name, or a rounding to its own precision.

    `jax.checkpoint` rounds residuals to their own type, which keeps XLA from holding them wider.
    """
    if checkpoint_name_of(eqn) is not None:
        return True
    if eqn.primitive.name != "reduce_precision":
        return False
    info = jnp.finfo(eqn.invars[0].aval.dtype)
    params = eqn.params
    return (params["exponent_bits"], params["mantissa_bits"]) == (info.nexp, info.nmant)


# -- a whole program ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Program:
    """A jaxpr made flat.

    ``eqns`` are in execution order with plain calls spliced in, their name stacks plain module
    paths relative to ``base``. ``consts`` are values of the first ``len(consts)`` of ``invars``.
    """

    invars: tuple[Any, ...]
    outvars: tuple[Any, ...]
    eqns: tuple[Any, ...]
    consts: tuple[Any, ...] = ()
    base: Path = ()

    @staticmethod
    def of(closed: Any, base: Path = ()) -> Program:
        """Flatten a closed jaxpr (`jax.make_jaxpr`)."""
        flat = _Flattener()
        jaxpr = closed.jaxpr
        consts = tuple(closed.consts)
        for var in (*jaxpr.constvars, *jaxpr.invars):
            flat.subst[var] = var
        flat.splice(jaxpr, ())
        outvars = tuple(flat.read(v) for v in jaxpr.outvars)
        invars = (*flat.constvars, *jaxpr.constvars, *jaxpr.invars)
        return Program(invars, outvars, tuple(flat.eqns), (*flat.consts, *consts), base)

    def path(self, eqn: Any) -> Path:
        """Return the full module path of one of the program's equations."""
        return module_path(eqn, self.base)


class _Flattener:
    """Splices plain calls into one list of equations, with fresh variables."""

    def __init__(self) -> None:
        self.subst: dict[Any, Any] = {}
        self.eqns: list[Any] = []
        self.constvars: list[Any] = []
        self.consts: list[Any] = []

    def read(self, atom: Any) -> Any:
        return atom if isinstance(atom, jec.Literal) else self.subst[atom]

    def splice(self, jaxpr: Any, base: Path, caller: Any = None) -> None:
        for eqn in jaxpr.eqns:
            eqn = _jax.with_caller(eqn, caller)
            path = module_path(eqn, base)
            if _jax.is_plain_call(eqn):
                self.call(eqn, path)
                continue
            invars = [self.read(v) for v in eqn.invars]
            outvars = [self.fresh(v) for v in eqn.outvars]
            self.eqns.append(_jax.with_scopes(eqn, path, invars=invars, outvars=outvars))

    def fresh(self, var: Any) -> Any:
        new = var if isinstance(var, jec.DropVar) else type(var)(var.aval)
        self.subst[var] = new
        return new

    def call(self, eqn: Any, path: Path) -> None:
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        open_jaxpr = inner.jaxpr
        args = [self.read(v) for v in eqn.invars]
        for var, const in zip(open_jaxpr.constvars, getattr(inner, "consts", ()), strict=True):
            self.consts.append(const)
            self.constvars.append(self.fresh(var))
        self.subst.update(zip(open_jaxpr.invars, args, strict=True))
        self.splice(open_jaxpr, path, eqn)
        for outer, out in zip(eqn.outvars, open_jaxpr.outvars, strict=True):
            self.subst[outer] = self.read(out)


def part(eqns: Sequence[Any], wanted: set[Any], base: Path) -> Program:
    """Return some of a program's equations as a program, with ``wanted`` among its outputs."""
    made = {v: None for e in eqns for v in e.outvars}
    read = {v: None for e in eqns for v in e.invars if not isinstance(v, jec.Literal)}
    invars = tuple(v for v in read if v not in made)
    outvars = tuple(v for v in made if v in wanted)
    return Program(invars, outvars, tuple(eqns), base=base)


def evaluate(
    program: Program, args: Sequence[Any], step: Callable[..., Any] = _jax.bind
) -> list[Any]:
    """Run a program on values (or tracers); ``step(eqn, values)`` evaluates one equation."""
    env = dict(zip(program.invars, (*program.consts, *args), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, jec.Literal) else env[atom]

    for eqn in program.eqns:
        env.update(zip(eqn.outvars, step(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in program.outvars]


def without_region_boundaries(program: Program) -> Program:
    """Return the same program with the checkpoint regions of the model spliced in."""
    if not any(e.primitive.name in _REGIONS or _is_hi_region(e) for e in program.eqns):
        return program

    def step(eqn: Any, values: list[Any]) -> list[Any]:
        if eqn.primitive.name not in _REGIONS and not _is_hi_region(eqn):
            return _jax.bind(eqn, values)
        (body,) = bodies(eqn)
        path = "/".join(module_path(eqn))
        with jax.named_scope(path) if path else contextlib.nullcontext():
            inner = body.jaxpr
            closed = inner if hasattr(inner, "consts") else jec.ClosedJaxpr(inner, ())
            return evaluate(Program.of(closed), values, step)

    count = len(program.consts)
    avals = [v.aval for v in program.invars[count:]]
    spliced = jax.make_jaxpr(lambda *args: evaluate(program, args, step))(*avals)
    return Program.of(spliced, program.base)


_REGIONS = frozenset({"remat2", "remat", "checkpoint"})


def _is_hi_region(eqn: Any) -> bool:
    hi = _jax.hi_primitive(eqn)
    return hi is not None and "Remat" in type(hi).__name__


# -- values, as selectors see them ----------------------------------------------------------


def value_of(
    eqn: Any, position: int, path: Path, names: Sequence[str] = (), *, full: bool = True
) -> Value:
    """Describe one output of an equation to the selectors of a policy.

    ``full=False`` leaves out the source line, which is the slow part (frames are symbolised).
    """
    var = eqn.outvars[position]
    chain = producers(eqn, position)
    return Value(
        primitives=tuple(dict.fromkeys(primitive_name(e) for e in chain)),
        names=tuple(names),
        module="/".join(path),
        source=source_of(eqn) if full else ("", 0),
        shape=tuple(getattr(var.aval, "shape", ())),
        dtype=str(getattr(var.aval, "dtype", "")),
        bytes=nbytes(var.aval),
        flops=flops(eqn),
        moved_bytes=moved_bytes(eqn),
        primitive=chain[-1].primitive,
        in_avals=tuple(v.aval for v in chain[-1].invars),
        params=chain[-1].params,
    )


def values(program: Program, *, full: bool = True) -> Iterator[Value]:
    """Yield every intermediate value of a program, those inside loops and branches too."""
    yield from _values(program.eqns, program.base, full)


def _values(eqns: Sequence[Any], base: Path, full: bool) -> Iterator[Value]:
    names = aliases(eqns)
    made = {v for e in eqns for v in e.outvars if checkpoint_name_of(e) is None}
    for eqn in eqns:
        path = module_path(eqn, base)
        name = checkpoint_name_of(eqn)
        if name is None:
            for i, var in enumerate(eqn.outvars):
                yield value_of(eqn, i, path, names.get(var, ()), full=full)
        elif isinstance(eqn.invars[0], jec.Literal) or eqn.invars[0] in names.keys() - made:
            yield value_of(eqn, 0, path, (name,), full=full)  # an input that was named
        for body in bodies(eqn):
            if body.kind != "rule":
                yield from _values(body.jaxpr.eqns, path, full)


def aliases(eqns: Sequence[Any]) -> dict[Any, tuple[str, ...]]:
    """Map each variable that carries a checkpoint name to its names.

    `checkpoint_name` is the identity: its input and its output are one value, so a name counts
    for both. (JAX's own policies save the output and recompute the input that a derivative rule
    uses; see the note on `Region` in `_remat`.)
    """
    names: dict[Any, tuple[str, ...]] = {}
    root: dict[Any, Any] = {}
    for eqn in eqns:
        if not is_identity(eqn) or isinstance(eqn.invars[0], jec.Literal):
            continue
        source = root.get(eqn.invars[0], eqn.invars[0])
        root[eqn.outvars[0]] = source
        name = checkpoint_name_of(eqn)
        if name is not None:
            names[source] = (*names.get(source, ()), name)
    return names
