"""The U-Net for segmentation, with unpadded convolutions, in Flax Linen.

Ronneberger et al., "U-Net: convolutional networks for biomedical image segmentation", MICCAI 2015,
https://arxiv.org/abs/1505.04597: an image of 572x572 pixels gives classes for the 388x388 in its
middle. Images are NHWC. The dropout at the end of the contracting path is left out.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

BLOCKS = "*/block_*"  # the paths a policy is applied to

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


class Block(nn.Module):
    """Two unpadded 3x3 convolutions, each with a ReLU: four pixels less along each side."""

    features: int
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, *images):
        x = jnp.concatenate(images, axis=-1)
        for name in ("conv_1", "conv_2"):
            conv = nn.Conv(
                self.features,
                (3, 3),
                padding="VALID",
                dtype=self.dtype,
                kernel_init=nn.initializers.he_normal(),
                name=name,
            )
            x = nn.relu(conv(x))
        return x


def _middle(x, pixels):
    """The middle of an image, of so many pixels along each side."""
    edge = (x.shape[1] - pixels) // 2
    return x[:, edge : edge + pixels, edge : edge + pixels]


class UNet(nn.Module):
    """Images ``(batch, image, image, channels)`` to logits ``(batch, output, output, classes)``."""

    classes: int = 2
    width: int = 64
    levels: int = 4
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x):
        passed = []
        for i in range(self.levels):
            x = Block(self.width * 2**i, self.dtype, name=f"block_down_{i}")(x)
            passed.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = Block(self.width * 2**self.levels, self.dtype, name="block_bottom")(x)
        for i in reversed(range(self.levels)):
            features = self.width * 2**i
            x = nn.ConvTranspose(features, (2, 2), (2, 2), dtype=self.dtype, name=f"up_{i}")(x)
            across = _middle(passed[i], x.shape[1])
            x = Block(features, self.dtype, name=f"block_up_{i}")(across, x)
        return nn.Conv(self.classes, (1, 1), dtype=self.dtype, name="head")(x)


def output_pixels(image, levels=4):
    """Return how many pixels along each side get classes; 0 if the image does not fit the levels.

    >>> output_pixels(572), output_pixels(573)
    (388, 0)
    """
    for _ in range(levels):
        image -= 4
        if image % 2:
            return 0
        image //= 2
    image -= 4
    for _ in range(levels):
        image = 2 * image - 4
    return max(image, 0)


def build(
    policy=None,
    *,
    batch=1,
    image=572,
    channels=1,
    classes=2,
    width=64,
    levels=4,
    dtype="f32",
    materialize=False,
    seed=0,
):
    """Return ``(loss_fn, args)`` for one training batch: ``loss_fn(params, images, labels)``.

    ``labels`` are those of the pixels in the middle, ``(batch, output, output)``.

    >>> loss_fn, args = build()
    >>> jax.eval_shape(loss_fn, *args)
    ShapeDtypeStruct(shape=(), dtype=float32)
    >>> args[2]
    ShapeDtypeStruct(shape=(1, 388, 388), dtype=int32)

    Args:
      policy: what to save in each block, as ``remat_kit.policy`` takes it; None leaves JAX's rule.
      batch, image, channels: images per batch, pixels along each side of one, and their channels.
      classes: number of logits of a pixel.
      width: channels of the first level; each one below has twice as many.
      levels: number of times that the image is halved.
      dtype: of the computation, "f32" or "bf16"; parameters and the loss are float32.
      materialize: return seeded arrays in place of ``jax.ShapeDtypeStruct``.
      seed: the seed of those arrays.

    Raises:
      ValueError: if a size is unknown or out of range; the message says what is allowed.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    sizes = {"batch": batch, "image": image, "channels": channels, "classes": classes}
    for name, value in (sizes | {"width": width, "levels": levels}).items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}={value!r}: must be a positive whole number")
    output = output_pixels(image, levels)
    if not output:
        # Every level takes 4 pixels, then halves: image sizes that fit are this far apart.
        apart = 2**levels
        first = next(n for n in range(1, 16 * apart) if output_pixels(n, levels))
        fits = first if image < first else image - (image - first) % apart
        raise ValueError(
            f"image={image!r}: must be {first} pixels or more in steps of {apart}, such as {fits}"
        )

    model = UNet(classes, width, levels, DTYPES[dtype])

    def loss_fn(params, images, labels):
        logits = jnp.asarray(model.apply({"params": params}, images), jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def make_args():
        keys = jax.random.split(jax.random.key(seed), 3)
        images = jax.random.normal(keys[1], (batch, image, image, channels))
        labels = jax.random.randint(keys[2], (batch, output, output), 0, classes)
        return model.init(keys[0], images)["params"], images, labels

    args = make_args() if materialize else jax.eval_shape(make_args)
    if policy is not None:
        import remat_kit

        loss_fn = remat_kit.policy(policy, at=BLOCKS)(loss_fn)
    return loss_fn, args
