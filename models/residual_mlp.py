"""A deep residual MLP in Flax Linen: 32 equal blocks, each a pre-norm feed-forward layer.

The block is the feed-forward half of a pre-norm transformer layer (LayerNorm, dense, GELU, dense,
plus the input), so the model is the shortest chain that behaves as a transformer's does: all blocks
equal, one value between them, and nearly all of the memory in the wide pre-activations.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

BLOCKS = "*/block_*"  # the paths a policy is applied to

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


class Block(nn.Module):
    """``x + down(gelu(up(norm(x))))``, ``expansion`` times the width in the middle."""

    expansion: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        y = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
        y = nn.Dense(self.expansion * width, dtype=self.dtype, name="up")(y)
        return x + nn.Dense(width, dtype=self.dtype, name="down")(nn.gelu(y))


class ResidualMLP(nn.Module):
    """Features ``(batch, features)`` to logits ``(batch, classes)``."""

    width: int = 1024
    layers: int = 32
    expansion: int = 4
    classes: int = 10
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.width, dtype=self.dtype, name="inputs")(x)
        for i in range(self.layers):
            x = Block(self.expansion, self.dtype, name=f"block_{i}")(x)
        x = nn.LayerNorm(dtype=self.dtype, name="norm")(x)
        return nn.Dense(self.classes, dtype=self.dtype, name="head")(x)


def build(
    policy=None,
    *,
    batch=1024,
    features=784,
    width=1024,
    layers=32,
    expansion=4,
    classes=10,
    dtype="f32",
    materialize=False,
    seed=0,
):
    """Return ``(loss_fn, args)`` for one training batch: ``loss_fn(params, inputs, labels)``.

    >>> loss_fn, args = build(batch=4, width=8)
    >>> jax.eval_shape(loss_fn, *args)
    ShapeDtypeStruct(shape=(), dtype=float32)
    >>> args[0]["block_31"]["up"]["kernel"]
    ShapeDtypeStruct(shape=(8, 32), dtype=float32)

    Args:
      policy: what to save in each block, as ``remat_kit.policy`` takes it; None leaves JAX's rule.
      batch, features: examples per batch, and numbers in each.
      width, layers: of the residual stream, and number of blocks along it.
      expansion: width of a block's middle, in widths of the stream.
      classes: number of logits.
      dtype: of the computation, "f32" or "bf16"; parameters and the loss are float32.
      materialize: return seeded arrays in place of ``jax.ShapeDtypeStruct``.
      seed: the seed of those arrays.

    Raises:
      ValueError: if a size is unknown or out of range; the message says what is allowed.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    sizes = {"batch": batch, "features": features, "width": width, "layers": layers}
    for name, value in (sizes | {"expansion": expansion, "classes": classes}).items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: must be a positive whole number")

    model = ResidualMLP(width, layers, expansion, classes, DTYPES[dtype])

    def loss_fn(params, inputs, labels):
        logits = jnp.asarray(model.apply({"params": params}, inputs), jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def make_args():
        keys = jax.random.split(jax.random.key(seed), 3)
        inputs = jax.random.normal(keys[1], (batch, features))
        labels = jax.random.randint(keys[2], (batch,), 0, classes)
        return model.init(keys[0], inputs)["params"], inputs, labels

    args = make_args() if materialize else jax.eval_shape(make_args)
    if policy is not None:
        import remat_kit

        loss_fn = remat_kit.policy(policy, at=BLOCKS)(loss_fn)
    return loss_fn, args
