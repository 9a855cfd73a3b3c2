"""Forty mistakes that people make: each ends with status 2, one message, and what to do."""

import pytest

GPT = "models/gpt.py:build"
MLP = "models/mlp.py:build"

MISTAKES = [
    # Commands and options that are nearly right.
    ("inspct models/mlp.py:build", "no command is named 'inspct'", "'inspect'"),
    ("Plan models/mlp.py:build", "no command is named 'Plan'", "'plan'"),
    ("maxbatch models/mlp.py:build", "no command is named 'maxbatch'", "'max-batch'"),
    ("max_batch models/mlp.py:build", "no command is named 'max_batch'", "'max-batch'"),
    ("--inspect models/mlp.py", "no command is named 'models/mlp.py'", "comes before the model"),
    (
        "models/mlp.py:build",
        "no command is named 'models/mlp.py:build'",
        "inspect models/mlp.py",
    ),
    (f"measure {MLP} --polcy dots", "measure has no option --polcy", "'--policy'"),
    (f"measure {MLP} --policies dots", "measure has no option --policies", "'--policy'"),
    (f"measure {MLP} --targets cpu", "measure has no option --targets", "'--target'"),
    (f"measure {MLP} --budget 1GiB", "measure has no option --budget", "an option of plan"),
    (f"plan {MLP} --budget min --batch 8", "plan has no option --batch", "an option of fit"),
    (f"inspect {MLP} --save x", "inspect has no option --save", "an option of plan"),
    (f"inspect {MLP} dots", "inspect ... dots", "quotes around a value"),
    (f"inspect {MLP} -p dots", "inspect has no option -p", "'--policy'"),
    (f"inspect {MLP} --policy", "--policy: expected at least one argument", "--help"),
    (f"plan {MLP}", "required: --budget", "--budget fit"),
    (f"fit {MLP}", "required: --batch", "--batch 8,16,32"),
    ("inspect --target cpu", "required: FILE_OR_MODULE:build", "the model comes first"),
    # Values.
    (f"fit {MLP} --batch 8,x", "'x' is not a whole number above 0", "--help"),
    (f"fit {MLP} --batch 0", "'0' is not a whole number above 0", "--help"),
    (f"max-batch {MLP} --step -8", "'-8' is not a whole number above 0", "--step 8"),
    (f"plan {MLP} --budget 14Gib/s", "14Gib/s", "GiB"),
    (f"plan {MLP} --budget 0", "--budget 0", "fit"),
    (f"plan {MLP} --budget fits", "--budget fits", "fit"),
    (f"plan {MLP} --budget min --objective speed", "no objective is named 'speed'", "'time'"),
    (f"plan {MLP} --budget min --target cpu tpu-v5e", "a plan is made for one chip", "name one"),
    (f"measure {MLP} --target a100", "no target is named 'a100'", "'a100-40g' or 'a100-80g'"),
    (f"measure {MLP} --target v5e", "no target is named 'v5e'", "'tpu-v5e'"),
    (f"measure {MLP} --target TPU-v5e", "no target is named 'TPU-v5e'", "'tpu-v5e'"),
    (f"measure {MLP} --target gpu", "no target is named 'gpu'", "'h100'"),
    (f"measure {MLP} --target mi300x", "cannot compile for AMD", "'local'"),
    (f"measure {MLP} --target cpu@80GG", "'80GG' is not a size", "40GiB"),
    (f"measure {MLP} --policy full_block", "no preset is named 'full_block'", "'block' or 'full'"),
    (f"measure {MLP} --policy maxtext_minimum", "'maxtext_minimum'", "'maxtext_minimal'"),
    (f"measure {MLP} --policy save(dotz)", "'dotz'", "'dots'"),
    (f"measure {MLP} --optimizer adamW2", "no optimizer of optax is named", "'adamw'"),
    (f"measure {MLP} --size batch:64", "not of the form name=value", "batch=64"),
    (f"measure {MLP} --size Batch=64", "no size is named 'Batch'", "'batch'"),
    ("measure models/gpt:build", "there is no file models/gpt", "models/gpt.py"),
    ("measure models/gtp.py:build", "there is no file models/gtp.py", "models/gpt.py"),
    ("measure gpt.py:build", "there is no file gpt.py", "a Python file, or a module"),
    (f"inspect {MLP} --png memory.gif --target cpu", "not a known picture format", ".png"),
    (f"inspect {MLP} --against nothing.json", "nothing.json", "inspect --json"),
    (f"diff {MLP} --policy dots --target cpu", "compiles nothing", "inspect"),
    ("policies dot", "no preset is named 'dot'", "'dots'"),
    ("targets h100", "targets ... h100", "--help"),
    ("bench --arch vgg", "'vgg'", "'vgg"),
    ("completion powershell", "invalid choice: 'powershell'", "completion bash"),
]


def test_they_are_forty_at_least():
    assert len({call for call, *_ in MISTAKES}) == len(MISTAKES) >= 40


@pytest.mark.parametrize(("call", "message", "hint"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_a_mistake_says_what_to_do(run, call, message, hint):
    status, out, err = run(*call.split())
    assert (status, out) == (2, "")
    assert "Traceback" not in err
    lines = err.strip().split("\n")
    found, advice = lines[-2:]
    assert found.startswith("error: ")
    assert message in found
    assert advice.startswith("hint: ")
    assert hint in advice
    assert sum(line.startswith("error: ") for line in lines) == 1
