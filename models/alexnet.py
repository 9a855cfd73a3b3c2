"""AlexNet in one column, as torchvision has it, in Flax Linen.

Krizhevsky, "One weird trick for parallelizing convolutional neural networks", 2014,
https://arxiv.org/abs/1404.5997: five convolutions, then three dense layers, with dropout before the
first two of these. Images are NHWC. The dense layers take the last image as it is: 224x224 pixels
become 6x6.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

BLOCKS = "*/block_*"  # the paths a policy is applied to

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
SMALLEST = 63  # pixels, of which one is left after the last pool

# channels in units of the width, kernel, strides, padding, and whether a pool follows
LAYERS = (
    (1, 11, 4, 2, True),
    (3, 5, 1, 2, True),
    (6, 3, 1, 1, False),
    (4, 3, 1, 1, False),
    (4, 3, 1, 1, True),
)


class Block(nn.Module):
    """A convolution, ReLU, and a pool of 3x3 pixels that overlap, where there is one."""

    features: int
    kernel: int
    strides: int
    padding: int
    pool: bool
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x):
        conv = nn.Conv(
            self.features,
            (self.kernel,) * 2,
            (self.strides,) * 2,
            padding=self.padding,
            dtype=self.dtype,
            kernel_init=nn.initializers.he_normal(),
            name="conv",
        )
        x = nn.relu(conv(x))
        return nn.max_pool(x, (3, 3), (2, 2)) if self.pool else x


class AlexNet(nn.Module):
    """Five convolutional blocks and a classifier with two hidden layers."""

    classes: int = 1000
    width: int = 64
    hidden: int = 4096
    dropout: float = 0.5
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x):
        for i, (channels, kernel, strides, padding, pool) in enumerate(LAYERS):
            features = channels * self.width
            block = Block(
                features, kernel, strides, padding, pool, dtype=self.dtype, name=f"block_{i}"
            )
            x = block(x)
        x = x.reshape(x.shape[0], -1)
        init = nn.initializers.he_normal()
        drop = nn.Dropout(self.dropout, deterministic=not self.dropout, name="dropout")
        for i in range(2):
            dense = nn.Dense(self.hidden, dtype=self.dtype, kernel_init=init, name=f"dense_{i}")
            x = nn.relu(dense(drop(x)))
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x)


def build(
    policy=None,
    *,
    batch=1024,
    image=224,
    classes=1000,
    width=64,
    hidden=4096,
    dropout=0.5,
    dtype="f32",
    materialize=False,
    seed=0,
):
    """Return ``(loss_fn, args)``: ``loss_fn(params, images, labels, key)``.

    Without dropout there is no ``key``, the random key of the step (``jax.random.PRNGKey``).

    >>> loss_fn, args = build(batch=4)
    >>> jax.eval_shape(loss_fn, *args)
    ShapeDtypeStruct(shape=(), dtype=float32)
    >>> args[0]["dense_0"]["kernel"]
    ShapeDtypeStruct(shape=(9216, 4096), dtype=float32)

    Args:
      policy: what to save in each block, as ``remat_kit.policy`` takes it; None leaves JAX's rule.
      batch, image: images per batch, and pixels along each side of one, 63 or more.
      classes: number of logits.
      width: channels of the first convolution; the others have 3, 6, 4 and 4 times as many.
      hidden: width of the two hidden dense layers.
      dropout: rate before each of these.
      dtype: of the computation, "f32" or "bf16"; parameters and the loss are float32.
      materialize: return seeded arrays in place of ``jax.ShapeDtypeStruct``.
      seed: the seed of those arrays.

    Raises:
      ValueError: if a size is unknown or out of range; the message says what is allowed.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    sizes = {"batch": batch, "image": image, "classes": classes, "width": width, "hidden": hidden}
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: must be a positive whole number")
    if image < SMALLEST:
        raise ValueError(f"image={image!r}: must be at least {SMALLEST}, which becomes one pixel")
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ValueError(f"dropout={dropout!r}: must be a rate in [0, 1)")

    model = AlexNet(classes, width, hidden, dropout, DTYPES[dtype])

    def loss_fn(params, images, labels, *key):
        rngs = {"dropout": key[0]} if key else {}
        logits = jnp.asarray(model.apply({"params": params}, images, rngs=rngs), jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def make_args():
        init, pixels, classed, step = jax.random.split(jax.random.PRNGKey(seed), 4)
        images = jax.random.normal(pixels, (batch, image, image, 3))
        labels = jax.random.randint(classed, (batch,), 0, classes)
        params = model.init({"params": init, "dropout": step}, images)["params"]
        return (params, images, labels, step)[: 4 if dropout else 3]

    args = make_args() if materialize else jax.eval_shape(make_args)
    if policy is not None:
        import remat_kit

        loss_fn = remat_kit.policy(policy, at=BLOCKS)(loss_fn)
    return loss_fn, args
