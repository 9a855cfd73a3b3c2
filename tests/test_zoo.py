"""The zoo: every model has its published parameters and trains alike under every policy."""

import math

import jax
import pytest
from zoo import load

DENSENET, RESIDUAL_MLP = (load(name) for name in ("densenet", "residual_mlp"))


def count(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def parameters(module, **size):
    return count(module.build(batch=1, **size)[1][0])


def test_residual_mlp_has_the_parameters_of_its_formula():
    width, hidden = 1024, 4096
    block = 2 * width + (width * hidden + hidden) + (hidden * width + width)
    ends = (784 * width + width) + 2 * width + (width * 10 + 10)
    assert parameters(RESIDUAL_MLP) == 32 * block + ends == 269_480_970


@pytest.mark.parametrize(
    ("depth", "published"),
    # `num_params` of the weights in torchvision/models/densenet.py
    [(121, 7_978_856), (161, 28_681_000), (169, 14_149_480), (201, 20_013_928)],
)
def test_densenet_has_the_published_parameters(depth, published):
    assert parameters(DENSENET, depth=depth) == published
