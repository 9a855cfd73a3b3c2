"""How is a policy written in a file?

A *recipe* is a TOML file of a few lines::

    description = "Keep the attention output of every block."
    origin = "https://example.org/where-it-comes-from"
    policy = "save(named('attn_out'))"

A *preset* is a recipe that comes with remat_kit. The text of a policy is parsed with a fixed list
of constructors and never evaluated, so a recipe from an unknown source can run no code. A recipe
may take one parameter, which a user writes after a colon (``uniform:2``).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.resources
import json
import operator
import pathlib
import re
import tomllib
from collections.abc import Callable, Iterable
from importlib.resources.abc import Traversable
from typing import Any

import jax

from remat_kit import _units
from remat_kit._errors import PolicyError, UnknownNameError, unknown
from remat_kit._policy import algebra as _algebra
from remat_kit._policy import selectors as _selectors
from remat_kit._policy import structural as _structural
from remat_kit._policy.algebra import MAX_NAMES, MAX_NESTING, Policy, Selector
from remat_kit._units import shortened

# ---------------------------------------------------------------------------------------------
# How much is read
# ---------------------------------------------------------------------------------------------

MAX_BYTES = 2**20


_MAX_DIGITS = 1000


_MAX_TOKENS = 100_000


# These patterns split a text into tokens, one match for each, in time linear in the length of the
# text: possessive quantifiers never backtrack, and an unclosed string ends with the text.
_TRIPLE = r"""\"{3}(?:[^"\\]|\\.|"(?!""))*+(?:"{3})?"""


_POLICY_TOKENS = re.compile(
    rf"""(?s:(?P<skip>(?:\s|\#[^\n]*+)++)
    |(?P<string>{_TRIPLE}|{_TRIPLE.replace('"', "'")}|"(?:[^"\\\n]|\\.)*+"?|'(?:[^'\\\n]|\\.)*+'?)
    |(?P<word>\w++)|(?P<open>[(\[{{])|(?P<close>[)\]}}])|.)""",
    re.VERBOSE,
)


_TOML_TOKENS = re.compile(
    rf"""(?s:(?P<skip>[ \t\r]++)|(?P<line>\n(?:\s|\#[^\n]*+)*+|\#[^\n]*+)
    |(?P<string>{_TRIPLE}|'{{3}}(?:[^']|'(?!''))*+(?:'{{3}})?|"(?:[^"\\\n]|\\.)*+"?|'[^'\n]*+'?)
    |(?P<word>[\w+:-]++)|(?P<open>[(\[{{])|(?P<close>[)\]}}])|(?P<dot>\.)|.)""",
    re.VERBOSE,
)


def _check_extent(text: str, tokens: re.Pattern[str], call: str, what: str) -> None:
    """Raise for a text that is too long or too deeply nested, before a slower parser reads it.

    Python's own parsers recurse, raise errors of their own for long numbers, and in places take
    time quadratic in the length, as `tomllib` does for dotted keys.
    """

    def refuse(reason: str) -> PolicyError:
        return PolicyError(
            f"`{call}`: {what}: {reason}",
            hint="a recipe has a few lines, and a plan has one for each kind of block; check that "
            "this is the file or the text that you meant",
        )

    if len(text) > MAX_BYTES:
        raise refuse(f"it is longer than {MAX_BYTES // 2**20} MiB")
    if max(text.count("\n"), text.count("\\")) > 2 * MAX_NAMES:
        raise refuse(f"it has more than {2 * MAX_NAMES:,} lines or backslashes")
    names = depth = dots = 0
    for count, token in enumerate(tokens.finditer(text)):
        kind = token.lastgroup
        names += kind in ("string", "word")
        depth += (kind == "open") - (kind == "close" and depth > 0)
        dots = 0 if kind == "line" else dots + (kind == "dot")
        if depth > MAX_NESTING or dots > MAX_NESTING:
            raise refuse(f"it is too deeply nested, more than {MAX_NESTING} levels")
        if names > MAX_NAMES:
            raise refuse(f"it has more than {MAX_NAMES:,} names")
        if kind == "word" and token[0].lstrip("+-_")[:1].isdigit() and len(token[0]) > _MAX_DIGITS:
            raise refuse(f"it has a number of more than {_MAX_DIGITS:,} digits")
        if count > _MAX_TOKENS:
            raise refuse(f"it has more than {_MAX_TOKENS:,} words and signs")


# ---------------------------------------------------------------------------------------------
# The text of a policy
# ---------------------------------------------------------------------------------------------

_CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    fn.__name__: fn
    for fn in (
        *(_algebra.save, _algebra.offload, _algebra.recompute, _algebra.first),
        *(
            _selectors.primitive,
            _selectors.named,
            _selectors.named_regex,
            _selectors.module,
            _selectors.dtype,
        ),
        *(_selectors.source, _selectors.larger_than, _selectors.smaller_than, _selectors.cheap),
        *(_structural.uniform, _structural.block, _structural.segments, _structural.nested),
        *(_structural.pieces, _structural.sliced, _structural.planned, _structural.auto),
        _algebra.callable_policy,
    )
}


_CONSTANTS = {
    c.label: c
    for c in (
        *(_selectors.everything, _selectors.nothing, _selectors.collective),
        *(_selectors.dots, _selectors.dots_no_batch, _selectors.gathered_parameters),
    )
}


# The members of `jax.checkpoint_policies` that are policies; the others make policies.
_JAX_POLICIES = (
    *("everything_saveable", "nothing_saveable", "dots_saveable", "checkpoint_dots"),
    *("dots_with_no_batch_dims_saveable", "checkpoint_dots_with_no_batch_dims"),
)


_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.Sub: operator.sub,
    ast.RShift: operator.rshift,
}


def parse(text: str) -> Policy:
    """Return the policy whose repr is ``text``; a selector ``s`` means ``save(s)``.

    >>> parse("save(dots - named('logits')) >> offload(module('*/mlp'))")
    save(dots & ~named('logits')) >> offload(module('*/mlp'))

    Args:
      text: calls of the public constructors, the constants (``dots``, …), ``|``, ``&``, ``~``,
        ``-``, ``>>``, strings, numbers, True, False, None, and nothing else.

    Raises:
      PolicyError: ``text`` is not the text of a policy; the message quotes the wrong piece.
      UnknownNameError: a constructor or constant does not exist.
    """
    _check_extent(text, _POLICY_TOKENS, _short(text), "this is not the text of a policy")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise PolicyError(
            f"`{_short(text)}`: this is not the text of a policy: {_short(str(error))}",
            hint="write what `repr(policy)` shows, for example save(named('attn_out'))",
        ) from None
    try:
        value = _read(tree.body, text)
    except RecursionError:
        raise PolicyError(
            f"`{_short(text)}`: this text is too deeply nested",
            hint="give one selector several patterns: named('a', 'b') instead of many with |",
        ) from None
    if isinstance(value, Selector | Policy):
        return _algebra.save(value) if isinstance(value, Selector) else value
    raise PolicyError(
        f"`{_short(text)}`: this gives {shortened(value)}, which is neither a policy nor "
        "a selector",
        hint="for example save(named('attn_out'))",
    )


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."


def _read(node: ast.expr, text: str) -> Any:
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, str | int | float):
            return value
        case ast.Name(id=name):
            if name not in _CONSTANTS:
                raise _unknown_word(name, text)
            return _CONSTANTS[name]
        case ast.BinOp(op=op) if type(op) in _OPERATORS:
            return _read_chain(node, text)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            a: Any = _operand(operand, text)
            return _apply(node, text, lambda: ~a)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            return _read_call(node, name, args, keywords, text)
        case ast.Attribute(attr=attr) if ast.unparse(node) == f"jax.checkpoint_policies.{attr}":
            if attr not in _JAX_POLICIES:
                raise unknown("policy of jax.checkpoint_policies", attr, _JAX_POLICIES, call=text)
            return getattr(jax.checkpoint_policies, attr)
    raise PolicyError(
        f"`{_short(text)}`: {_unparsed(node)} is not allowed in the text of a policy",
        hint="a policy consists of constructors such as save(...) and named(...), constants such "
        "as dots, the operators | & ~ - >>, and literals",
    )


def _read_chain(node: ast.expr, text: str) -> Selector | Policy:
    """Read ``a | b | c | ...`` without recursion, since each operator adds a level to its tree."""
    chain: list[ast.BinOp] = []
    while isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        chain.append(node)
        node = node.left
    value = _operand(node, text)
    for link in reversed(chain):
        right = _operand(link.right, text)
        value = _apply(link, text, functools.partial(_OPERATORS[type(link.op)], value, right))
    return value


def _unparsed(node: ast.expr) -> str:
    return repr(_short(ast.unparse(node)))


def _operand(node: ast.expr, text: str) -> Selector | Policy:
    value = _read(node, text)
    if isinstance(value, Selector | Policy):
        return value
    raise PolicyError(
        f"`{_short(text)}`: {_unparsed(node)} is neither a selector nor a policy",
        hint="operators combine selectors with selectors and policies with policies",
    )


def _read_call(
    node: ast.Call, name: str, args: list[ast.expr], keywords: list[ast.keyword], text: str
) -> Any:
    if name not in _CONSTRUCTORS:
        raise _unknown_word(name, text)
    given = [_read(a, text) for a in args]
    named: dict[str, Any] = {}
    for keyword in keywords:
        if keyword.arg is None:
            raise PolicyError(
                f"`{_short(text)}`: `**` is not allowed in the text of a policy",
                hint=f"write the keywords of {name}(...) one by one",
            )
        named[keyword.arg] = _read(keyword.value, text)
    return _apply(node, text, lambda: _CONSTRUCTORS[name](*given, **named))


def _apply(node: ast.expr, text: str, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except TypeError as error:
        raise PolicyError(
            f"`{_short(text)}`: {_unparsed(node)} cannot be built: {error}",
            hint="`help(remat_kit.<constructor>)` shows its arguments",
        ) from None


def _unknown_word(name: str, text: str) -> UnknownNameError:
    if name == "where":
        return UnknownNameError(
            f"`{_short(text)}`: where(...) takes a function, which a text cannot contain",
            hint="build this policy in Python, or use the other selectors",
        )
    words = [*_CONSTRUCTORS, *_CONSTANTS]
    return unknown("constructor of a policy", name, words, call=_short(text))


# ---------------------------------------------------------------------------------------------
# Recipes
# ---------------------------------------------------------------------------------------------


def _as_int(text: str) -> str:
    return repr(int(text))


def _as_size(text: str) -> str:
    _units.parse_bytes(text)
    return repr(text)


def _as_names(text: str) -> str:
    names = [n.strip() for n in text.split(",")]
    if not all(names):
        raise ValueError("an empty name")
    return ", ".join(map(repr, names))


# For each type of a parameter: a function from the argument that a user writes to a piece of the
# policy's text, and an example of such an argument.
_PARAMETERS: dict[str, tuple[Callable[[str], str], str]] = {
    "int": (_as_int, "2"),
    "int or None": (_as_int, "4"),
    "size": (_as_size, "1MiB"),
    "names": (_as_names, "a,b"),
    "text": (repr, ".*_proj"),
    "axis": (repr, "model"),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A named policy and its source.

    A user gives the name where a policy is expected, as in the configurations of MaxText and
    AXLearn.

    >>> r = Recipe("keep_out", "save(named('attn_out'))", description="Attention outputs only.")
    >>> r.policy
    save(named('attn_out'))

    Attributes:
      name: the name of the file without ``.toml``.
      text: the repr of the policy, with ``{parameter}`` in the place of the parameter.
      description: one or two sentences.
      origin: the library or paper that uses this policy, with the address of its documentation.
      aliases: other names of the recipe.
      parameters: empty, or one pair of the parameter's name and its type: ``int``,
        ``int or None``, ``size``, ``names`` (one or more, separated by commas), ``text`` or
        ``axis`` (the name of a mesh axis).

    Raises:
      PolicyError: ``text`` is not the text of a policy, or a parameter is not well formed.
    """

    name: str
    text: str
    description: str = ""
    origin: str = ""
    aliases: tuple[str, ...] = ()
    parameters: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if len(self.parameters) > 1:
            raise PolicyError(
                f"`{self.name}`: a recipe takes at most one parameter, and this recipe has "
                + ", ".join(name for name, _ in self.parameters),
                hint="write fixed values for the others, or write several recipes",
            )
        for parameter, kind in self.parameters:
            if kind not in _PARAMETERS:
                raise unknown("type of a parameter", str(kind), _PARAMETERS, call=self.name)
            if not parameter.isidentifier() or f"{{{parameter}}}" not in self.text:
                raise PolicyError(
                    f"`{self.name}`: the parameter {shortened(parameter)} does not occur in "
                    f"{shortened(self.text)}",
                    hint=f"write {{{parameter}}} where its value goes",
                )
        parse(self._filled(self._example()))

    @property
    def usage(self) -> str:
        """How a user writes the recipe: ``"dots"``, ``"uniform:<n>"``, ``"nested[:<group>]"``."""
        optional = self.parameters and self.parameters[0][1] == "int or None"
        shown = "".join(f":<{p}>" for p, _ in self.parameters)
        return self.name + (f"[{shown}]" if optional else shown)

    @property
    def policy(self) -> Policy:
        """The policy itself.

        Raises:
          PolicyError: the recipe needs a parameter.
        """
        if not self.parameters:
            return parse(self.text)
        if self.parameters[0][1] == "int or None":
            return parse(self._filled("None"))
        raise PolicyError(
            f"`{self.name}`: this recipe needs a parameter",
            hint=f"write it after a colon: {self.usage}, for example "
            f"{self.name}:{_PARAMETERS[self.parameters[0][1]][1]}",
        )

    def given(self, argument: str) -> Recipe:
        """Return the recipe with its parameter filled in.

        >>> Recipe("uniform", "uniform({n})", parameters=(("n", "int"),)).given("2").policy
        uniform(2)

        Raises:
          PolicyError: the recipe takes no parameter, or ``argument`` is not of its type.
        """
        call = f"{self.name}:{_short(argument)}"
        if not self.parameters:
            raise PolicyError(
                f"`{call}`: the recipe {self.name!r} takes no parameter", hint=f"write {self.name}"
            )
        kind = self.parameters[0][1]
        fill, example = _PARAMETERS[kind]
        try:
            filled = self._filled(fill(argument))
        except ValueError:
            raise PolicyError(
                f"`{call}`: {shortened(argument)} is not of the type {kind!r}",
                hint=f"for example {self.name}:{example}",
            ) from None
        name = f"{self.name}:{argument}"
        return dataclasses.replace(self, name=name, text=filled, aliases=(), parameters=())

    def _example(self) -> str:
        return "".join(_PARAMETERS[k][0](_PARAMETERS[k][1]) for _, k in self.parameters)

    def _filled(self, piece: str) -> str:
        places = sum(self.text.count(f"{{{name}}}") for name, _ in self.parameters)
        longest = len(self.text) + places * len(piece)
        if longest > MAX_BYTES:
            raise PolicyError(
                f"`{self.name}`: with this parameter the policy is longer than "
                f"{MAX_BYTES // 2**20} MiB",
                hint="give a shorter parameter",
            )
        # `str.format` would fail on other braces in the text, as in a regular expression.
        return functools.reduce(
            lambda text, p: text.replace(f"{{{p[0]}}}", piece), self.parameters, self.text
        )


