"""DenseNet-121/161/169/201 (bottlenecks, half the channels at a transition), in Flax Linen.

Huang et al., "Densely connected convolutional networks", CVPR 2017,
https://arxiv.org/abs/1608.06993. Images are NHWC, every convolution pads to SAME. A dense layer
takes the outputs of all earlier ones of its stage and joins them itself, as in Pleiss et al.,
"Memory-efficient implementation of DenseNets", 2017, https://arxiv.org/abs/1707.06990: when it is
rematerialized, what is kept for it are those outputs, each of them once. ``build`` trains: batch
normalization uses the statistics of the batch.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

BLOCKS = "*/block_*"  # the paths a policy is applied to

STAGES = {
    121: (6, 12, 24, 16),
    161: (6, 12, 36, 24),
    169: (6, 12, 32, 32),
    201: (6, 12, 48, 32),
}
GROWTH = {121: 32, 161: 48, 169: 32, 201: 32}
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}

Conv = partial(nn.Conv, use_bias=False)
Norm = partial(nn.BatchNorm, momentum=0.9)


class DenseLayer(nn.Module):
    """A 1x1 and a 3x3 convolution of everything so far; gives ``growth`` channels."""

    growth: int
    dtype: DTypeLike = jnp.float32
    train: bool = True

    @nn.compact
    def __call__(self, *features):
        norm = partial(Norm, use_running_average=not self.train, dtype=self.dtype)
        x = jnp.concatenate(features, axis=-1)
        x = nn.relu(norm(name="bn_1")(x))
        x = Conv(4 * self.growth, (1, 1), dtype=self.dtype, name="conv_1")(x)
        x = nn.relu(norm(name="bn_2")(x))
        return Conv(self.growth, (3, 3), dtype=self.dtype, name="conv_2")(x)


class Transition(nn.Module):
    """Joins a stage; halves the channels and each side of the image."""

    dtype: DTypeLike = jnp.float32
    train: bool = True

    @nn.compact
    def __call__(self, *features):
        x = jnp.concatenate(features, axis=-1)
        x = Norm(use_running_average=not self.train, dtype=self.dtype, name="bn")(x)
        x = Conv(x.shape[-1] // 2, (1, 1), dtype=self.dtype, name="conv")(nn.relu(x))
        return nn.avg_pool(x, (2, 2), (2, 2))


class DenseNet(nn.Module):
    """A stem, stages of dense layers with transitions between them, and a linear classifier."""

    stages: tuple[int, ...] = STAGES[121]
    growth: int = 32
    classes: int = 1000
    dtype: DTypeLike = jnp.float32
    train: bool = True

    @nn.compact
    def __call__(self, x):
        norm = partial(Norm, use_running_average=not self.train, dtype=self.dtype)
        x = Conv(2 * self.growth, (7, 7), (2, 2), dtype=self.dtype, name="stem_conv")(x)
        x = nn.relu(norm(name="stem_bn")(x))
        features = [nn.max_pool(x, (3, 3), (2, 2), padding="SAME")]
        i = 0
        for stage, layers in enumerate(self.stages):
            if stage > 0:
                transition = Transition(self.dtype, self.train, name=f"transition_{stage}")
                features = [transition(*features)]
            for _ in range(layers):
                layer = DenseLayer(self.growth, self.dtype, self.train, name=f"block_{i}")
                features.append(layer(*features))
                i += 1
        x = nn.relu(norm(name="bn")(jnp.concatenate(features, axis=-1)))
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
    depth=121,
    batch=32,
    image=224,
    classes=1000,
    growth=None,
    stages=None,
    dtype="f32",
    materialize=False,
    seed=0,
):
    """Return ``(loss_fn, args)``: ``loss_fn(params, batch_stats, images, labels)``.

    The new running statistics are computed and dropped, so that the loss is a scalar;
    ``loss_and_stats`` returns both.

    >>> loss_fn, args = build(batch=4, image=32, growth=4, stages=(2, 3))
    >>> jax.eval_shape(loss_fn, *args)
    ShapeDtypeStruct(shape=(), dtype=float32)

    Args:
      policy: what to save in each dense layer, as ``remat_kit.policy`` takes it; None leaves JAX's
        rule.
      depth: 121, 161, 169 or 201 layers.
      batch, image: images per batch, and pixels along each side of one.
      classes: number of logits.
      growth: channels that a dense layer adds, in place of those of ``depth``; the stem has twice
        as many.
      stages: dense layers in each stage, in place of those of ``depth``.
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
    growth = GROWTH[depth] if growth is None else growth
    sizes = {"batch": batch, "image": image, "classes": classes, "growth": growth}
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: must be a positive whole number")
    stages = STAGES[depth] if stages is None else stages
    whole = isinstance(stages, tuple | list) and all(type(n) is int and n > 0 for n in stages)
    if not whole or not stages:
        raise ValueError(f"stages={stages!r}: must be positive whole numbers, one for each stage")
    shrink = 2 ** (len(stages) + 1)
    if image < shrink:
        raise ValueError(f"image={image!r}: must be at least {shrink}, which becomes one pixel")

    model = DenseNet(tuple(stages), growth, classes, DTYPES[dtype])

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
