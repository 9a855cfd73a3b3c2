"""Memory baselines: the memory that a step needed earlier, in a file beside its test.

A file belongs to one test, so that processes that run different tests never write the same file.
It is replaced as a whole, so that a reader sees a whole baseline or none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from remat_kit import _files
from remat_kit._apply import decorate as _decorate
from remat_kit._apply import void as _void
from remat_kit._chip import compile as _compile
from remat_kit._chip import target as _target
from remat_kit._chip.memory import Memory
from remat_kit._chip.target import Target
from remat_kit._errors import CheckError, UserError
from remat_kit._inspect import report as _report
from remat_kit._inspect import tables as _tables
from remat_kit._inspect.residuals import Residual, residuals_of
from remat_kit._program.steps.gradient import Argnums
from remat_kit._program.steps.losses import argnums_of, gradients_of, step_of
from remat_kit._show.table import aligned
from remat_kit._units import format_bytes, format_percent

_FORMAT = "remat_kit memory baseline 1"


_PARTS = {
    "argument_bytes": "arguments",
    "output_bytes": "outputs",
    "alias_bytes": "aliased",
    "temp_bytes": "temporaries",
    "host_bytes": "on the host",
    "saved_bytes": "kept for the backward pass",
    "peak_bytes": "peak",
}


_COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda13-pjrt", "jax-cuda12-pjrt")


_LONGEST = 20  # modules in a message


# -- one program --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The memory that one gradient program needs on one chip, and what each module saves.

    Attributes:
        target: the name of the chip.
        argument_bytes, output_bytes, alias_bytes, temp_bytes, host_bytes, peak_bytes: of the
            compiled program, as in `remat_kit.Memory`.
        saved_bytes: intermediate values saved on the device for the backward pass. None for a
            function that is a whole step, because its backward pass cannot be identified.
        saved: the same by module path.
        versions: of the libraries that took part.
    """

    target: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int | None
    temp_bytes: int | None
    host_bytes: int | None
    peak_bytes: int
    saved_bytes: int | None
    saved: Mapping[str, int] = dataclasses.field(hash=False)
    versions: Mapping[str, str] = dataclasses.field(hash=False)

    def to_json(self) -> dict[str, Any]:
        """Return plain values, ready for `json.dumps`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, plain: Any) -> Snapshot:
        """Build a snapshot from what `to_json` returned; ValueError for anything else."""
        fields = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(plain, dict) or set(plain) != fields:
            raise ValueError(f"an entry has other fields than {', '.join(sorted(fields))}")
        sizes = [plain[name] for name in _PARTS] + [plain["saved"], plain["versions"]]
        if not isinstance(plain["peak_bytes"], int) or not all(map(_is_size, sizes)):
            raise ValueError("an entry holds something other than sizes")
        return cls(**plain)


def _is_size(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(name, str) for name in value)
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def saved_values(
    loss: Callable[..., Any], args: Sequence[Any], argnums: Argnums, *, call: str
) -> list[Residual] | None:
    """Return the intermediate values saved for the backward pass, of all losses of a step.

    None if ``argnums`` is None and the function takes no gradient.
    """
    if argnums is None:
        step = step_of(loss, args, None, call=call)
        if step is None or not step.losses:
            return None
    _, parts = gradients_of(loss, args, argnums, call=call)
    return [r for part in parts for r in residuals_of(part.gradient) if not r.is_input]


def saved_by_module(values: Sequence[Residual]) -> dict[str, int]:
    """Return the bytes that each module saves on the device, largest first."""
    found: dict[str, int] = {}
    for r in values:
        if r.memory == "device":
            found[r.module] = found.get(r.module, 0) + r.bytes
    return dict(sorted(found.items(), key=lambda entry: (-entry[1], entry[0])))


def snapshot(memory: Memory, values: Sequence[Residual] | None) -> Snapshot:
    """Combine what the compiler and the trace say about one program.

    ``memory`` must have a peak: if the compiler refuses a program without a figure, there is no
    snapshot.
    """
    saved = saved_by_module(values or ())
    return Snapshot(
        target=memory.target,
        argument_bytes=memory.argument_bytes,
        output_bytes=memory.output_bytes,
        alias_bytes=memory.alias_bytes,
        temp_bytes=memory.temp_bytes,
        host_bytes=memory.host_bytes,
        peak_bytes=memory.peak_bytes or 0,
        saved_bytes=None if values is None else sum(saved.values()),
        saved=saved,
        versions=_tables.versions() | dict(memory.versions),
    )


# -- what changed -------------------------------------------------------------------------------


def changes(before: Snapshot, after: Snapshot) -> str:
    """Describe what changed between two programs: by part, then by module, then versions.

    >>> sizes = dict(argument_bytes=64, output_bytes=8, alias_bytes=0, host_bytes=0, versions={})
    >>> old = Snapshot(target="cpu", temp_bytes=1024, peak_bytes=1096, saved_bytes=1024,
    ...                saved={"Net/block_0": 512, "Net/block_1": 512}, **sizes)
    >>> new = dataclasses.replace(old, temp_bytes=2048, peak_bytes=2120, saved_bytes=2048,
    ...                           saved={"Net/block_0": 1024, "Net/block_1": 1024})
    >>> print(changes(old, new))
                                before     after      change
    temporaries                 1 KiB      2 KiB      +1 KiB
    kept for the backward pass  1 KiB      2 KiB      +1 KiB
    peak                        1.07 KiB   2.07 KiB   +1 KiB
    <BLANKLINE>
    kept by module              before     after      change
    Net/block_* ×2              2 × 512 B  2 × 1 KiB  +1 KiB
    """
    parts = [
        (name, getattr(before, field), getattr(after, field))
        for field, name in _PARTS.items()
        if getattr(before, field) != getattr(after, field)
    ]
    rows = [(name, _size(old), _size(new), _change(old, new)) for name, old, new in parts]
    rows = [("", "before", "after", "change"), *rows]
    if modules := list(_module_rows(before.saved, after.saved)):
        rows += [("", "", "", ""), ("kept by module", "before", "after", "change"), *modules]
    return "\n\n".join(["\n".join(aligned(rows)), *_notes(before, after, bool(modules))])


def _size(size: int | None) -> str:
    return "?" if size is None else format_bytes(size)


def _change(old: int | None, new: int | None) -> str:
    if old is None or new is None:
        return ""
    return f"{'+' if new > old else ''}{format_bytes(new - old)}"


def _module_rows(
    before: Mapping[str, int], after: Mapping[str, int]
) -> Iterator[tuple[str, str, str, str]]:
    """Yield a row for each module that changed; equal changes of repeated blocks share a row."""
    groups: dict[tuple[str, int, int], list[str]] = {}
    for path in dict.fromkeys([*after, *before]):
        old, new = before.get(path, 0), after.get(path, 0)
        if old != new:
            groups.setdefault((_report.roll_up(path), old, new), []).append(path)
    ordered = sorted(groups.items(), key=lambda g: -abs(g[0][2] - g[0][1]) * len(g[1]))
    for (rolled, old, new), paths in ordered[:_LONGEST]:
        n = len(paths)
        name = f"{rolled} ×{n}" if n > 1 else paths[0] or "(no module)"
        times = f"{n} × " if n > 1 else ""
        sizes = [f"{times}{format_bytes(size)}" for size in (old, new)]
        yield name, sizes[0], sizes[1], _change(n * old, n * new)
    if (left := len(ordered) - _LONGEST) > 0:
        yield f"… and {left} more kinds of modules", "", "", ""


def _notes(before: Snapshot, after: Snapshot, modules: bool) -> Iterator[str]:
    other = [
        f"{name} {before.versions.get(name, 'absent')} → {after.versions.get(name, 'absent')}"
        for name in dict.fromkeys([*before.versions, *after.versions])
        if before.versions.get(name) != after.versions.get(name)
    ]
    compiler = any(text.startswith(f"{name} ") for text in other for name in _COMPILERS)
    if other:
        which = "the compiler itself may be what changed" if compiler else "other versions"
        yield f"{which}: {', '.join(other)}"
    if not modules and before.saved_bytes is not None and after.saved_bytes is not None:
        yield "what each module keeps for the backward pass is the same as before"


# -- the file -----------------------------------------------------------------------------------


def read(path: Path) -> dict[str, Snapshot] | None:
    """Return the snapshots of a file by label, or None if there is no file.

    Raises:
        ValueError: the file is not one that `write` wrote.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    plain = json.loads(text)
    if not isinstance(plain, dict) or plain.get("format") != _FORMAT:
        raise ValueError(f"its format is not {_FORMAT!r}")
    checks = plain.get("checks")
    if not isinstance(checks, dict):
        raise ValueError("it has no checks")
    return {label: Snapshot.from_json(entry) for label, entry in checks.items()}


