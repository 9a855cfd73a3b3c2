"""Compile a program for a chip and report the memory that it needs.

This process lowers the program, and a child process compiles it with the compiler of the chip. A
laptop can therefore answer for an H100 or a TPU. The program does not run, except for the target
``local``. Answers are stored on disk, by the lowered program, the chip and the versions of the
compilers.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import jax

from remat_kit import _frames, _jax
from remat_kit._chip import assignment as _assignment
from remat_kit._chip import lowering as _lowering
from remat_kit._chip.cache import Cache, default_cache, key_of
from remat_kit._chip.catalogue import TOPOLOGY_OPTIONS, Options
from remat_kit._chip.memory import Memory, kind_of
from remat_kit._chip.target import (
    EXTRAS,
    SCHEDULER_FLAG,
    Target,
    for_devices,
    needs_scheduler_flag,
    several_targets,
    target,
)
from remat_kit._chip.worker import WITHOUT_CODE, Worker, WorkerDiedError
from remat_kit._compiled.hlo import xla_remat_count
from remat_kit._errors import (
    CompileError,
    MissingPluginError,
    RematKitError,
    TargetError,
    UserError,
)
from remat_kit._frameworks import flax as _flax
from remat_kit._policy import structural as _structural
from remat_kit._program import program as _program
from remat_kit._program import value as _value
from remat_kit._program.steps import losses as _losses
from remat_kit._program.steps import step as _step
from remat_kit._program.steps import traced as _traced
from remat_kit._program.steps.gradient import Argnums
from remat_kit._units import format_bytes


@dataclass(frozen=True)
class Compiled:
    """A compiled program: the memory that it needs, and its optimized HLO.

    Attributes:
        memory: the memory that it needs.
        hlo_text: the optimized, scheduled HLO; None if the program does not fit on the chip.
        chip: the chip that it was compiled for.
        offloaded_bytes: bytes that the traced program moves to the host's memory, on all devices.
        meshes: the meshes over which it is partitioned; empty for one device.
    """

    memory: Memory
    hlo_text: str | None = field(repr=False)
    chip: Target
    offloaded_bytes: int = 0
    meshes: tuple[_lowering.ProgramMesh, ...] = ()


@overload
def measure(
    fn: Callable[..., Any],
    *args: Any,
    target: str | Target = "cpu",
    argnums: Argnums = 0,
    donate_argnums: int | Sequence[int] = (),
    optimizer: Any = None,
    cache: bool = True,
    compiler_options: Options | None = None,
) -> Memory: ...


@overload
def measure(
    fn: Callable[..., Any],
    *args: Any,
    target: list[str | Target] | list[str] | tuple[str | Target, ...],
    argnums: Argnums = 0,
    donate_argnums: int | Sequence[int] = (),
    optimizer: Any = None,
    cache: bool = True,
    compiler_options: Options | None = None,
) -> tuple[Memory, ...]: ...


def measure(
    fn: Callable[..., Any],
    *args: Any,
    target: str | Target | Sequence[str | Target] = "cpu",
    argnums: Argnums = 0,
    donate_argnums: int | Sequence[int] = (),
    optimizer: Any = None,
    cache: bool = True,
    compiler_options: Options | None = None,
) -> Memory | tuple[Memory, ...]:
    """Compile the gradient of a loss for a chip and report the memory that it needs there.

    The figures are those of `jax.stages.Compiled.memory_analysis`, for a chip that need not be in
    this machine.

    >>> import jax, jax.numpy as jnp
    >>> loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    >>> w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    >>> x = jax.ShapeDtypeStruct((1024, 256), jnp.float32)
    >>> memory = measure(loss, w, x, target="cpu")
    >>> memory.argument_bytes, memory.fits
    (1310720, True)

    Args:
        fn: called as ``fn(*args)``; returns a scalar, or ``(scalar, aux)``. It may also be a
            training step, which takes a gradient itself; it is compiled as it is.
        args: pytrees of arrays, numbers or `jax.ShapeDtypeStruct`. Only their shapes, their dtypes,
            their shardings over several devices and whether they lie in the host's memory matter.
            The target ``local`` runs the program and replaces shapes by arrays of zeros.
        target: a chip or its name (see `target`); for a list of them, a tuple is returned. If the
            program is partitioned over a mesh, by the shardings of its arguments or inside, the
            target has as many devices, and all figures are those of one of them.
        argnums: which arguments of a loss to differentiate. If it is None, ``fn`` is compiled as
            it is, whether it takes a gradient or not. A jitted step is compiled with its own
            donation and static arguments. What a step of Flax NNX changes in its arguments is part
            of the program.
        donate_argnums: the arguments whose memory the results may take over, as in `jax.jit`; not
            for a jitted step that donates other arguments.
        optimizer: an ``optax.GradientTransformation``. If it is given, the whole training step is
            compiled: the gradients, the optimizer's state and the update, with parameters and
            state donated.
        cache: whether to look for the answer on disk and to store it there.
        compiler_options: for XLA; they override those of the target.

    Returns:
        The memory in bytes, or a tuple with one `Memory` for each target of a list.

    Raises:
        UnknownNameError: no chip has that name.
        MissingPluginError: the compiler of the chip is not installed.
        TargetError: XLA cannot compile for this chip unless the chip is in the machine.
        NotDifferentiableError: ``fn`` is not a loss, or one of the arguments to differentiate has
            no gradient.
        CompileError: the compiler ended, or refused the program for another reason than memory.
        UserError: the program's mesh and the topology of a target have different sizes.
    """
    chosen = [_target_of(target)] if isinstance(target, (str, Target)) else several_targets(target)
    for chip in chosen:
        _require(chip, "measure")
    argnums = _losses.argnums_of(fn, args, argnums, donate_argnums, optimizer, call="measure")
    found = tuple(
        compile_program(
            fn,
            args,
            chip,
            argnums=argnums,
            donate_argnums=donate_argnums,
            optimizer=optimizer,
            cache=cache,
            compiler_options=compiler_options,
        )
        for chip in chosen
    )
    for compiled in found:
        warn_of_offload_on_cpu(compiled, "measure")
        _warn_of_dropped_offload(compiled)
        if argnums is None:
            before = without_policy(
                compiled,
                fn,
                args,
                donate_argnums=donate_argnums,
                cache=cache,
                compiler_options=compiler_options,
            )
            warn_if_not_lower(compiled.memory, before, fn, "measure")
    memories = tuple(compiled.memory for compiled in found)
    return memories[0] if isinstance(target, (str, Target)) else memories


def warn_of_offload_on_cpu(compiled: Compiled, call: str) -> bool:
    """Emit a `RematKitWarning` if the program offloads and the chip is a CPU, which has one memory.

    Returns whether this is the case.
    """
    stays = compiled.memory.on_cpu and bool(compiled.offloaded_bytes)
    if stays:
        _frames.warn(
            f"`{call}(..., target={compiled.memory.target!r})`: "
            f"{format_bytes(compiled.offloaded_bytes)} are offloaded, but a CPU's memory is the "
            "host's, so they stay where they are and count as before",
            "name a GPU or a TPU as the target, or recompute instead of offloading",
        )
    return stays


def _warn_of_dropped_offload(compiled: Compiled) -> None:
    if not compiled.memory.drops_offload(compiled.offloaded_bytes):
        return
    _frames.warn(
        f"`measure(..., target={compiled.memory.target!r})`: "
        f"{format_bytes(compiled.offloaded_bytes)} are offloaded in the traced program, but the "
        f"compiled one keeps {format_bytes(compiled.memory.host_bytes or 0)} in the host's memory: "
        "the compiler removed the transfers, and the values stay on the device",
        "offload inside a scan, where the compiler keeps the transfers, or recompute instead",
    )


_CHEAP_SECONDS = 5.0


_FEW_BYTES = 2**16  # of temporaries, below which nobody saves memory


def without_policy(
    compiled: Compiled,
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    donate_argnums: int | Sequence[int] = (),
    cache: bool = True,
    compiler_options: Options | None = None,
) -> Memory | None:
    """Return the memory of a decorated step without its policy, or None if it is not known.

    It is known if it is in the cache. Otherwise the step is compiled without the policy, if the
    decorated step took at most a few seconds to compile.

    Args:
        compiled: the decorated step.
        fn, args, donate_argnums, cache, compiler_options: as for `measure`.
    """
    bare = _losses.undecorated(fn)
    if bare is fn or compiled.memory.temp_bytes is None:
        return None
    store = default_cache() if cache else None
    try:
        job = _job(
            bare, args, compiled.chip, None, donate_argnums, compiler_options, None, "measure"
        )
        if compiled.memory.compile_seconds > _CHEAP_SECONDS and not job.is_known(store):
            return None
        return job.compiled(store, run=False).memory
    except RematKitError:
        return None


def warn_if_not_lower(
    memory: Memory, before: Memory | None, fn: Callable[..., Any], call: str
) -> None:
    """Emit a `RematKitWarning` if a decorated step needs no less memory than without its policy.

    A plan may save everything, because the step fits; it only must not need more.

    Args:
        memory, before: the memory with the policy, and without it; None if that is not known.
        fn: the decorated step.
        call: the public function that the warning names.
    """
    if before is None or memory.temp_bytes is None or before.temp_bytes is None:
        return
    if memory.temp_bytes < _FEW_BYTES:
        return
    more = memory.temp_bytes - before.temp_bytes
    if more < 0 or (more == 0 and _has_plan(fn)):
        return
    _frames.warn(
        f"`{call}(..., target={memory.target!r})`: the policy on the step saves no memory: the "
        f"compiled step needs {format_bytes(memory.temp_bytes)} of temporaries, and "
        f"{format_bytes(before.temp_bytes)} without it",
        "remat_kit.inspect(step, ..., target=...) shows what holds the peak, and remat_kit.plan "
        "finds which values to save",
    )


def _has_plan(fn: Callable[..., Any]) -> bool:
    """Tell whether a function is decorated with a plan, or with a policy that plans."""
    decorated = getattr(fn, _traced.STEP, None)
    planned = (_structural.Planned, _structural.Automatic)
    return decorated is not None and isinstance(decorated.app.policy, planned)


def compile_program(
    fn: Callable[..., Any],
    args: Sequence[Any],
    target: str | Target,
    *,
    argnums: Argnums = 0,
    donate_argnums: int | Sequence[int] = (),
    cache: bool = True,
    compiler_options: Options | None = None,
    optimizer: Any = None,
    call: str = "measure",
    run: bool = True,
    code: bool = True,
) -> Compiled:
    """Do the same as `measure`, and return the optimized HLO too.

    Args:
        fn, target, donate_argnums, cache, compiler_options, optimizer: as for `measure`.
        args: the arguments of ``fn``.
        argnums: the positions of the arguments to differentiate, or None for a step, which is not
            found out here (see `losses.argnums_of`).
        call: the public function that error messages name.
        run: whether the program runs, if the target is ``local``.
        code: whether the compiler has to generate machine code. If not, it is stopped when it has
            assigned all buffers, if it takes more than a second longer. The memory is the same, but
            for the size of the code and the compiler's own figure of the peak, which are None.

    Raises:
        RematKitError: as for `measure`.
    """
    job = _job(fn, args, target, argnums, donate_argnums, compiler_options, optimizer, call)
    if not code:
        job = job.without_code()
    return job.compiled(default_cache() if cache else None, run)


# The part of a TPU's memory in which a program's buffers leave room for its code, and for what the
# chip reserves. If they take more, the compiler may still refuse the program.
_SURELY_FITS = 0.9


_START_SECONDS = 1.0  # about what a new child takes to start


def _dumps(options: Options) -> bool:
    """Tell whether the user has the compiler write about programs into a folder of their own."""
    flag = "xla_dump_to"
    return flag in options or any(flag in os.environ.get(name, "") for name in _COMPILER_VARIABLES)


@dataclass(frozen=True)
class _CompileJob:
    """A program that is lowered for a chip, and with it what the compiler is asked.

    Attributes:
        call: the public function that error messages name.
        program, lowered: the program as it was traced, and as the compiler gets it.
        chip: the chip, with as many devices as the program has.
        options: for the compiler.
        added: the fields of a `Memory` about the optimizer's state.
        request: what the worker gets; None for the target ``local``, which compiles here.
    """

    call: str
    program: _traced.CompilableProgram
    lowered: _lowering.Lowered
    chip: Target
    options: Options
    added: Mapping[str, int | None]
    request: dict[str, Any] | None

    def without_code(self) -> _CompileJob:
        """Return a job that needs no machine code, if the compiler can be stopped before it."""
        if self.request is None or _dumps(self.options):
            return self
        # The other compilers know no limit.
        share = _SURELY_FITS if self.chip.platform == "tpu" else math.inf
        wanted = {"enough": share * self.chip.memory_bytes, "patience": _START_SECONDS}
        return dataclasses.replace(self, request={**self.request, WITHOUT_CODE: wanted})

    def is_known(self, cache: Cache | None) -> bool:
        """Tell whether the answer is in the cache."""
        if cache is None or self.request is None:
            return False
        return _known(self.request, self.lowered.identity, cache) is not None

    def compiled(self, cache: Cache | None, run: bool) -> Compiled:
        """Return the compiled program, from the cache if it is there."""
        lowered, chip = self.lowered, self.chip
        shapes = _shape_bytes(self.program, lowered)
        if self.request is None:
            found = _compiled_here(self.program, shapes, chip, self.options, self.call, run)
        else:
            answer, cached = _answer(self.request, lowered.identity, chip, cache, self.call)
            memory = _memory(answer, chip, cached, shapes)
            moved = _value.offloaded_bytes(self.program.traced.jaxpr)
            found = Compiled(memory, answer.get("hlo"), chip, moved)
        mesh = dict(lowered.meshes[0].axes) if lowered.meshes else {}
        memory = dataclasses.replace(found.memory, devices=chip.devices, mesh=mesh, **self.added)
        return dataclasses.replace(found, memory=memory, meshes=lowered.meshes)


def _job(
    fn: Callable[..., Any],
    args: Sequence[Any],
    target: str | Target,
    argnums: Argnums,
    donate_argnums: int | Sequence[int],
    compiler_options: Options | None,
    optimizer: Any,
    call: str,
) -> _CompileJob:
    """Trace and lower a program."""
    chip = _target_of(target)
    _require(chip, call)
    is_local = kind_of(chip.name) == "local"
    if is_local:
        args = _on_devices_here(args, chip, call)
    program = _traced.trace(fn, args, argnums, donate_argnums, optimizer=optimizer, call=call)
    options: Options = {
        **dict(chip.compiler_options),
        **_jax.compiler_options_of(program.traced),
        **(compiler_options or {}),
    }
    added = _of_optimizer(optimizer, args, argnums, call)
    lowered = _lowered(program.traced, chip, call)
    _check_devices(program, lowered.devices, call)
    chip = for_devices(chip, lowered.devices, call)
    request = None if is_local else _request(lowered, chip, options)
    return _CompileJob(call, program, lowered, chip, options, added, request)


def _check_devices(program: _traced.CompilableProgram, devices: int, call: str) -> None:
    """Raise if a function names an abstract mesh, and nothing says that it runs on its devices.

    JAX lowers such a program for one device and ignores its constraints (0.10.2, 0.12).
    """
    if devices > 1:
        return
    captured = _captured(program.traced.jaxpr)
    if captured is not None:
        kind = captured.aval.str_short(short_dtypes=True)
        count = _jax.devices_of(captured.sharding)
        raise UserError(
            f"`{call}`: the function captures an array, {kind}, on a mesh of {count} devices, and "
            "no argument has a sharding over a mesh, so JAX would lower it for one device",
            hint="make the array an argument of the function, and give it with its sharding",
        )
    named = _jax.devices_within(program.traced.jaxpr)
    if named > 1:
        raise UserError(
            f"`{call}`: the function uses an abstract mesh of {named} devices, and no argument has "
            "a sharding over a mesh, so JAX would lower it for one device",
            hint="give one argument a sharding, if need be a copy on each device: "
            "jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))",
        )


def _captured(closed: Any) -> Any:
    """Return an array over several devices that a traced program captures, or None."""
    arrays = [c for c in getattr(closed, "consts", ()) if isinstance(c, jax.Array)]
    inner = (body.jaxpr for eqn in closed.eqns for body in _program.bodies(eqn))
    found = (c for c in arrays if _jax.devices_of(c.sharding) > 1)
    own = next(found, None)
    if own is not None:
        return own
    return next((c for j in inner if (c := _captured(j)) is not None), None)


def _on_devices_here(args: Sequence[Any], chip: Target, call: str) -> tuple[Any, ...]:
    """Return arguments whose abstract meshes are replaced by meshes of this process's devices."""

    def placed(leaf: Any) -> Any:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(leaf, jax.ShapeDtypeStruct) or not _jax.is_abstract(sharding):
            return leaf
        for_devices(chip, _jax.devices_of(sharding), call)
        return leaf.update(sharding=_jax.concrete(sharding))

    return tuple(_flax.map_arrays(placed, arg) for arg in args)


