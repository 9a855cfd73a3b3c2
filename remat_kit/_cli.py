"""The command line: ``remat-kit inspect | diff | measure | plan | frontier | max-batch | fit | …``.

Standard output is data: text for a terminal, plain when piped, JSON on request. Progress and errors
go to standard error. Exit status: 0 done, 1 a fault of remat_kit, 2 a wrong call or a model that
cannot be worked on, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import json
import os
import pathlib
import sys
import traceback
from collections.abc import Container, Iterator, Sequence
from typing import Any, NoReturn

from rich.console import Console

from remat_kit._builder import Builder, Loss, loaded, parse_sizes
from remat_kit._errors import (
    InternalError,
    MissingPluginError,
    RematKitError,
    UserError,
    unknown,
)

BASELINE = "none"
DONE, OWN_FAULT, USER_FAULT, INTERRUPTED = 0, 1, 2, 130
_PIPE_CLOSED = 141  # what a shell reports for a process that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    >>> main(["policies", "nothing"])
    nothing
      keeps   save(nothing)
      about   Keep only the inputs of the region, recompute the rest.
      from    JAX, https://docs.jax.dev/en/latest/gradient-checkpointing.html
    0

    Args:
      argv: the arguments; those of the process by default.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    debug = "--debug" in argv or os.environ.get("REMAT_KIT_DEBUG", "") not in ("", "0")
    try:
        options = _parser().parse_args(argv)
        options.run(options)
        sys.stdout.flush()
    except SystemExit as error:  # argparse: --help, --version, a wrong call
        return error.code if isinstance(error.code, int) else USER_FAULT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # What is left in the buffer would raise once more when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    except Exception as error:
        return _failed(error, debug)
    return DONE


def _failed(error: Exception, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    if isinstance(error, RematKitError) and not isinstance(error, InternalError):
        print(f"error: {error}", file=sys.stderr)
        return USER_FAULT
    print(
        f"internal error: {type(error).__name__}: {error}\n"
        "hint: this is a fault of remat_kit; please report it with the command you ran and what "
        "the same command prints with --debug",
        file=sys.stderr,
    )
    return OWN_FAULT


# -- the arguments ----------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """A parser whose errors look like ours."""

    def error(self, message: str) -> NoReturn:
        hint = f"`{self.prog} --help` shows what it takes"
        if "FILE_OR_MODULE:build" in message:
            hint = f"the model comes first: {self.prog} models/gpt.py:build --policy dots"
        self.exit(USER_FAULT, f"error: {message}\nhint: {hint}\n")


_FILES = {
    "html": "write a page there that shows everything, for a browser",
    "png": "draw the memory over the schedule there, for each target; .svg and .pdf work too",
    "perfetto": "write the timeline there, for each target, as a trace for ui.perfetto.dev",
}

_MODEL_HELP = (
    "a Python file or module and a function in it that returns (loss_fn, args): "
    "models/gpt.py:build, my_package.train:build"
)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="remat-kit",
        description="Say, see and measure what a JAX training step keeps in memory.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(
        required=True, metavar="COMMAND", dest="command", parser_class=_Parser
    )
    for name, run, about in (
        ("inspect", _inspect, "list what is saved and what is computed twice"),
        ("diff", _diff, "show the gradient programs without and with a policy, aligned"),
        ("measure", _measure, "compile for chips, present or not, and show the memory it takes"),
        ("plan", _plan, "find the fastest schedule that fits a budget, and compile it"),
        ("frontier", _frontier, "show every schedule worth having, without compiling"),
        ("max-batch", _max_batch, "find the largest batch that fits, by compiling a few"),
        ("fit", _fit, "say which batches fit which chips with which policies"),
    ):
        command = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        _add_model(command)
        command.set_defaults(run=run)
    for name in ("inspect", "diff"):
        commands.choices[name].add_argument(
            "--full", action="store_true", help="show everything, not the most important lines"
        )
    for kind, about in _FILES.items():
        commands.choices["inspect"].add_argument(
            f"--{kind}", metavar="PATH", type=pathlib.Path, help=about
        )
    commands.choices["inspect"].add_argument(
        "--against",
        metavar="PATH",
        help="say what grew and what shrank since an earlier `inspect --json PATH`",
    )
    _add_plan(commands.choices["plan"], commands.choices["frontier"])
    _add_batch(commands.choices["max-batch"], commands.choices["fit"])
    _add_bench(commands)
    policies = commands.add_parser(
        "policies", help="list the presets, or show one", allow_abbrev=False
    )
    policies.add_argument("name", nargs="?", metavar="NAME", help="a preset, a recipe, a policy")
    policies.set_defaults(run=_policies)
    targets = commands.add_parser(
        "targets", help="list the chips that can be compiled for", allow_abbrev=False
    )
    targets.set_defaults(run=_targets)
    for command in commands.choices.values():
        command.add_argument(
            "--json", metavar="PATH", help="write JSON there; - is standard output"
        )
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="FILE_OR_MODULE:build", help=_MODEL_HELP)
    parser.add_argument(
        "--policy",
        action="extend",
        nargs="+",
        default=[],
        metavar="P",
        help="a preset, a recipe's path or the text of a policy; repeatable; "
        f"{BASELINE!r} is always the first",
    )
    parser.add_argument(
        "--at",
        metavar="PATTERN",
        help="apply the policies to these module paths ('*/block_*') of the loss, "
        "not through the builder",
    )
    parser.add_argument(
        "--target",
        action="extend",
        nargs="+",
        default=[],
        metavar="T",
        help="a chip to compile for (see `remat-kit targets`); repeatable; h100@40GiB is a "
        "smaller h100",
    )
    parser.add_argument(
        "--size",
        action="extend",
        nargs="+",
        default=[],
        metavar="k=v",
        help="an argument for the builder; repeatable",
    )


def _add_plan(plan: argparse.ArgumentParser, frontier: argparse.ArgumentParser) -> None:
    plan.add_argument(
        "--budget",
        metavar="B",
        required=True,
        help="bytes on the device (14GiB), a fraction of the step's activations (0.5), min, free "
        "(the least at no more than 2 %% extra time) or fit (what the chip has)",
    )
    plan.add_argument(
        "--save", metavar="PATH", type=pathlib.Path, help="write the plan there, as a recipe"
    )
    for command, default in ((plan, "balanced"), (frontier, "time")):
        command.add_argument(
            "--objective",
            metavar="O",
            default=default,
            help="what to spend least of: time (by the chip's roofline), flops, or balanced, three "
            "parts FLOPs and one part time, as shares of the forward pass "
            f"(default: {default})",
        )
        command.add_argument(
            "--optimizer",
            metavar="NAME",
            help="count the whole training step with this optimizer of optax (adamw, sgd, lion): "
            "its state, its update, parameters donated",
        )
        command.add_argument(
            "--offload",
            action="store_true",
            help="let what the iterations of scans keep wait in the host's memory",
        )
    for kind, about in (("png", "draw memory against time"), ("html", "the same as a page")):
        frontier.add_argument(f"--{kind}", metavar="PATH", type=pathlib.Path, help=about)


def _add_batch(max_batch: argparse.ArgumentParser, fit: argparse.ArgumentParser) -> None:
    for parser in (max_batch, fit):
        parser.add_argument(
            "--batch-name",
            metavar="NAME",
            default="batch",
            help="the builder's argument for the batch size; 'batch' by default",
        )
    max_batch.add_argument(
        "--start",
        metavar="N",
        type=_whole,
        help="the batch to begin with; by default the builder's",
    )
    max_batch.add_argument(
        "--step", metavar="N", type=_whole, default=1, help="try only multiples of N"
    )
    max_batch.add_argument("--at-most", metavar="N", type=_whole, help="try no batch above N")
    fit.add_argument(
        "--batch",
        action="extend",
        nargs="+",
        type=_wholes,
        required=True,
        metavar="N,N",
        help="the batch sizes: 8,16,32; repeatable",
    )


def _add_bench(commands: Any) -> None:
    from remat_kit import _bench

    about = "plan one of the CNNs of a published table, beside the paper's figures"
    known = ", ".join(line.arch for line in _bench.TABLE)
    bench = commands.add_parser("bench", help=about, description=about, allow_abbrev=False)
    bench.add_argument("--arch", metavar="NAME", required=True, help=f"one of {known}")
    bench.add_argument(
        "--target", metavar="T", default="cpu", help="the chip to compile for; 'cpu' by default"
    )
    bench.add_argument(
        "--models", metavar="DIR", default="models", help="the folder of the model files"
    )
    bench.add_argument(
        "--size",
        action="extend",
        nargs="+",
        default=[],
        metavar="k=v",
        help="an argument for the builder over the paper's; repeatable",
    )
    bench.add_argument(
        "--compiles",
        metavar="N",
        type=_whole,
        default=_bench.COMPILES,
        help="compile at most N programs for each of the three plans",
    )
    bench.set_defaults(run=_bench_row)


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _wholes(text: str) -> list[int]:
    return [_whole(part) for part in text.split(",")]


def _version() -> str:
    import importlib.metadata

    try:
        return f"remat-kit {importlib.metadata.version('remat-kit')}"
    except importlib.metadata.PackageNotFoundError:
        return "remat-kit, not installed"


# -- the work of one command ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Job:
    """A model with the policies and targets that were asked for, all of them checked."""

    builder: Builder
    policies: tuple[str, ...]
    targets: tuple[str, ...]
    at: str | None
    sizes: dict[str, Any]

    def losses(self) -> dict[str, Loss]:
        """Build the loss once for each policy, the baseline first."""
        return {policy: self._loss(policy) for policy in self.policies}

    def _loss(self, policy: str) -> Loss:
        if policy == BASELINE or self.at is None:
            return self.builder.build(self.sizes, None if policy == BASELINE else policy)
        import remat_kit

        fn, args = self.builder.build(self.sizes)
        return remat_kit.policy(policy, at=self.at)(fn), args

    def described(self) -> dict[str, Any]:
        """What was asked, for JSON."""
        return {"model": self.builder.address, "size": self.sizes, "at": self.at}


@contextlib.contextmanager
def _job(options: argparse.Namespace, targets: Sequence[str] = ()) -> Iterator[_Job]:
    chosen = tuple(dict.fromkeys(options.target or targets))
    _stay_off_the_device(chosen)
    sizes = parse_sizes(options.size)
    plans = {"plan", "plan+offload"} if options.command in ("max-batch", "fit") else set()
    policies = _checked_policies(options.policy, plans)
    _check_targets(chosen)
    _check_writable(options.json)
    with loaded(options.model) as builder:
        if set(policies[1:]) - plans and options.at is None and not builder.takes_policy:
            raise UserError(
                f"`{options.model}`: the builder takes no policy",
                hint="say with --at where the policies go, for example --at '*/block_*', or "
                "give the builder a parameter `policy`",
            )
        yield _Job(builder, policies, chosen, options.at, sizes)


def _checked_policies(texts: Sequence[str], plans: Container[str] = ()) -> tuple[str, ...]:
    from remat_kit._policy import as_policy

    for text in texts:
        if text not in plans:
            as_policy(text, call=f"--policy {text}")
    return tuple(dict.fromkeys([BASELINE, *texts]))


def _check_targets(names: Sequence[str]) -> None:
    from remat_kit._target import target

    for name in names:
        chip = target(name)
        if not chip.available:
            raise MissingPluginError(
                f"`--target {name}`: the compiler for {chip.platform} is not installed",
                hint=chip.needs,
            )


def _stay_off_the_device(targets: Sequence[str]) -> None:
    """Trace on the CPU, so that a present accelerator's memory is left alone."""
    import jax

    local = any(name.partition("@")[0] == "local" for name in targets)
    if not local and not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")


