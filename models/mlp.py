"""The MNIST network of MindSpore's recomputation tutorial: 784-512-512-10, in Flax Linen.

The repeated block begins at the pre-activation (ReLU, then Dense), so that a recomputed ReLU is
one that feeds its own Dense's weight gradient.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

BLOCKS = "*/block_*"  # the paths a policy is applied to


class Block(nn.Module):
    """ReLU, then a dense layer."""

    features: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.features, name="dense")(nn.relu(x))


class MLP(nn.Module):
    """A dense layer, ``layers - 1`` hidden blocks, and a last block that gives the logits."""

    hidden: int = 512
    layers: int = 2
    classes: int = 10

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.hidden, name="inputs")(x)
        for i in range(self.layers):
            last = i == self.layers - 1
            x = Block(self.classes if last else self.hidden, name=f"block_{i}")(x)
        return x


def build(
    policy=None,
    *,
    batch=32,
    features=784,
    hidden=512,
    layers=2,
    classes=10,
    materialize=False,
    seed=0,
):
    """Return ``(loss_fn, args)`` for one training batch: ``loss_fn(params, images, labels)``.

    >>> loss_fn, args = build(batch=4)
    >>> jax.eval_shape(loss_fn, *args)
    ShapeDtypeStruct(shape=(), dtype=float32)
    >>> args[1:]
    (ShapeDtypeStruct(shape=(4, 784), dtype=float32), ShapeDtypeStruct(shape=(4,), dtype=int32))

    Args:
      policy: what to save in each block, as ``remat_kit.policy`` takes it; None leaves JAX's rule.
      batch, features: images per batch, and pixels per image.
      hidden, layers: width, and number of hidden layers (ReLUs).
      classes: number of logits.
      materialize: return seeded arrays in place of ``jax.ShapeDtypeStruct``.
      seed: the seed of those arrays.

    Raises:
      ValueError: if a size is not a positive whole number.
    """
    sizes = {"batch": batch, "features": features, "hidden": hidden, "layers": layers}
    for name, value in (sizes | {"classes": classes}).items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: must be a positive whole number")

    model = MLP(hidden, layers, classes)

    def loss_fn(params, images, labels):
        logits = jnp.asarray(model.apply({"params": params}, images), jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def make_args():
        keys = jax.random.split(jax.random.key(seed), 3)
        images = jax.random.normal(keys[1], (batch, features))
        labels = jax.random.randint(keys[2], (batch,), 0, classes)
        return model.init(keys[0], images)["params"], images, labels

    args = make_args() if materialize else jax.eval_shape(make_args)
    if policy is not None:
        import remat_kit

        loss_fn = remat_kit.policy(policy, at=BLOCKS)(loss_fn)
    return loss_fn, args