def _of_optimizer(
    optimizer: Any, args: Sequence[Any], argnums: Argnums, call: str
) -> dict[str, int | None]:
    """The fields of a `Memory` about the optimizer's state, or about that of AdamW if none."""
    if optimizer is None:
        return {"adamw_bytes": _step.adamw_bytes(args, argnums, call)}
    return {"optimizer_bytes": _step.state_bytes(optimizer, args, argnums, call)}


def _target_of(name: str | Target) -> Target:
    return target(name)  # callers have a parameter named `target`, which hides the function


def _require(chip: Target, call: str) -> None:
    if chip.available:
        return
    raise MissingPluginError(
        f"`{call}(..., target={chip.name!r})`: the compiler for {chip.platform} is not installed",
        hint=EXTRAS[chip.platform],
    )


# -- asking the child -----------------------------------------------------------------------


def _lowered(traced: Any, chip: Target, call: str) -> _lowering.Lowered:
    try:
        # The code that asked for the program is not part of it: `measure` on one line of a script
        # and `inspect` on the next share an answer.
        lowered = _lowering.lower(traced, chip.platform, boundary=_OWN_FILES)
    except Exception as error:
        raise CompileError(
            f"`{call}(..., target={chip.name!r})`: the program cannot be lowered for "
            f"{chip.platform}: {str(error).strip()}",
            hint="a program with callbacks into Python (jax.debug.print, io_callback) or kernels "
            "for another kind of chip cannot be lowered for this one; remove them, or measure on "
            "the chip itself with target 'local'",
        ) from error
    return lowered