_KEYS = ("description", "origin", "policy", "aliases", "parameters")


def loads(text: str, name: str = "recipe") -> Recipe:
    """Read a recipe from the text of its file.

    >>> loads("policy = 'save(dots)'", name="mine").policy
    save(dots)

    Args:
      text: TOML.
      name: the name of the recipe, which the file does not contain.

    Raises:
      PolicyError: ``text`` is not TOML, or not a recipe.
      UnknownNameError: ``text`` has a key that recipes do not have.
    """
    _check_extent(text, _TOML_TOKENS, name, "this recipe cannot be read")
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError, OverflowError) as error:
        # `tomllib` also raises other errors than its own, for numbers and dates.
        raise PolicyError(
            f"`{name}`: this is not TOML: {error}", hint=f"a recipe has the keys {', '.join(_KEYS)}"
        ) from None
    for key in table:
        if key not in _KEYS:
            raise unknown("key of a recipe", key, _KEYS, call=name)
    aliases, parameters = table.get("aliases", []), table.get("parameters", {})
    policy, description, origin = (table.get(k, "") for k in ("policy", "description", "origin"))
    kinds = parameters.values() if isinstance(parameters, dict) else [None]
    if not _all_text([policy, description, origin, *kinds]):
        raise PolicyError(
            f"`{name}`: policy, description, origin and the types of parameters must be text",
            hint="""for example policy = "save(named('attn_out'))" """.strip(),
        )
    if not isinstance(aliases, list) or not _all_text(aliases):
        raise PolicyError(
            f"`{name}`: aliases must be a list of names", hint='for example aliases = ["minimal"]'
        )
    if not policy:
        raise PolicyError(
            f"`{name}`: a recipe needs a policy",
            hint="""add a line such as policy = "save(named('attn_out'))" """.strip(),
        )
    return Recipe(name, policy, description, origin, tuple(aliases), tuple(parameters.items()))


