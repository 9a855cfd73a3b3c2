"""Every option of every command changes something, or is refused with the reason.

The options come from the parser itself, so a new one without a case here fails.
"""

import json
import textwrap

import pytest

from remat_kit._cli import arguments as _arguments
from remat_kit._cli import commands as _commands
from remat_kit._cli import main as _main

MODEL = """
    import jax, jax.numpy as jnp
    import remat_kit

    def build(policy=None, batch=8, width=8, unused=8):
        def layer(w, x):
            return jnp.sin(jnp.exp(jnp.cos(jnp.tanh(x @ w))))

        def loss(weights, x):
            for i, w in enumerate(weights):
                with jax.named_scope(f"block_{i}"):
                    x = remat_kit.policy(policy)(layer)(w, x)
            return jnp.mean(x)

        weights = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 4
        return loss, (weights, jax.ShapeDtypeStruct((batch, width), jnp.float32))
"""

# For each option: what is added to the call of its command, and what else the call needs then.
CASES = {
    "inspect": {
        "--policy": (["dots"], []),
        "--at": (["block_0"], ["--policy", "nothing"]),
        "--target": (["cpu"], []),
        "--size": (["batch=16"], []),
        "--full": ([], ["--policy", "dots"]),
        "--optimizer": (["adam"], ["--target", "cpu"]),
        "--html": (["FILE.html"], []),
        "--png": (["FILE.png"], ["--target", "cpu"]),
        "--perfetto": (["FILE.json"], ["--target", "cpu"]),
        "--against": (["EARLIER"], []),
    },
    "diff": {
        "--policy": (["dots"], ["--policy", "nothing"]),
        "--at": (["block_0"], ["--policy", "nothing"]),
        "--target": (["cpu"], ["--policy", "nothing"]),
        "--size": (["batch=16"], ["--policy", "nothing"]),
        "--full": ([], ["--policy", "nothing"]),
    },
    "measure": {
        "--policy": (["dots"], []),
        "--at": (
            ["block_0"],
            ["--policy", "nothing", "--size", "batch=4096", "--size", "width=64"],
        ),
        "--optimizer": (["adam"], []),
        "--target": (["cpu@1GiB"], []),
        "--size": (["batch=16"], []),
        "--full": ([], []),
    },
    "plan": {
        "--full": ([], []),
        "--policy": (["dots"], []),
        "--at": (["block_*"], []),
        "--target": (["cpu@1GiB"], []),
        "--size": (["batch=16"], []),
        "--save": (["FILE.toml"], []),
        "--html": (["FILE.html"], []),
        "--objective": (["banana"], []),
        "--optimizer": (["adam"], []),
        "--offload": ([], []),
        "--pieces": ([], ["--size", "batch=65536"]),
    },
    "frontier": {
        "--full": ([], []),
        "--policy": (["dots"], []),
        "--at": (["block_*"], []),
        "--target": (["h100"], []),
        "--size": (["batch=16"], []),
        "--objective": (["banana"], []),
        "--optimizer": (["adam"], []),
        "--offload": ([], []),
        "--pieces": ([], ["--size", "batch=65536"]),
        "--png": (["FILE.png"], []),
        "--html": (["FILE.html"], []),
    },
    "max-batch": {
        "--full": ([], []),
        "--policy": (["nothing"], []),
        "--at": (["block_0"], ["--policy", "nothing"]),
        "--target": (["cpu@128KiB"], []),
        "--size": (["width=16"], []),
        "--batch-name": (["width"], []),
        "--optimizer": (["adam"], []),
        "--start": (["16"], []),
        "--step": (["7"], []),
        "--at-most": (["9"], []),
        "--pieces": ([], []),
    },
    "fit": {
        "--full": ([], []),
        "--policy": (["nothing"], []),
        "--at": (["block_0"], ["--policy", "nothing"]),
        "--target": (["cpu@128KiB"], []),
        "--size": (["width=16"], []),
        "--batch-name": (["width"], ["--batch", "16"]),
        "--optimizer": (["adam"], []),
        "--batch": (["16"], []),
        "--pieces": ([], []),
    },
    "bench": {
        "--arch": (["vgg13"], []),
        "--target": (["banana"], []),
        "--models": (["nowhere"], []),
        "--size": (["batch=banana"], []),
        "--compiles": (["0"], []),
        "--pieces": ([], []),
    },
    "doctor": dict.fromkeys(
        ("--target", "--budget", "--pieces", "--step", "--log", "--save", "--html", "--full")
    ),
    "run": dict.fromkeys(("--plan", "--policy", "--at")),
    "mcp": {},
    "models": {},
    "policies": {"--full": ([], [])},
    "targets": {"--full": ([], [])},
    "completion": {},
    "schema": {},
}
# Commands whose options have tests of their own, the latter two in `test_doctor.py`.
APART = ("bench", "doctor", "run")
# What a command cannot do without.
BASE = {
    "plan": ["--budget", "min"],
    "max-batch": ["--target", "cpu@64KiB"],
    "fit": ["--batch", "4", "--target", "cpu@64KiB"],
}
EVERYWHERE = {"--help", "--json", "--debug"}
REQUIRED = {"--budget", "--arch", "--batch"}
# Refused: what the message says.
IDLE = {
    ("diff", "--target"): "compiles nothing",
    ("plan", "--policy"): "a plan decides what",
    ("plan", "--at"): "a plan decides what",
    ("frontier", "--policy"): "a plan decides what",
    ("frontier", "--at"): "a plan decides what",
    ("plan", "--offload"): "nowhere to move an array to",
    ("frontier", "--offload"): "nowhere to move an array to",
}