def write(path: Path, test: str, checks: Mapping[str, Snapshot]) -> None:
    """Replace the file by these snapshots, all at once."""
    plain = {
        "format": _FORMAT,
        "test": test,
        "checks": {label: entry.to_json() for label, entry in checks.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(plain, indent=2, ensure_ascii=False) + "\n"
    _files.write_atomically(path, text.encode())


# -- the fixture's value ------------------------------------------------------------------------


class MemoryBaseline:
    """Compares the memory of programs with the file of one test; the fixture ``memory_baseline``.

    >>> import jax, jax.numpy as jnp, tempfile
    >>> loss = lambda w, x: jnp.sum(jnp.tanh(x @ w))
    >>> w = x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "baseline.json")
    ...     _ = MemoryBaseline(path, update=True).check(loss, w, x)  # doctest: +ELLIPSIS
    ...     MemoryBaseline(path).check(loss, w, x).argument_bytes
    cpu: baseline written, peak ...
    2048

    Args:
        path: the file.
        test: the name of the test.
        update: whether to write the file instead of comparing with it.
        command: the command that writes the file, for messages.
        say: called with messages of a test that passes.
    """

    def __init__(
        self,
        path: Path,
        *,
        test: str = "",
        update: bool = False,
        command: str = "pytest --update-memory-baselines",
        say: Callable[[str], None] = print,
    ) -> None:
        self.path = path
        self.test = test
        self.update = update
        self.command = command
        self._say = say
        self._checked: dict[str, Snapshot] = {}

    def check(
        self,
        fn: Callable[..., Any],
        *args: Any,
        target: str | Target = "cpu",
        tolerance: float = 0.02,
        label: str | None = None,
        policy: Any = None,
        at: str | None = None,
        argnums: Argnums = 0,
        donate_argnums: int | Sequence[int] = (),
    ) -> Memory:
        """Compile the gradient of a loss and fail if its peak has grown since the baseline.

        If the peak has shrunk by more than the tolerance, the check passes and says so. With
        ``update`` the baseline is written and nothing is compared.

        Args:
            fn: called as ``fn(*args)``; returns a real scalar, or a pair of a scalar and anything.
            args: pytrees of arrays or `jax.ShapeDtypeStruct`.
            target: the chip to compile for.
            tolerance: the growth that passes, as a fraction of the baseline's peak.
            label: distinguishes several checks of one test; by default the name of the target.
            policy: applied to ``fn`` first, as `remat_kit.policy` does; None changes nothing.
            at: the module paths that ``policy`` is applied at.
            argnums: which arguments to differentiate; None for a function that is a whole step.
            donate_argnums: the arguments whose memory the results may take over.

        Returns:
            The memory that the program needs.

        Raises:
            CheckError: the peak grew, there is no baseline, or its file is damaged.
            UserError: two checks have the same label, or the tolerance is negative.
            TargetError: this machine cannot compile for the chip.
        """
        __tracebackhide__ = True
        call = "memory_baseline.check"
        _void.check_at(policy, at, call)
        if not tolerance >= 0:
            raise UserError(
                f"`{call}(..., tolerance={tolerance!r})`: a share of the peak is 0 or more",
                hint="0.02 lets the peak grow by 2 %",
            )
        name = label or _target.target(target).name
        if name in self._checked:
            raise UserError(
                f"`{call}(..., label={name!r})`: this test has another check of that label",
                hint="give each check of a test a label of its own: label='dots'",
            )
        loss = fn if policy is None else _decorate.policy(policy, at=at)(fn)
        argnums = argnums_of(loss, args, argnums, donate_argnums, call=call)
        memory = _compile.compile_program(
            loss, args, target, argnums=argnums, donate_argnums=donate_argnums, call=call
        ).memory
        if memory.peak_bytes is None:
            raise CheckError(
                f"`{call}`: {memory}; the compiler does not say how much, so there is nothing to "
                "compare",
                hint="make the step fit first: `remat_kit.testing.assert_fits` says what holds "
                "the memory",
            )
        now = snapshot(memory, saved_values(loss, args, argnums, call=call))
        self._checked[name] = now
        if self.update:
            self._write(name, now)
        else:
            self._compare(name, self._known(name), now, tolerance)
        return memory

    def _write(self, name: str, now: Snapshot) -> None:
        try:
            old = read(self.path)
        except ValueError:
            old = None
        if old != self._checked:
            write(self.path, self.test, self._checked)
            self._say(f"{name}: baseline written, peak {format_bytes(now.peak_bytes)}")

    def _known(self, name: str) -> Snapshot:
        __tracebackhide__ = True
        try:
            known = read(self.path)
        except ValueError as error:
            raise CheckError(
                f"`memory_baseline.check`: the baseline {self.path} cannot be read: {error}",
                hint=f"restore it from version control, or write it anew: {self.command}",
            ) from error
        if known is None or name not in known:
            what = "file" if known is None else f"entry {name!r} in the file"
            raise CheckError(
                f"`memory_baseline.check`: there is no baseline yet: no {what} {self.path}",
                hint=f"write it, look at it and commit it: {self.command}",
            )
        return known[name]

    def _compare(self, name: str, before: Snapshot, after: Snapshot, tolerance: float) -> None:
        __tracebackhide__ = True
        update = f"if this is meant, write the baseline anew and commit it: {self.command}"
        if before.target != after.target:
            raise CheckError(
                f"`memory_baseline.check(..., target={after.target!r})`: the baseline {name!r} in "
                f"{self.path} is of {before.target}",
                hint=update,
            )
        share = after.peak_bytes / before.peak_bytes - 1 if before.peak_bytes else 0.0
        sizes = f"{format_bytes(before.peak_bytes)} to {format_bytes(after.peak_bytes)}"
        if after.peak_bytes > before.peak_bytes * (1 + tolerance):
            raise CheckError(
                f"`memory_baseline.check(..., target={after.target!r})`: the peak grew from {sizes}"
                f" ({_percent(share)}; {_percent(tolerance)} would pass)\n\n"
                + changes(before, after)
                + "\n",
                hint=update,
            )
        if after.peak_bytes < before.peak_bytes * (1 - tolerance):
            self._say(
                f"{name}: the peak shrank from {sizes} ({_percent(share)}); keep it: {self.command}"
            )


def _percent(share: float) -> str:
    if share >= 1:
        return f"×{1 + share:.3g}"
    return f"{'+' if share >= 0 else ''}{format_percent(share)}"


def file_name(test: str) -> str:
    """Return the name of a test's file: the test's, with what file systems refuse replaced.

    >>> file_name("test_fits[dots]"), file_name("TestStep::test_fits[a/b]")
    ('test_fits[dots].json', 'TestStep.test_fits[a_b]-f9ad8ed3.json')
    """
    plain = test.replace("::", ".")
    safe = re.sub(r"[^\w.,=+\-\[\]]", "_", plain, flags=re.ASCII)[:120]
    if safe == plain:
        return f"{safe}.json"
    return f"{safe}-{hashlib.sha256(test.encode()).hexdigest()[:8]}.json"
