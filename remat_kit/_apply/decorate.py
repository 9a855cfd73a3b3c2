"""How does a policy get to a function, a Linen or NNX module, a layer or a scan body?

The public decorator is `policy`. It turns each call of the decorated object into a call of a
function of arrays, which it traces, divides into regions and runs (see `blocks` and `region`).
Without ``at=`` the whole call is one region. With it, each call of a matching submodule is a
region. The submodules are found by their paths in the trace, also inside scans, branches and jitted
functions, so the model itself does not change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from remat_kit import _frames, _jax, _units
from remat_kit._apply import partitioned as _partitioned
from remat_kit._apply import steps as _steps
from remat_kit._apply import void as _void
from remat_kit._apply.blocks import BlockCutter, reads_sources
from remat_kit._apply.region import keeps_nothing
from remat_kit._errors import UnknownNameError, UserError
from remat_kit._frameworks import arguments as _arguments
from remat_kit._frameworks import classes as _classes
from remat_kit._frameworks import flax as _flax
from remat_kit._frameworks import haiku as _haiku
from remat_kit._frameworks.arguments import Call
from remat_kit._policy import check as _check
from remat_kit._policy import patterns as _patterns
from remat_kit._policy import reading as _reading
from remat_kit._policy import selectors as _selectors
from remat_kit._policy import structural as _structural
from remat_kit._policy.algebra import Policy
from remat_kit._program import communication as _communication
from remat_kit._program import paths as _paths
from remat_kit._program import value as _value
from remat_kit._program.paths import Path
from remat_kit._program.program import Program
from remat_kit._program.steps import losses as _losses
from remat_kit._program.steps import taken as _taken
from remat_kit._program.steps import traced as _traced


def policy(
    what: Any,
    *,
    at: str | None = None,
    methods: Sequence[str] | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    prevent_cse: bool | Sequence[Any] | None = None,
    losses: str | None = None,
    step: bool | None = None,
) -> Callable[[Any], Any]:
    """Return a decorator that saves, offloads or recomputes residuals as ``what`` says.

    >>> import jax, jax.numpy as jnp
    >>> from remat_kit import policy
    >>> @policy("dots")
    ... def layer(x, w):
    ...     return jnp.sin(jnp.tanh(x @ w))
    >>> jax.grad(lambda w: layer(jnp.ones((2, 3)), w).sum())(jnp.ones((3, 3))).shape
    (3, 3)

    Args:
      what: a preset (``"dots"``), a policy or selector, the path of a recipe, a table from a
        configuration file, a policy callable of JAX, or None (the decorator then changes nothing).
      at: a pattern of module paths, such as ``"*/block_*"``. Each call of a matching submodule is a
        region of its own; without ``at`` the decorated call is the region. ``*`` matches within one
        component of a path, ``**`` any number of components.
      methods: the methods of a module class that become regions; ``__call__`` by default.
      static_argnums: positions of arguments that are not traced. They refer to the signature of the
        decorated object; for a class or a method ``self`` has position 0, as for `nn.remat`.
      static_argnames: names of arguments that are not traced.
      prevent_cse: as in `jax.checkpoint`. The default is False in the body of a scan or a while
        loop, where the compiler cannot merge the recomputation with the forward pass and the
        barrier costs time, and True elsewhere.
      losses: if a training step is decorated, a pattern of the names of those losses that get the
        policy, such as ``"*/critic_loss"``; by default all of them do. The name of a loss is the
        name of the function that takes the gradient, a slash, and the loss's own name.
      step: whether the decorated function is a training step; found out by default.

    Returns:
      A decorator for a function, a training step, a Linen or NNX module class, an instance of one
      (bound to its parent or not), a method, or a scan body. Parameters keep their names and
      places.

    Raises:
      UnknownNameError: at once: the preset or recipe does not exist. At the first trace: the
        decorated function has no value, module or primitive that a pattern of the policy or ``at``
        names.
      PolicyError: ``what`` is not a policy.

    Warns:
      RematKitWarning: at the first trace, once for each decorator and reason, if the policy or a
        part of it has no effect: a rule selects none of the values, no input has a gradient,
        ``prevent_cse=False`` is given outside of a loop, this version of JAX cannot offload, or a
        function with ``step=True`` takes no gradient.

    A training step may be decorated as a whole. The policy is then put around each loss that the
    step differentiates, also in a jit, a scan or a `shard_map` inside of it. The step itself does
    not change, and its jit keeps its donated and static arguments:

    >>> @jax.jit
    ... def train_step(w, x):
    ...     return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)
    >>> policy("dots")(train_step)(jnp.ones((3, 3)), jnp.ones((2, 3))).shape
    (3, 3)

    A function that takes a gradient itself (with `jax.grad`, `jax.vjp`, `jax.linearize` or
    `nnx.grad`) is a step in these cases:

    * It is jitted with donated arguments.
    * It has the state of an optimizer among its arguments.
    * It returns updated parameters, or a gradient of an argument.
    * All modules that ``at=`` matches are differentiated inside of it.

    It is not a step but a loss if its result is a scalar, or ``(scalar, aux)`` where the scalar
    depends on the gradient (a penalty on a gradient), or if something differentiates the call, as
    in MAML or in a loss of an energy model's forces. Other functions that take a gradient, such as
    a block that computes forces, are decorated as they are. If a function is first called in a
    `jit` and differentiated later, it looks like a step at its first call, and ``step=False`` says
    that it is none.

    Arrays and Python's numbers and bools are traced, as `jax.checkpoint` traces them. If the
    function needs the value of a bool or an int (for an ``if``, a ``range`` or a shape), tracing
    fails, and the function is traced again with Python values. So flags such as ``train=True`` need
    no ``static_argnums``, unlike a float that determines which Python code runs. An argument that
    is not an array (None, a string, a function) always remains a Python value, and so do the fields
    of an Equinox module that are not arrays.

    Follows `jax.checkpoint`, `nn.remat`, `nnx.remat` and `equinox.filter_checkpoint`, each of which
    accepts one kind of policy.
    """
    chosen = _reading.as_policy(what, call=f"policy({_text(what)})")
    if chosen is None:
        return lambda target: target
    if _reads_shardings(chosen):
        _communication.want()
    if isinstance(chosen, _structural.Automatic) and at is not None:
        raise UserError(
            f"`policy({_text(what)}, at={at!r})`: `auto` plans a whole loss or step, and finds its "
            "regions itself",
            hint="leave at= out, and decorate the loss or the step instead of its blocks",
        )
    if isinstance(chosen, _structural.Pieces) and prevent_cse is not None:
        raise UserError(
            f"`policy({_text(what)}, prevent_cse={prevent_cse!r})`: pieces are the iterations of a "
            "loop, in which there is nothing to prevent",
            hint="leave prevent_cse= out",
        )
    application = Application(
        policy=chosen,
        at=at,
        static_argnums=_indices(static_argnums),
        static_argnames=(static_argnames,)
        if isinstance(static_argnames, str)
        else tuple(static_argnames),
        prevent_cse=tuple(prevent_cse) if isinstance(prevent_cse, (list, tuple)) else prevent_cse,
        call=f"policy({_text(what)}{'' if at is None else f', at={at!r}'})",
        losses=losses,
        step=step,
    )
    return functools.partial(_decorate, application, methods=methods)


def name(x: Any, name: str) -> Any:
    """Give a value (or every leaf of a pytree) a name that `named` selects.

    >>> import jax.numpy as jnp
    >>> float(name(jnp.float32(1.0), "attn_out"))
    1.0

    It is `jax.ad_checkpoint.checkpoint_name`, which models may also use directly. The result has
    the shapes and values of ``x``.

    Args:
      x: an array, or a pytree of arrays.
      name: the checkpoint name.

    Raises:
      TypeError: a leaf of ``x`` is not an array or a number.
    """
    from jax.ad_checkpoint import checkpoint_name

    return checkpoint_name(x, name)


def _indices(numbers: int | Sequence[int]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


def _text(what: Any) -> str:
    if isinstance(what, (dict, list, tuple, set)):
        return _units.shortened(what)  # a container may contain itself
    text = repr(what)
    return text if len(text) <= 80 else text[:77] + "..."


# -- decorating each kind of object -----------------------------------------------------------


def _decorate(app: Application, target: Any, methods: Sequence[str] | None = None) -> Any:
    if isinstance(target, (staticmethod, classmethod)):
        return type(target)(_decorate(app, target.__func__, methods))
    app.check_names(target, methods)
    kinds = (_flax.is_linen_class, _flax.is_linen, _flax.is_nnx, _haiku.is_module)
    if app.losses is not None and (isinstance(target, type) or any(k(target) for k in kinds)):
        raise app.no_step()
    if isinstance(target, type) or _flax.is_linen_class(target):
        return _class(dataclasses.replace(app, calls=[]), target, methods)
    if _flax.is_linen(target):
        return _linen_instance(app, target, methods)
    if _flax.is_nnx(target) or _haiku.is_module(target):
        return _classes.sharing(target, _class_of_instances(app, type(target), methods))
    if type(target) is jax.tree_util.Partial and methods is None:
        return _partial(app, target)
    if _classes.is_callable_pytree(target):
        return _classes.of_class(target, _class_of_instances(app, type(target), methods))
    if methods is not None:
        raise UserError(
            f"`{app.call}`: methods={tuple(methods)} was given for {target!r}",
            hint="methods= is for a module class or instance; leave it out for a function",
        )
    _check_callable(app, target)
    return app.function(target)


def _check_callable(app: Application, target: Any) -> None:
    if not callable(target):
        raise UserError(
            f"`{app.call}`: {target!r} cannot be decorated",
            hint="decorate a function, a module class or an instance of one",
        )
    inner = inspect.unwrap(target)
    if inspect.isgeneratorfunction(inner) or inspect.iscoroutinefunction(inner):
        raise UserError(
            f"`{app.call}`: {inner.__qualname__} is a generator or a coroutine, so calling it "
            "computes nothing yet",
            hint="decorate the functions that it calls",
        )


def _class(app: Application, cls: Any, methods: Sequence[str] | None) -> Any:
    """Return a subclass, under the same name, whose methods are regions."""
    if _flax.is_linen_class(cls):
        decorated = _flax.lift_linen(cls, app, methods)
        _classes.remember(decorated, _class, app, cls, methods)
    else:
        decorated = _subclass(cls, app, tuple(methods or ("__call__",)))
    _decorated[decorated] = app
    return decorated


def _subclass(cls: type, app: Application, methods: Sequence[str]) -> type:
    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = app.function(method)
        return _haiku.transparent(wrapped) if _haiku.is_module_class(cls) else wrapped

    decorated = _classes.subclass(cls, wrap, methods, call=app.call, **{_APPLIED: app})
    _classes.remember(decorated, _class_of_instances, app, cls, tuple(methods))
    if _classes.is_pytree_class(cls):
        _classes.register(decorated, cls)
    return decorated


def _class_of_instances(app: Application, cls: type, methods: Sequence[str] | None) -> type:
    """Return one class for all decorated instances of a class.

    Their pytrees then have the same structure and can be stacked.
    """
    chosen = tuple(methods or ("__call__",))
    try:
        return _cached_subclass(cls, app, chosen)
    except TypeError:  # `prevent_cse` is a pytree that cannot be hashed
        return _subclass(cls, app, chosen)


@functools.cache
def _cached_subclass(cls: type, app: Application, methods: tuple[str, ...]) -> type:
    return _subclass(cls, app, methods)


def _partial(app: Application, target: jax.tree_util.Partial) -> jax.tree_util.Partial:
    """Decorate the function of a partial; its bound arguments remain leaves of the pytree."""
    bound = len(target.args)
    argnums = tuple(i + bound if i >= 0 else i for i in app.static_argnums)
    inner = _decorate(dataclasses.replace(app, static_argnums=argnums), target.func)
    return jax.tree_util.Partial(inner, *target.args, **target.keywords)


def _linen_instance(app: Application, module: Any, methods: Sequence[str] | None) -> Any:
    if not _flax.is_bound(module):
        return _flax.linen_like(module, _class(app, type(module), methods))

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    lifted = _flax.lift_linen(call, app)
    return functools.partial(lifted, module)


@dataclasses.dataclass(frozen=True)
class Application:
    """A policy and the options with which it is applied.

    Attributes:
      policy: the policy.
      at, static_argnums, static_argnames, prevent_cse, losses, step: see `policy`.
      call: the call of `policy` as the user wrote it, which messages quote.
      calls: empty before the first call, one entry while the first call is being traced, two
        entries afterwards.
      constants: the paths of the arguments that had to be Python values (see `_arguments.attempt`).
      warned: the messages of the warnings that have been emitted, since each is emitted once.
    """

    policy: Policy
    at: str | None
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    prevent_cse: Any
    call: str
    losses: str | None = None
    step: bool | None = None
    calls: list[bool] = dataclasses.field(default_factory=list, compare=False)
    constants: set[str] = dataclasses.field(default_factory=set, compare=False)
    warned: set[str] = dataclasses.field(default_factory=set, compare=False)

    def check_names(self, target: Any, methods: Sequence[str] | None) -> None:
        """Raise if the decorated object has no parameter of the name of a static argument."""
        cls = target.func if isinstance(target, functools.partial) else target
        if not isinstance(cls, type):
            modules = (_flax.is_linen, _flax.is_nnx, _haiku.is_module, _classes.is_callable_pytree)
            cls = type(target) if any(is_one(target) for is_one in modules) else None
        if cls is jax.tree_util.Partial:  # its function is decorated
            return
        if cls is None:
            functions = [target]
        else:
            functions = [getattr(cls, m, None) for m in methods or ("__call__",)]
        _arguments.check_names(self.static_argnames, functions, self.call)

    def function(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``fn``, which runs in regions; its arguments may contain Flax modules.

        If ``fn`` is a training step, its losses run in regions.
        """
        planned = isinstance(self.policy, _structural.Planned) and self.policy.step
        known = True if planned and self.step is None else self.step
        steps = _steps.StepCalls(self, fn, known, self.losses)
        splits = _partitioned.CalledSteps()

        @_jax.entry
        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if _reads_shardings(self.policy) and steps.known is not False:
                with splits.known_in(wrapped, args, kwargs):
                    return called(*args, **kwargs)
            return called(*args, **kwargs)

        def called(*args: Any, **kwargs: Any) -> Any:
            if isinstance(self.policy, _structural.Automatic):
                is_step, result = steps.automatic(self.policy, args, kwargs)
                if is_step:
                    return result
            elif steps.is_step((args, kwargs)):
                return steps.run(args, kwargs)
            module = _flax.bound_linen(args, kwargs)
            if module is not None:
                self.check_one_flag("a Flax module")
                return _flax.call_linen(fn, module, args, kwargs, self)
            inner, first, named = _flax.opened_nnx(fn)
            args, kwargs = (*first, *args), {**named, **kwargs}
            inner = _flax.scoped_method(inner, args)
            optimizer = _losses.holds_optimizer((args, kwargs))
            pure, args, kwargs = self.without_static(inner, args, kwargs, fn, skip=-len(first))
            run = _haiku.threaded(functools.partial(self.run, steps=steps, optimizer=optimizer))
            if _flax.holds_nnx((args, kwargs)):
                self.check_one_flag("a Flax module")
                return _flax.run_nnx(run, pure, args, kwargs)
            return run(pure, args, kwargs)

        wrapped.__dict__[_APPLIED] = self
        wrapped.__dict__[_traced.STEP] = steps
        return wrapped

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        steps: _steps.StepCalls | None = None,
        optimizer: bool = False,
    ) -> Any:
        """Call a function of arrays in the regions of the policy.

        Args:
          fn, args, kwargs: the function and its arguments.
          steps: if the function may be a step, the object that finds out.
          optimizer: whether the state of an optimizer is among the arguments.
        """
        if not self.calls:
            self.calls.append(True)
        if self.at is not None or isinstance(self.policy, _structural.Structural):
            self.check_one_flag("a policy with several regions")
        loop = _jax.inside_loop()
        base = _paths.join_scopes(_jax.current_scopes())
        call, traced, step = self._traced(fn, args, kwargs, base, steps, optimizer)
        if step:
            return call.evaluated(traced)
        if steps is not None and self.losses is not None:
            raise self.no_step()
        if isinstance(self.policy, _structural.Automatic):
            return self._planned(self.policy, call, traced, loop, base)
        context = _communication.current()
        is_first_trace = isinstance(context, _communication.Collector)
        if is_first_trace and isinstance(self.policy, _structural.Planned):
            # The plan is of the program of the second trace, which has regions inside.
            return call.evaluated(traced)
        first = not self.calls[1:]
        program = Program.traced(traced, base)
        if self._asks_for_collectives() and not self._has_no_derivative(traced, call.arrays):
            if isinstance(context, _communication.Collector):
                barred, call.arrays = context.barrier(traced, call.arrays, base)
                return call.evaluated(barred)
            program = self._marked(program, [*traced.consts, *call.arrays])
        with self._hint_on_equinox((args, kwargs)):
            self._check(program)
        if first:
            self.calls.append(True)
            self._warn(program, call.arrays)
        self._warn_of_cse(program, call.arrays, loop)
        flags = self._flags(call, args, kwargs)
        with self._hint_on_effects():
            if self.at is None and keeps_nothing(self.policy):
                return self._recomputed(call, not loop if flags is None else flags)
            if self._has_no_derivative(traced, call.arrays):
                return call.evaluated(traced)
            return call.result(traced, BlockCutter(self, loop, flags).run(program, call.arrays))

    def _traced(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        base: Path,
        steps: _steps.StepCalls | None,
        optimizer: bool,
    ) -> tuple[Call, _jax.Traced, bool]:
        """Trace a call, and tell whether it is a step; then its losses have regions already."""

        def trace(catching: Any) -> tuple[Call, _jax.Traced]:
            with _flax.nnx_scopes(), catching:
                return _arguments.attempt(Call.trace, fn, args, kwargs, self.constants)

        def is_step(call: Call, traced: _jax.Traced) -> bool:
            return not self._is_planned(traced, base) and _void.is_step(
                self.policy,
                traced.closed,
                call.result(traced, traced.closed.out_avals),
                base=base,
                matches=self._matches(),
                arguments=_arrays((*args, *kwargs.values())),
                optimizer=optimizer,
            )

        if steps is None:  # a method of a module
            call, traced = trace(contextlib.nullcontext())
            name = getattr(fn, "__name__", type(fn).__name__)
            _void.check_step(is_step(call, traced), traced.closed, function=name, call=self.call)
            return call, traced, False
        call, traced = trace(contextlib.nullcontext())
        if steps.known is False or _taken.being_differentiated() or not is_step(call, traced):
            return call, traced, False
        # The second trace has regions around the losses.
        steps.known = True
        return *trace(steps.catching()), True

    def _asks_for_collectives(self) -> bool:
        # Inside of `shard_map` the collectives are equations.
        return _reads_collectives(self.policy) and _jax.mapped_axes() is None

    def _marked(self, program: Program, inputs: Sequence[Any]) -> Program:
        """Return a program that says which values a collective makes, as far as that is known."""
        marked = _partitioned.marked(program, inputs)
        if marked is None and max(jax.device_count(), _jax.context_devices()) > 1:
            self.warn_once(_partitioned.UNKNOWN.format(call=self.call), _partitioned.UNKNOWN_HINT)
        return marked or program

    def no_step(self) -> UserError:
        return UserError(
            f"`{self.call}`: losses={self.losses!r} chooses among the losses of a training step, "
            "and what is decorated is no step",
            hint="leave losses= out; step=True says that a function is a step",
        )

    def _is_planned(self, traced: _jax.Traced, base: Path) -> bool:
        """Tell whether the policy is a plan of a traced function itself, not of its losses."""
        plan = self.policy
        if (
            not isinstance(plan, _structural.Planned)
            or plan.step
            or _taken.taken(traced.closed) is None
        ):
            return False
        cutter = BlockCutter(self, loop=False)
        return cutter.fits(Program.traced(traced, base), plan)

    def _planned(
        self,
        auto: _structural.Automatic,
        call: Call,
        traced: _jax.Traced,
        loop: bool,
        base: Path,
    ) -> Any:
        """Run a loss with the plan that `auto` asks for."""
        plan = None
        # remat_kit traces a loss before it differentiates it; then the tangents are not there yet.
        early = _taken.expected() and not any(map(_jax.is_differentiated, call.arrays))
        if not early and not self._has_no_derivative(traced, call.arrays):
            plan = _steps.planned_loss(auto, self, call, traced)
        if plan is None:
            return call.evaluated(traced)
        cutter = BlockCutter(self.with_policy(plan), loop, None)
        return call.result(traced, cutter.run(Program.traced(traced, base), call.arrays))

    def with_policy(self, policy: Policy) -> Application:
        """Return the same application of another policy."""
        return dataclasses.replace(self, policy=policy)

    def _has_no_derivative(self, traced: _jax.Traced, arrays: Sequence[Any]) -> bool:
        """Tell whether nobody can differentiate a call, so that regions would change nothing.

        Such a call runs as it does without a policy, and inner functions under `jax.jit` run
        compiled. The answer is False for a structural policy, because its call checks that the
        program has the blocks that the policy names.
        """
        changes_nothing = (_structural.Automatic, _structural.Sliced)
        if isinstance(self.policy, _structural.Structural) and not isinstance(
            self.policy, changes_nothing
        ):
            return False
        inputs = (*traced.consts, *arrays)
        return not any(isinstance(x, _jax.Tracer) and _void.is_inexact(x) for x in inputs)

    def _recomputed(self, call: Call, prevent_cse: bool | tuple[bool, ...]) -> Any:
        """Call a function under `jax.checkpoint`, which finds it in the cache and saves nothing."""
        cse: Any = prevent_cse
        if isinstance(cse, tuple):
            cse = call.like_arguments(cse)
        with _flax.nnx_scopes():
            return call.apply(lambda fn: _jax.checkpoint(fn, prevent_cse=cse))

    def _flags(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool | tuple[bool, ...] | None:
        """Return ``prevent_cse``; if it has several flags, one for each traced array of a call."""
        if self.prevent_cse is None or isinstance(self.prevent_cse, bool):
            return self.prevent_cse
        flags = _arguments.flags(self.prevent_cse, (args, kwargs) if kwargs else args, self.call)
        return tuple(f for f, traced in zip(flags, call.traced, strict=True) if traced)

    def check_one_flag(self, what: str) -> None:
        """Raise for one flag for each argument if regions have other inputs than the arguments."""
        if self.prevent_cse is not None and not isinstance(self.prevent_cse, bool):
            raise UserError(
                f"`{self.call}`: prevent_cse={self.prevent_cse!r} has a flag for each argument, "
                f"which {what} cannot have",
                hint="give one bool, or leave prevent_cse out",
            )

    @contextlib.contextmanager
    def _hint_on_effects(self) -> Iterator[None]:
        """Add a hint to the error that JAX raises for an effect that cannot run twice."""
        try:
            yield
        except NotImplementedError as error:
            if "Effects not supported in" in str(error):
                error.add_note(
                    f"hint: `{self.call}`: a region may run twice, which JAX refuses for this "
                    "effect, as `jax.checkpoint` does; move the callback out of the region, or use "
                    "`jax.debug.callback` or `jax.pure_callback`"
                )
            raise

    def _matches(self) -> _void.Matches | None:
        at = self.at
        if at is None:
            return None
        return lambda path: _patterns.prefix_matching(at, "/".join(path)) is not None

    def _warn(self, program: Program, values: Sequence[Any]) -> None:
        """Emit a warning for each reason for which the policy has no effect."""
        if isinstance(self.policy, _structural.Planned):
            return
        matches, call = self._matches(), f"`{self.call}`"
        if not _void.has_gradient(program, values, matches):
            self.warn_once(
                f"{call}: no input of the decorated function has a gradient, so nothing is "
                "recomputed",
                "decorate a function of the parameters or the activations; integers, masks and "
                "keys have no gradient",
            )
            return
        full = reads_sources(self.policy)
        said = _partitioned.UNKNOWN.format(call=self.call) in self.warned
        for rule, seen in _void.unmatched(self.policy, program, matches, full=full):
            if said and any(leaf in _COLLECTIVES for leaf in rule.leaves()):
                continue
            self.warn_once(
                f"{call}: {rule!r} selects none of the values here, so it has no effect",
                _void.explain(rule, seen),
            )
        if _jax.drops_offload() and _void.offloads(self.policy):
            self.warn_once(
                f"{call}: jax {jax.__version__} does not offload under jax_remat3, so the values "
                "that the policy offloads are recomputed",
                "use a newer jax, or set jax_remat3 to False",
            )

    def _warn_of_cse(self, program: Program, values: Sequence[Any], loop: bool) -> None:
        """Warn if the compiler sees both passes in one program and merges the recomputation."""
        if self.prevent_cse is not False or loop or _void.in_a_loop(program, self._matches()):
            return
        if any(map(_jax.compiled_with_its_gradient, values)):
            self.warn_once(
                f"`{self.call}`: with prevent_cse=False outside of a loop the compiler merges the "
                "recomputation with the forward pass, so no memory is saved",
                "leave prevent_cse out, and it is chosen for each region",
            )

    def warn_once(self, message: str, hint: str) -> None:
        """Emit a warning, unless this application has emitted it before."""
        if message not in self.warned:
            self.warned.add(message)
            _frames.warn(message, hint)

    def untraced(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function of arrays as it is, with the arguments that `run` would give it."""
        return _arguments.untraced(fn, args, kwargs, self.constants)

    def without_static(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        signature_of: Any,
        skip: int,
    ) -> _arguments.Split:
        """Return ``fn`` closed over its static arguments, and its other arguments."""
        return _arguments.without_static(
            fn,
            args,
            kwargs,
            argnums=self.static_argnums,
            argnames=self.static_argnames,
            signature_of=signature_of,
            skip=skip,
            call=self.call,
        )

    @contextlib.contextmanager
    def _hint_on_equinox(self, args: Any) -> Iterator[None]:
        """Explain an unknown module path by the fact that Equinox writes no paths into a trace."""
        try:
            yield
        except UnknownNameError as error:
            if not error.message.count(": no module is named") or not _arguments.holds_equinox(
                args
            ):
                raise
            raise UnknownNameError(
                f"{error.message}; the fields of an Equinox module have no paths in a trace",
                hint="call the field under `jax.named_scope('name')` in the module, which gives it "
                "a path, or decorate the field itself with `eqx.tree_at(lambda m: m.field, model, "
                "replace_fn=remat_kit.policy(...))`",
            ) from None

    def _check(self, program: Program) -> None:
        if self.at is not None:
            BlockCutter(self, loop=False).check_at(program)
        if not _checkable(self.policy):
            return
        values = list(_value.values(program, full=False))
        try:
            _check.check(self.policy, values, call=self.call)
        except UnknownNameError:
            # Derivative rules give names too: those of kernels name what their backward rules read.
            derived = _void.differentiated(program)
            if derived is None:
                raise
            values += _value.values(derived, full=False)
            try:
                _check.check(self.policy, values, call=self.call)
            except UnknownNameError as error:
                raise self._out_of_reach(program, derived) or error from None

    def _out_of_reach(self, *programs: Program) -> UnknownNameError | None:
        """Return the error for names in kernels and in custom rules that a policy cannot reach."""
        inside = {name for program in programs for name in _void.names_in_rules(program)}
        named = [x for x in self.policy.leaves() if isinstance(x, _selectors.Named)]
        for leaf in named:
            for pattern in leaf.patterns if leaf.strict else ():
                if _selectors.any_match(inside, (pattern,)):
                    return UnknownNameError(
                        f"`{self.call}`: the name {pattern!r} is inside of a custom derivative "
                        "rule or a kernel, where no value can be saved on its own",
                        hint="name what the forward rule of the custom_vjp function returns for "
                        "its backward rule, or select the result of the whole kernel",
                    )
        return None


def _arrays(arguments: Sequence[Any]) -> list[list[Any]]:
    return [[x for x in jax.tree.leaves(a) if hasattr(x, "dtype")] for a in arguments]


_decorated: weakref.WeakKeyDictionary[type, Application] = weakref.WeakKeyDictionary()


def uncalled() -> dict[type, str]:
    """Return the decorated module classes that nothing has called so far, with their decorators."""
    return {c: f"remat_kit.{app.call}" for c, app in _decorated.items() if not app.calls}


def applied(fn: Any) -> tuple[Policy | None, str | None]:
    """Return the policy that `policy` applied to a function last, and its ``at``.

    Both are None if there is no policy, and ``at`` is None if it was not given.

    >>> applied(policy("dots", at="*/block_*")(lambda x: x)), applied(len)
    ((save(dots), '*/block_*'), (None, None))
    """
    while isinstance(fn, functools.partial) and not hasattr(fn, _APPLIED):
        fn = fn.func
    application = getattr(fn, _APPLIED, None)
    return (None, None) if application is None else (application.policy, application.at)


_APPLIED = "__remat_kit_policy__"


@functools.cache
def _reads_collectives(policy: Policy) -> bool:
    return any(leaf in _COLLECTIVES for leaf in policy.leaves())


def _reads_shardings(policy: Policy) -> bool:
    return isinstance(policy, _structural.Sliced) or _reads_collectives(policy)


_COLLECTIVES = (_selectors.collective, _selectors.gathered_parameters)


@functools.cache
def _checkable(policy: Policy) -> bool:
    kinds = (_selectors.Named, _selectors.Module, _selectors.Primitive)
    return isinstance(policy, _structural.Segments) or any(
        isinstance(leaf, kinds) for leaf in policy.leaves()
    )