def _inspect(options: argparse.Namespace) -> None:
    from remat_kit import _report

    files = _files(options)
    earlier = None
    if options.against is not None:
        from remat_kit._compare import read_report

        earlier = read_report(options.against, call="--against")
    with _job(options) as job:
        losses = job.losses()
        reports = []
        with _Progress(len(losses)) as progress:
            for policy, (fn, args) in losses.items():
                progress.compiling(policy, job.targets)
                with job.builder.explained(losses[BASELINE]):
                    reports.append(
                        _report.inspect(
                            fn,
                            *args,
                            target=job.targets or None,
                            label=policy,
                            against=earlier,
                        )
                    )
    comparison = _report.Comparison(tuple(reports))
    if options.json:
        _write_json(options.json, job.described() | comparison.to_json())
    _write_files(files, dataclasses.replace(comparison, model=job.builder.address))
    if options.json != "-":
        alone = len(reports) == 1
        _show(*([] if alone else [comparison]), *(reports if alone or options.full else []))


def _files(options: argparse.Namespace) -> list[tuple[str, str, pathlib.Path]]:
    """What to write where besides JSON, checked: kinds, targets and paths.

    With several targets, each picture and trace has its target in its name.
    """
    found = [("html", "", options.html)] if options.html else []
    targets = tuple(dict.fromkeys(options.target))
    for kind in ("png", "perfetto"):
        path = getattr(options, kind)
        if path is None:
            continue
        if not targets:
            raise UserError(
                f"`--{kind} {path}`: without a target nothing is compiled, and there is no "
                "timeline to write",
                hint="add --target, for example --target cpu",
            )
        for name in targets:
            own = path if len(targets) == 1 else path.with_stem(f"{path.stem}-{name}")
            found.append((kind, name, own))
    for kind, _, path in found:
        if kind == "png":
            from remat_kit._figures import check_picture

            check_picture(path, call=f"--png {path}")
        _check_writable(path, kind)
    return found


