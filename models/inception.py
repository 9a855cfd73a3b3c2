"""Inception-v3 without its auxiliary head, in Flax Linen.

Szegedy et al., "Rethinking the Inception architecture for computer vision", CVPR 2016,
https://arxiv.org/abs/1512.00567, with the channels of the released network, which torchvision has
too. Images are NHWC; each convolution is followed by batch normalization and a ReLU. ``build``
trains: batch normalization uses the statistics of the batch.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

BLOCKS = "*/block_*"  # the paths a policy is applied to

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
SMALLEST = 75  # pixels, of which one is left


class Conv(nn.Module):
    """Convolution, batch normalization, ReLU; channels are counted for a ``width`` of 32."""

    features: int
    kernel: tuple[int, int]
    strides: int = 1
    padding: str = "SAME"
    width: int = 32
    dtype: DTypeLike = jnp.float32
    train: bool = True

    @nn.compact
    def __call__(self, x):
        conv = nn.Conv(
            self.features * self.width // 32,
            self.kernel,
            (self.strides,) * 2,
            padding=self.padding,
            use_bias=False,
            dtype=self.dtype,
            name="conv",
        )
        norm = nn.BatchNorm(
            use_running_average=not self.train,
            momentum=0.9,
            epsilon=1e-3,
            dtype=self.dtype,
            name="bn",
        )
        return nn.relu(norm(conv(x)))


class Block(nn.Module):
    """Branches that take the same image, joined; the subclasses say which branches.

    A layer of a branch is its channels and its kernel, of stride 1. ``shrink`` makes the last
    layer of a branch a stride of 2 without padding, which halves the image. ``nn.nowrap`` keeps the
    methods out of the paths: ``block_0/5x5_1/conv``.
    """

    width: int = 32
    dtype: DTypeLike = jnp.float32
    train: bool = True

    @nn.nowrap
    def conv(self, name, *args):
        kinds = {"width": self.width, "dtype": self.dtype, "train": self.train}
        return Conv(*args, **kinds, name=name)

    @nn.nowrap
    def branch(self, x, name, *layers, shrink=False):
        for i, (features, *kernel) in enumerate(layers):
            last = i == len(layers) - 1
            window = (2, "VALID") if shrink and last else ()
            x = self.conv(f"{name}_{i}", features, tuple(kernel), *window)(x)
        return x

    @nn.nowrap
    def fork(self, x, name, *layers):
        """A branch whose last image goes through 1x3 and through 3x1."""
        x = self.branch(x, name, *layers)
        return [self.conv(f"{name}_{n}x{m}", 384, (n, m))(x) for n, m in ((1, 3), (3, 1))]

    @nn.nowrap
    def pooled(self, x, features):
        x = nn.avg_pool(x, (3, 3), (1, 1), "SAME")
        return self.branch(x, "pool", (features, 1, 1))


class BlockA(Block):
    """Kernels of 5x5 and of twice 3x3, on 35x35 pixels."""

    pool: int = 64

    @nn.compact
    def __call__(self, x):
        outputs = [
            self.branch(x, "1x1", (64, 1, 1)),
            self.branch(x, "5x5", (48, 1, 1), (64, 5, 5)),
            self.branch(x, "3x3", (64, 1, 1), (96, 3, 3), (96, 3, 3)),
            self.pooled(x, self.pool),
        ]
        return jnp.concatenate(outputs, axis=-1)


class BlockB(Block):
    """From 35x35 pixels to 17x17."""

    @nn.compact
    def __call__(self, x):
        outputs = [
            self.branch(x, "3x3", (384, 3, 3), shrink=True),
            self.branch(x, "3x3_twice", (64, 1, 1), (96, 3, 3), (96, 3, 3), shrink=True),
            nn.max_pool(x, (3, 3), (2, 2)),
        ]
        return jnp.concatenate(outputs, axis=-1)


class BlockC(Block):
    """Kernels of 7x7, factorized, once and twice, on 17x17 pixels."""

    middle: int = 128

    @nn.compact
    def __call__(self, x):
        c = self.middle
        outputs = [
            self.branch(x, "1x1", (192, 1, 1)),
            self.branch(x, "7x7", (c, 1, 1), (c, 1, 7), (192, 7, 1)),
            self.branch(x, "7x7_twice", (c, 1, 1), (c, 7, 1), (c, 1, 7), (c, 7, 1), (192, 1, 7)),
            self.pooled(x, 192),
        ]
        return jnp.concatenate(outputs, axis=-1)


class BlockD(Block):
    """From 17x17 pixels to 8x8."""

    @nn.compact
    def __call__(self, x):
        outputs = [
            self.branch(x, "3x3", (192, 1, 1), (320, 3, 3), shrink=True),
            self.branch(x, "7x7", (192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3), shrink=True),
            nn.max_pool(x, (3, 3), (2, 2)),
        ]
        return jnp.concatenate(outputs, axis=-1)


class BlockE(Block):
    """Kernels that fork into 1x3 and 3x1, on 8x8 pixels."""

    @nn.compact
    def __call__(self, x):
        outputs = [
            self.branch(x, "1x1", (320, 1, 1)),
            *self.fork(x, "3x3", (384, 1, 1)),
            *self.fork(x, "3x3_twice", (448, 1, 1), (384, 3, 3)),
            self.pooled(x, 192),
        ]
        return jnp.concatenate(outputs, axis=-1)


class Inception(nn.Module):
    """A stem, eleven blocks, and a linear classifier."""

    classes: int = 1000
    width: int = 32
    dropout: float = 0.5
    dtype: DTypeLike = jnp.float32
    train: bool = True

    @nn.compact
    def __call__(self, x):
        kinds = {"width": self.width, "dtype": self.dtype, "train": self.train}
        x = Conv(32, (3, 3), 2, "VALID", **kinds, name="stem_0")(x)
        x = Conv(32, (3, 3), 1, "VALID", **kinds, name="stem_1")(x)
        x = Conv(64, (3, 3), **kinds, name="stem_2")(x)
        x = nn.max_pool(x, (3, 3), (2, 2))
        x = Conv(80, (1, 1), **kinds, name="stem_3")(x)
        x = Conv(192, (3, 3), 1, "VALID", **kinds, name="stem_4")(x)
        x = nn.max_pool(x, (3, 3), (2, 2))
        blocks = [
            *((BlockA, {"pool": pool}) for pool in (32, 64, 64)),
            (BlockB, {}),
            *((BlockC, {"middle": middle}) for middle in (128, 160, 160, 192)),
            (BlockD, {}),
            *((BlockE, {}) for _ in range(2)),
        ]
        for i, (block, own) in enumerate(blocks):
            x = block(**kinds, **own, name=f"block_{i}")(x)
        x = jnp.mean(x, axis=(1, 2))
        x = nn.Dropout(self.dropout, deterministic=not self.dropout, name="dropout")(x)
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x)


def loss_and_stats(model, params, batch_stats, images, labels, *key):
    """Return the mean cross entropy of one batch, and the running statistics after it."""
    variables = {"params": params, "batch_stats": batch_stats}
    rngs = {"dropout": key[0]} if key else {}
    logits, new = model.apply(variables, images, rngs=rngs, mutable=["batch_stats"])
    logits = logits.astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, new["batch_stats"]


def build(
    policy=None,
    *,
    batch=32,
    image=300,
    classes=1000,
    width=32,
    dropout=0.5,
    dtype="f32",
    materialize=False,
    seed=0,
):
    """Return ``(loss_fn, args)``: ``loss_fn(params, batch_stats, images, labels, key)``.

    Without dropout there is no ``key``, the random key of the step (``jax.random.PRNGKey``). The
    new running statistics are computed and dropped, so that the loss is a scalar;
    ``loss_and_stats`` returns both.

    >>> loss_fn, args = build(batch=2, image=75, width=2)
    >>> jax.eval_shape(loss_fn, *args)
    ShapeDtypeStruct(shape=(), dtype=float32)

    Args:
      policy: what to save in each block, as ``remat_kit.policy`` takes it; None leaves JAX's rule.
      batch, image: images per batch, and pixels along each side of one, 75 or more.
      classes: number of logits.
      width: channels of the first convolution, an even number; all others are in proportion.
      dropout: rate before the classifier.
      dtype: of the computation, "f32" or "bf16"; parameters and the loss are float32.
      materialize: return seeded arrays in place of ``jax.ShapeDtypeStruct``.
      seed: the seed of those arrays.

    Raises:
      ValueError: if a size is unknown or out of range; the message says what is allowed.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    sizes = {"batch": batch, "image": image, "classes": classes, "width": width}
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: must be a positive whole number")
    if width % 2:
        raise ValueError(f"width={width!r}: must be a multiple of 2")
    if image < SMALLEST:
        raise ValueError(f"image={image!r}: must be at least {SMALLEST}, which becomes one pixel")
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout!r}: must be a rate in [0, 1)")

    model = Inception(classes, width, dropout, DTYPES[dtype])

    def loss_fn(params, batch_stats, images, labels, *key):
        return loss_and_stats(model, params, batch_stats, images, labels, *key)[0]

    def make_args():
        init, pixels, classed, step = jax.random.split(jax.random.PRNGKey(seed), 4)
        images = jax.random.normal(pixels, (batch, image, image, 3))
        labels = jax.random.randint(classed, (batch,), 0, classes)
        variables = model.init({"params": init, "dropout": step}, images)
        args = (variables["params"], variables["batch_stats"], images, labels, step)
        return args[: 5 if dropout else 4]

    args = make_args() if materialize else jax.eval_shape(make_args)
    if policy is not None:
        import remat_kit

        loss_fn = remat_kit.policy(policy, at=BLOCKS)(loss_fn)
    return loss_fn, args
