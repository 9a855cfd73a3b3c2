"""The commands: each reads its options, calls the library and prints the answer."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import inspect
import os
import pathlib
import re
import shlex
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

from remat_kit._cli.output import (
    BASELINE,
    BATCH_OPTIONS,
    LONGEST_OPTIMIZER,
    PLAN_OPTIONS,
    answer,
    check_writable,
    explained_output,
    lints_of_a_raised_peak,
    read_call,
    refuse_idle,
    shown_recipe,
    write_file,
    write_with,
)
from remat_kit._cli.progress import Progress
from remat_kit._errors import MissingPluginError, UserError, unknown
from remat_kit._program.builder import Builder, Loss, loaded, parse_sizes

# -- the work of one command ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Job:
    """A model with the policies and targets that were asked for, after all were checked."""

    builder: Builder
    policies: tuple[str, ...]
    targets: tuple[str, ...]
    at: str | None
    sizes: dict[str, Any]

    def losses(self) -> dict[str, Loss]:
        """Build the loss once for each policy, the baseline first."""
        return {policy: self._loss(policy) for policy in self.policies}

    def _loss(self, policy: str) -> Loss:
        whole = _is_of_the_whole_program(policy)
        if policy == BASELINE or (self.at is None and not whole):
            return self.builder.build(self.sizes, None if policy == BASELINE else policy)
        import remat_kit

        fn, args = self.builder.build(self.sizes)
        return remat_kit.policy(policy, at=self.at)(fn), args

    def described(self) -> dict[str, Any]:
        """The request, as plain values for JSON."""
        return {"model": self.builder.address, "size": self.sizes, "at": self.at}


@contextlib.contextmanager
def _job(options: argparse.Namespace, targets: Sequence[str] = ()) -> Iterator[_Job]:
    refuse_idle(options)
    chosen = tuple(dict.fromkeys(options.target or targets))
    _stay_off_the_device(chosen)
    sizes = parse_sizes(options.size)
    plans = set(PLAN_OPTIONS) if options.command in BATCH_OPTIONS else set()
    policies = _checked_policies(options.policy, plans)
    _check_targets(chosen)
    for kind in ("json", "save", "html"):
        check_writable(getattr(options, kind, None), kind)
    with loaded(options.model) as builder:
        on_blocks = [p for p in policies[1:] if p not in plans and not _is_of_the_whole_program(p)]
        if on_blocks and options.at is None and not builder.takes_policy:
            raise UserError(
                f"`{options.model}`: the builder takes no policy",
                hint="name the modules for the policies with --at, for example --at '*/block_*', "
                "or give the builder a parameter `policy`",
            )
        yield _Job(builder, policies, chosen, options.at, sizes)


def _is_of_the_whole_program(policy: str) -> bool:
    """Tell whether a policy is a plan or `auto`, which the blocks of a model cannot have."""
    from remat_kit._policy.reading import as_policy
    from remat_kit._policy.structural import Automatic, Planned

    return policy not in (BASELINE, *PLAN_OPTIONS) and isinstance(
        as_policy(policy, call=f"--policy {policy}"), (Automatic, Planned)
    )


def _checked_policies(texts: Sequence[str], plans: Container[str] = ()) -> tuple[str, ...]:
    from remat_kit._policy.reading import as_policy

    for text in texts:
        if text not in plans:
            as_policy(text, call=f"--policy {text}")
    return tuple(dict.fromkeys([BASELINE, *texts]))


def _check_targets(names: Sequence[str]) -> None:
    from remat_kit._chip.target import target

    for name in names:
        chip = target(name)
        if not chip.available:
            raise MissingPluginError(
                f"`--target {name}`: the compiler for {chip.platform} is not installed",
                hint=chip.needs,
            )


def _stay_off_the_device(targets: Sequence[str]) -> None:
    """Trace on the CPU, so that the memory of an accelerator in this machine is not used."""
    import jax

    local = any(name.partition("@")[0] == "local" for name in targets)
    if not local and not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")


def inspect_command(options: argparse.Namespace) -> None:
    from remat_kit._inspect import comparison as _comparison
    from remat_kit._inspect import report as _report

    files = _files(options)
    optimizer = _optimizer(options.optimizer)
    earlier = None
    if options.against is not None:
        from remat_kit._inspect.compare import read_report

        earlier = read_report(options.against, call="--against")
    with _job(options) as job:
        losses = job.losses()
        reports = []
        with Progress(len(losses)) as progress:
            for policy, (fn, args) in losses.items():
                progress.compiling(policy, job.targets)
                with job.builder.explained(losses[BASELINE]):
                    reports.append(
                        _report.inspect(
                            fn,
                            *args,
                            target=job.targets or None,
                            optimizer=optimizer,
                            label=policy,
                            against=earlier,
                        )
                    )
    asked = _plan_command(job)
    comparison = _comparison.Comparison(
        tuple(dataclasses.replace(report, plan_command=asked) for report in reports)
    )
    shown = comparison.tables()
    if len(reports) == 1:
        shown = comparison.reports[0].tables(options.full)
    elif options.full:
        shown += [table for r in comparison.reports for table in r.tables(full=True)[1:]]
    elif len(reports) == 2:
        report = comparison.reports[1]
        shown += [_of_policy(table, report.policy) for table in report.kept_tables()]
    named = dataclasses.replace(comparison, model=job.builder.address, command=options.call)
    writes = [functools.partial(write_file, file, named) for file in files]
    answer(options, job.described() | comparison.to_json(), shown, writes)


def _of_policy(table: Any, policy: str) -> Any:
    return dataclasses.replace(table, title=f"with {policy}, {table.title}")


def _command(name: str, job: _Job, *words: str) -> str:
    """Return the command line of another question about the same program, without its target."""
    sizes = [f"{key}={value}" for key, value in job.sizes.items()]
    sized = ["--size", *sizes] if sizes else []
    return shlex.join(["remat-kit", name, job.builder.address, *sized, *words])


def _plan_command(job: _Job) -> str:
    return _command("plan", job, "--budget", "fit")


def _files(options: argparse.Namespace) -> list[tuple[str, str, pathlib.Path]]:
    """Check the files to write besides JSON; return (kind, target, path) for each.

    If there are several targets, the name of each picture and trace contains its target.
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
            from remat_kit._show.figures import check_picture

            check_picture(path, call=f"--png {path}")
        check_writable(path, kind)
    return found