def _write_files(files: Sequence[tuple[str, str, pathlib.Path]], comparison: Any) -> None:
    from remat_kit._target import target

    for kind, chip, path in files:
        name = target(chip).name if chip else ""
        if name and not any(name in report.readings for report in comparison.reports):
            print(f"note: no --{kind} for {name}, for nothing compiled for it", file=sys.stderr)
            continue
        with _explained_write(path, kind):
            if kind == "html":
                comparison.to_html(path)
            elif kind == "png":
                comparison.to_png(path, name)
            else:
                comparison.to_perfetto(path, name)


def _diff(options: argparse.Namespace) -> None:
    from remat_kit import _report

    with _job(options) as job:
        if len(job.policies) == 1:
            raise UserError(
                f"`remat-kit diff {options.model}`: there is nothing to compare the baseline with",
                hint="give a policy, for example --policy dots",
            )
        losses = job.losses()
        before, args = losses[BASELINE]
        diffs = {}
        with _Progress(len(losses) - 1) as progress:
            for policy in job.policies[1:]:
                progress.count(policy)
                with job.builder.explained(losses[BASELINE]):
                    after, _ = losses[policy]
                    labels = (BASELINE, policy)
                    diffs[policy] = _report.diff(
                        before, after, *args, full=options.full, labels=labels
                    )
    if options.json:
        found = [{"policy": policy, **diff.to_json()} for policy, diff in diffs.items()]
        _write_json(options.json, job.described() | {"diffs": found})
    if options.json != "-":
        _show(*diffs.values())


