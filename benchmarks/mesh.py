"""Memory, collectives and time of sharded models on slices that are not there.

    python benchmarks/mesh.py --target cpu:8@16GiB --json benchmarks/results/mesh.json
    python benchmarks/mesh.py --target h100:8 --json benchmarks/results/mesh.json
    python benchmarks/mesh.py --render --json benchmarks/results/mesh.json

Each model is partitioned over the devices of each target and compiled five times: as it is, with
each block recomputed (`nothing`), with all of a block recomputed but what collectives make
(`save(collective)`; not for `dp`, whose blocks have none), with the matrix products of each block
saved (`dots`), and with the fastest plan that needs no more memory than `nothing`. Bytes are those
of one device. Losses without an optimizer are compiled, and nothing is run.

"Predicted" is what the planner says of the program without a policy and of its plan before it has
compiled them, in parts of the compiled bytes. Collectives are counted as often as a step runs them.
"Repeated" are those that are in the program only because of recomputation. "Step" is the roofline
of computation and memory plus the time of the collectives that the program waits for, all at peak
rates.

The file is written after each row, and rows of another run that are in it already stay there, so
the compilers of several environments can take part in one table. Compiled programs are kept on
disk: a run that was interrupted finds them when it starts again.

Exit status: 0 when done, 2 for a wrong call or a compiler that is not installed.
"""

from __future__ import annotations

import json
import math
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import _common
from _common import MIB, Case

import remat_kit

_GPT = {"size": "small", "layers": 6, "batch": 32, "vocab": 50304, "dtype": "bf16"}
_LLAMA = {
    "size": "7b",
    "layers": 4,
    "width": 1024,
    "heads": 16,
    "kv_heads": 8,
    "hidden": 2816,
    "vocab": 32000,
    "seq": 1024,
    "batch": 32,
    "dtype": "bf16",
}
CASES = {"gpt": Case("GPT", "gpt", _GPT), "llama_nnx": Case("Llama", "llama_nnx", _LLAMA)}
_TINY = {"size": "tiny", "batch": 64, "seq": 64}
SMOKE = {"gpt": Case("GPT", "gpt", _TINY)}
SHARDINGS = ("dp", "fsdp", "fsdp+tp")
KEEPING = "save(collective)"
POLICIES = ("none", "nothing", KEEPING, "dots", "plan")
TARGETS = ("cpu:8@16GiB", "h100:8", "tpu-v5e:4x4")
COMPILES = 10  # of a plan, at most

Row = dict[str, Any]


def mesh_of(sharding: str, devices: int) -> str:
    """Return the mesh of a sharding: the two axes of one with both are as equal as they can be.

    >>> mesh_of("fsdp", 8), mesh_of("fsdp+tp", 8), mesh_of("fsdp+tp", 16)
    ('data=8', 'data=4,model=2', 'data=4,model=4')
    """
    if "tp" not in sharding:
        return f"data={devices}"
    model = max(n for n in range(1, math.isqrt(devices) + 1) if devices % n == 0)
    return f"data={devices // model},model={model}"


def rows(case: Case, sharding: str, target: str) -> Iterator[Row]:
    """Yield the row of each policy of a model that is sharded over a target."""
    mesh = mesh_of(sharding, remat_kit.target(target).devices)
    sharded = Case(case.name, case.module, {**case.size, "mesh": mesh, "sharding": sharding})
    begun = {"model": case.name, "sharding": sharding, "mesh": mesh, "target": target}
    loss, args = sharded.loss("none")
    predicted = remat_kit.frontier(loss, *args, target=target).plain.predicted_peak_bytes
    limit: Any = None
    for policy in POLICIES[:-1]:
        if policy == KEEPING and sharding == "dp":
            continue
        applied = remat_kit.save(remat_kit.collective) if policy == KEEPING else policy
        row = begun | {"policy": policy} | read(*sharded.loss(applied), target)
        if policy == "none":
            row["predicted_bytes"] = predicted
        if policy == "nothing":
            limit = row["compiled_bytes"]
        yield row
    yield begun | {"policy": "plan", "budget_bytes": limit} | planned(loss, args, target, limit)


