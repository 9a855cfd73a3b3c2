"""The zoo: every model has its published parameters and trains alike under every policy."""

import math

import jax
import pytest
from zoo import load

ALEXNET, CELLS, DENSENET, INCEPTION, RESIDUAL_MLP, VGG = (
    load(name) for name in ("alexnet", "cells", "densenet", "inception", "residual_mlp", "vgg")
)


def count(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def parameters(module, **size):
    return count(module.build(batch=1, **size)[1][0])


def test_residual_mlp_has_the_parameters_of_its_formula():
    width, hidden = 1024, 4096
    block = 2 * width + (width * hidden + hidden) + (hidden * width + width)
    ends = (784 * width + width) + 2 * width + (width * 10 + 10)
    assert parameters(RESIDUAL_MLP) == 32 * block + ends == 269_480_970


# `num_params` of the weights in torchvision/models/alexnet.py and vgg.py
def test_alexnet_has_the_published_parameters():
    assert parameters(ALEXNET) == 61_100_840


@pytest.mark.parametrize(
    ("depth", "published"),
    [(11, 132_863_336), (13, 133_047_848), (16, 138_357_544), (19, 143_667_240)],
)
def test_vgg_has_the_published_parameters(depth, published):
    assert parameters(VGG, depth=depth) == published


def test_inception_has_the_published_parameters():
    # torchvision's `num_params` counts the auxiliary head too: a 1x1 convolution from 768 to 128
    # channels, a 5x5 one to 768, each with batch normalization, and a linear classifier.
    head = (768 * 128 + 2 * 128) + (5 * 5 * 128 * 768 + 2 * 768) + (768 * 1000 + 1000)
    assert parameters(INCEPTION) == 27_161_264 - head == 23_834_568


@pytest.mark.parametrize(
    ("depth", "published"),
    # `num_params` of the weights in torchvision/models/densenet.py
    [(121, 7_978_856), (161, 28_681_000), (169, 14_149_480), (201, 20_013_928)],
)
def test_densenet_has_the_published_parameters(depth, published):
    assert parameters(DENSENET, depth=depth) == published


OPERATIONS = {
    "sep_3": lambda c: 2 * (9 * c + c * c + 2 * c),
    "sep_5": lambda c: 2 * (25 * c + c * c + 2 * c),
    "sep_7": lambda c: 2 * (49 * c + c * c + 2 * c),
    "dil_3": lambda c: 9 * c + c * c + 2 * c,
    "1x7_7x1": lambda c: 14 * c * c + 2 * c,
}


def of_cells(normal, reduction):
    """The parameters of 20 cells of 36, 72 and 144 channels, by ``cnn/model.py`` of DARTS.

    Each of the two cells is its operations that have parameters, and how many results it joins.
    """

    def conv_and_norm(inputs, outputs):
        return inputs * outputs + 2 * outputs

    total = 3 * 3 * 3 * 108 + 2 * 108  # the stem
    before, last = 108, 108
    for i in range(20):
        channels = 36 * (2 if i >= 6 else 1) * (2 if i >= 13 else 1)
        operations, joined = reduction if i in (6, 13) else normal
        # Two convolutions to half the channels each have the parameters of one to all of them.
        total += conv_and_norm(before, channels) + conv_and_norm(last, channels)
        total += sum(OPERATIONS[name](channels) for name in operations.split())
        before, last = last, joined * channels
    return total + last * 10 + 10


@pytest.mark.parametrize(
    ("arch", "normal", "reduction", "published"),
    [
        # cnn/train.py of DARTS logs "param size = 3.349342MB", which counts parameters, not bytes.
        ("darts", ("sep_3 sep_3 sep_3 sep_3 sep_3 dil_3", 4), ("", 4), 3_349_342),
        # Table 1 of the DARTS paper has 3.1 million for AmoebaNet-A; the rest is the operations of
        # figure 5 of Real et al. and of figure 4 of Zoph et al., as cnn/genotypes.py has them.
        (
            "amoebanet",
            ("sep_3 sep_5 sep_3 sep_3", 3),
            ("sep_3 sep_7 sep_7 1x7_7x1 sep_3", 3),
            3_145_078,
        ),
        (
            "nasnet",
            ("sep_5 sep_3 sep_5 sep_3 sep_3", 5),
            ("sep_5 sep_7 sep_7 sep_5 sep_3", 3),
            3_830_950,
        ),
    ],
)
def test_cells_have_the_published_parameters(arch, normal, reduction, published):
    assert parameters(CELLS, arch=arch) == of_cells(normal, reduction) == published
