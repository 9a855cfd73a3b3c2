"""Random programs inside `shard_map` over eight CPU devices, in a process of their own."""

import os
import pathlib
import subprocess
import sys

EXAMPLES = int(os.environ.get("REMAT_KIT_EXAMPLES", "200"))
HERE = pathlib.Path(__file__).parent


def test_random_programs_in_shard_map():
    count = str(max(1, EXAMPLES // 40))
    script = [sys.executable, str(HERE / "sharded_programs.py"), count]
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        script, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-6000:]