def diff_command(options: argparse.Namespace) -> None:
    from remat_kit._inspect import report as _report

    with _job(options) as job:
        if len(job.policies) == 1:
            raise UserError(
                f"`remat-kit diff {options.model}`: there is nothing to compare the baseline with",
                hint="give a policy, for example --policy dots",
            )
        losses = job.losses()
        before, args = losses[BASELINE]
        diffs = {}
        with Progress(len(losses) - 1) as progress:
            for policy in job.policies[1:]:
                progress.count(policy)
                with job.builder.explained(losses[BASELINE]):
                    after, _ = losses[policy]
                    labels = (BASELINE, policy)
                    diffs[policy] = _report.diff(
                        before, after, *args, full=options.full, labels=labels
                    )
    found = [{"policy": policy, **diff.to_json()} for policy, diff in diffs.items()]
    answer(options, job.described() | {"diffs": found}, [*diffs.values()])


def _planned(
    options: argparse.Namespace, find: Callable[..., Any], **how: Any
) -> tuple[Any, dict[str, Any]]:
    """Return what a function of the planner answers, and the answer with the request for JSON."""
    optimizer = _optimizer(options.optimizer)
    with _job(options, options.target) as job:
        if len(job.targets) > 1:
            raise UserError(
                f"`--target {' '.join(job.targets)}`: a plan is made for one chip",
                hint="name one; run the command once for each",
            )
        fn, args = job.builder.build(job.sizes, None)
        with Progress() as progress, job.builder.explained((fn, args)):
            found = find(
                fn,
                *args,
                target=job.targets[0] if job.targets else "cpu",
                objective=options.objective,
                optimizer=optimizer,
                offload=options.offload,
                pieces=options.pieces,
                progress=progress.say,
                **how,
            )
    return found, job.described() | found.to_json()


def plan_command(options: argparse.Namespace) -> None:
    from remat_kit._planner import plan as _plan
    from remat_kit._planner.search import parsed_budget
    from remat_kit._show.table import headed

    budget = parsed_budget(options.budget, where=f"--budget {options.budget[:64]}")
    found, plain = _planned(options, _plan.plan, budget=budget)
    page = functools.partial(found.to_html, command=options.call)
    writes = [
        functools.partial(write_with, path, kind, write)
        for kind, write in (("save", found.save), ("html", page))
        if (path := getattr(options, kind))
    ]
    shown = [headed(found.headline), found.explain()]
    if options.full:
        shown.append(headed(f"the policy\n{found.policy!r}"))
    answer(options, plain, shown, writes)


def _sized(options: argparse.Namespace) -> list[str]:
    return ["--size", *options.size] if options.size else []


