"""Where does a program take a gradient, and what does its gradient compute?

`gradient` checks and traces the gradient of a loss. `taken` tells whether a function takes a
gradient itself, and `losses` finds each loss that a training step differentiates. `step` puts an
optimizer around a loss, and `traced` traces the whole program that is compiled.
"""