_OWN_FILES = (
    __file__,
    *(str(Path(__file__).parents[1] / "_program" / f"{n}.py") for n in ("gradient", "traced")),
)


def _request(lowered: _lowering.Lowered, chip: Target, options: Options) -> dict[str, Any]:
    kind = chip.topology.partition(":")[0]
    topology_options: dict[str, Any] = dict(TOPOLOGY_OPTIONS.get(kind, {}))
    if chip.platform == "cuda":
        each = chip.devices // chip.hosts
        topology_options = {"target_config": chip.spec, "topology": f"1x{chip.hosts}x{each}"}
    request = {
        "program": lowered.bytecode,
        "platform": chip.platform,
        "topology": chip.topology,
        "topology_options": topology_options,
        "options": options,
        "settings": _lowering.compile_settings(),
    }
    if chip.devices == 1:
        return request
    sizes = [n for _, n in lowered.meshes[0].axes] if lowered.meshes else [chip.devices]
    return {**request, "mesh": {"shape": sizes, "unsharded": lowered.unsharded}}


def _key(request: Mapping[str, Any], identity: str) -> str:
    """Return the name of an answer, from everything that the answer depends on."""
    rest = {name: value for name, value in request.items() if name != "program"}
    outside = [_environment(request["platform"]), _versions(request["platform"])]
    outside.append({name: os.environ.get(name, "") for name in _COMPILER_VARIABLES})
    return key_of("memory 1", identity, json.dumps([rest, outside], sort_keys=True))