def _optimizer(text: str | None) -> Any:
    """Return the optimizer of optax that a text names: ``adamw`` or ``optax.adamw(1e-3, b1=0.8)``.

    The text is not evaluated: the name must be in a list, and arguments must be literals.
    """
    if text is None:
        return None
    call = f"--optimizer {text[:LONGEST_OPTIMIZER]}"
    try:
        import optax
    except ImportError as error:
        raise MissingPluginError(
            f"`{call}`: optax is not installed", hint="pip install optax"
        ) from (error)
    public = [n for n in dir(optax) if n.islower() and not n.startswith("_")]
    known = [n for n in public if _makes_optimizer(getattr(optax, n))]
    name, args, kwargs = read_call(text, call)
    if name not in known:
        raise unknown("optimizer of optax", name, known, call=call)
    # The learning rate does not matter for memory.
    given = args or (() if "learning_rate" in kwargs else (1e-3,))
    try:
        return getattr(optax, name)(*given, **kwargs)
    except Exception as error:
        raise UserError(
            f"`{call}`: optax.{name} does not accept these arguments: {error}",
            hint=f"the name alone is enough: --optimizer {name}",
        ) from error


def _makes_optimizer(make: Any) -> bool:
    """Tell whether a function of optax makes an optimizer: its first argument is a rate."""
    try:
        first = next(iter(inspect.signature(make).parameters), "")
    except (TypeError, ValueError):
        return False
    return first == "learning_rate" and not inspect.isclass(make)


def frontier_command(options: argparse.Namespace) -> None:
    from remat_kit._planner import frontier as _frontier
    from remat_kit._show.figures import check_picture
    from remat_kit._show.table import headed

    if options.png:
        check_picture(options.png, call=f"--png {options.png}")
    for kind in ("png", "html"):
        check_writable(getattr(options, kind), kind)
    found, plain = _planned(options, _frontier.frontier)
    plan_command = shlex.join(["remat-kit", "plan", options.model, *_sized(options)])
    page = functools.partial(found.to_html, command=options.call, plan_command=plan_command)
    writes = [
        functools.partial(write_with, path, kind, write)
        for kind, write in (("png", found.to_png), ("html", page))
        if (path := getattr(options, kind))
    ]
    shown = [headed(found.headline), found.table(full=options.full)]
    answer(options, plain, shown, writes)


def measure_command(options: argparse.Namespace) -> None:
    from remat_kit._chip.compile import measure
    from remat_kit._inspect.headline import measured_headline
    from remat_kit._show.table import headed

    found: dict[str, dict[str, Any]] = {}
    optimizer = _optimizer(options.optimizer)
    with _job(options, targets=("cpu",)) as job:
        losses = job.losses()
        with Progress(len(losses) * len(job.targets)) as progress:
            for policy, (fn, args) in losses.items():
                for name in job.targets:
                    progress.compiling(policy, (name,))
                    with job.builder.explained(losses[BASELINE]):
                        memory = measure(fn, *args, target=name, optimizer=optimizer)
                    found.setdefault(policy, {})[memory.target] = memory
    lints = {policy: lints_of_a_raised_peak(found, policy) for policy in found}
    policies = [
        {
            "policy": policy,
            "memory": {name: m.to_json() for name, m in by_target.items()},
            "lints": [lint.to_json() for lint in lints[policy]],
        }
        for policy, by_target in found.items()
    ]
    void = {policy: some[0].code for policy, some in lints.items() if some}
    said = measured_headline(found, void, _command("inspect", job), _plan_command(job))
    plain = job.described() | {"headline": said, "policies": policies}
    answer(options, plain, [headed(said), _memory_table(found, lints, options.full)])


def _memory_table(found: dict[str, dict[str, Any]], lints: dict[str, list[Any]], full: bool) -> Any:
    from remat_kit._show.table import Table
    from remat_kit._units import format_bytes

    def shown(size: int | None) -> str:
        return "?" if size is None else format_bytes(size)

    fields = {
        "temporaries": "temp_bytes",
        "arguments": "argument_bytes",
        "outputs": "output_bytes",
        **({"aliased": "alias_bytes", "code": "code_bytes"} if full else {}),
        "host": "host_bytes",
        "peak": "peak_bytes",
        "memory": "memory_bytes",
        "headroom": "headroom_bytes",
    }
    rows = []
    for policy, by_target in found.items():
        for name, m in by_target.items():
            sizes = [shown(getattr(m, field)) for field in fields.values()]
            step = "" if m.step_seconds is None else f"{1e3 * m.step_seconds:.3g} ms"
            rows.append((policy, name, *sizes, "yes" if m.fits else "no", step))
    columns = ("policy", "target", *fields, "fits", "step")
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    notes = (n for by_target in found.values() for m in by_target.values() for n in m.all_notes)
    warned = [f"lint: {policy}: {x.message}" for policy, some in lints.items() for x in some]
    footer = "\n".join([*warned, *(f"note: {note}" for note in dict.fromkeys(notes))])
    spare = ("host", "outputs", "arguments", "memory", "temporaries")
    return Table("memory", columns, tuple(rows), footer, spare)


