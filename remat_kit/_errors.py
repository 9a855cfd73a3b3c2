"""What can go wrong, as a tree.

::

    RematKitError
    ├── UserError                the call cannot work as written; the message says what to do
    │   ├── PolicyError          a policy, recipe, selector or preset that is not well formed
    │   ├── UnknownNameError     a name, module, primitive, preset or target that does not exist
    │   ├── NotDifferentiableError   the function has no gradient to take
    │   └── BuildError           a model file or builder that cannot be loaded or run
    ├── TargetError              a chip cannot be compiled for here
    │   ├── MissingPluginError   the extra that brings its compiler is not installed
    │   └── CompileError         the compiler refused the program or died
    ├── CheckError               a check of `remat_kit.testing` failed
    └── InternalError            a fault of remat_kit itself; please report it

Every message names the call in backticks, says what came and why it cannot work, and ends in
a line that starts with ``hint:`` and says what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RematKitError(Exception):
    """The base of every error that remat_kit raises."""

    def __init__(self, message: str, *, hint: str | None = None):
        self.message = message
        self.hint = hint
        super().__init__(message if hint is None else f"{message}\nhint: {hint}")


class UserError(RematKitError, ValueError):
    """The call cannot work as written."""


class PolicyError(UserError):
    """A policy, recipe, selector or preset is not well formed."""


class UnknownNameError(UserError):
    """A name, module, primitive, preset or target does not exist."""


class NotDifferentiableError(UserError):
    """The function has no gradient with respect to what was asked."""


class BuildError(UserError):
    """A model file or builder cannot be loaded or run."""


class TargetError(RematKitError, RuntimeError):
    """A chip cannot be compiled for here."""


class MissingPluginError(TargetError):
    """The package that brings the chip's compiler is not installed."""


class CompileError(TargetError):
    """The compiler refused the program, or its process died."""


class CheckError(RematKitError, AssertionError):
    """A check of `remat_kit.testing` failed."""


class InternalError(RematKitError, AssertionError):
    """A fault of remat_kit itself."""


def near_matches(word: str, known: Iterable[str], n: int = 3) -> list[str]:
    """Return up to ``n`` of ``known`` that a reader may have meant by ``word``.

    >>> near_matches("atn_out", ["attn_out", "mlp_up"])
    ['attn_out']
    """
    known = sorted(set(known))
    by_fold = {k.lower(): k for k in reversed(known)}
    close = difflib.get_close_matches(word.lower(), by_fold, n=n, cutoff=0.5)
    return [by_fold[k] for k in close]


def unknown(kind: str, word: str, known: Iterable[str], *, call: str) -> UnknownNameError:
    """Build the error for a ``word`` that names no ``kind``, with near matches as the hint."""
    known = sorted(set(known))
    close = near_matches(word, known)
    if close:
        hint = "did you mean " + " or ".join(f"{c!r}" for c in close) + "?"
    elif known:
        shown = ", ".join(repr(k) for k in known[:12])
        hint = f"there are: {shown}" + (f", … ({len(known)} in all)" if len(known) > 12 else "")
    else:
        hint = f"there is no {kind} here at all"
    return UnknownNameError(f"`{call}`: no {kind} is named {word!r}", hint=hint)