def _all_text(values: Iterable[Any]) -> bool:
    return all(isinstance(v, str) for v in values)


def dumps(recipe: Recipe | Policy) -> str:
    """Write a recipe, or a policy as a recipe, as the text of a file that `loads` reads back.

    >>> from remat_kit import dots, save
    >>> print(dumps(save(dots)), end="")
    policy = "save(dots)"

    Raises:
      PolicyError: the policy contains a function (`where`, or `callable_policy` of a function that
        is not one of JAX's), which a text cannot contain.
    """
    if isinstance(recipe, Policy):
        recipe = Recipe("recipe", repr(recipe))
    fields = (("description", recipe.description), ("origin", recipe.origin))
    lines = [f"{key} = {_quoted(text)}" for key, text in fields if text]
    if recipe.aliases:
        lines.append(f"aliases = [{', '.join(map(_quoted, recipe.aliases))}]")
    lines.append(f"policy = {_policy_text(recipe.text)}")
    if recipe.parameters:
        lines += ["", "[parameters]", *(f"{p} = {_quoted(kind)}" for p, kind in recipe.parameters)]
    return "\n".join(lines) + "\n"


def _policy_text(text: str) -> str:
    if not text.startswith("planned(") or "'''" in text:
        return _quoted(text)
    lines = text.replace("', '", "',\n  '")
    return f"'''\n{lines}\n'''"