def _one_target(job: _Job) -> str:
    if len(job.targets) > 1:
        raise UserError(
            f"`--target {' '.join(job.targets)}`: a plan is made for one chip",
            hint="name one; run the command once for each",
        )
    return job.targets[0] if job.targets else "cpu"


def _plan(options: argparse.Namespace) -> None:
    from remat_kit import _plan

    _check_writable(options.json)
    _check_writable(options.save, "save")
    with _job(options, options.target) as job:
        fn, args = job.builder.build(job.sizes, None)
        with _Progress() as progress, job.builder.explained((fn, args)):
            found = _plan.plan(
                fn,
                *args,
                budget=options.budget,
                target=_one_target(job),
                objective=options.objective,
                optimizer=_optimizer(options.optimizer),
                offload=options.offload,
                progress=progress.say,
            )
    if options.save:
        with _explained_write(options.save, "save"):
            found.save(options.save)
    if options.json:
        _write_json(options.json, job.described() | found.to_json())
    if options.json != "-":
        _show(found.explain())


def _optimizer(name: str | None) -> Any:
    """The optimizer of optax with a name; its learning rate does not matter for memory."""
    if name is None:
        return None
    try:
        import optax
    except ImportError as error:
        raise MissingPluginError(
            f"`--optimizer {name}`: optax is not installed", hint="pip install optax"
        ) from error
    known = [n for n in dir(optax) if n.islower() and _makes_optimizer(getattr(optax, n))]
    if name not in known:
        raise unknown("optimizer of optax", name, known, call=f"--optimizer {name}")
    return getattr(optax, name)(1e-3)