def _answer(
    request: dict[str, Any], identity: str, chip: Target, cache: Cache | None, call: str
) -> tuple[dict[str, Any], bool]:
    known = _known(request, identity, cache)
    if known is not None:
        return known, True
    answer = _ask(request, chip, call)
    if "no_topology" in answer:
        if chip.devices > 1:
            raise TargetError(
                f"`{call}(..., target={chip.name!r})`: the compiler knows no such topology: "
                f"{answer['no_topology'].strip()}",
                hint="name another topology of as many devices",
            )
        answer = {"refused": answer["no_topology"]}
    if "refused" in answer and _out_of_memory(answer["refused"]) is None:
        raise CompileError(
            f"`{call}(..., target={chip.name!r})`: the compiler refused the program: "
            f"{answer['refused'].strip()}",
            hint="if the program runs on the chip itself, please report this",
        )
    if cache is not None:
        cache.put(_key(request, identity), json.dumps(answer).encode())
    return answer, False


def _known(request: Mapping[str, Any], identity: str, cache: Cache | None) -> dict[str, Any] | None:
    """Return the stored answer to a request; that of the whole compilation serves any request."""
    if cache is None:
        return None
    known = _checked_answer(cache.get(_key(_whole(request), identity)))
    if known is None and WITHOUT_CODE in request:
        known = _checked_answer(cache.get(_key(request, identity)), _assignment.FIELDS)
    return known


