"""Which loss does an address on the command line name, and what is wrong if it cannot be built?

An address consists of a file or a module and the name of a function in it:
``models/gpt.py:build`` or ``my_package.train:build``. The models that come with the package have
names of one word: ``gpt``. The function is called with sizes, and with a policy if it has such a
parameter. It returns ``(loss_fn, args)``. An exception that the user's own
code raises becomes a `BuildError` with the line of that code; an exception that remat_kit raises is
passed on unchanged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import os
import pathlib
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType, TracebackType
from typing import Any

from remat_kit._errors import BuildError, NotDifferentiableError, UserError, near_matches, unknown
from remat_kit._files import data_folder, is_own_file

Loss = tuple[Callable[..., Any], tuple[Any, ...]]


_RETURNS = "a builder returns `(loss_fn, args)`, where `loss_fn(*args)` is the loss"


# -- sizes ------------------------------------------------------------------------------------

_INTEGER = re.compile(r"[+-]?\d+(_\d+)*")


_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


_WORDS = {"true": True, "false": False, "none": None}


def parse_sizes(texts: Sequence[str]) -> dict[str, Any]:
    """Read ``k=v`` texts: whole numbers, floats, True, False, None, and strings.

    >>> parse_sizes(["depth=50", "rate=1e-3", "scan=true", "dtype=bf16", "size='2'"])
    {'depth': 50, 'rate': 0.001, 'scan': True, 'dtype': 'bf16', 'size': '2'}

    Raises:
      UserError: there is no name before the ``=``, or a name is given twice.
    """
    sizes: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(
                f"`--size {text}`: this is not of the form name=value",
                hint="for example --size batch=64",
            )
        if name in sizes:
            raise UserError(f"`--size {text}`: {name} is given twice", hint="give each size once")
        if name == "policy":
            raise UserError(
                f"`--size {text}`: the policy is not a size", hint=f"write --policy {value}"
            )
        sizes[name] = _value(value)
    return sizes


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text


# -- the builder ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Builder:
    """A function that builds a loss and its arguments, and where it came from.

    Attributes:
      address: the address as the user wrote it.
      function: called as ``function(policy=..., **sizes)``.
      root: the folder that contains the user's code.
    """

    address: str
    function: Callable[..., Any]
    root: pathlib.Path

    @property
    def takes_policy(self) -> bool:
        """Tell whether the function has a parameter for the policy."""
        return self.takes("policy")

    def takes(self, name: str) -> bool:
        """Tell whether the function has a parameter of that name."""
        parameters = self._parameters()
        return parameters is None or _accepts(parameters, name)

    def build(self, sizes: Mapping[str, Any], policy: Any = None) -> Loss:
        """Call the function and check what it returns.

        Args:
          sizes: keyword arguments of the function.
          policy: passed on as ``policy=``, unless it is None.

        Raises:
          UnknownNameError: the function has no parameter for one of the sizes.
          BuildError: the function raised an exception, or did not return ``(loss_fn, args)``.
        """
        given = dict(sizes) if policy is None else {"policy": policy, **sizes}
        self._check_call(given)
        with self.explained():
            result = self.function(**given)
        return self._checked(result)

    @contextlib.contextmanager
    def explained(self, loss: Loss | None = None) -> Iterator[None]:
        """Turn an exception of the user's code inside the context into a `BuildError`.

        An exception of JAX that `jax.grad` of ``loss`` raises too, without remat_kit, becomes a
        `NotDifferentiableError`. Text that the user's code prints goes to standard error.
        """
        with explained(self.address, self.root, loss):
            yield

    def _parameters(self) -> Mapping[str, inspect.Parameter] | None:
        try:
            return inspect.signature(self.function).parameters
        except (TypeError, ValueError):
            return None

    def _check_call(self, given: Mapping[str, Any]) -> None:
        parameters = self._parameters()
        if parameters is None:
            return
        by_name = [n for n, p in parameters.items() if p.kind in _BY_NAME and n != "policy"]
        for name in given:
            if not _accepts(parameters, name):
                raise unknown("size", name, by_name, call=f"{self.address} --size {name}=...")
        try:
            inspect.signature(self.function).bind(**given)
        except TypeError as error:
            raise BuildError(
                f"`{self.address}`: the builder cannot be called: {error}",
                hint="give its arguments with --size name=value, or give its parameters defaults",
            ) from None

    def _checked(self, result: Any) -> Loss:
        if not isinstance(result, tuple | list) or len(result) != 2 or not callable(result[0]):
            raise BuildError(
                f"`{self.address}`: the builder returned {_described(result)}", hint=_RETURNS
            )
        fn, args = result
        if not isinstance(args, tuple | list):
            raise BuildError(
                f"`{self.address}`: the builder returned as arguments {_described(args)}, "
                "not a tuple",
                hint=_RETURNS + "; one argument alone is `(x,)`",
            )
        try:
            inspect.signature(fn).bind(*args)
        except TypeError as error:
            raise BuildError(
                f"`{self.address}`: the builder returned a loss that cannot be called with the "
                f"{len(args)} arguments that it returned: {error}",
                hint=_RETURNS,
            ) from None
        except ValueError:
            pass  # a callable without a signature
        return fn, tuple(args)


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _accepts(parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return True
    return name in parameters and parameters[name].kind in _BY_NAME


def _described(value: Any) -> str:
    if isinstance(value, tuple | list):
        inside = ", ".join(type(v).__name__ for v in value[:4]) + (", …" if len(value) > 4 else "")
        return f"a {type(value).__name__} of {len(value)} ({inside})"
    return "None" if value is None else f"a value of type {type(value).__name__}"


# -- from an address to a builder -------------------------------------------------------------


@contextlib.contextmanager
def loaded(address: str) -> Iterator[Builder]:
    """Import the function that ``address`` names, whose code may import modules of its folder.

    Args:
      address: the path of a Python file, the name of a module or the name of a packaged model,
        then ``:`` and the name of a function in it. Without the name, the function is called
        ``build``. A module of the current folder comes before a packaged model of its name, and
        that before an installed module.

    Raises:
      BuildError: the file or module does not exist or cannot be imported.
      UnknownNameError: the file or module has no such function.
    """
    place, name = _parts(address)
    place = _packaged_file(place) or place
    is_file = _looks_like_file(place)
    root = _file_root(place, address) if is_file else pathlib.Path.cwd()
    with _importable(root):
        with explained(address, root):
            module = _file_module(place, address) if is_file else _named_module(place, address)
        if not is_file:
            root = _module_root(module, root)
        yield Builder(address, _function(module, name, address), root)


@functools.cache
def packaged_models() -> Mapping[str, pathlib.Path]:
    """Return the files of the models that come with the package, by name.

    >>> packaged_models()["gpt"].name
    'gpt.py'
    """
    return {path.stem: path for path in sorted(data_folder("models").glob("*.py"))}


def _packaged_file(place: str) -> str | None:
    """Return the file of the packaged model of this name, unless the user has such a module."""
    if place not in packaged_models():
        return None
    own = (f"{place}.py", os.path.join(place, "__init__.py"))
    return None if any(map(os.path.exists, own)) else str(packaged_models()[place])


def _parts(address: str) -> tuple[str, str]:
    place, colon, name = address.rpartition(":")
    if not colon or os.sep in name:
        place, name = address, "build"
    if not place or not name:
        raise BuildError(
            f"`{address}`: a model is named by a file or module and a function in it",
            hint="for example models/gpt.py:build or my_package.train:build; `remat-kit models` "
            "lists those that come with remat_kit",
        )
    return place, name


def _looks_like_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place or os.sep in place or os.path.lexists(place)


def _file_root(place: str, address: str) -> pathlib.Path:
    path = pathlib.Path(place)
    if "\0" in place:
        raise BuildError(f"`{address}`: a path cannot contain NUL", hint="name a Python file")
    if path.is_dir():
        files = sorted(f.name for f in path.glob("*.py"))
        hint = "it contains " + ", ".join(files[:12]) if files else "it contains no Python file"
        raise BuildError(
            f"`{address}`: {place} is a folder, not a file", hint=f"name a file in it; {hint}"
        )
    if not path.is_file():
        raise BuildError(f"`{address}`: there is no file {place}", hint=_similar_files(path))
    return path.resolve().parent


def _similar_files(path: pathlib.Path) -> str:
    own = path.stem in packaged_models()
    also = f"; the model that comes with remat_kit is called {path.stem!r}" if own else ""
    if not path.parent.is_dir():
        here = pathlib.Path.cwd()
        return f"there is no folder {path.parent} either; the current one is {here}{also}"
    close = near_matches(path.name, [f.name for f in path.parent.glob("*.py")])
    if close:
        return "did you mean " + " or ".join(str(path.parent / c) for c in close) + f"?{also}"
    return f"name a Python file, or a module that can be imported{also}"


@contextlib.contextmanager
def _importable(folder: pathlib.Path) -> Iterator[None]:
    text = str(folder)
    sys.path.insert(0, text)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the user's code may have changed it
            sys.path.remove(text)


def _file_module(place: str, address: str) -> ModuleType:
    path = pathlib.Path(place).resolve()
    name = "_remat_kit_model_" + re.sub(r"\W", "_", path.stem)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BuildError(
            f"`{address}`: {place} is not a Python file", hint="name a file that ends in .py"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a module up there
    with _readable(place, address):
        spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _readable(place: str, address: str) -> Iterator[None]:
    """Explain an exception that Python raises before it runs the first line of a file."""
    try:
        yield
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = all(f.filename == __file__ or f.filename.startswith("<frozen") for f in frames)
        if not ours or (isinstance(error, SyntaxError) and error.filename and error.lineno):
            raise
        reason = getattr(error, "strerror", None) or getattr(error, "msg", None) or str(error)
        raise BuildError(
            f"`{address}`: {place} cannot be read as Python: {reason or type(error).__name__}",
            hint="name a file of Python source, in UTF-8 and without NUL bytes; "
            "`python FILE` shows the same error",
        ) from error


def _named_module(place: str, address: str) -> ModuleType:
    importlib.invalidate_caches()
    try:
        with _readable(place, address):
            return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not (place == error.name or place.startswith(error.name + ".")):
            raise
        if "." in place:
            raise BuildError(
                f"`{address}`: there is no module {error.name}",
                hint=f"a module is looked for in {pathlib.Path.cwd()} and among the installed "
                "packages; the path of a file works too",
            ) from None
        raise BuildError(
            f"`{address}`: there is no module {place}, and no model of that name",
            hint=_models_in_words(place),
        ) from None
    except BuildError:
        raise
    except (TypeError, ValueError) as error:
        if place.strip(".") and not place.startswith("."):
            raise
        raise BuildError(
            f"`{address}`: {place!r} is not the name of a module: {error}",
            hint="for example my_package.train:build",
        ) from None


def _models_in_words(place: str) -> str:
    close = near_matches(place, packaged_models())
    meant = "did you mean " + " or ".join(map(repr, close)) + "? " if close else ""
    return (
        f"{meant}the models that come with remat_kit are {', '.join(packaged_models())}; "
        "the path of a file works too"
    )


def _module_root(module: ModuleType, otherwise: pathlib.Path) -> pathlib.Path:
    file = getattr(module, "__file__", None)
    if file is None:
        return otherwise
    # The folder of the outermost package, since its other files belong to the user too.
    up = module.__name__.count(".") + (pathlib.Path(file).name == "__init__.py")
    folder = pathlib.Path(file).resolve().parent
    return folder.parents[up - 2] if up > 1 else folder


def _function(module: ModuleType, name: str, address: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if function is None:
        known = [n for n, v in vars(module).items() if inspect.isfunction(v) and n[:1] != "_"]
        raise unknown("builder", name, known, call=address)
    if not callable(function):
        raise BuildError(
            f"`{address}`: {name} is {_described(function)}, not a function", hint=_RETURNS
        )
    return function


# -- whose fault it is ------------------------------------------------------------------------


@contextlib.contextmanager
def explained(address: str, root: pathlib.Path, loss: Loss | None = None) -> Iterator[None]:
    """See `Builder.explained`."""
    from remat_kit._errors import RematKitError

    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except RematKitError:
        raise
    except SystemExit as error:
        raise BuildError(
            f"`{address}`: it ended the program (exit status {error.code})",
            hint='keep what is to run as a script under `if __name__ == "__main__":`',
        ) from error
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise _explanation(error, address, root, loss) or error from error


def _explanation(
    error: BaseException, address: str, root: pathlib.Path, loss: Loss | None
) -> UserError | None:
    shown = f"{type(error).__name__}: {str(error).strip() or 'without a message'}"
    if isinstance(error, SyntaxError) and error.filename:
        where = f"{_shown_path(error.filename)}:{error.lineno}"
        text = f"`{address}`: {type(error).__name__}: {error.msg} ({where})"
        return BuildError(text, hint="correct that line; `python FILE` shows the same error")
    line = user_line(error.__traceback__, root)
    if line is not None:
        hint = "the builder or the loss raised this itself; --debug shows the whole traceback"
        if isinstance(error, ImportError) and "relative import" in str(error):
            hint = "address a file of a package as a module: my_package.train:build"
        return BuildError(f"`{address}`: {shown} ({line})", hint=hint)
    if loss is not None and (plain := _fault_without_us(loss)) is not None:
        return NotDifferentiableError(
            f"`{address}`: JAX cannot differentiate this loss: {plain}",
            hint="`jax.grad` of the same loss says the same; --debug shows the whole traceback",
        )
    return None


def user_line(trace: TracebackType | None, root: pathlib.Path) -> str | None:
    """Return ``file:line`` of the innermost frame of the user's code, if it raised an exception.

    None if a frame of remat_kit is inside of that frame, because then remat_kit raised it.

    Args:
      trace: the traceback of the exception.
      root: the folder that contains the user's code.
    """
    line: str | None = None
    for frame in traceback.extract_tb(trace):
        path = pathlib.Path(frame.filename)
        if is_own_file(frame.filename):
            line = None
        elif _is_users(path, root):
            line = f"{_shown_path(frame.filename)}:{frame.lineno}"
    return line


def _is_users(path: pathlib.Path, root: pathlib.Path) -> bool:
    if not path.is_absolute():
        return False  # "<frozen importlib._bootstrap>" and the like
    path = path.resolve()
    installed = [pathlib.Path(p).resolve() for p in _library_folders()]
    if any(path.is_relative_to(p) and not root.is_relative_to(p) for p in installed):
        return False
    return path.is_relative_to(root)


def _library_folders() -> set[str]:
    paths = sysconfig.get_paths()
    return {paths[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")}


def _shown_path(filename: str) -> str:
    path = pathlib.Path(filename)
    cwd = pathlib.Path.cwd()
    return str(path.relative_to(cwd)) if path.is_relative_to(cwd) else filename


def _fault_without_us(loss: Loss) -> str | None:
    """Return the error of JAX for the gradient of a loss without a policy, or None."""
    import jax

    from remat_kit._program.steps.gradient import abstract, gradient_program

    fn, args = loss
    try:
        jax.eval_shape(gradient_program(fn, args), *abstract(args))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip()}"
    return None
