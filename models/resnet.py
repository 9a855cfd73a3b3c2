"""ResNet-18/34/50/101/152 (v1.5: the stride sits in the 3x3 convolution), in Flax Linen.

He et al., "Deep residual learning for image recognition", CVPR 2016, https://arxiv.org/abs/1512.03385.
Images are NHWC, every convolution pads to SAME (XLA's own, not the symmetric padding of torch).
``build`` trains: batch normalization uses the statistics of the batch.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

BLOCKS = "*/block_*"  # the paths a policy is applied to

STAGES = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
}
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}

Conv = partial(nn.Conv, use_bias=False)
Norm = partial(nn.BatchNorm, momentum=0.9)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (ResNet-18 and 34)."""

    features: int
    strides: int
    dtype: DTypeLike = jnp.float32
    train: bool = True

    @nn.compact
    def __call__(self, x):
        conv = partial(Conv, dtype=self.dtype)
        norm = partial(Norm, use_running_average=not self.train, dtype=self.dtype)
        y = conv(self.features, (3, 3), (self.strides,) * 2, name="conv_1")(x)
        y = nn.relu(norm(name="bn_1")(y))
        y = conv(self.features, (3, 3), name="conv_2")(y)
        y = norm(name="bn_2", scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = conv(self.features, (1, 1), (self.strides,) * 2, name="conv_shortcut")(x)
            x = norm(name="bn_shortcut")(x)
        return nn.relu(x + y)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions and a shortcut (ResNet-50 and deeper)."""

    features: int
    strides: int
    dtype: DTypeLike = jnp.float32
    train: bool = True

    @nn.compact
    def __call__(self, x):
        conv = partial(Conv, dtype=self.dtype)
        norm = partial(Norm, use_running_average=not self.train, dtype=self.dtype)
        y = conv(self.features, (1, 1), name="conv_1")(x)
        y = nn.relu(norm(name="bn_1")(y))
        y = conv(self.features, (3, 3), (self.strides,) * 2, name="conv_2")(y)
        y = nn.relu(norm(name="bn_2")(y))
        y = conv(4 * self.features, (1, 1), name="conv_3")(y)
        y = norm(name="bn_3", scale_init=nn.initializers.zeros)(y)
        if x.shape != y.shape:
            x = conv(4 * self.features, (1, 1), (self.strides,) * 2, name="conv_shortcut")(x)
            x = norm(name="bn_shortcut")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A stem, four stages of residual blocks, and a linear classifier."""

    depth: int = 50
    classes: int = 1000
    width: int = 64
    dtype: DTypeLike = jnp.float32
    train: bool = True

    @nn.compact
    def __call__(self, x):
        block = BasicBlock if self.depth < 50 else Bottleneck
        block = partial(block, dtype=self.dtype, train=self.train)
        x = Conv(self.width, (7, 7), (2, 2), dtype=self.dtype, name="stem_conv")(x)
        x = Norm(use_running_average=not self.train, dtype=self.dtype, name="stem_bn")(x)
        x = nn.max_pool(nn.relu(x), (3, 3), (2, 2), padding="SAME")
        i = 0
        for stage, blocks in enumerate(STAGES[self.depth]):
            for j in range(blocks):
                strides = 2 if stage > 0 and j == 0 else 1
                x = block(self.width * 2**stage, strides, name=f"block_{i}")(x)
                i += 1
        x = jnp.mean(x, axis=(1, 2))
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
    depth=50,
    batch=64,
    image=224,
    classes=1000,
    width=64,
    dtype="f32",
    materialize=False,
    seed=0,
):
    """Return ``(loss_fn, args)``: ``loss_fn(params, batch_stats, images, labels)``.

    The new running statistics are computed and dropped, so that the loss is a scalar;
    ``loss_and_stats`` returns both.

    >>> loss_fn, args = build(depth=18, batch=4, image=32)
    >>> jax.eval_shape(loss_fn, *args)
    ShapeDtypeStruct(shape=(), dtype=float32)

    Args:
      policy: what to save in each block, as ``remat_kit.policy`` takes it; None leaves JAX's rule.
      depth: 18, 34, 50, 101 or 152 layers.
      batch, image: images per batch, and pixels along each side of one.
      classes: number of logits.
      width: channels of the first stage; each later stage has twice as many.
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
    sizes = {"batch": batch, "image": image, "classes": classes, "width": width}
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: must be a positive whole number")

    model = ResNet(depth, classes, width, DTYPES[dtype])

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
