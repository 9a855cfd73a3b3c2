"""How do agents and editors ask what the command line answers?

`remat-kit mcp` is a server of the Model Context Protocol (https://modelcontextprotocol.io) on
standard input and output. Each call of a tool runs the command line in a process of its own. So a
model file is read anew, what it prints does not reach the protocol, a fault of it or of a compiler
does not end the server, and a call that the client cancels ends at once.

The module imports the package `mcp`, an extra, so nothing but the command imports this module.
"""

# The package `mcp` reads the annotations of the tools at run time, so they must not be strings.
# That is why this module does not use `from __future__ import annotations`.

import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Literal

import anyio
from anyio.streams.text import TextReceiveStream
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, TextContent, ToolAnnotations
from pydantic import Field

import remat_kit

_INSTRUCTIONS = """\
remat_kit says what a JAX training step keeps in memory on a chip, and plans what to save and what
to recompute (rematerialization, activation checkpointing) so that it fits. The chip need not be in
this machine. A model is addressed as FILE.py:build or package.module:build, a function that
returns (loss_fn, args); its file is imported and run. `gpt`, `resnet`, `vit` and other models come
with remat_kit. Start with `inspect`; use `plan` if the step does not fit.\
"""

Model = Annotated[
    str,
    Field(
        description="FILE.py:build or package.module:build, relative to the server's folder, or "
        "the name of a packaged model: gpt, resnet, vit"
    ),
]
Sizes = Annotated[
    Mapping[str, bool | int | float | str | None],
    Field(description='arguments for the builder, for example {"size": "small", "batch": 16}'),
]
Policies = Annotated[
    list[str],
    Field(description="presets or texts of policies, to compare with no policy: nothing, dots"),
]
At = Annotated[
    str | None,
    Field(description="apply the policies to these module paths of the loss: */block_*"),
]
Optimizer = Annotated[
    str | None,
    Field(description="count the whole step with this optimizer of optax: adamw"),
]
Targets = Annotated[list[str], Field(description="chips to compile for, see `targets`: tpu-v5e")]

_SHOWN = 20  # entries of each list of a report; the whole lists can take megabytes
_limiter = anyio.CapacityLimiter(2)  # calls that trace and compile; each may need gigabytes


def server() -> MCPServer:
    """Return the server, with the tools inspect, plan, fit and targets.

    >>> anyio.run(server().list_tools)[0].name
    'inspect'
    """
    made = MCPServer(
        "remat-kit",
        version=remat_kit.__version__,
        instructions=_INSTRUCTIONS,
        log_level="WARNING",  # a call that fails is for the client, not for the log
    )
    # Not read-only: a model's file is imported, and may do whatever its author wants.
    runs_a_model = ToolAnnotations(destructive_hint=False, idempotent_hint=True)
    for tool in (inspect, plan, fit):
        made.add_tool(tool, annotations=runs_a_model)
    made.add_tool(targets, annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False))
    return made


async def inspect(
    context: Context,
    model: Model,
    sizes: Sizes = {},  # noqa: B006 (pydantic copies it)
    targets: Targets = [],  # noqa: B006
    policies: Policies = [],  # noqa: B006
    at: At = None,
    optimizer: Optimizer = None,
) -> CallToolResult:
    """Say what a step saves for its backward pass and computes twice, what holds its peak memory on
    each target and whether it fits, what XLA did with each checkpoint region, and what would help.

    Without targets nothing is compiled, which takes seconds. The lists are cut to their 20 largest
    entries.
    """
    words = _options(target=targets, policy=policies, at=at, optimizer=optimizer, size=sizes)
    async with _limiter:
        text, answer = await _answer(context, "inspect", words, model)
    return _result(text, _brief(answer))


async def plan(
    context: Context,
    model: Model,
    budget: Annotated[
        str,
        Field(
            description="bytes on the device (14GiB), a fraction of the step's activations (50%), "
            "min, free (the least memory at 2 % extra time or less) or fit (the chip's memory)"
        ),
    ] = "fit",
    target: Annotated[str, Field(description="the chip to compile for, see `targets`")] = "cpu",
    sizes: Sizes = {},  # noqa: B006
    optimizer: Optimizer = None,
    objective: Annotated[
        Literal["balanced", "time", "flops"], Field(description="what to minimize")
    ] = "balanced",
    offload: Annotated[
        bool, Field(description="also offload residuals of scans to the host's memory")
    ] = False,
    pieces: Annotated[
        bool, Field(description="also run segments in pieces of an axis, one after the other")
    ] = False,
) -> CallToolResult:
    """Find the fastest schedule of saving and recomputing that fits a budget, and compile it.

    `policy` of the answer is the plan as text: `remat_kit.policy(text)(loss_fn)` runs it.
    """
    words = _options(
        budget=budget, target=[target], size=sizes, optimizer=optimizer, objective=objective
    )
    words += ["--offload"] if offload else []
    words += ["--pieces"] if pieces else []
    async with _limiter:
        return _result(*await _answer(context, "plan", words, model))


