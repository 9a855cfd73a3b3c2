"""VGG-11/13/16/19 without batch normalization, in Flax Linen.

Simonyan and Zisserman, "Very deep convolutional networks for large-scale image recognition", ICLR
2015, https://arxiv.org/abs/1409.1556: configurations A, B, D and E. Images are NHWC. The dense
layers take the last image as it is: 224x224 pixels become 7x7.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

BLOCKS = "*/block_*"  # the paths a policy is applied to

# convolutions in each of the five stages
STAGES = {
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
SMALLEST = 32  # pixels, of which one is left after the last pool


class Block(nn.Module):
    """One stage: 3x3 convolutions, each with a ReLU, and a pool of 2x2 pixels."""

    features: int
    layers: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.he_normal()
        for i in range(self.layers):
            name = f"conv_{i}"
            x = nn.Conv(self.features, (3, 3), dtype=self.dtype, kernel_init=init, name=name)(x)
            x = nn.relu(x)
        return nn.max_pool(x, (2, 2), (2, 2))


class VGG(nn.Module):
    """Five stages and a classifier with two hidden layers."""

    depth: int = 16
    classes: int = 1000
    width: int = 64
    hidden: int = 4096
    dropout: float = 0.5
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x):
        for i, layers in enumerate(STAGES[self.depth]):
            features = self.width * min(2**i, 8)
            x = Block(features, layers, self.dtype, name=f"block_{i}")(x)
        x = x.reshape(x.shape[0], -1)
        init = nn.initializers.he_normal()
        drop = nn.Dropout(self.dropout, deterministic=not self.dropout, name="dropout")
        for i in range(2):
            dense = nn.Dense(self.hidden, dtype=self.dtype, kernel_init=init, name=f"dense_{i}")
            x = drop(nn.relu(dense(x)))
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x)


def build(
    policy=None,
    *,
    depth=16,
    batch=64,
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

    >>> loss_fn, args = build(depth=11, batch=4)
    >>> jax.eval_shape(loss_fn, *args)
    ShapeDtypeStruct(shape=(), dtype=float32)
    >>> args[0]["dense_0"]["kernel"]
    ShapeDtypeStruct(shape=(25088, 4096), dtype=float32)

    Args:
      policy: what to save in each stage, as ``remat_kit.policy`` takes it; None leaves JAX's rule.
      depth: 11, 13, 16 or 19 layers.
      batch, image: images per batch, and pixels along each side of one, 32 or more.
      classes: number of logits.
      width: channels of the first stage; the later ones have 2, 4, 8 and 8 times as many.
      hidden: width of the two hidden dense layers.
      dropout: rate after each of these.
      dtype: of the computation, "f32" or "bf16"; parameters and the loss are float32.
      materialize: return seeded arrays in place of ``jax.ShapeDtypeStruct``.
      seed: the seed of those arrays.

    Raises:
      ValueError: if a size is unknown or out of range; the message says what is allowed.
    """
    if depth not in STAGES:
        raise ValueError(f"depth={depth!r}: must be one of {', '.join(map(str, STAGES))}")
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

    model = VGG(depth, classes, width, hidden, dropout, DTYPES[dtype])

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
