"""How can one equation run on a piece of an axis?

A loop over pieces of an axis of ``n`` entries computes a part of each value at a time. An equation
can take part if its inputs and outputs fit together in one of a few ways: each of them is split
along an axis (`Along`), whole (None), or, for an output, a sum, maximum or minimum that is complete
only after the last piece (`Partial`).

`values` has these ways and what a piece of a value is, `rules` lists the ways of each primitive,
and `run` runs an equation in one of them. `inside` and `derivatives` have the rules of equations
with programs inside: calls, branches and loops, and functions with derivative rules of their own.
`split` finds the equations of a program that can run together.

Example: the product of ``x`` of shape (8, 3) and ``w`` of shape (3, 5) can run on pieces of the
rows of ``x``, on pieces of the columns of ``w``, or on pieces of the axis that it sums over:

>>> import jax, jax.numpy as jnp
>>> (dot,) = jax.make_jaxpr(jnp.dot)(jnp.ones((8, 3)), jnp.ones((3, 5))).eqns
>>> ways(dot, 8, In(0), Along(0))
[Way(inputs=(Along(axis=0, outer=1, inner=1), None), outputs=(Along(axis=0, outer=1, inner=1),))]
>>> [way.outputs for way in ways(dot, 3, In(0), Along(1))]
[(<Partial.SUM: 'sum'>,)]
"""

# `inside` and `derivatives` add their rules to those of `rules` and `run` when they are imported.
from remat_kit._program.pieces import derivatives as derivatives
from remat_kit._program.pieces import inside as inside
from remat_kit._program.pieces.rules import ways as ways
from remat_kit._program.pieces.run import on_piece as on_piece
from remat_kit._program.pieces.values import Along as Along
from remat_kit._program.pieces.values import How as How
from remat_kit._program.pieces.values import In as In
from remat_kit._program.pieces.values import Out as Out
from remat_kit._program.pieces.values import Partial as Partial
from remat_kit._program.pieces.values import Piece as Piece
from remat_kit._program.pieces.values import Way as Way
from remat_kit._program.pieces.values import shape_of as shape_of