async def fit(
    context: Context,
    model: Model,
    batches: Annotated[list[int], Field(description="the batch sizes to try", min_length=1)],
    targets: Targets = ["cpu"],  # noqa: B006
    policies: Policies = [],  # noqa: B006
    sizes: Sizes = {},  # noqa: B006
    at: At = None,
    batch_name: Annotated[
        str, Field(description="the builder's argument for the batch size")
    ] = "batch",
    optimizer: Optimizer = None,
) -> CallToolResult:
    """Say which batch sizes fit which chips with which policies, what is left, and the slowdown.

    Each combination is compiled. Among the policies, "plan" is the fastest plan that fits.
    """
    words = _options(target=targets, policy=policies, at=at, optimizer=optimizer, size=sizes)
    words += _options(batch=[str(batch) for batch in batches], batch_name=batch_name)
    async with _limiter:
        return _result(*await _answer(context, "fit", words, model))


async def targets(context: Context) -> CallToolResult:
    """List the chips that can be compiled for, their memory and rates, and what is missing."""
    return _result(*await _answer(context, "targets", []))


# -- from a call to a command -----------------------------------------------------------------


def _options(**given: Any) -> list[str]:
    """Return options of the command line, in the form that takes no value for an option.

    >>> _options(policy=["dots", "--html"], at=None, size={"batch": 8, "size": "8"})
    ['--policy=dots', '--policy=--html', '--size=batch=8', "--size=size='8'"]
    """
    words = []
    for name, value in given.items():
        if isinstance(value, Mapping):
            values = [f"{k}={_written(v)}" for k, v in value.items()]
        else:
            values = [] if value is None else value if isinstance(value, list) else [value]
        words += [f"--{name.replace('_', '-')}={each}" for each in values]
    return words


def _written(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)


async def _answer(
    context: Context, command: str, words: list[str], *model: str
) -> tuple[str, dict[str, Any]]:
    """Run a command and return what it printed and its JSON; lines of progress go to the client.

    Raises:
      ToolError: the command failed; the text is its message.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "answer.json"
        # -P: a folder of the user's that is called remat_kit is not this package.
        start = [sys.executable, "-P", "-m", "remat_kit", command, *words, f"--json={path}"]
        printed: list[str] = []
        said: list[str] = []
        async with await anyio.open_process(
            [*start, "--", *model] if model else start, stdin=subprocess.DEVNULL
        ) as process:
            async with anyio.create_task_group() as group:
                group.start_soon(_collect, process.stdout, printed)
                async for line in _lines(process.stderr):
                    said.append(line)
                    await context.report_progress(len(said), message=line)
            await process.wait()
        if process.returncode:
            raise ToolError(_message(said) or f"the command ended with {process.returncode}")
        warned = [line for line in said if line.startswith(("warning: ", "hint: "))]
        return "\n".join([*warned, "".join(printed)]), json.loads(path.read_text("utf-8"))


async def _lines(stream: Any) -> AsyncIterator[str]:
    """Yield the lines of a stream of bytes as they come."""
    rest = ""
    async for text in TextReceiveStream(stream, errors="replace"):
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            yield line
    if rest:
        yield rest


async def _collect(stream: Any, printed: list[str]) -> None:
    async for text in TextReceiveStream(stream, errors="replace"):
        printed.append(text)


def _message(said: list[str]) -> str:
    """Return the error at the end of what a command said on standard error.

    >>> _message(["1/1 tracing", "error: `gtp`: there is no model", "hint: did you mean gpt?"])
    'error: `gtp`: there is no model\\nhint: did you mean gpt?'
    """
    starts = [i for i, line in enumerate(said) if line.startswith(("error: ", "internal error: "))]
    return "\n".join(said[starts[-1] if starts else -_SHOWN :])


def _result(text: str, answer: dict[str, Any]) -> CallToolResult:
    content = [TextContent(type="text", text=text.strip())]
    return CallToolResult(content=[*content], structured_content=answer)


def _brief(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of `inspect` with its longest lists cut, and without the timeline."""
    return answer | {"policies": [_brief_report(report) for report in answer["policies"]]}


def _brief_report(report: dict[str, Any]) -> dict[str, Any]:
    lists = {
        name: sorted(report[name], key=lambda entry: -entry[size])[:_SHOWN]
        for name, size in (("saved", "bytes"), ("inputs", "bytes"), ("recomputed", "flops"))
    }
    peaks = {
        target: peak
        | {
            "buffers": peak["buffers"][:_SHOWN],
            "buffers_left_out": peak["buffers_left_out"] + len(peak["buffers"][_SHOWN:]),
        }
        for target, peak in report["peak"].items()
    }
    twice = {name: some[:_SHOWN] for name, some in report["hlo_recomputed"].items()}
    return report | lists | {"peak": peaks, "hlo_recomputed": twice, "timeline": {}}