def commands():
    parser = _arguments.argument_parser()
    (found,) = (a.choices for a in parser._actions if isinstance(a.choices, dict))
    return found


def options(command):
    actions = commands()[command]._actions
    return {a.option_strings[-1] for a in actions if a.option_strings} - EVERYWHERE


def test_the_cases_are_those_of_the_parser():
    assert set(CASES) == set(commands())
    for command, cases in CASES.items():
        assert options(command) - REQUIRED <= set(cases), command
        assert set(cases) <= options(command), command


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.py"
    path.write_text(textwrap.dedent(MODEL))
    earlier = path.with_name("earlier.json")
    assert _main.main(["inspect", str(path), "--size", "batch=4", "--json", str(earlier)]) == 0
    return path


@pytest.fixture
def run(model, capsys, tmp_path):
    def run(command, *words):
        where = {"FILE": str(tmp_path / "file"), "EARLIER": str(model.with_name("earlier.json"))}
        words = [
            w.replace("FILE", where["FILE"]).replace("EARLIER", where["EARLIER"]) for w in words
        ]
        first = [str(model)] if command in _arguments._MODEL else []
        status = _main.main([command, *first, *BASE.get(command, []), *words])
        out, err = capsys.readouterr()
        return status, out, err, {p.name for p in tmp_path.iterdir()}

    return run


@pytest.fixture(scope="module")
def shown():
    """What each call without the option has shown: that is the same for many options."""
    return {}


@pytest.mark.parametrize(
    ("command", "option"),
    [(c, o) for c, cases in CASES.items() for o in cases if c not in APART and (c, o) not in IDLE],
)
def test_an_option_changes_something(run, shown, command, option):
    values, needed = CASES[command][option]
    call = (command, *needed)
    if call not in shown:
        shown[call] = run(*call)
    before = shown[call]
    after = run(command, *needed, option, *values)
    assert before[0] == 0, before[2]
    changed = after[1] != before[1] or after[3] != before[3]
    assert changed or (after[0] == 2 and "error: " in after[2])


@pytest.mark.parametrize("option", sorted(CASES["bench"]))
def test_an_option_of_bench_is_read(run, option):
    values, _ = CASES["bench"][option]
    arch = [] if option == "--arch" else ["--arch", "vgg11"]
    status, out, err, _ = run("bench", *arch, option, *values, "--models", "nowhere")
    assert status == 2
    assert out == ""
    assert (values[0] if option in ("--target", "--compiles") else "nowhere") in err


@pytest.mark.parametrize(("command", "option"), IDLE)
def test_an_option_without_an_effect_is_refused_before_the_work(run, monkeypatch, command, option):
    if option != "--offload":
        monkeypatch.setattr(_commands, "loaded", None)  # nothing is imported, traced or compiled
    values, needed = CASES[command][option]
    status, out, err, _ = run(command, *needed, option, *values)
    assert (status, out) == (2, "")
    message, hint = err.strip().split("\n")[-2:]
    assert option.strip("-") in message
    assert IDLE[command, option] in message
    assert hint.startswith("hint: ")


@pytest.mark.parametrize("command", ["inspect", "measure", "max-batch", "fit"])
@pytest.mark.parametrize("policies", [[], ["--policy", "none"]])
def test_at_needs_a_policy(run, monkeypatch, command, policies):
    monkeypatch.setattr(_commands, "loaded", None)
    status, out, err, _ = run(command, "--at", "block_*", *policies)
    assert (status, out) == (2, "")
    assert "`--at block_*`: it has no effect here: there is no policy" in err


@pytest.mark.parametrize(
    ("command", "words"), [("fit", ["--batch", "8"]), ("max-batch", ["--at-most", "64"])]
)
def test_a_batch_that_the_program_does_not_have_is_refused(run, command, words):
    status, out, err, _ = run(command, *words, "--batch-name", "unused")
    assert (status, out) == (2, "")
    assert "give the same program, so 'unused' is not the size of the batch" in err


def test_fit_needs_batches(model, capsys):
    assert _main.main(["fit", str(model), "--batch-name", "width"]) == 2
    assert "the following arguments are required: --batch" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["max-batch", "fit"])
def test_at_does_not_reach_a_plan(run, command):
    status, _, err, _ = run(command, "--at", "block_*", "--policy", "plan")
    assert status == 2
    assert "there is no policy to apply at these modules" in err


@pytest.mark.parametrize("command", ["inspect", "measure", "diff"])
def test_a_policy_that_matches_nothing_is_a_line_on_standard_error(run, command):
    status, out, err, _ = run(command, "--policy", "maxtext_minimal")
    assert status == 0
    assert "warning" not in out
    (line,) = (line for line in err.splitlines() if line.startswith("warning: "))
    assert "selects none of the values here" in line
    status, out, err, _ = run(command, "--policy", "nothing", "--json", "-")
    assert "warning: " not in err
    json.loads(out)