def max_batch_command(options: argparse.Namespace) -> None:
    from remat_kit._batch import max_batch as _max_batch
    from remat_kit._batch import model as _model
    from remat_kit._chip.target import target
    from remat_kit._inspect.headline import batches_headline
    from remat_kit._show.table import headed

    found: list[_max_batch.MaxBatch] = []
    with _job(options, targets=("cpu",)) as job:
        model = _batch_model(job, options)
        asked = [(policy, name) for name in job.targets for policy in job.policies]
        with Progress(len(asked)) as progress, _interruptible() as interrupted:
            for policy, name in asked:
                found.append(
                    _max_batch.search(
                        model,
                        policy,
                        target(name),
                        start=options.start,
                        step=options.step,
                        at_most=options.at_most or _model.AT_MOST,
                        progress=progress.say,
                        call="remat-kit max-batch",
                    )
                )
                if not found[-1].complete:
                    raise KeyboardInterrupt
                progress.advance()
    if interrupted and not found:
        raise KeyboardInterrupt
    rows = [m.to_json() for m in found]
    said = batches_headline((m.target, m.policy, m.batch) for m in found)
    named = {"batch_name": options.batch_name, "complete": not interrupted, "results": rows}
    table = _max_batch.max_batch_table(found, job.builder.address)
    shown = [headed(said), table]
    if options.full:
        shown += [m.trial_table() for m in found]
    answer(options, job.described() | {"headline": said} | named, shown)
    if interrupted:
        raise KeyboardInterrupt


def fit_command(options: argparse.Namespace) -> None:
    from remat_kit._batch import fit as _fit
    from remat_kit._chip.target import target

    batches = sorted({batch for part in options.batch for batch in part})
    with _job(options, targets=("cpu",)) as job:
        model = _batch_model(job, options)
        with Progress(len(job.targets) * len(job.policies) * len(batches)) as progress:
            chips = [target(name) for name in job.targets]
            found = _fit.matrix(
                model,
                job.policies,
                chips,
                batches,
                progress=progress.count,
                call="remat-kit fit",
            )
    named = {"batch_name": options.batch_name}
    shown = [*found.tables(), *([found.cell_table()] if options.full else [])]
    answer(options, job.described() | named | found.to_json(), shown)
    if not found.complete:
        raise KeyboardInterrupt


def _batch_model(job: _Job, options: argparse.Namespace) -> Any:
    from remat_kit._batch.model import Model

    model = Model(
        job.builder,
        job.sizes,
        job.at,
        options.batch_name,
        optimizer=_optimizer(options.optimizer),
        pieces=options.pieces,
    )
    model.check(job.policies, f"remat-kit {options.command} {job.builder.address}")
    return model


@contextlib.contextmanager
def _interruptible() -> Iterator[list[bool]]:
    """Catch Ctrl-C; yield a list that is empty unless Ctrl-C was pressed."""
    came: list[bool] = []
    try:
        yield came
    except KeyboardInterrupt:
        came.append(True)


def bench_command(options: argparse.Namespace) -> None:
    from remat_kit._cli import bench as _bench
    from remat_kit._cli import published as _published

    _published.published(options.arch, call=f"--arch {options.arch}")
    _stay_off_the_device((options.target,))
    sizes = parse_sizes(options.size)
    _check_targets((options.target,))
    check_writable(options.json)
    with Progress() as progress:
        row = _bench.bench(
            options.arch,
            options.target,
            models=options.models,
            sizes=sizes,
            compiles=options.compiles,
            pieces=options.pieces,
            progress=progress.say,
        )
    answer(options, row.to_json(), [row.table()])