def _quoted(text: str) -> str:
    # A JSON string is a TOML string, except for DEL, which TOML requires to be escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


# ---------------------------------------------------------------------------------------------
# Looking recipes up
# ---------------------------------------------------------------------------------------------


def recipes() -> list[Recipe]:
    """Return the recipes that come with remat_kit, sorted by name.

    `Recipe.origin` names the library or paper that each recipe follows: JAX, MaxText,
    Megatron-LM, ….

    >>> [r.usage for r in recipes() if r.name in ("dots", "nested", "uniform")]
    ['dots', 'nested[:<group>]', 'uniform:<n>']
    """
    return list(_catalogue()[0].values())


def load(name_or_path: str) -> Recipe:
    """Return the recipe with a name or an alias, which may have a parameter, or at a path.

    >>> load("dots").policy, load("uniform:2").policy, load("minimal").name
    (save(dots), uniform(2), 'maxtext_minimal')

    Args:
      name_or_path: ``"dots"``, ``"uniform:2"``, ``"my_recipes/attn.toml"``, …

    Raises:
      UnknownNameError: there is no recipe of this name, and no file at this path.
      PolicyError: the file is not a recipe, or the parameter is missing or not of its type.
    """
    by_name, by_alias = _catalogue()
    head, colon, argument = name_or_path.partition(":")
    name = by_alias.get(head, head)
    if name in by_name:
        return by_name[name].given(argument) if colon else by_name[name]
    if name_or_path.endswith(".toml"):
        return _load_file(pathlib.Path(name_or_path))
    raise unknown("preset", head, [*by_name, *by_alias], call=name_or_path)