def planned(loss: Any, args: Any, target: str, limit: int) -> Row:
    """Return the figures of the fastest plan within a limit, or why there is none."""
    how = {"budget": limit, "target": target, "objective": "time", "compiles": COMPILES}
    try:
        plan = remat_kit.plan(loss, *args, **how)
    except remat_kit.UserError as error:
        return {"error": error.message}
    found = read(remat_kit.policy(plan)(loss), args, target)
    return found | {"predicted_bytes": plan.predicted_peak_bytes, "tried": plan.tried}


def read(loss: Any, args: Any, target: str) -> Row:
    """Compile a loss and return the figures of one device."""
    report = remat_kit.inspect(loss, *args, target=target)
    memory, reading = report.memory[target], report.readings[target]
    seconds = report.to_json()["step_seconds"][target]
    again = [c for c in reading.collectives if c.repeated]
    return {
        "compiled_bytes": memory.peak_bytes,
        "temporary_bytes": memory.temp_bytes,
        "fits": memory.fits,
        "collectives": sum(c.times for c in reading.collectives),
        "moved_bytes": sum(c.times * c.bytes for c in reading.collectives),
        "repeated": sum(c.times for c in again),
        "repeated_bytes": sum(c.times * c.bytes for c in again),
        "link_seconds": seconds["links"],
        "step_seconds": seconds["roofline"],
        "flops": seconds["flops"],
        "versions": dict(memory.versions),
    }


COLUMNS = (
    *("model", "sharding", "target", "policy", "peak, MiB", "predicted", "collectives"),
    *("moved, MiB", "repeated", "again, MiB", "links, ms", "step, ms"),
)
_KEYS = ("model", "sharding", "target", "policy")


def rendered(report: Mapping[str, Any]) -> str:
    """Return a report as Markdown."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|---|---|---|" + "---:|" * 8]
    lines += [_line(row) for row in report["rows"]]
    return "\n".join([*lines, *_ending(report)])


def _line(row: Row) -> str:
    head = [row["model"], f"{row['sharding']}, {row['mesh']}", row["target"], row["policy"]]
    if "error" in row:
        cells = [f"no schedule within {row['budget_bytes'] / MIB:,.0f}", *[""] * 7]
        return "| " + " | ".join([*head, *cells]) + " |"
    fits = "" if row["fits"] else ", does not fit"
    cells = [
        f"{row['compiled_bytes'] / MIB:,.0f}{fits}",
        f"{row['predicted_bytes'] / row['compiled_bytes']:.2f}" if "predicted_bytes" in row else "",
        f"{row['collectives']}",
        f"{row['moved_bytes'] / MIB:,.0f}",
        f"{row['repeated']}",
        f"{row['repeated_bytes'] / MIB:,.0f}",
        _milliseconds(row["link_seconds"]),
        _milliseconds(row["step_seconds"]),
    ]
    return "| " + " | ".join([*head, *cells]) + " |"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.{0 if seconds >= 0.1 else 2}f}"


def _ending(report: Mapping[str, Any]) -> list[str]:
    """Return the last lines: the models, and each target with its versions and its command."""
    sizes = "; ".join(f"{case['name']}: {_size(case['size'])}" for case in report["cases"])
    about = (
        "Figures of one device. *Predicted* is the planner's prediction before it compiled the "
        "program, in parts of the compiled peak. *Moved* are the bytes of the results of all "
        "collectives of a step; *repeated* and *again* are the collectives that only recomputation "
        "needs, and their bytes. *Links* is the time of all collectives at peak rates, and *step* "
        "the roofline with those that the program waits for. A *plan* is the fastest that needs no "
        f"more memory than `nothing` in each block. {sizes}. No chip but a CPU was there."
    )
    lines = ["", about, ""]
    for target, taken in report["taken"].items():
        versions = ", ".join(f"{name} {version}" for name, version in taken["versions"].items())
        commands = " and ".join(f"`{command}`" for command in taken["commands"])
        lines.append(f"- {target}: {taken['date']}, {versions}, by {commands}")
    return lines


def _size(size: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in size.items())


def merged(old: Mapping[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """Return a report with the rows of an earlier one that the new one does not replace."""
    if old is None:
        return new

    def key(row: Row) -> tuple[Any, ...]:
        return tuple(row[name] for name in _KEYS)

    def taken(target: str) -> Row:
        before, now = (report["taken"].get(target, {"commands": []}) for report in (old, new))
        return (
            before | now | {"commands": [*dict.fromkeys((*before["commands"], *now["commands"]))]}
        )

    replaced = {key(row): row for row in new["rows"]}
    kept = [replaced.pop(key(row), row) for row in old["rows"]]
    cases = {case["name"]: case for case in (*old["cases"], *new["cases"])}
    return new | {
        "versions": {**old["versions"], **new["versions"]},
        "taken": {target: taken(target) for target in {**old["taken"], **new["taken"]}},
        "cases": list(cases.values()),
        "rows": sorted([*kept, *replaced.values()], key=_place),
    }


def _place(row: Row) -> tuple[Any, ...]:
    """Return the place of a row in the table; targets that are not the default's come last."""
    target, known = row["target"], [*TARGETS]
    place = known.index(target) if target in known else len(known)
    return (
        *(row["model"], place, target),
        *(SHARDINGS.index(row["sharding"]), POLICIES.index(row["policy"])),
    )


