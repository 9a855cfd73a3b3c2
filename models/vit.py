"""A vision transformer in Flax Linen: pre-norm encoder layers over patches and a class token.

Dosovitskiy et al., "An image is worth 16x16 words: transformers for image recognition at scale",
ICLR 2021, https://arxiv.org/abs/2010.11929. Images are NHWC. The layers are unrolled, or scanned
with their parameters stacked.
"""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

BLOCKS = "*/block_*"  # the paths a policy is applied to, unrolled ("block_3") or not ("block_scan")

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


def _positive(name, value):
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}: must be a positive whole number")


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of one model; ``dtype`` is that of the computation, parameters are float32."""

    layers: int
    width: int
    heads: int
    patch: int
    image: int = 224
    classes: int = 1000
    dtype: str = "f32"
    dropout: float = 0.0
    scan: bool = False

    def __post_init__(self):
        for name in ("layers", "width", "heads", "patch", "image", "classes"):
            _positive(name, getattr(self, name))
        if self.width % self.heads:
            raise ValueError(
                f"heads={self.heads} does not divide width={self.width}: must be a divisor of it"
            )
        if self.image % self.patch:
            raise ValueError(f"image={self.image}: must be a multiple of patch={self.patch}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: must be one of {', '.join(DTYPES)}")
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout!r}: must be a rate in [0, 1)")
        if not isinstance(self.scan, bool):
            raise ValueError(f"scan={self.scan!r}: must be True or False")


# Table 1 of the paper, with the sizes of patches that its results name.
SIZES = {
    "tiny": Config(layers=2, width=32, heads=4, patch=4, image=16, classes=10),
    "b16": Config(layers=12, width=768, heads=12, patch=16),
    "b32": Config(layers=12, width=768, heads=12, patch=32),
    "l16": Config(layers=24, width=1024, heads=16, patch=16),
    "l32": Config(layers=24, width=1024, heads=16, patch=32),
    "h14": Config(layers=32, width=1280, heads=16, patch=14),
}


class Attention(nn.Module):
    """Self-attention with separate query, key and value projections."""

    config: Config

    @nn.compact
    def __call__(self, x):
        c = self.config
        dtype = DTYPES[c.dtype]
        heads = (c.heads, c.width // c.heads)

        def project(name):
            return checkpoint_name(
                nn.DenseGeneral(heads, dtype=dtype, name=name)(x), f"{name}_proj"
            )

        query, key, value = project("query"), project("key"), project("value")
        scores = jnp.einsum("bqhd,bkhd->bhqk", query * heads[1] ** -0.5, key)
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(dtype)
        context = checkpoint_name(jnp.einsum("bhqk,bkhd->bqhd", weights, value), "context")
        out = nn.DenseGeneral(c.width, (-2, -1), dtype=dtype, name="out")
        return checkpoint_name(out(context), "out_proj")


class Feedforward(nn.Module):
    """Two dense layers, four times the width between them, around a GELU."""

    config: Config

    @nn.compact
    def __call__(self, x):
        c = self.config
        drop = nn.Dropout(c.dropout, deterministic=not c.dropout, name="dropout")
        x = nn.Dense(4 * c.width, dtype=DTYPES[c.dtype], name="up")(x)
        x = drop(nn.gelu(checkpoint_name(x, "mlpwi"), approximate=False))
        x = nn.Dense(c.width, dtype=DTYPES[c.dtype], name="down")(x)
        return checkpoint_name(x, "mlpwo")


class Block(nn.Module):
    """One encoder layer; it returns a pair so that ``nn.scan`` can take it as it is."""

    config: Config

    @nn.compact
    def __call__(self, x, _=None):
        c = self.config
        norm = partial(nn.LayerNorm, dtype=DTYPES[c.dtype])
        drop = nn.Dropout(c.dropout, deterministic=not c.dropout, name="dropout")
        y = Attention(c, name="attn")(norm(name="ln_1")(x))
        x = x + checkpoint_name(drop(y), "attn_out")
        y = Feedforward(c, name="mlp")(norm(name="ln_2")(x))
        return x + drop(y), None


class ViT(nn.Module):
    """Images ``(batch, image, image, 3)`` to logits ``(batch, classes)``."""

    config: Config

    @nn.compact
    def __call__(self, images):
        c = self.config
        dtype = DTYPES[c.dtype]
        patches = nn.Conv(
            c.width, (c.patch,) * 2, (c.patch,) * 2, padding="VALID", dtype=dtype, name="patches"
        )
        x = patches(images)
        x = x.reshape(x.shape[0], -1, c.width)
        token = self.param("class_token", nn.initializers.zeros, (1, 1, c.width)).astype(dtype)
        x = jnp.concatenate([jnp.broadcast_to(token, (x.shape[0], 1, c.width)), x], axis=1)
        init = nn.initializers.normal(0.02)
        x = x + self.param("positions", init, (1, *x.shape[1:])).astype(dtype)
        x = nn.Dropout(c.dropout, deterministic=not c.dropout, name="dropout")(x)
        if c.scan:
            layers = nn.scan(
                Block,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                length=c.layers,
            )
            x, _ = layers(c, name="block_scan")(x, None)
        else:
            for i in range(c.layers):
                x, _ = Block(c, name=f"block_{i}")(x)
        x = nn.LayerNorm(dtype=dtype, name="ln")(x)
        return nn.Dense(c.classes, dtype=dtype, name="head")(x[:, 0])


def config_of(size, **overrides):
    """Return the ``Config`` of a preset, with every override that is not None put in.

    >>> config_of("b16", layers=2).width
    768
    """
    if size not in SIZES:
        raise ValueError(f"size={size!r}: must be one of {', '.join(SIZES)}")
    given = {name: value for name, value in overrides.items() if value is not None}
    return dataclasses.replace(SIZES[size], **given)


def build(
    policy=None,
    *,
    size="b16",
    batch=64,
    layers=None,
    width=None,
    heads=None,
    patch=None,
    image=None,
    classes=None,
    dtype="f32",
    dropout=0.0,
    scan=False,
    materialize=False,
    seed=0,
):
    """Return ``(loss_fn, args)`` for one training batch: ``loss_fn(params, images, labels)``.

    With dropout there is a fourth argument, the random key of the step (``jax.random.PRNGKey``).

    >>> loss_fn, args = build(size="tiny", batch=2)
    >>> jax.eval_shape(loss_fn, *args)
    ShapeDtypeStruct(shape=(), dtype=float32)
    >>> args[0]["positions"]
    ShapeDtypeStruct(shape=(1, 17, 32), dtype=float32)

    Args:
      policy: what to save in each layer, as ``remat_kit.policy`` takes it; None leaves JAX's rule.
      size: a preset, one of ``SIZES``.
      batch: images per batch.
      layers, width, heads, patch, image, classes: override the preset; ``image`` and ``patch`` are
        pixels along each side.
      dtype: of the computation, "f32" or "bf16"; parameters and the loss are float32.
      dropout: rate on embeddings and after every dense layer, but not on attention weights.
      scan: run the layers as one ``nn.scan`` with stacked parameters, not unrolled.
      materialize: return seeded arrays in place of ``jax.ShapeDtypeStruct``.
      seed: the seed of those arrays.

    Raises:
      ValueError: if a size is unknown or out of range; the message says what is allowed.
    """
    _positive("batch", batch)
    config = config_of(
        size,
        layers=layers,
        width=width,
        heads=heads,
        patch=patch,
        image=image,
        classes=classes,
        dtype=dtype,
        dropout=dropout,
        scan=scan,
    )
    model = ViT(config)

    def loss_fn(params, images, labels, *key):
        rngs = {"dropout": key[0]} if key else {}
        logits = jnp.asarray(model.apply({"params": params}, images, rngs=rngs), jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def make_args():
        init, pixels, classed, step = jax.random.split(jax.random.PRNGKey(seed), 4)
        images = jax.random.normal(pixels, (batch, config.image, config.image, 3))
        labels = jax.random.randint(classed, (batch,), 0, config.classes)
        params = model.init({"params": init, "dropout": step}, images)["params"]
        return (params, images, labels, step)[: 4 if config.dropout else 3]

    args = make_args() if materialize else jax.eval_shape(make_args)
    if policy is not None:
        import remat_kit

        loss_fn = remat_kit.policy(policy, at=BLOCKS)(loss_fn)
    return loss_fn, args
