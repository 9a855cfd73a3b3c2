"""The line of progress in a terminal."""

import functools
import json

from batch_programs import MLP, SMALL


def test_a_bar_in_a_terminal(run, monkeypatch):
    from rich.console import Console

    monkeypatch.setattr("rich.console.Console", functools.partial(Console, force_terminal=True))
    status, out, err = run("fit", MLP, *SMALL, "--batch", "8", "16", "--json", "-")
    assert status == 0
    assert len(json.loads(out)["cells"]) == 2
    assert "/2" in err
