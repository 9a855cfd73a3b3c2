"""Each fact about a compiler still holds for the installed versions.

``pytest tests/probes -s`` prints the answers; those for a TPU are slow, so it takes ``-m ''``.
"""

import importlib.metadata
import inspect
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import probes

import remat_kit
from remat_kit._backend.facts import RELEASES, facts
from remat_kit._chip.target import target

READ_BACK = {"keeps_the_mark_of_recomputes", "states_trip_counts", "estimates_cycles"}  # from HLO
FACTS = {fact.name: fact for fact in facts()}
APPLIES = [
    pytest.param(
        fact,
        platform,
        id=f"{fact.name}-{platform}",
        marks=[
            pytest.mark.skipif(
                not target(probes.CHIPS[platform]).available,
                reason=f"needs the compiler for {platform}",
            ),
            *([] if platform == "cpu" else [pytest.mark.slow]),
        ],
    )
    for fact in FACTS.values()
    for platform in fact.backends
]


@pytest.fixture(scope="module")
def table():
    lines = []
    yield lines
    print(f"\n\njax {importlib.metadata.version('jax')}", *lines, sep="\n")


@pytest.mark.parametrize(("fact", "platform"), APPLIES)
def test_a_fact_holds_where_it_was_seen(fact, platform, table):
    """A release that is not among `RELEASES` is expected to be like the newest of them."""
    answer = getattr(probes, fact.name)(platform)
    table.append(f"{fact.name:<34}{platform:<6}{answer}")
    if not fact.seen[platform]:
        pytest.skip(f"no release has shown it yet; this one: {answer}")
    installed = importlib.metadata.version("jax")
    seen = (installed if installed in RELEASES else RELEASES[-1]) in fact.seen[platform]
    assert answer.holds is seen, (
        f"{fact.name} on {platform}: {answer}. {fact.sentence} Change the releases in "
        "remat_kit/_backend/facts.py, and what rests on the fact"
    )


def test_every_fact_has_a_probe_and_is_used_by_the_package():
    package = pathlib.Path(remat_kit.__file__).parent
    files = [f for f in package.rglob("*.py") if f.name != "facts.py"]
    text = "\n".join(f.read_text() for f in files)
    for name, fact in FACTS.items():
        assert inspect.isfunction(getattr(probes, name, None)), name
        assert name in READ_BACK or f"facts.{name.upper()}" in text, f"nothing rests on {name}"
        assert fact.sentence.endswith(".")
        assert {*fact.backends} <= {*probes.CHIPS}
        assert all({*seen} <= {*RELEASES} for seen in fact.seen.values())
