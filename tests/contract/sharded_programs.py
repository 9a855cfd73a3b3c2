"""Random programs inside `shard_map` over eight CPU devices; `test_sharded_programs.py` runs it.

A process of its own, because XLA must be told of eight devices before JAX starts:

    python tests/contract/sharded_programs.py 200        two hundred examples
"""

import os
import pathlib
import sys

DEVICES = 8

if __name__ == "__main__":  # pytest imports this file too, for its docstrings
    os.environ["JAX_PLATFORMS"] = "cpu"
    flag = f"--xla_force_host_platform_device_count={DEVICES}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    sys.path.append(str(pathlib.Path(__file__).parents[1]))  # for what all tests share

import dataclasses  # noqa: E402
import warnings  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import same_examples  # noqa: E402, F401
import strategies  # noqa: E402
from harness import FLAGS, Application, Case, flagged, loss_of, runs  # noqa: E402
from hypothesis import HealthCheck, Phase, assume, given, seed, settings  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from programs import Op, Program  # noqa: E402

import remat_kit  # noqa: E402


def sharded(case: Case, fn, args):
    """Run a transformation of the program with its rows' columns over the devices."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x, w, rest = args
    xs = jnp.stack([x * (1 + i / DEVICES) for i in range(DEVICES)])
    arrays = {name: rest[name] for name in ("n", "key")}
    loss = loss_of(fn, case.program.used)

    def local(xs, w, arrays):
        return loss(xs[0], w, {**rest, **arrays})

    def total(xs, w, arrays):
        def of_all(xs, w, arrays):
            return jax.lax.psum(local(xs, w, arrays), "data")

        placed = jax.shard_map(
            of_all, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P(), check_vma=False
        )
        return placed(xs, w, arrays)

    def inside(xs, w, arrays):
        def of_each(xs, w, arrays):
            dx, dw = jax.grad(local, (0, 1))(xs, w, arrays)
            return dx, jax.lax.psum(dw, "data")

        placed = jax.shard_map(
            of_each,
            mesh=mesh,
            in_specs=(P("data"), P(), P()),
            out_specs=(P("data"), P()),
            check_vma=False,
        )
        return placed(xs, w, arrays)

    def one(xs, w, arrays):
        """Only the sharded argument has a tangent."""
        return jax.grad(total)(xs, w, arrays)

    what = {
        "value": total,
        "gradient": jax.grad(total, (0, 1)),
        "gradient of one": one,
        "pullback": inside,
    }
    with flagged(case.flags):
        return jax.jit(what[case.transform])(xs, w, arrays)


def check(case: Case) -> bool:
    """Compare as `Case.check` does; return whether JAX can run the undecorated program."""
    args = case.program.arguments()
    if not runs(lambda: sharded(case, case.program.fn, args)):
        return False
    expected = sharded(case, case.program.fn, args)
    try:
        with flagged(case.flags):
            decorated = case.application.put_on(case.program.fn, case.program, args)
        got = sharded(case, decorated, args)
    except remat_kit.UnknownNameError:
        return False
    except Exception:
        if runs(lambda: sharded(case, case.checkpointed(), args)):
            raise
        return False
    case.compare(expected, got, bitwise=False)
    return True


FOUND = [
    # A region of the schedule has a constant output. jax 0.10.2 cannot compile what reads it.
    Case(
        program=Program(
            blocks=(
                (Op("vjp_normalised", 2, 4, 3),),
                (Op("vmap", 4, 3, 5, (Op("pad", 3, 3, 6), Op("rem", 3, 1, 3))),),
                (Op("debug", 3, 2, 3),),
            ),
            outputs=(0,),
            used=(0,),
            dtype="float32",
            rows=3,
            new_key=True,
        ),
        application=Application("schedule:756"),
        transform="gradient of one",
        mode="jit",
        flags=FLAGS,
    ),
]


def main(examples: int) -> None:
    """Compare the cases that once failed, and so many others."""
    for case in FOUND:
        assert check(case)
    transforms = ("value", "gradient", "gradient", "gradient of one", "pullback")

    @seed(os.environ.get("REMAT_KIT_SEED", "0"))
    @settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # shrinking would compile for minutes
        suppress_health_check=list(HealthCheck),
    )
    @given(strategies.cases(transforms, ("jit",)))
    def run(case: Case) -> None:
        small = dataclasses.replace(case.program, dtype="float32", rows=3)
        assume(check(dataclasses.replace(case, program=small)))

    run()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    # Without most optimizations programs compile faster, and fewer operations are fused.
    jax.config.update("jax_disable_most_optimizations", True)
    main(int(sys.argv[1]))
