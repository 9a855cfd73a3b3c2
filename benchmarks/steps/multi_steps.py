"""Linen with `optax.MultiSteps`: the optimizer sums the gradients of four steps."""

from __future__ import annotations

from typing import Any

import digits
import jax
import linen
import optax
from flax.training.train_state import TrainState

after = linen.after


def build() -> tuple[Any, tuple[Any, ...]]:
    images, labels = digits.batch()
    net = linen.Net()
    optimizer = optax.MultiSteps(optax.adamw(digits.RATE), every_k_schedule=4)
    params = net.init(jax.random.key(0), images[:1])
    state = TrainState.create(apply_fn=net.apply, params=params, tx=optimizer)
    return linen.train_step, (state, images, labels)
