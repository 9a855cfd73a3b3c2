"""The table of mutations is true of the code as it is; `benchmarks/mutations.py` runs them."""

import mutations
import pytest


def test_forty_places():
    names = [m.name for m in mutations.MUTATIONS]
    assert len(names) == len(set(names)) >= 40


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda m: m.name)
def test_the_text_of_a_mutation_is_there_once(mutation):
    assert mutations.places(mutation) == 1
    assert mutation.new != mutation.old


@pytest.mark.parametrize("mutation", mutations.MUTATIONS, ids=lambda m: m.name)
def test_the_tests_of_a_mutation_exist(mutation):
    assert mutation.tests
    for test in mutation.tests:
        file, _, name = test.partition("::")
        text = (mutations.ROOT / file).read_text(encoding="utf-8")
        assert f"def {name.partition('[')[0]}(" in text


SMALL = """
def double(x):
    return 2 * x
"""
TEST = """
from library import double

def test_double():
    assert double(3) == 6
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("new", "verdict"), [("3 * x", "noticed"), ("x * 2", "not noticed")], ids=["wrong", "equal"]
)
def test_a_mutation_is_noticed_or_not(tmp_path, monkeypatch, new, verdict):
    (tmp_path / "library.py").write_text(SMALL)
    (tmp_path / "test_library.py").write_text(TEST)
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    monkeypatch.setattr(mutations, "COPIED", ("library.py", "test_library.py"))
    found = mutations.Mutation("double", "", "library.py", "2 * x", new, ("test_library.py",))
    assert mutations.places(found) == 1
    assert mutations.unbroken([found]) == ""
    assert mutations.tried(found).verdict == verdict
    assert (tmp_path / "library.py").read_text() == SMALL