def _makes_optimizer(make: Any) -> bool:
    """Tell whether this is one of optax's optimizers: they take a learning rate first."""
    try:
        first = next(iter(inspect.signature(make).parameters), "")
    except (TypeError, ValueError):
        return False
    return first == "learning_rate" and not inspect.isclass(make)


def _frontier(options: argparse.Namespace) -> None:
    from remat_kit import _frontier
    from remat_kit._figures import check_drawing, check_picture

    if options.png:
        check_picture(options.png, call=f"--png {options.png}")
    if options.html:
        check_drawing(call=f"--html {options.html}")
    for kind in ("json", "png", "html"):
        _check_writable(getattr(options, kind), kind)
    with _job(options, options.target) as job:
        fn, args = job.builder.build(job.sizes, None)
        with _Progress() as progress, job.builder.explained((fn, args)):
            found = _frontier.frontier(
                fn,
                *args,
                target=_one_target(job),
                objective=options.objective,
                optimizer=_optimizer(options.optimizer),
                offload=options.offload,
                progress=progress.say,
            )
    for kind in ("png", "html"):
        path = getattr(options, kind)
        if path:
            with _explained_write(path, kind):
                getattr(found, f"to_{kind}")(path)
    if options.json:
        _write_json(options.json, job.described() | found.to_json())
    if options.json != "-":
        _show(found.table())


def _measure(options: argparse.Namespace) -> None:
    from remat_kit._target import measure

    found: dict[str, dict[str, Any]] = {}
    with _job(options, targets=("cpu",)) as job:
        losses = job.losses()
        with _Progress(len(losses) * len(job.targets)) as progress:
            for policy, (fn, args) in losses.items():
                for name in job.targets:
                    progress.compiling(policy, (name,))
                    with job.builder.explained(losses[BASELINE]):
                        memory = measure(fn, *args, target=name)
                    found.setdefault(policy, {})[name] = memory
    if options.json:
        policies = [
            {"policy": policy, "memory": {name: m.to_json() for name, m in by_target.items()}}
            for policy, by_target in found.items()
        ]
        _write_json(options.json, job.described() | {"policies": policies})
    if options.json != "-":
        _show(_memory_table(found))


def _memory_table(found: dict[str, dict[str, Any]]) -> Any:
    from remat_kit._policy import format_bytes
    from remat_kit._table import Table

    def shown(size: int | None) -> str:
        return "?" if size is None else format_bytes(size)

    names = ["temporaries", "arguments", "outputs", "host", "peak", "memory", "headroom", "fits"]
    rows = []
    for policy, by_target in found.items():
        for name, m in by_target.items():
            sizes = (m.temp_bytes, m.argument_bytes, m.output_bytes, m.host_bytes, m.peak_bytes)
            row = [policy, name, *map(shown, sizes), shown(m.memory_bytes)]
            row += [shown(m.headroom_bytes), "yes" if m.fits else "no"]
            rows.append((*row, "" if m.step_seconds is None else f"{1e3 * m.step_seconds:.3g} ms"))
    columns = ("policy", "target", *names, "step")
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    notes = (n for by_target in found.values() for m in by_target.values() for n in m.notes)
    footer = "\n".join(f"note: {note}" for note in dict.fromkeys(notes))
    return Table("memory", columns, tuple(rows), footer)


