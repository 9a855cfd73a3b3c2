"""The CIFAR networks of repeated cells: NASNet-A, AmoebaNet-A and DARTS-V2, in Flax Linen.

Zoph et al., "Learning transferable architectures for scalable image recognition", CVPR 2018,
https://arxiv.org/abs/1707.07012; Real et al., "Regularized evolution for image classifier
architecture search", AAAI 2019, https://arxiv.org/abs/1802.01548; Liu et al., "DARTS:
differentiable architecture search", ICLR 2019, https://arxiv.org/abs/1806.09055. The three are
evaluated in one network, that of https://github.com/quark0/darts (``cnn/model.py``): a stem of
three times the width, then cells that take the outputs of the two cells before them, of which the
ones at a third and at two thirds of the depth halve the image and double the channels.

The auxiliary head and drop path are left out. Images are NHWC, every convolution and pool pads to
SAME. ``build`` trains: batch normalization uses the statistics of the batch.
"""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

BLOCKS = "*/block_*"  # the paths a policy is applied to

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}

Conv = partial(nn.Conv, use_bias=False)
Norm = partial(nn.BatchNorm, momentum=0.9)


@dataclasses.dataclass(frozen=True)
class Wiring:
    """One kind of cell: what is computed, and which results are joined into its output.

    Results are numbered: 0 and 1 are the inputs, each pair of ``operations`` adds the next one. A
    pair is two operations whose outputs are summed, ``"sep_3 1"`` being ``sep_3`` of result 1.
    """

    operations: tuple[tuple[str, str], ...]
    joined: tuple[int, ...]


# (the cell that keeps the size of the image, the cell that halves it)
ARCHITECTURES = {
    "nasnet": (
        Wiring(
            (
                ("sep_5 1", "sep_3 0"),
                ("sep_5 0", "sep_3 0"),
                ("avg_3 1", "skip 0"),
                ("avg_3 0", "avg_3 0"),
                ("sep_3 1", "skip 1"),
            ),
            joined=(2, 3, 4, 5, 6),
        ),
        Wiring(
            (
                ("sep_5 1", "sep_7 0"),
                ("max_3 1", "sep_7 0"),
                ("avg_3 1", "sep_5 0"),
                ("skip 3", "avg_3 2"),
                ("sep_3 2", "max_3 1"),
            ),
            joined=(4, 5, 6),
        ),
    ),
    "amoebanet": (
        Wiring(
            (
                ("avg_3 0", "max_3 1"),
                ("sep_3 0", "sep_5 2"),
                ("sep_3 0", "avg_3 3"),
                ("sep_3 1", "skip 1"),
                ("skip 0", "avg_3 1"),
            ),
            joined=(4, 5, 6),
        ),
        Wiring(
            (
                ("avg_3 0", "sep_3 1"),
                ("max_3 0", "sep_7 2"),
                ("sep_7 0", "avg_3 1"),
                ("max_3 0", "max_3 1"),
                ("1x7_7x1 0", "sep_3 5"),
            ),
            joined=(3, 4, 6),
        ),
    ),
    "darts": (
        Wiring(
            (
                ("sep_3 0", "sep_3 1"),
                ("sep_3 0", "sep_3 1"),
                ("sep_3 1", "skip 0"),
                ("skip 0", "dil_3 2"),
            ),
            joined=(2, 3, 4, 5),
        ),
        Wiring(
            (
                ("max_3 0", "max_3 1"),
                ("skip 2", "max_3 1"),
                ("max_3 0", "skip 2"),
                ("skip 2", "max_3 1"),
            ),
            joined=(2, 3, 4, 5),
        ),
    ),
}


class Pointwise(nn.Module):
    """ReLU, 1x1 convolution, batch normalization."""

    features: int
    dtype: DTypeLike = jnp.float32
    train: bool = True

    @nn.compact
    def __call__(self, x):
        x = Conv(self.features, (1, 1), dtype=self.dtype, name="conv")(nn.relu(x))
        return Norm(use_running_average=not self.train, dtype=self.dtype, name="bn")(x)