def policies_command(options: argparse.Namespace) -> None:
    from remat_kit._policy import recipe as _recipe
    from remat_kit._show.table import Table

    check_writable(options.json)
    chosen = [_recipe_of(options.name)] if options.name else _recipe.recipes()
    plain = [_recipe_json(recipe) for recipe in chosen]
    if options.name:
        answer(options, plain[0], [shown_recipe(chosen[0])])
        return
    columns = ("policy", "also", "what it does", *(("keeps", "from") if options.full else ()))
    groups: dict[str, list[tuple[str, ...]]] = {}
    for r in chosen:
        more = (r.text, r.origin) if options.full else ()
        row = (r.usage, ", ".join(r.aliases), r.description, *more)
        groups.setdefault(_project(r.origin), []).append(row)
    order = sorted(groups, key=lambda name: (name != "JAX", name.lower()))
    tables = [Table(name, columns, tuple(groups[name]), spare=("also",)) for name in order]
    answer(options, {"policies": plain}, tables)


def _project(origin: str) -> str:
    """Return the project that a preset comes from: the first word of its origin.

    >>> _project("Megatron-LM's recompute_method=block, https://..."), _project("JAX, https://...")
    ('Megatron-LM', 'JAX')
    """
    return re.split(r"'s\b|[,\s]", origin, maxsplit=1)[0] or "own"


def _recipe_of(text: str) -> Any:
    from remat_kit._policy import recipe as _recipe
    from remat_kit._policy.reading import as_policy

    if any(mark in text for mark in "(|&~>"):
        return _recipe.Recipe(text, repr(as_policy(text, call=text)))
    return _recipe.load(text)


def _recipe_json(recipe: Any) -> dict[str, Any]:
    plain = dataclasses.asdict(recipe) | {"usage": recipe.usage}
    plain["policy"] = plain.pop("text")
    return plain | {"aliases": list(recipe.aliases), "parameters": dict(recipe.parameters)}


def targets_command(options: argparse.Namespace) -> None:
    from remat_kit._chip.target import targets
    from remat_kit._show.table import Table
    from remat_kit._units import format_bytes

    check_writable(options.json)
    _stay_off_the_device(())
    chips = targets()
    columns = ("target", "chip", "memory", "compiler")
    columns += (
        ("bandwidth", "to the host", "links", "host memory", "peak rates", "from")
        if options.full
        else ()
    )
    rows = []
    for chip in chips:
        ready = "installed" if chip.available else f"needs {_package(chip.needs)}"
        row = (chip.name, chip.description, format_bytes(chip.memory_bytes), ready)
        rows.append((*row, *(_rates(chip) if options.full else ())))
    missing = dict.fromkeys(chip.needs for chip in chips if not chip.available)
    footer = "\n".join(f"{_package(needs)}: {needs}" for needs in missing)
    footer = f"{footer}\n{_TOPOLOGIES}".strip()
    table = Table("targets", columns, tuple(rows), footer)
    answer(options, {"targets": [_target_json(chip) for chip in chips]}, [table])


_TOPOLOGIES = (
    "note: several devices have names like tpu-v5e:4x4 and tpu-v5p:4x4x4 (slices), h100:8 (one "
    "host), h100:4x8 (four hosts of eight) and cpu:8"
)


def _package(needs: str | None) -> str:
    """Return the package of an instruction to install one."""
    return (needs or "").removeprefix("pip install ").strip("'")


def _rates(chip: Any) -> tuple[str, ...]:
    from remat_kit._units import format_bytes

    links = (chip.bandwidth_bytes_per_second, chip.host_bandwidth_bytes_per_second)
    peaks = (f"{name} {rate / 1e12:.3g}" for name, rate in chip.flops_per_second.items())
    shown = (f"{link / 1e9:.4g} GB/s" for link in links)
    ways = ", ".join(f"{name} {rate / 1e9:.4g}" for name, rate in chip.links.items())
    host = "?" if chip.host_memory_bytes is None else format_bytes(chip.host_memory_bytes)
    return (*shown, f"{ways} GB/s", host, ", ".join(peaks) + " TFLOP/s", chip.source)


def _target_json(chip: Any) -> dict[str, Any]:
    names = (
        *("name", "platform", "description", "memory_bytes", "bandwidth_bytes_per_second"),
        *("host_bandwidth_bytes_per_second", "source", "available", "needs", "devices"),
        "host_memory_bytes",
    )
    plain = {name: getattr(chip, name) for name in names}
    rates = {"links": dict(chip.links), "flops_per_second": dict(chip.flops_per_second)}
    return plain | rates


def completion_command(options: argparse.Namespace) -> None:
    from remat_kit._cli.arguments import argument_parser
    from remat_kit._cli.completion import script

    with explained_output():
        print(script(argument_parser(), options.shell), end="")


def mcp_command(options: argparse.Namespace) -> None:
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise MissingPluginError(
            "`remat-kit mcp`: the package mcp is not installed", hint="pip install 'remat-kit[mcp]'"
        ) from error
    from remat_kit._cli.server import server

    server().run()
