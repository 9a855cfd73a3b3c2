"""The published figures that `bench` compares plans with."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from remat_kit._errors import unknown

COMPILES = 3  # programs for each of the three plans


# A backward pass is about as much work as two forward passes, so a step is three forward passes.
_FORWARDS_PER_STEP = 3


@dataclasses.dataclass(frozen=True)
class Published:
    """One line of the paper's table.

    Attributes:
        arch: the name for ``--arch``.
        title: the name in the paper.
        file: the name of the model's file, without its suffix.
        sizes: for the builder. Dropout is off, as in the authors' script.
        plain_mib: peak memory in MiB beyond weights and their gradients, without checkpoints.
        least_mib: the same with the paper's checkpoints.
        overhead: extra time of a step, as a fraction of a step.
    """

    arch: str
    title: str
    file: str
    sizes: Mapping[str, Any] = dataclasses.field(hash=False)
    plain_mib: int
    least_mib: int
    overhead: float

    @property
    def fraction(self) -> float:
        """Memory with the paper's checkpoints divided by the memory without."""
        return self.least_mib / self.plain_mib

    @property
    def extra_forward(self) -> float:
        """The paper's extra work, in forward passes.

        A step is three forward passes, so 31 % of a step is 0.93 of a forward pass. The value is at
        most 1, because the paper's method runs an operation at most twice; more time than that is
        not work.
        """
        return min(1.0, _FORWARDS_PER_STEP * self.overhead)


# arch, title, file, sizes, MiB without, MiB with checkpoints, extra time of a step
TABLE = (
    Published("alexnet", "AlexNet", "alexnet", {"batch": 1024, "dropout": 0.0}, 4955, 3287, 0.34),
    Published(
        "vgg11", "VGG-11", "vgg", {"depth": 11, "batch": 64, "dropout": 0.0}, 3577, 2781, 0.34
    ),
    Published(
        "vgg13", "VGG-13", "vgg", {"depth": 13, "batch": 64, "dropout": 0.0}, 5136, 3565, 0.33
    ),
    Published(
        "vgg16", "VGG-16", "vgg", {"depth": 16, "batch": 64, "dropout": 0.0}, 5136, 3565, 0.32
    ),
    Published(
        "vgg19", "VGG-19", "vgg", {"depth": 19, "batch": 64, "dropout": 0.0}, 5189, 3565, 0.33
    ),
    Published("resnet18", "ResNet-18", "resnet", {"depth": 18, "batch": 256}, 5635, 3677, 0.30),
    Published("resnet34", "ResNet-34", "resnet", {"depth": 34, "batch": 128}, 4079, 1838, 0.35),
    Published("resnet50", "ResNet-50", "resnet", {"depth": 50, "batch": 64}, 5323, 1973, 0.31),
    Published("resnet101", "ResNet-101", "resnet", {"depth": 101, "batch": 32}, 3934, 1024, 0.35),
    Published("resnet152", "ResNet-152", "resnet", {"depth": 152, "batch": 16}, 2767, 526, 0.37),
    Published(
        "densenet121", "DenseNet-121", "densenet", {"depth": 121, "batch": 32}, 4027, 898, 0.34
    ),
    Published(
        "densenet161", "DenseNet-161", "densenet", {"depth": 161, "batch": 16}, 3751, 666, 0.36
    ),
    Published(
        "densenet169", "DenseNet-169", "densenet", {"depth": 169, "batch": 32}, 4862, 897, 0.32
    ),
    Published(
        "densenet201", "DenseNet-201", "densenet", {"depth": 201, "batch": 16}, 3146, 474, 0.53
    ),
    Published(
        "inception", "Inception-v3", "inception", {"batch": 32, "dropout": 0.0}, 3074, 881, 0.29
    ),
    Published("nasnet", "NASNet", "cells", {"arch": "nasnet", "batch": 64}, 5832, 1129, 0.31),
    Published(
        "amoebanet", "AmoebaNet", "cells", {"arch": "amoebanet", "batch": 64}, 4944, 1058, 0.36
    ),
    Published("darts", "DARTS", "cells", {"arch": "darts", "batch": 64}, 5627, 1115, 0.55),
)


def published(arch: str, *, call: str = "bench") -> Published:
    """Return the paper's line for an architecture.

    >>> line = published("resnet101")
    >>> line.plain_mib, line.least_mib, round(line.fraction, 2), line.extra_forward
    (3934, 1024, 0.26, 1.0)

    Args:
        arch: as in `TABLE`.
        call: the call that error messages name.

    Raises:
        UnknownNameError: the paper has no such model.
    """
    by_name = {line.arch: line for line in TABLE}
    if arch not in by_name:
        raise unknown("architecture", arch, by_name, call=call)
    return by_name[arch]