class Halve(nn.Module):
    """ReLU, then every second pixel and the ones between them, half of the channels from each."""

    features: int
    dtype: DTypeLike = jnp.float32
    train: bool = True

    @nn.compact
    def __call__(self, x):
        x = nn.relu(x)
        conv = partial(Conv, self.features // 2, (1, 1), (2, 2), dtype=self.dtype)
        x = jnp.concatenate([conv(name="conv_1")(x), conv(name="conv_2")(x[:, 1:, 1:])], axis=-1)
        return Norm(use_running_average=not self.train, dtype=self.dtype, name="bn")(x)


class Separable(nn.Module):
    """ReLU, depthwise convolution, 1x1 convolution, batch normalization: once, or twice over."""

    kernel: int
    strides: int
    dilation: int = 1
    times: int = 2
    dtype: DTypeLike = jnp.float32
    train: bool = True

    @nn.compact
    def __call__(self, x):
        channels = x.shape[-1]
        for i in range(1, self.times + 1):
            depthwise = Conv(
                channels,
                (self.kernel,) * 2,
                (self.strides if i == 1 else 1,) * 2,
                kernel_dilation=self.dilation,
                feature_group_count=channels,
                dtype=self.dtype,
                name=f"depthwise_{i}",
            )
            x = depthwise(nn.relu(x))
            x = Conv(channels, (1, 1), dtype=self.dtype, name=f"pointwise_{i}")(x)
            norm = Norm(use_running_average=not self.train, dtype=self.dtype, name=f"bn_{i}")
            x = norm(x)
        return x


class Factorized(nn.Module):
    """ReLU, 1x7 convolution, 7x1 convolution, batch normalization."""

    strides: int
    dtype: DTypeLike = jnp.float32
    train: bool = True

    @nn.compact
    def __call__(self, x):
        conv = partial(Conv, x.shape[-1], dtype=self.dtype)
        x = conv((1, 7), (1, self.strides), name="conv_1")(nn.relu(x))
        x = conv((7, 1), (self.strides, 1), name="conv_2")(x)
        return Norm(use_running_average=not self.train, dtype=self.dtype, name="bn")(x)


class Cell(nn.Module):
    """One cell: of the two results before it, the first may still have the doubled image."""

    wiring: Wiring
    features: int
    strides: int
    halve: bool
    dtype: DTypeLike = jnp.float32
    train: bool = True

    @nn.compact
    def __call__(self, before, last):
        kinds = {"dtype": self.dtype, "train": self.train}
        first = Halve if self.halve else Pointwise
        results = [
            first(self.features, **kinds, name="input_0")(before),
            Pointwise(self.features, **kinds, name="input_1")(last),
        ]
        for i, pair in enumerate(self.wiring.operations):
            a, b = (self._operation(text, results, f"{i}_{j}") for j, text in enumerate(pair))
            results.append(a + b)
        return jnp.concatenate([results[i] for i in self.wiring.joined], axis=-1)

    @nn.nowrap  # or the method would be part of the paths
    def _operation(self, text, results, position):
        kind, index = text.split()
        x = results[int(index)]
        strides = self.strides if int(index) < 2 else 1
        kinds = {"dtype": self.dtype, "train": self.train, "name": f"op_{position}"}
        match kind.split("_"):
            case ["skip"]:
                return x if strides == 1 else Halve(self.features, **kinds)(x)
            case ["max", size]:
                return nn.max_pool(x, (int(size),) * 2, (strides,) * 2, padding="SAME")
            case ["avg", size]:
                window = ((int(size),) * 2, (strides,) * 2, "SAME")
                return nn.avg_pool(x, *window, count_include_pad=False)
            case ["sep", size]:
                return Separable(int(size), strides, **kinds)(x)
            case ["dil", size]:
                return Separable(int(size), strides, dilation=2, times=1, **kinds)(x)
            case ["1x7", "7x1"]:
                return Factorized(strides, **kinds)(x)
            case _:
                raise ValueError(f"{text!r}: there is no operation {kind!r}")


class CellNet(nn.Module):
    """A stem, the cells, and a linear classifier."""

    arch: str = "darts"
    layers: int = 20
    width: int = 36
    classes: int = 10
    dtype: DTypeLike = jnp.float32
    train: bool = True

    @nn.compact
    def __call__(self, x):
        kinds = {"dtype": self.dtype, "train": self.train}
        normal, reduction = ARCHITECTURES[self.arch]
        x = Conv(3 * self.width, (3, 3), dtype=self.dtype, name="stem_conv")(x)
        x = Norm(use_running_average=not self.train, dtype=self.dtype, name="stem_bn")(x)
        before, last = x, x
        features, halve = self.width, False
        for i in range(self.layers):
            reduces = i in (self.layers // 3, 2 * self.layers // 3)
            wiring, strides = (reduction, 2) if reduces else (normal, 1)
            features *= strides
            cell = Cell(wiring, features, strides, halve, **kinds, name=f"block_{i}")
            before, last = last, cell(before, last)
            halve = reduces
        x = jnp.mean(last, axis=(1, 2))
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x)


def loss_and_stats(model, params, batch_stats, images, labels):
    """Return the mean cross entropy of one batch, and the running statistics after it."""
    variables = {"params": params, "batch_stats": batch_stats}
    logits, new = model.apply(variables, images, mutable=["batch_stats"])
    logits = logits.astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, new["batch_stats"]


def build(
    policy=None,
    *,
    arch="darts",
    batch=64,
    image=32,
    classes=10,
    width=36,
    layers=20,
    dtype="f32",
    materialize=False,
    seed=0,
):
    """Return ``(loss_fn, args)``: ``loss_fn(params, batch_stats, images, labels)``.

    The new running statistics are computed and dropped, so that the loss is a scalar;
    ``loss_and_stats`` returns both.

    >>> loss_fn, args = build(arch="nasnet", batch=2, width=4, layers=3)
    >>> jax.eval_shape(loss_fn, *args)
    ShapeDtypeStruct(shape=(), dtype=float32)

    Args:
      policy: what to save in each cell, as ``remat_kit.policy`` takes it; None leaves JAX's rule.
      arch: "nasnet", "amoebanet" or "darts".
      batch, image: images per batch, and pixels along each side of one, a multiple of 4.
      classes: number of logits.
      width: channels of the first cells' operations, an even number.
      layers: number of cells.
      dtype: of the computation, "f32" or "bf16"; parameters and the loss are float32.
      materialize: return seeded arrays in place of ``jax.ShapeDtypeStruct``.
      seed: the seed of those arrays.

    Raises:
      ValueError: if a size is unknown or out of range; the message says what is allowed.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"arch={arch!r}: must be one of {', '.join(ARCHITECTURES)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    sizes = {"batch": batch, "image": image, "classes": classes, "width": width, "layers": layers}
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: must be a positive whole number")
    for name, value, divisor in (("width", width, 2), ("image", image, 4)):
        if value % divisor:
            raise ValueError(f"{name}={value!r}: must be a multiple of {divisor}")

    model = CellNet(arch, layers, width, classes, DTYPES[dtype])

    def loss_fn(params, batch_stats, images, labels):
        return loss_and_stats(model, params, batch_stats, images, labels)[0]

    def make_args():
        keys = jax.random.split(jax.random.key(seed), 3)
        images = jax.random.normal(keys[1], (batch, image, image, 3))
        labels = jax.random.randint(keys[2], (batch,), 0, classes)
        variables = model.init(keys[0], images)
        return variables["params"], variables["batch_stats"], images, labels

    args = make_args() if materialize else jax.eval_shape(make_args)
    if policy is not None:
        import remat_kit

        loss_fn = remat_kit.policy(policy, at=BLOCKS)(loss_fn)
    return loss_fn, args
