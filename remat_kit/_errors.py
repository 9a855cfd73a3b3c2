"""Which errors does remat_kit raise, and what does a message contain?

::

    RematKitError
    ├── UserError                the call cannot work as written; the message says what to do
    │   ├── PolicyError          a policy, recipe, selector or preset is not well formed
    │   ├── UnknownNameError     a name, module, primitive, preset or target does not exist
    │   ├── NotDifferentiableError   the function has no gradient for these arguments
    │   └── BuildError           a model file or builder cannot be loaded or run
    ├── TargetError              this machine cannot compile for a chip
    │   ├── MissingPluginError   the package with the compiler is not installed
    │   └── CompileError         the compiler refused the program, or its process ended
    ├── CheckError               a check of `remat_kit.testing` failed
    └── InternalError            a bug in remat_kit; please report it

    RematKitWarning              a policy has no effect, for the given reason; a `UserWarning`

Every message names the call in backticks and says which value was given and why it cannot work. It
ends with a line that starts with ``hint:`` and says what to do instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RematKitError(Exception):
    """The base class of every error that remat_kit raises.

    >>> error = RematKitError("`f()`: this cannot work", hint="call it otherwise")
    >>> print(error)
    `f()`: this cannot work
    hint: call it otherwise

    Args:
        message: names the call in backticks and says why it cannot work.
        hint: what to do instead; it becomes the last line of the text.

    remat_kit raises subclasses of this class, never the class itself.
    """

    def __init__(self, message: str, *, hint: str | None = None):
        self.message = message
        self.hint = hint
        super().__init__(message if hint is None else f"{message}\nhint: {hint}")


class UserError(RematKitError, ValueError):
    """The call cannot work as it is written. Also a `ValueError`.

    Raised by every public function for arguments that do not fit, and in the place of the
    ValueError and TypeError that `jax.checkpoint` raises for its options.

    >>> import remat_kit
    >>> remat_kit.target("h100@0")
    Traceback (most recent call last):
    remat_kit._errors.UserError: `target('h100@0')`: a chip needs memory
    hint: write it as 'h100@40GiB'
    """


class PolicyError(UserError):
    """A policy, recipe, selector or preset is not well formed.

    Raised by the selectors, the policy functions and `remat_kit.policy`.

    >>> import remat_kit
    >>> remat_kit.named()
    Traceback (most recent call last):
    remat_kit._errors.PolicyError: `named()`: no pattern was given
    hint: give one or more non-empty strings, such as `named("attn_*")`
    """


class UnknownNameError(UserError):
    """A name, module, primitive, preset or target does not exist.

    Raised by `remat_kit.target`, `remat_kit.policy` and the functions that use them.

    >>> import remat_kit
    >>> remat_kit.target("h10")
    Traceback (most recent call last):
    remat_kit._errors.UnknownNameError: `target('h10')`: no target is named 'h10'
    hint: did you mean 'h100' or 'v100' or 'p100'?
    """


class NotDifferentiableError(UserError):
    """The function has no gradient with respect to the arguments that were asked for.

    Raised where `jax.grad` raises a TypeError, for example by `remat_kit.inspect` and `measure`.

    >>> import jax, remat_kit
    >>> w = jax.ShapeDtypeStruct((2,), "int32")
    >>> try:
    ...     remat_kit.inspect(lambda w: w.sum(), w)
    ... except remat_kit.NotDifferentiableError:
    ...     print("integers have no gradient")
    integers have no gradient
    """


class BuildError(UserError):
    """A model file or builder cannot be loaded or run.

    Raised by the command line and by `remat_kit.max_batch` and `fit`.

    >>> from remat_kit._program.builder import loaded
    >>> try:
    ...     with loaded("no_such_model.py:build"):
    ...         pass
    ... except BuildError:
    ...     print("there is no such file")
    there is no such file
    """


class TargetError(RematKitError, RuntimeError):
    """This machine cannot compile for a chip. Also a `RuntimeError`, like the errors of XLA.

    Raised by `remat_kit.target`, `measure`, `inspect`, `plan`, `max_batch` and `fit`.

    >>> import remat_kit
    >>> try:
    ...     remat_kit.target("mi300x")
    ... except remat_kit.TargetError:
    ...     print("XLA cannot compile for an AMD chip that is not in the machine")
    XLA cannot compile for an AMD chip that is not in the machine
    """


class MissingPluginError(TargetError):
    """The package that contains the compiler for the chip is not installed.

    Raised by every function that compiles. `Target.available` tells in advance whether the package
    is installed.

    >>> print(MissingPluginError("no compiler", hint="pip install 'remat-kit[tpu]'"))
    no compiler
    hint: pip install 'remat-kit[tpu]'
    """


class CompileError(TargetError):
    """XLA refused the program, or its process ended without a result.

    Raised by every function that compiles. A program that needs more memory than the chip has is
    no error; see `Memory.fits`.

    >>> import jax, remat_kit
    >>> w = jax.ShapeDtypeStruct((2,), "float32")
    >>> options = {"no_such_option": "1"}
    >>> try:
    ...     remat_kit.measure(lambda w: w.sum(), w, compiler_options=options, cache=False)
    ... except remat_kit.CompileError:
    ...     print("XLA does not know this option")
    XLA does not know this option
    """


class CheckError(RematKitError, AssertionError):
    """A check of `remat_kit.testing` failed. Also an `AssertionError`, which pytest reports.

    >>> import jax, remat_kit
    >>> x = jax.ShapeDtypeStruct((1024,), "float32")
    >>> try:
    ...     remat_kit.testing.assert_equivalent(lambda x: x.sum(), lambda x: x.max(), x)
    ... except CheckError:
    ...     print("the two functions have different values")
    the two functions have different values
    """


class InternalError(RematKitError, AssertionError):
    """A bug in remat_kit; please report it.

    Raised if a result violates something that remat_kit guarantees.

    >>> issubclass(InternalError, AssertionError)
    True
    """


class RematKitWarning(UserWarning):
    """A policy or a part of it has no effect, although the call is well formed.

    Emitted with `warnings.warn` by `remat_kit.policy`, `inspect`, `measure`, `fit` and `max_batch`.
    It is raised as an error only under ``warnings.simplefilter("error")``.

    >>> issubclass(RematKitWarning, UserWarning)
    True
    """


_SHOWN = 200  # largest number of characters of a word that a message shows


def near_matches(word: str, known: Iterable[str], n: int = 3) -> list[str]:
    """Return up to ``n`` of the ``known`` words that a user may have meant by ``word``.

    >>> near_matches("atn_out", ["attn_out", "mlp_up"])
    ['attn_out']
    >>> near_matches("a100", ["a100-40g", "a100-80g", "v100"])
    ['a100-40g', 'a100-80g']
    """
    word = word[:_SHOWN]  # a longer word is not a misspelled name
    known = sorted(set(known))
    by_fold = {k.lower(): k for k in reversed(known)}
    if len(word) > 1:  # the members of a family: `a100` is a100-40g or a100-80g
        family = [by_fold[k] for k in sorted(by_fold) if k.startswith(f"{word.lower()}-")]
        if family:
            return family[:n]
    close = difflib.get_close_matches(word.lower(), by_fold, n=n, cutoff=0.5)
    return [by_fold[k] for k in close]


def unknown(kind: str, word: str, known: Iterable[str], *, call: str) -> UnknownNameError:
    """Return the error for a ``word`` that is no ``kind``; its hint lists similar known words."""
    known = sorted(set(known))
    close = near_matches(word, known)
    word, call = (t if len(t) <= _SHOWN else t[: _SHOWN - 3] + "..." for t in (word, call))
    if close:
        hint = "did you mean " + " or ".join(f"{c!r}" for c in close) + "?"
    elif known:
        shown = ", ".join(repr(k) for k in known[:12])
        hint = f"there are: {shown}" + (f", … ({len(known)} in all)" if len(known) > 12 else "")
    else:
        hint = f"there is no {kind} here at all"
    return UnknownNameError(f"`{call}`: no {kind} is named {word!r}", hint=hint)