def _load_file(path: pathlib.Path) -> Recipe:
    try:
        text = _read_file(path)
    except UnicodeDecodeError:
        raise _unreadable(path, "it is not UTF-8 text") from None
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    except ValueError as error:  # a NUL in the path
        raise _unreadable(path, str(error)) from None
    return loads(text, name=path.stem)


def _unreadable(path: pathlib.Path, reason: str) -> UnknownNameError:
    return UnknownNameError(
        f"`{_short(str(path))}`: this recipe cannot be read: {reason}",
        hint="give the path of a recipe (*.toml), or the name of a preset",
    )


def _read_file(path: pathlib.Path) -> str:
    """Read a file up to the largest size of a recipe; refuse pipes and devices, which may block."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(0, "it is not a regular file")
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    # The text of a longer file may end inside of a character. `loads` then refuses it.
    return data.decode("utf-8", "replace" if len(data) > MAX_BYTES else "strict")


def resolve(text: str) -> Policy:
    """Return the policy that a text stands for: a preset, a recipe's path, or a policy's repr.

    >>> resolve("block:4"), resolve("recompute(primitive('max'))"), resolve("auto:0.5")
    (block(4), recompute(primitive('max')), auto('0.5'))

    Raises:
      UnknownNameError: the preset, file or constructor does not exist.
      PolicyError: ``text`` does not stand for a policy.
    """
    if len(text) > MAX_BYTES:
        return parse(text)  # raises the error for a long text
    head, _, rest = (part.strip() for part in text.partition(":"))
    if head == "auto":  # no preset, since it makes no decision about a value
        return _structural.auto(rest or "fit")
    by_name, by_alias = _catalogue()
    is_name = head in by_name or head in by_alias or text.endswith(".toml")
    if not is_name and re.search(r"[(|&~>]|\s-\s", text):
        return parse(text)
    return load(text.strip()).policy


def _folder() -> Traversable:
    packaged = importlib.resources.files("remat_kit") / "policies"
    return packaged if packaged.is_dir() else _checkout()


def _checkout() -> pathlib.Path:
    return pathlib.Path(__file__).parents[2] / "policies"


@functools.cache
def _catalogue() -> tuple[dict[str, Recipe], dict[str, str]]:
    files = sorted((f for f in _folder().iterdir() if f.name.endswith(".toml")), key=_file_name)
    by_name = {
        f.name.removesuffix(".toml"): loads(
            f.read_text(encoding="utf-8"), name=f.name.removesuffix(".toml")
        )
        for f in files
    }
    return by_name, {alias: name for name, r in by_name.items() for alias in r.aliases}


def _file_name(file: Traversable) -> str:
    return file.name


# ---------------------------------------------------------------------------------------------
# The catalogue of the checkout's `policies/README.md`
# ---------------------------------------------------------------------------------------------

_BEGIN, _END = "<!-- catalogue: begin -->", "<!-- catalogue: end -->"


def with_catalogue(readme: str) -> str:
    """Return the text of ``policies/README.md`` with a new table of the recipes."""
    before, _, rest = readme.partition(_BEGIN)
    after = rest.partition(_END)[2]
    return f"{before}{_BEGIN}\n{_table()}{_END}{after}"


def write_catalogue() -> None:
    """Bring the table in the checkout's ``policies/README.md`` up to date."""
    readme = _checkout() / "README.md"
    readme.write_text(with_catalogue(readme.read_text(encoding="utf-8")), encoding="utf-8")


def _table() -> str:
    rows = ["| preset | also | what it does | policy | from |", "|---|---|---|---|---|"]
    for r in recipes():
        also = ", ".join(f"`{a}`" for a in r.aliases)
        policy = r.text.replace("|", "\\|")
        origin = re.sub(r"(https?://\S*[^\s.,)])", r"<\1>", r.origin)
        rows.append(f"| `{r.usage}` | {also} | {r.description} | `{policy}` | {origin} |")
    return "\n".join(rows) + "\n"
