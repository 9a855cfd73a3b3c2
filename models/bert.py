"""BERT-Base and BERT-Large with both pre-training heads, in Flax Linen.

Devlin et al., "BERT: pre-training of deep bidirectional transformers for language understanding",
NAACL 2019, https://arxiv.org/abs/1810.04805: post-norm encoder layers, masked-token prediction at a
fixed number of positions per sequence, and next-sentence prediction. The layers are unrolled, or
scanned with their parameters stacked.
"""

import dataclasses
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

BLOCKS = "*/block_*"  # the paths a policy is applied to, unrolled ("block_3") or not ("block_scan")

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
SEGMENTS = 2  # kinds of token: of the first sentence, and of the second


def _positive(name, value):
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}: must be a positive whole number")


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of one model; ``dtype`` is that of the computation, parameters are float32."""

    layers: int
    width: int
    heads: int
    vocab: int = 30522
    seq: int = 512
    predictions: int = 80
    dtype: str = "f32"
    dropout: float = 0.1
    scan: bool = False
    stream: jax.sharding.NamedSharding | None = None

    def __post_init__(self):
        for name in ("layers", "width", "heads", "vocab", "seq", "predictions"):
            _positive(name, getattr(self, name))
        if self.width % self.heads:
            raise ValueError(
                f"heads={self.heads} does not divide width={self.width}: must be a divisor of it"
            )
        if self.predictions > self.seq:
            raise ValueError(f"predictions={self.predictions}: must be at most seq={self.seq}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: must be one of {', '.join(DTYPES)}")
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout!r}: must be a rate in [0, 1)")
        if not isinstance(self.scan, bool):
            raise ValueError(f"scan={self.scan!r}: must be True or False")


# The uncased models as published. The second phase of their training has sequences of 512 tokens
# and predicts at most 80 of them.
SIZES = {
    "tiny": Config(layers=2, width=32, heads=4, vocab=128, seq=16, predictions=4),
    "base": Config(layers=12, width=768, heads=12),
    "large": Config(layers=24, width=1024, heads=16),
}

# -- a mesh of several devices ------------------------------------------------------------------

SHARDINGS = ("dp", "fsdp", "tp", "fsdp+tp")

# The mesh axis that each dimension of a parameter may be split over, by the end of its path: over
# "data" with fsdp, over "model" with tp. Scanned layers have one dimension more in front, and
# what is not listed is whole on every device.
SPLITS = {
    "query/kernel": ("data", "model", None),
    "key/kernel": ("data", "model", None),
    "value/kernel": ("data", "model", None),
    "query/bias": ("model", None),
    "key/bias": ("model", None),
    "value/bias": ("model", None),
    "out/kernel": ("model", None, "data"),
    "up/kernel": ("data", "model"),
    "up/bias": ("model",),
    "down/kernel": ("model", "data"),
    "words/embedding": ("model", "data"),
    "positions/embedding": (None, "data"),
    "pooler/kernel": ("data", "model"),
    "transform/kernel": ("data", "model"),
}


def _mesh_of(mesh, materialize):
    """Return the mesh that ``"data=8,model=8"`` describes: its devices are there or abstract."""
    if not isinstance(mesh, str):
        return mesh
    try:
        sizes = {name: int(size) for name, size in (a.split("=") for a in mesh.split(","))}
    except ValueError:
        sizes = {}
    if not sizes or min(sizes.values()) < 1:
        raise ValueError(f"mesh={mesh!r}: must be axes and their sizes, as in 'data=8,model=8'")
    kinds = (jax.sharding.AxisType.Auto,) * len(sizes)
    if materialize:
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), kinds)
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


def _check_sharding(mesh, sharding):
    if sharding not in SHARDINGS:
        raise ValueError(f"sharding={sharding!r}: must be one of {', '.join(SHARDINGS)}")
    needed = ["data"] if sharding != "tp" else []
    needed += ["model"] if "tp" in sharding else []
    missing = [axis for axis in needed if axis not in mesh.shape]
    if missing:
        raise ValueError(f"sharding={sharding!r}: needs a mesh with the axis {missing[0]!r}")


def _spec(axes, shape, mesh, used):
    """Return a partition; a dimension that its axis does not divide stays whole."""
    axes = (None,) * (len(shape) - len(axes)) + tuple(axes)
    return jax.sharding.PartitionSpec(
        *(
            axis if axis in used and axis in mesh.shape and n % mesh.shape[axis] == 0 else None
            for axis, n in zip(axes, shape)
        )
    )


def _on_mesh(args, mesh, sharding, batch):
    """Return the parameters and the batch with their shardings."""
    used = {"fsdp": ("data",), "tp": ("model",), "fsdp+tp": ("data", "model")}.get(sharding, ())

    def place(leaf, spec):
        there = jax.sharding.NamedSharding(mesh, spec)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(sharding=there)
        return jax.device_put(leaf, there)

    def parameter(path, leaf):
        names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
        if names[-1] in ("value", "raw_value"):  # the array inside of an NNX variable
            names.pop()
        end = "/".join(names[-2:])
        return place(leaf, _spec(SPLITS.get(end, ()), leaf.shape, mesh, used))

    def row(leaf):
        is_batch = leaf.ndim and leaf.shape[0] == batch and leaf.dtype == jnp.int32
        axes = ("data", *(None,) * (leaf.ndim - 1)) if is_batch else ()
        return place(leaf, _spec(axes, leaf.shape, mesh, ("data",)))

    params, *rest = args
    return jax.tree_util.tree_map_with_path(parameter, params), *map(row, rest)


def _stream(mesh, sharding, batch, seq):
    """Return the sharding of what one layer hands to the next: rows, with tp positions too."""
    used = ("data", "model") if "tp" in sharding else ("data",)
    spec = _spec(("data", "model", None), (batch, seq, 1), mesh, used)
    return jax.sharding.NamedSharding(mesh, spec)


def _split(x, stream):
    return x if stream is None else jax.lax.with_sharding_constraint(x, stream)


_INIT = nn.initializers.normal(0.02)
_gelu = partial(nn.gelu, approximate=False)


class Attention(nn.Module):
    """Self-attention with separate query, key and value projections; ``mask`` says what to see."""

    config: Config

    @nn.compact
    def __call__(self, x, mask):
        c = self.config
        dtype = DTYPES[c.dtype]
        heads = (c.heads, c.width // c.heads)

        def project(name):
            y = nn.DenseGeneral(heads, dtype=dtype, kernel_init=_INIT, name=name)(x)
            return checkpoint_name(y, f"{name}_proj")

        query, key, value = project("query"), project("key"), project("value")
        scores = jnp.einsum("bqhd,bkhd->bhqk", query * heads[1] ** -0.5, key)
        scores = jnp.where(mask[:, None, None, :], scores.astype(jnp.float32), -1e9)
        weights = jax.nn.softmax(scores).astype(dtype)
        weights = nn.Dropout(c.dropout, deterministic=not c.dropout, name="dropout")(weights)
        context = checkpoint_name(jnp.einsum("bhqk,bkhd->bqhd", weights, value), "context")
        out = nn.DenseGeneral(c.width, (-2, -1), dtype=dtype, kernel_init=_INIT, name="out")
        return checkpoint_name(out(context), "out_proj")


class Feedforward(nn.Module):
    """Two dense layers, four times the width between them, around a GELU."""

    config: Config

    @nn.compact
    def __call__(self, x):
        c = self.config
        dtype = DTYPES[c.dtype]
        x = nn.Dense(4 * c.width, dtype=dtype, kernel_init=_INIT, name="up")(x)
        x = _gelu(checkpoint_name(x, "mlpwi"))
        x = nn.Dense(c.width, dtype=dtype, kernel_init=_INIT, name="down")(x)
        return checkpoint_name(x, "mlpwo")


class Block(nn.Module):
    """One encoder layer; it returns a pair so that ``nn.scan`` can take it as it is."""

    config: Config

    @nn.compact
    def __call__(self, x, mask):
        c = self.config
        norm = partial(nn.LayerNorm, epsilon=1e-12, dtype=DTYPES[c.dtype])
        drop = nn.Dropout(c.dropout, deterministic=not c.dropout, name="dropout")
        x = checkpoint_name(_split(x, c.stream), "layer_input")
        y = drop(Attention(c, name="attn")(x, mask))
        x = norm(name="ln_1")(x + checkpoint_name(y, "attn_out"))
        y = drop(Feedforward(c, name="mlp")(x))
        return norm(name="ln_2")(x + y), None


class BERT(nn.Module):
    """Tokens and segments ``(batch, seq)``, positions ``(batch, predictions)`` to both logits.

    The first are ``(batch, predictions, vocab)``, of the tokens at those positions; the second are
    ``(batch, 2)``, of whether the second segment follows the first. Token 0 is padding, which
    nothing attends to.
    """

    config: Config

    @nn.compact
    def __call__(self, tokens, segments, positions):
        c = self.config
        dtype = DTYPES[c.dtype]
        norm = partial(nn.LayerNorm, epsilon=1e-12, dtype=dtype)
        dense = partial(nn.Dense, dtype=dtype, kernel_init=_INIT)
        embed = partial(nn.Embed, features=c.width, dtype=dtype, embedding_init=_INIT)
        words = embed(c.vocab, name="words")
        x = words(tokens) + embed(SEGMENTS, name="segments")(segments)
        x = x + embed(c.seq, name="positions")(jnp.arange(tokens.shape[1]))[None]
        drop = nn.Dropout(c.dropout, deterministic=not c.dropout, name="dropout")
        x = drop(norm(name="ln")(x))
        mask = tokens != 0
        if c.scan:
            layers = nn.scan(
                Block,
                variable_axes={"params": 0},
                split_rngs={"params": True, "dropout": True},
                in_axes=nn.broadcast,  # pyright: ignore[reportArgumentType]
                length=c.layers,
            )
            x, _ = layers(c, name="block_scan")(x, mask)
        else:
            for i in range(c.layers):
                x, _ = Block(c, name=f"block_{i}")(x, mask)
        pooled = jnp.tanh(dense(c.width, name="pooler")(x[:, 0]))
        follows = dense(2, name="next_sentence")(pooled)
        x = jnp.take_along_axis(x, positions[..., None], axis=1)
        x = norm(name="ln_tokens")(_gelu(dense(c.width, name="transform")(x)))
        bias = self.param("bias", nn.initializers.zeros, (c.vocab,))
        return words.attend(x) + bias.astype(dtype)[None, None], follows


def config_of(size, **overrides):
    """Return the ``Config`` of a preset, with every override that is not None put in.

    >>> config_of("large", layers=2).width
    1024
    """
    if size not in SIZES:
        raise ValueError(f"size={size!r}: must be one of {', '.join(SIZES)}")
    given = {name: value for name, value in overrides.items() if value is not None}
    return dataclasses.replace(SIZES[size], **given)


def build(
    policy=None,
    *,
    size="base",
    batch=8,
    layers=None,
    width=None,
    heads=None,
    vocab=None,
    seq=None,
    predictions=None,
    dtype="f32",
    dropout=0.1,
    scan=False,
    mesh=None,
    sharding=None,
    materialize=False,
    seed=0,
):
    """Return ``(loss_fn, args)`` for one batch of pre-training.

    It is called as ``loss_fn(params, tokens, segments, positions, targets, follows, key)``, with
    ``tokens`` and ``segments`` of ``(batch, seq)``, ``positions`` and ``targets`` of ``(batch,
    predictions)`` and ``follows`` of ``(batch,)``. Without dropout there is no ``key``, the random
    key of the step (``jax.random.PRNGKey``).

    >>> loss_fn, args = build(size="tiny", batch=2, scan=True)
    >>> jax.eval_shape(loss_fn, *args)
    ShapeDtypeStruct(shape=(), dtype=float32)
    >>> args[0]["block_scan"]["mlp"]["up"]["kernel"]
    ShapeDtypeStruct(shape=(2, 32, 128), dtype=float32)

    Args:
      policy: what to save in each layer, as ``remat_kit.policy`` takes it; None leaves JAX's rule.
      size: a preset, one of ``SIZES``.
      batch: sequences per batch.
      layers, width, heads, vocab, seq, predictions: override the preset.
      dtype: of the computation, "f32", "bf16" or "f16"; parameters and the loss are float32.
      dropout: rate on embeddings, attention weights and both residual branches.
      scan: run the layers as one ``nn.scan`` with stacked parameters, not unrolled.
      mesh: the axes of a mesh and their sizes, as in ``"data=8,model=8"``, or a mesh. The arguments
        then have shardings over it, and the batch is split over ``data``.
      sharding: what is split besides: nothing ("dp"), the parameters over ``data`` ("fsdp"), heads
        and hidden units over ``model`` ("tp"), or both ("fsdp+tp").
      materialize: return seeded arrays in place of ``jax.ShapeDtypeStruct``.
      seed: the seed of those arrays.

    Raises:
      ValueError: if a size is unknown or out of range; the message says what is allowed.
    """
    _positive("batch", batch)
    if sharding is not None and mesh is None:
        raise ValueError(f"sharding={sharding!r}: needs a mesh, as in mesh='data=8,model=8'")
    config = config_of(
        size,
        layers=layers,
        width=width,
        heads=heads,
        vocab=vocab,
        seq=seq,
        predictions=predictions,
        dtype=dtype,
        dropout=dropout,
        scan=scan,
    )
    if mesh is not None:
        mesh, sharding = _mesh_of(mesh, materialize), sharding or "dp"
        _check_sharding(mesh, sharding)
        stream = _stream(mesh, sharding, batch, config.seq)
        config = dataclasses.replace(config, stream=stream)
    model = BERT(config)

    def loss_fn(params, tokens, segments, positions, targets, follows, *key):
        rngs = {"dropout": key[0]} if key else {}
        logits = model.apply({"params": params}, tokens, segments, positions, rngs=rngs)
        losses = [
            optax.softmax_cross_entropy_with_integer_labels(
                jnp.asarray(x, jnp.float32), labels
            ).mean()
            for x, labels in zip(logits, (targets, follows))
        ]
        return losses[0] + losses[1]

    def make_args():
        init, drawn, placed, aimed, paired, step = jax.random.split(jax.random.PRNGKey(seed), 6)
        tokens = jax.random.randint(drawn, (batch, config.seq), 1, config.vocab)
        halves = jnp.arange(config.seq) >= config.seq // 2
        segments = jnp.broadcast_to(halves.astype(jnp.int32)[None], tokens.shape)
        shape = (batch, config.predictions)
        order = jnp.argsort(jax.random.uniform(placed, tokens.shape), axis=1)
        positions = order[:, : config.predictions].astype(jnp.int32)
        targets = jax.random.randint(aimed, shape, 1, config.vocab)
        follows = jax.random.randint(paired, (batch,), 0, 2)
        rngs = {"params": init, "dropout": step}
        params = model.init(rngs, tokens, segments, positions)["params"]
        args = (params, tokens, segments, positions, targets, follows, step)
        return args[: 7 if config.dropout else 6]

    # Parameters are initialized on one device, where a sharding over several would be refused.
    args = make_args() if materialize else jax.eval_shape(make_args)
    if mesh is not None:
        args = _on_mesh(args, mesh, sharding, batch)
    if policy is not None:
        import remat_kit

        loss_fn = remat_kit.policy(policy, at=BLOCKS)(loss_fn)
    return loss_fn, args
