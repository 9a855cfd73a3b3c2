"""Lints about saved values that are cheap to recompute."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from remat_kit._inspect.lints.scene import (
    Lint,
    Scene,
    array_text,
    at_place,
    conjunction,
    counted,
    grouped,
    in_module,
    is_product,
    recomputing_before,
)
from remat_kit._inspect.residuals import Residual
from remat_kit._policy import selectors as _selectors
from remat_kit._policy.algebra import Selector
from remat_kit._program import paths as _paths
from remat_kit._program.flow import FORWARD, Op
from remat_kit._program.steps.gradient import Gradient
from remat_kit._units import format_bytes

# -- saved, although a smaller value would do -------------------------------------------------

_VIEWS = frozenset(
    ("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "rev", "copy")
)


@dataclasses.dataclass(frozen=True)
class _Copy:
    """A saved value that is another form of a smaller value, or of one that is saved too."""

    residual: Residual
    primitives: tuple[str, ...]
    source_type: str
    source_bytes: int
    source_lives: bool

    @property
    def spared_bytes(self) -> int:
        return self.residual.bytes - (0 if self.source_lives else self.source_bytes)

    @property
    def is_cast(self) -> bool:
        return "convert_element_type" in self.primitives and self.source_type != self.residual.dtype


def _copies(scene: Scene) -> list[_Copy]:
    found = (_copy(scene, op, r) for op, r in scene.on_device)
    return [copy for copy in found if copy is not None]


def _copy(scene: Scene, op: Op, r: Residual) -> _Copy | None:
    made, names = op.producer, []
    best: _Copy | None = None
    while made.kind == "equation" and made.primitive in (*_VIEWS, "convert_element_type"):
        names.append(made.primitive)
        read, aval = made.inputs[0], made.eqn.invars[0].aval
        if scene.gradient.flow.numbering.is_constant(read.number):
            return None  # compilers fold constants
        size = round(made.operand_bytes(0) * made.times)
        lives = scene.lives(read.number)
        candidate = _Copy(r, tuple(dict.fromkeys(names)), str(aval.dtype), size, lives)
        # Outside a loop, compilers read a transposed or reshaped array in place; a loop stacks
        # both arrays.
        wasted = lives and (made.times > 1 or size < r.bytes)
        if size <= r.bytes and (wasted or 2 * size <= r.bytes):
            best = candidate if best is None or lives or size < best.source_bytes else best
        if lives or read.origin is None:
            break
        made = read.origin.producer
    return best


def saved_copies(scene: Scene) -> Iterator[Lint]:
    def key(copy: _Copy) -> Any:
        r = copy.residual
        place = _paths.roll_up(r.module), r.source, r.reason.startswith("input of region")
        return copy.is_cast, copy.primitives, r.dtype, copy.source_type, copy.source_lives, *place

    for (is_cast, primitives, *_), copies in grouped(_copies(scene), key).items():
        if sum(c.spared_bytes for c in copies) >= scene.threshold:
            yield (_upcast if is_cast else _view)(scene, copies, primitives)


def _upcast(scene: Scene, copies: Sequence[_Copy], primitives: tuple[str, ...]) -> Lint:
    first, r = copies[0], copies[0].residual
    what = f"{r.dtype} {'copies' if len(copies) > 1 else 'copy'} of {first.source_type} values"
    dtype = _selectors.dtype(r.dtype)
    return _copy_lint("saved-upcast", scene, copies, what, primitives, dtype)


def _view(scene: Scene, copies: Sequence[_Copy], primitives: tuple[str, ...]) -> Lint:
    verb = " and ".join(primitives)
    what = f"{'results' if len(copies) > 1 else 'result'} of {verb}"
    return _copy_lint("saved-view", scene, copies, what, primitives, None)


def _copy_lint(
    code: str,
    scene: Scene,
    copies: Sequence[_Copy],
    what: str,
    primitives: tuple[str, ...],
    dtype: Selector | None,
) -> Lint:
    r, module = copies[0].residual, _paths.roll_up(copies[0].residual.module)
    size, spared = sum(c.residual.bytes for c in copies), sum(c.spared_bytes for c in copies)
    if copies[0].source_lives:
        why = "its source is in memory anyway"
    else:
        why = f"its source takes {format_bytes(sum(c.source_bytes for c in copies))}"
    message = (
        f"{len(copies)} {what}, {format_bytes(size)}, saved for the backward pass"
        f"{at_place(module, r.source)}; {why}, and recomputing it only moves data"
    )
    if r.reason.startswith("input of region"):
        fix = (
            f"# move this {primitives[0]} into the block, so that the block's input is the "
            f"{'smaller' if not copies[0].source_lives else 'saved'} value"
        )
    else:
        selector = conjunction(_selectors.primitive(*primitives), dtype, in_module(module))
        fix = scene.instead(lambda policy: recomputing_before(selector, policy), r)
    return Lint(code, message, fix, module, r.source, spared)


# -- dropout ----------------------------------------------------------------------------------

_RANDOM = frozenset(("random_bits", "threefry2x32", "rng_bit_generator", "rng_uniform"))


def _random_ops(gradient: Gradient) -> set[Op]:
    """Return the forward operations that use a random key and read nothing but keys."""
    from_keys: set[Op] = set()
    drawn: set[Op] = set()
    key_of = gradient.flow.numbering.key
    for op in gradient.flow.ops:
        if op.frame.phase != FORWARD:
            break
        if op.kind == "argument":
            dtype = key_of(op.numbers[0]).dtype
            pure = dtype == "uint32" or dtype.startswith("key")
        else:
            read = op.inputs[:1] if op.kind == "carry" else op.inputs
            origins = [v.origin for v in read if v.origin is not None]
            pure = op.kind == "constant" or all(o in from_keys for o in origins)
            draws = op.kind == "equation" and op.primitive in _RANDOM
            if pure and (draws or any(o in drawn for o in origins)):
                drawn.add(op)
        if pure:
            from_keys.add(op)
    return drawn


def dropout_masks(scene: Scene) -> Iterator[Lint]:
    drawn = _random_ops(scene.gradient)
    masks = [
        (op, r)
        for op, r in scene.on_device
        if op.producer in drawn and not r.dtype.startswith(("key", "uint32"))
    ]

    def key(mask: tuple[Op, Residual]) -> Any:
        return _paths.roll_up(mask[1].module), mask[1].source

    for (module, source), found in grouped(masks, key).items():
        size = sum(r.bytes for _, r in found)
        if size < scene.threshold:
            continue
        op, r = found[0]
        selector = _mask_selector(scene, op.producer, drawn, module)
        message = (
            f"{counted(len(found), 'random mask')} such as {array_text(r)}, {format_bytes(size)}, "
            f"saved for the backward pass{at_place(module, source)}; the same mask can be "
            "recomputed from the random key, which takes a few bytes"
        )
        fix = scene.instead(lambda policy, s=selector: recomputing_before(s, policy), r)
        yield Lint("dropout-mask-saved", message, fix, module, source, size)


def _mask_selector(scene: Scene, mask: Op, drawn: set[Op], module: str) -> Selector:
    """Select all operations from the key to the mask: by module or line, if these are all cheap."""
    cone = _cone(mask, drawn)
    products = [op for op in scene.gradient.primal.ops if is_product(op)]

    def is_cheap(place: Callable[[Op], str]) -> bool:
        here = place(mask)
        return (
            bool(here)
            and all(place(op) == here for op in cone)
            and all(place(op) != here for op in products)
        )

    if is_cheap(lambda op: op.module):
        return _selectors.module(module)
    if is_cheap(lambda op: op.source):
        return _selectors.source(mask.source)
    primitives = _selectors.primitive(*dict.fromkeys(op.primitive for op in cone))
    return conjunction(primitives, in_module(module))


def _cone(mask: Op, drawn: set[Op]) -> list[Op]:
    todo, found = [mask], {}
    while todo:
        op = todo.pop()
        if op in found or op not in drawn:
            continue
        found[op] = None
        todo.extend(v.origin for v in op.inputs if v.origin is not None)
    return [op for op in found if op.kind == "equation"]