def _max_batch(options: argparse.Namespace) -> None:
    from remat_kit import _fit
    from remat_kit._target import target

    found: list[_fit.MaxBatch] = []
    with _job(options, targets=("cpu",)) as job:
        model = _batch_model(job, options)
        asked = [(policy, name) for name in job.targets for policy in job.policies]
        with _Progress(len(asked)) as progress, _interruptible() as interrupted:
            for policy, name in asked:
                found.append(
                    _fit.search(
                        model,
                        policy,
                        target(name),
                        start=options.start,
                        step=options.step,
                        at_most=options.at_most or _fit.AT_MOST,
                        progress=progress.say,
                        call="remat-kit max-batch",
                    )
                )
                if not found[-1].complete:
                    raise KeyboardInterrupt
                progress.advance()
    if interrupted and not found:
        raise KeyboardInterrupt
    if options.json:
        rows = [m.to_json() for m in found]
        named = {"batch_name": options.batch_name, "complete": not interrupted}
        _write_json(options.json, job.described() | named | {"results": rows})
    if options.json != "-":
        _show(_fit.max_batch_table(found, job.builder.address))
    if interrupted:
        raise KeyboardInterrupt


def _fit(options: argparse.Namespace) -> None:
    from remat_kit import _fit as fits
    from remat_kit._target import target

    batches = sorted({batch for part in options.batch for batch in part})
    with _job(options, targets=("cpu",)) as job:
        model = _batch_model(job, options)
        with _Progress(len(job.targets) * len(job.policies) * len(batches)) as progress:
            chips = [target(name) for name in job.targets]
            found = fits.matrix(
                model,
                job.policies,
                chips,
                batches,
                progress=progress.count,
                call="remat-kit fit",
            )
    if options.json:
        named = {"batch_name": options.batch_name}
        _write_json(options.json, job.described() | named | found.to_json())
    if options.json != "-":
        _show(found.table())
    if not found.complete:
        raise KeyboardInterrupt


def _batch_model(job: _Job, options: argparse.Namespace) -> Any:
    from remat_kit._fit import Model

    model = Model(job.builder, job.sizes, job.at, options.batch_name)
    model.check(job.policies, f"remat-kit {options.command} {job.builder.address}")
    return model


@contextlib.contextmanager
def _interruptible() -> Iterator[list[bool]]:
    """Swallow Ctrl-C and give a list that is empty unless it came."""
    came: list[bool] = []
    try:
        yield came
    except KeyboardInterrupt:
        came.append(True)


def _bench_row(options: argparse.Namespace) -> None:
    from remat_kit import _bench

    _bench.published(options.arch, call=f"--arch {options.arch}")
    _stay_off_the_device((options.target,))
    sizes = parse_sizes(options.size)
    _check_targets((options.target,))
    _check_writable(options.json)
    with _Progress() as progress:
        row = _bench.bench(
            options.arch,
            options.target,
            models=options.models,
            sizes=sizes,
            compiles=options.compiles,
            progress=progress.say,
        )
    if options.json:
        _write_json(options.json, row.to_json())
    if options.json != "-":
        _show(row.table())


def _policies(options: argparse.Namespace) -> None:
    from remat_kit import _recipe
    from remat_kit._table import Table

    _check_writable(options.json)
    chosen = [_recipe_of(options.name)] if options.name else _recipe.recipes()
    if options.json:
        plain = [_recipe_json(recipe) for recipe in chosen]
        _write_json(options.json, plain[0] if options.name else {"policies": plain})
    if options.json == "-":
        return
    if options.name:
        _show_recipe(chosen[0])
        return
    rows = [(r.usage, ", ".join(r.aliases), r.description) for r in chosen]
    _show(Table("policies", ("policy", "also", "what it does"), tuple(rows)))


def _recipe_of(text: str) -> Any:
    from remat_kit import _recipe
    from remat_kit._policy import as_policy

    if any(mark in text for mark in "(|&~>"):
        return _recipe.Recipe(text, repr(as_policy(text, call=text)))
    return _recipe.load(text)


def _recipe_json(recipe: Any) -> dict[str, Any]:
    plain = dataclasses.asdict(recipe) | {"usage": recipe.usage}
    plain["policy"] = plain.pop("text")
    return plain | {"aliases": list(recipe.aliases), "parameters": dict(recipe.parameters)}


