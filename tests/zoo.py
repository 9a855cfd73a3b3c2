"""What the tests share about the files of ``models/``, which are programs and no package."""

from _common import ROOT as ROOT
from _common import load as load


def equations(jaxpr):
    """Every equation of a jaxpr, with those of the bodies inside."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for sub in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(sub, "jaxpr", sub)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)