def _whole(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request for the whole compilation."""
    return {name: value for name, value in request.items() if name != WITHOUT_CODE}


def _checked_answer(
    data: bytes | None, counts: Sequence[str] = _jax.MEMORY_FIELDS
) -> dict[str, Any] | None:
    """Parse a stored answer; None if it is not one, for example because of another release.

    ``counts`` are the fields of its memory.
    """
    try:
        answer = json.loads(data) if data is not None else None
    except (ValueError, RecursionError):
        return None
    match answer:
        case {"refused": str()}:
            return answer
        case {"memory": dict() as memory, "hlo": str() as hlo, "compile_seconds": int() | float()}:
            if hlo.startswith("HloModule") and all(type(memory.get(c)) is int for c in counts):
                return answer
    return None


# Environment variables from which the compilers read flags; the child process inherits them.
_COMPILER_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "TF_XLA_FLAGS")


# By process, platform, and the number of CPU devices, which is fixed when the child starts.
_workers: dict[tuple[int, str, int], Worker] = {}


def _ask(request: dict[str, Any], chip: Target, call: str) -> dict[str, Any]:
    # A forked process inherits the table but must not read the pipes, so its id is in the key.
    cpus = chip.devices if chip.platform == "cpu" else 1
    place = (os.getpid(), chip.platform, cpus)
    if place not in _workers:
        if cpus > 1:
            _close_workers_of_cpus()
        _workers[place] = Worker(_environment(chip.platform, cpus))
    try:
        with _folder(request) as given:
            return _workers[place].ask(given)
    except WorkerDiedError as death:
        last = "\n".join(f"    {line[:300]}" for line in death.stderr_lines[-8:])
        raise CompileError(
            f"`{call}(..., target={chip.name!r})`: {death}"
            + (f"; the last lines that it printed:\n{last}" if last else "; it printed nothing"),
            hint="the next call starts a new one; if this program ends it every time, the "
            "compiler has a fault: try a smaller program or another version of the compiler",
        ) from None


@contextlib.contextmanager
def _folder(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Add a temporary folder to a request for the memory without code.

    If none can be made, the request asks for the whole compilation.
    """
    if WITHOUT_CODE not in request:
        yield request
        return
    try:
        made = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    except OSError:
        yield _whole(request)
        return
    with made as folder:
        yield {**request, WITHOUT_CODE: {**request[WITHOUT_CODE], "folder": folder}}


def _close_workers_of_cpus() -> None:
    """End the children with several CPU devices, so that at most one of them exists."""
    for place in [p for p in _workers if p[0] == os.getpid() and p[2] > 1]:
        _workers.pop(place).close()


@atexit.register
def close_workers() -> None:
    """End the worker processes; the next call starts new ones."""
    for (process, *_), worker in list(_workers.items()):
        if process == os.getpid():
            worker.close()


def _environment(platform: str, cpus: int = 1) -> dict[str, str]:
    common = {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    }
    flags = []
    if platform == "cpu" and needs_scheduler_flag():
        flags.append(f"{SCHEDULER_FLAG}=false")
    if cpus > 1:
        flags.append(f"--xla_force_host_platform_device_count={cpus}")
        common["JAX_NUM_CPU_DEVICES"] = str(cpus)  # it decides where it is set
    if flags:
        given = os.environ.get("XLA_FLAGS", "")
        common["XLA_FLAGS"] = " ".join([given, *flags]).strip()
    return common


def _versions(platform: str) -> dict[str, str]:
    packages = ["jax", "jaxlib"]
    packages += ["libtpu"] if platform == "tpu" else []
    packages += ["jax-cuda13-pjrt", "jax-cuda12-pjrt"] if platform == "cuda" else []
    found = {}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# -- from an answer to a Memory -------------------------------------------------------------


def _memory(
    answer: Mapping[str, Any], chip: Target, cached: bool, shapes: tuple[int, int]
) -> Memory:
    common: dict[str, Any] = {
        "target": chip.name,
        "memory_bytes": chip.memory_bytes,
        "cached": cached,
        "versions": _versions(chip.platform),
    }
    notes = chip.notes
    if "refused" in answer:
        needs = (_out_of_memory(answer["refused"]) or {}).get("needs")
        if needs is not None:  # the compiler rounds it; it is certainly more than the chip has
            needs = max(needs, chip.memory_bytes + 1)
        return Memory(
            argument_bytes=shapes[0],
            output_bytes=shapes[1],
            **dict.fromkeys(
                ("alias_bytes", "temp_bytes", "code_bytes", "host_bytes", "compiler_peak_bytes")
            ),
            peak_bytes=needs,
            needs_bytes=needs,
            fits=False,
            compile_seconds=0.0,
            notes=(*notes, _NOT_COMPILED if chip.devices == 1 else _NOT_COMPILED_ON_A_MESH),
            **common,
        )
    stats = answer["memory"]
    peak = (
        stats["argument_size_in_bytes"]
        + stats["output_size_in_bytes"]
        - stats["alias_size_in_bytes"]
        + stats["temp_size_in_bytes"]
    )
    # The compiler for TPUs knows the memory limit in MiB; the other compilers know no limit.
    fits = peak <= chip.memory_bytes
    if added := xla_remat_count(answer["hlo"]):
        notes += (f"XLA's own rematerialization added {added} instructions",)
    return Memory(
        argument_bytes=stats["argument_size_in_bytes"],
        output_bytes=stats["output_size_in_bytes"],
        alias_bytes=stats["alias_size_in_bytes"],
        temp_bytes=stats["temp_size_in_bytes"],
        code_bytes=stats.get("generated_code_size_in_bytes"),
        host_bytes=sum(stats[f"host_{n}_size_in_bytes"] for n in ("argument", "output", "temp"))
        - stats["host_alias_size_in_bytes"],
        peak_bytes=peak,
        compiler_peak_bytes=stats.get("peak_memory_in_bytes"),
        fits=fits,
        needs_bytes=None if fits else peak,
        compile_seconds=answer["compile_seconds"],
        notes=notes,
        **common,
    )


_NOT_COMPILED = "did not compile: argument and output bytes are those of the shapes"


_NOT_COMPILED_ON_A_MESH = (
    "did not compile: argument and output bytes are those of the shards; what has no sharding "
    "counts as split over all devices"
)


_NEEDS = (
    re.compile(r"total memory required[^()]*\(([\d.]+[KMGTP]?)\) exceeds available HBM"),
    re.compile(r"Used ([\d.]+[KMGTP]?) of [\d.]+[KMGTP]? hbm", re.I),
    re.compile(r"Total hbm usage >= ([\d.]+[KMGTP]?)", re.I),
)


def _out_of_memory(message: str) -> dict[str, int | None] | None:
    """Parse an error of a compiler; None unless it is about the chip's main memory."""
    if "RESOURCE_EXHAUSTED" not in message or not re.search(r"hbm|out of memory", message, re.I):
        return None
    for pattern in _NEEDS:
        if found := pattern.search(message):
            return {"needs": _binary(found.group(1))}
    if re.search(r"\b[vs]mem\b", message, re.I):
        return None  # this is on-chip scratch memory, of which no such chip has more
    return {"needs": None}


def _binary(text: str) -> int:
    powers = {unit: 2 ** (10 * power) for power, unit in enumerate("KMGTP", start=1)}
    return int(float(text.rstrip("KMGTP")) * powers.get(text[-1], 1))


def _shape_bytes(program: _traced.CompilableProgram, lowered: _lowering.Lowered) -> tuple[int, int]:
    """Return the bytes of the arguments and of the results on one device, by their shapes."""
    if lowered.devices > 1:
        return lowered.shard_bytes
    return tuple(  # pyright: ignore
        sum(map(_lowering.nbytes, jax.tree.leaves(tree)))
        for tree in (program.arguments, program.results)
    )


# -- the present device ---------------------------------------------------------------------

_RUN_SECONDS = 2.0


_MIN_RUNS, _MAX_RUNS = 3, 20


def _compiled_here(
    program: _traced.CompilableProgram,
    shapes: tuple[int, int],
    chip: Target,
    options: Options,
    call: str,
    run: bool,
) -> Compiled:
    start = time.perf_counter()
    try:
        with _jax.own_metadata():
            compiled = program.traced.lower().compile(compiler_options=options or None)
    except _lowering.compile_failure_types() as error:
        if _out_of_memory(str(error)) is None:
            raise CompileError(
                f"`{call}(..., target='local')`: the compiler refused the program: {error}",
                hint="try it with plain `jax.jit`; if it works there, please report this",
            ) from error
        return Compiled(_memory({"refused": str(error)}, chip, False, shapes), None, chip)
    answer = {
        "compile_seconds": time.perf_counter() - start,
        "memory": _lowering.memory_stats_to_dict(compiled.memory_analysis()),
        "hlo": compiled.as_text() or "",
    }
    memory = _memory(answer, chip, False, shapes)
    if run:
        memory = _with_run(memory, compiled, program)
    return Compiled(memory, answer["hlo"], chip)


def _with_run(memory: Memory, compiled: Any, program: _traced.CompilableProgram) -> Memory:
    device = jax.local_devices()[0]
    before = device.memory_stats() or {}
    try:
        with jax.disable_jit(False):
            seconds = _timed_runs(compiled, program)
    except _lowering.compile_failure_types() as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        note = "compiled, but ran out of memory while it ran"
        return dataclasses.replace(memory, fits=False, notes=(*memory.notes, note))
    after = device.memory_stats() or {}
    peak, note = _peak_between(before, after, memory.argument_bytes)
    return dataclasses.replace(
        memory,
        step_seconds=statistics.median(seconds),
        measured_peak_bytes=peak,
        notes=(*memory.notes, *note),
    )


def _timed_runs(compiled: Any, program: _traced.CompilableProgram) -> list[float]:
    values, donated, tree = program.values()
    seconds: list[float] = []
    begun = time.perf_counter()
    # Processes that run a program together must run it equally often, whatever their clocks say.
    most = _MAX_RUNS if jax.process_count() == 1 else _MIN_RUNS
    # The first run is a warm-up and does not count.
    for run in range(most + 1):
        inputs = [_copy(v) if given else v for v, given in zip(values, donated, strict=True)]
        jax.block_until_ready(inputs)
        args, kwargs = tree.unflatten(inputs)
        start = time.perf_counter()
        jax.block_until_ready(compiled(*args, **kwargs))
        if run:
            seconds.append(time.perf_counter() - start)
        if run >= _MIN_RUNS and time.perf_counter() - begun > _RUN_SECONDS:
            break
    return seconds


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, jax.Array) else value


def _peak_between(
    before: Mapping[str, int], after: Mapping[str, int], argument_bytes: int
) -> tuple[int | None, tuple[str, ...]]:
    """Return the allocator's peak during the run; it records that of the whole process."""
    if "peak_bytes_in_use" not in after:
        return None, ()
    if after["peak_bytes_in_use"] <= before.get("peak_bytes_in_use", 0):
        return None, ("no measured peak: something earlier in this process used more memory",)
    others = max(0, before.get("bytes_in_use", 0) - argument_bytes)
    return int(after["peak_bytes_in_use"]) - others, ()