def report_of(found: Row, case: Case, given: Sequence[str]) -> dict[str, Any]:
    """Return a report of one row."""
    new = _common.described(__file__, given, [found.get("versions", {})])
    about = {"date": new["date"], "versions": new["versions"], "commands": [new["command"]]}
    taken = {found["target"]: about} if "versions" in found else {}
    plain = _common.without(found, "versions")
    cases = [{"name": case.name, "size": dict(case.size)}]
    return new | {"taken": taken, "cases": cases, "rows": [plain]}


def earlier(path: pathlib.Path | None) -> Any:
    """Return the report of an earlier run, or None."""
    if path is None or not path.exists():
        return None
    return json.loads(path.read_text(encoding="utf-8"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    parser = _common.parser(__doc__, smoke="a small model over two CPU devices, for tests")
    parser.add_argument("--target", nargs="+", default=list(TARGETS), metavar="T")
    parser.add_argument("--model", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--sharding", nargs="+", choices=SHARDINGS, default=list(SHARDINGS))
    parser.add_argument("--render", action="store_true", help="write only the table again")
    options = parser.parse_args(given)
    report = earlier(options.json)
    if options.render:
        if report is None:
            parser.error("--render needs --json PATH of a file that exists")
        _common.write(options.json, report, rendered(report))
        return 0
    cases = SMOKE if options.smoke else {name: CASES[name] for name in options.model}
    targets = ["cpu:2"] if options.smoke else options.target
    shardings = SHARDINGS[1:2] if options.smoke else options.sharding
    jobs = [(c, s, t) for t in targets for c in cases.values() for s in shardings]
    try:
        with _common.progress() as bar:
            job = bar.add_task("", total=len(jobs) * len(POLICIES))
            for case, sharding, target in jobs:
                bar.update(job, description=f"{case.name}, {sharding}, {target}")
                for found in rows(case, sharding, target):
                    report = merged(report, report_of(found, case, given))
                    if options.json:
                        _common.write(options.json, report, rendered(report))
                    bar.advance(job)
    except remat_kit.RematKitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    assert report is not None
    print(rendered(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