def _show_recipe(recipe: Any) -> None:
    print(recipe.usage)
    lines = {
        "keeps": recipe.text,
        "also": ", ".join(recipe.aliases),
        "takes": ", ".join(f"{name}: {kind}" for name, kind in recipe.parameters),
        "about": recipe.description,
        "from": recipe.origin,
    }
    for name, text in lines.items():
        if text:
            print(f"  {name:<7} {text}")


def _targets(options: argparse.Namespace) -> None:
    from remat_kit._policy import format_bytes
    from remat_kit._table import Table
    from remat_kit._target import targets

    _check_writable(options.json)
    _stay_off_the_device(())
    chips = targets()
    if options.json:
        plain = [_target_json(chip) for chip in chips]
        _write_json(options.json, {"targets": plain})
    if options.json == "-":
        return
    rows = []
    for chip in chips:
        ready = "installed" if chip.available else f"missing: {chip.needs}"
        rows.append((chip.name, chip.description, format_bytes(chip.memory_bytes), ready))
    _show(Table("targets", ("target", "chip", "memory", "compiler"), tuple(rows)))


def _target_json(chip: Any) -> dict[str, Any]:
    names = (
        *("name", "platform", "description", "memory_bytes", "bandwidth_bytes_per_second"),
        *("host_bandwidth_bytes_per_second", "source", "available", "needs"),
    )
    plain = {name: getattr(chip, name) for name in names}
    return plain | {"flops_per_second": dict(chip.flops_per_second)}


# -- what is written --------------------------------------------------------------------------


def _check_writable(path: str | pathlib.Path | None, kind: str = "json") -> None:
    """Raise before the long work if a file cannot be written after it."""
    if path is None or path == "-":
        return
    existed = os.path.lexists(path)
    with _explained_write(path, kind), open(path, "a"):
        pass
    if not existed:
        os.unlink(path)


def _write_json(path: str, value: Any) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    with _explained_write(path):
        pathlib.Path(path).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _explained_write(path: str | pathlib.Path, kind: str = "json") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"`--{kind} {path}`: it cannot be written: {error.strerror}",
            hint="name a file in a folder that exists and can be written"
            + (", or - for the terminal" if kind == "json" else ""),
        ) from error


def _show(*values: Any) -> None:
    """Print reports or tables: with `rich` in a terminal, as plain text elsewhere."""
    console = Console()
    for number, value in enumerate(values):
        if console.is_terminal:
            console.print(value.rich() if hasattr(value, "rich") else value)
        else:
            print("\n" * bool(number) + (value.text() if hasattr(value, "rich") else str(value)))


class _Progress:
    """What is worked on, on standard error: a bar in a terminal, plain lines elsewhere.

    Args:
      total: pieces of work; 0 where their number is not known, and a spinner is shown instead.
    """

    def __init__(self, total: int = 0):
        self._total = total
        self._begun = 0
        self._console = Console(stderr=True)
        self._shown: Any = None

    def __enter__(self) -> _Progress:
        if self._console.is_terminal:
            from rich import progress

            bar = (*progress.Progress.get_default_columns()[:2], progress.MofNCompleteColumn())
            spinner = (progress.SpinnerColumn(), progress.TextColumn("{task.description}"))
            columns = (*(bar if self._total else spinner), progress.TimeElapsedColumn())
            self._shown = progress.Progress(*columns, console=self._console, transient=True)
            self._shown.add_task("tracing", total=self._total or None)
            self._shown.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown is not None:
            self._shown.stop()

    def say(self, text: str) -> None:
        """Show what is worked on now, and the best answer so far."""
        if self._shown is not None:
            from rich.markup import escape

            self._shown.update(self._shown.task_ids[0], description=escape(text))
        else:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def advance(self) -> None:
        """Count one piece of the work as done."""
        if self._shown is not None:
            self._shown.advance(self._shown.task_ids[0])

    def count(self, text: str) -> None:
        """Show the next piece of the work; the one before it is done."""
        if self._begun:
            self.advance()
        self._begun += 1
        self.say(text if self._shown is not None else f"{self._begun}/{self._total} {text}")

    def compiling(self, policy: str, targets: Sequence[str]) -> None:
        """Show the next piece of the work: a policy, for some chips."""
        self.count(f"{policy}, compiling for {', '.join(targets)}" if targets else policy)
