"""A GPT-2/GPT-3 decoder in Flax Linen: pre-norm, learned positions, causal attention, GELU.

Radford et al., "Language models are unsupervised multitask learners", 2019; Brown et al.,
"Language models are few-shot learners", NeurIPS 2020, https://arxiv.org/abs/2005.14165.
The layers are unrolled, or scanned with their parameters stacked. GPT-3's alternating sparse
attention is left out: every layer here is dense.
"""

import dataclasses

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
    vocab: int = 50257
    seq: int = 1024
    dtype: str = "f32"
    dropout: float = 0.0
    tied: bool = True
    scan: bool = False
    stream: jax.sharding.NamedSharding | None = None

    def __post_init__(self):
        for name in ("layers", "width", "heads", "vocab", "seq"):
            _positive(name, getattr(self, name))
        if self.width % self.heads:
            raise ValueError(
                f"heads={self.heads} does not divide width={self.width}: must be a divisor of it"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: must be one of {', '.join(DTYPES)}")
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout!r}: must be a rate in [0, 1)")
        for name in ("tied", "scan"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be True or False")


# GPT-2 as published. GPT-3 as in table 2.1 of its paper, but with the head count that makes the
# heads of "1.3b" 128 wide, as the table says they are, and with a "13b" that 40 heads divide.
# "72l" has the depth of MindSpore's recomputation example: 72 of the "350m" blocks.
SIZES = {
    "tiny": Config(layers=2, width=32, heads=4, vocab=128, seq=16),
    "small": Config(layers=12, width=768, heads=12),
    "medium": Config(layers=24, width=1024, heads=16),
    "large": Config(layers=36, width=1280, heads=20),
    "xl": Config(layers=48, width=1600, heads=25),
    "350m": Config(layers=24, width=1024, heads=16, seq=2048),
    "760m": Config(layers=24, width=1536, heads=16, seq=2048),
    "1.3b": Config(layers=24, width=2048, heads=16, seq=2048),
    "2.7b": Config(layers=32, width=2560, heads=32, seq=2048),
    "6.7b": Config(layers=32, width=4096, heads=32, seq=2048),
    "13b": Config(layers=40, width=5120, heads=40, seq=2048),
    "175b": Config(layers=96, width=12288, heads=96, seq=2048),
    "72l": Config(layers=72, width=1024, heads=16),
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
    "wte/embedding": ("model", "data"),
    "wpe/embedding": (None, "data"),
    "head/kernel": ("data", "model"),
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


# With explicit axes, the type of an array says how it is split, and an operation whose result could
# be split in several ways is an error. The parameters are gathered before they are used, as XLA
# does by itself with automatic axes, and a lookup says how its result is split.


def _with_explicit_axes(mesh, sharding):
    if "tp" in sharding:
        raise ValueError(f"sharding={sharding!r}: must be 'dp' or 'fsdp' with explicit=True")
    kinds = (jax.sharding.AxisType.Explicit,) * len(mesh.axis_names)
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return jax.sharding.AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=kinds)


def _is_explicit(stream):
    return stream is not None and jax.sharding.AxisType.Explicit in stream.mesh.axis_types


def _begin(x, stream):
    return jax.sharding.reshard(x, stream) if _is_explicit(stream) else _split(x, stream)


def _whole(parameter, stream):
    if not _is_explicit(stream):
        return parameter
    everywhere = jax.sharding.PartitionSpec()
    return jax.sharding.reshard(parameter, jax.sharding.NamedSharding(stream.mesh, everywhere))


def _dot_general(stream):
    """Return the ``dot_general`` of a dense layer, or None for that of JAX."""
    if not _is_explicit(stream):
        return None

    def dot_general(x, kernel, *args, **kwargs):
        return jax.lax.dot_general(x, _whole(kernel, stream), *args, **kwargs)

    return dot_general


def _lookup(embed, indices, stream, split):
    """Return rows of an ``nn.Embed``; ``split`` are the mesh axes of the result's dimensions."""
    if not _is_explicit(stream):
        return embed(indices)
    table = _whole(jnp.asarray(embed.embedding, embed.dtype), stream)
    spec = jax.sharding.PartitionSpec(*split)
    place = jax.sharding.NamedSharding(stream.mesh, spec)
    return table.at[indices].get(out_sharding=place)


def _cross_entropy(logits, labels, stream):
    if not _is_explicit(stream):
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    # The lookup of a label's logit has a derivative whose split is ambiguous.
    is_label = labels[..., None] == jnp.arange(logits.shape[-1])[None, None]
    return jax.nn.logsumexp(logits, -1) - jnp.where(is_label, logits, 0).sum(-1)


def _init(scale=1.0):
    return nn.initializers.normal(0.02 * scale)


class Attention(nn.Module):
    """Causal self-attention with separate query, key and value projections."""

    config: Config

    @nn.compact
    def __call__(self, x):
        c = self.config
        dtype = DTYPES[c.dtype]
        heads = (c.heads, c.width // c.heads)

        def project(name):
            kinds = {"dtype": dtype, "dot_general": _dot_general(c.stream)}
            y = nn.DenseGeneral(heads, kernel_init=_init(), name=name, **kinds)(x)
            return checkpoint_name(y, f"{name}_proj")

        query, key, value = project("query"), project("key"), project("value")
        scores = jnp.einsum("bqhd,bkhd->bhqk", query * heads[1] ** -0.5, key)
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))[None, None]
        scores = jnp.where(causal, scores.astype(jnp.float32), -jnp.inf)
        weights = jax.nn.softmax(scores).astype(dtype)
        weights = nn.Dropout(c.dropout, deterministic=not c.dropout, name="dropout")(weights)
        context = checkpoint_name(jnp.einsum("bhqk,bkhd->bqhd", weights, value), "context")
        out_init = _init((2 * c.layers) ** -0.5)
        kinds = {"dtype": dtype, "dot_general": _dot_general(c.stream)}
        out = nn.DenseGeneral(c.width, (-2, -1), kernel_init=out_init, name="out", **kinds)
        return checkpoint_name(out(context), "out_proj")


class Feedforward(nn.Module):
    """Two dense layers, four times the width between them, around a GELU."""

    config: Config

    @nn.compact
    def __call__(self, x):
        c = self.config
        kinds = {"dtype": DTYPES[c.dtype], "dot_general": _dot_general(c.stream)}
        x = nn.Dense(4 * c.width, kernel_init=_init(), name="up", **kinds)(x)
        x = nn.gelu(checkpoint_name(x, "mlpwi"))
        down_init = _init((2 * c.layers) ** -0.5)
        x = nn.Dense(c.width, kernel_init=down_init, name="down", **kinds)(x)
        return checkpoint_name(x, "mlpwo")


class Block(nn.Module):
    """One decoder layer; it returns a pair so that ``nn.scan`` can take it as it is."""

    config: Config

    @nn.compact
    def __call__(self, x, _=None):
        c = self.config
        dtype = DTYPES[c.dtype]
        drop = nn.Dropout(c.dropout, deterministic=not c.dropout, name="dropout")
        x = checkpoint_name(_begin(x, c.stream), "decoder_layer_input")
        y = Attention(c, name="attn")(nn.LayerNorm(dtype=dtype, name="ln_1")(x))
        x = x + checkpoint_name(drop(y), "attn_out")
        y = Feedforward(c, name="mlp")(nn.LayerNorm(dtype=dtype, name="ln_2")(x))
        return x + drop(y), None


class GPT(nn.Module):
    """Tokens ``(batch, seq)`` to logits ``(batch, seq, vocab)``."""

    config: Config

    @nn.compact
    def __call__(self, tokens):
        c = self.config
        dtype = DTYPES[c.dtype]
        embed = nn.Embed(c.vocab, c.width, dtype=dtype, embedding_init=_init(), name="wte")
        positions = nn.Embed(c.seq, c.width, dtype=dtype, embedding_init=_init(), name="wpe")
        x = _lookup(embed, tokens, c.stream, ("data", None, None))
        x = x + _lookup(positions, jnp.arange(tokens.shape[1]), c.stream, (None, None))[None]
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
        x = nn.LayerNorm(dtype=dtype, name="ln_f")(x)
        if c.tied and not _is_explicit(c.stream):
            return embed.attend(x)
        if c.tied:
            return jnp.dot(x, _whole(jnp.asarray(embed.embedding, dtype), c.stream).T)
        kinds = {"dtype": dtype, "dot_general": _dot_general(c.stream)}
        return nn.Dense(c.vocab, False, kernel_init=_init(), name="head", **kinds)(x)


def config_of(size, **overrides):
    """Return the ``Config`` of a preset, with every override that is not None put in.

    >>> config_of("small", layers=2).width
    768
    """
    if size not in SIZES:
        raise ValueError(f"size={size!r}: must be one of {', '.join(SIZES)}")
    given = {name: value for name, value in overrides.items() if value is not None}
    return dataclasses.replace(SIZES[size], **given)


def build(
    policy=None,
    *,
    size="small",
    batch=8,
    layers=None,
    width=None,
    heads=None,
    vocab=None,
    seq=None,
    dtype="f32",
    dropout=0.0,
    tied=True,
    scan=False,
    mesh=None,
    sharding=None,
    explicit=False,
    materialize=False,
    seed=0,
):
    """Return ``(loss_fn, args)`` for one training batch: ``loss_fn(params, tokens)``.

    ``tokens`` is ``(batch, seq + 1)``: each position predicts the next token. With dropout there
    is a third argument, the random key of the step (``jax.random.PRNGKey``).

    >>> loss_fn, args = build(size="tiny", batch=2, scan=True)
    >>> jax.eval_shape(loss_fn, *args)
    ShapeDtypeStruct(shape=(), dtype=float32)
    >>> args[0]["block_scan"]["mlp"]["up"]["kernel"]
    ShapeDtypeStruct(shape=(2, 32, 128), dtype=float32)

    Args:
      policy: what to save in each layer, as ``remat_kit.policy`` takes it; None leaves JAX's rule.
      size: a preset, one of ``SIZES``.
      batch: sequences per batch.
      layers, width, heads, vocab, seq: override the preset.
      dtype: of the computation, "f32" or "bf16"; parameters and the loss are float32.
      dropout: rate on embeddings, attention weights and both residual branches.
      tied: use the token embedding as the output layer.
      scan: run the layers as one ``nn.scan`` with stacked parameters, not unrolled.
      mesh: the axes of a mesh and their sizes, as in ``"data=8,model=8"``, or a mesh. The arguments
        then have shardings over it, and the batch is split over ``data``.
      sharding: what is split besides: nothing ("dp"), the parameters over ``data`` ("fsdp"), heads
        and hidden units over ``model`` ("tp"), or both ("fsdp+tp").
      explicit: whether the axes of the mesh are explicit (``jax.sharding.AxisType.Explicit``), so
        that the shardings of all values are in their types; for "dp" and "fsdp".
      materialize: return seeded arrays in place of ``jax.ShapeDtypeStruct``.
      seed: the seed of those arrays.

    Raises:
      ValueError: if a size is unknown or out of range; the message says what is allowed.
    """
    _positive("batch", batch)
    if sharding is not None and mesh is None:
        raise ValueError(f"sharding={sharding!r}: needs a mesh, as in mesh='data=8,model=8'")
    if explicit and mesh is None:
        raise ValueError("explicit=True: needs a mesh, as in mesh='data=8'")
    config = config_of(
        size,
        layers=layers,
        width=width,
        heads=heads,
        vocab=vocab,
        seq=seq,
        dtype=dtype,
        dropout=dropout,
        tied=tied,
        scan=scan,
    )
    if mesh is not None:
        mesh, sharding = _mesh_of(mesh, materialize), sharding or "dp"
        _check_sharding(mesh, sharding)
        mesh = _with_explicit_axes(mesh, sharding) if explicit else mesh
        stream = _stream(mesh, sharding, batch, config.seq)
        config = dataclasses.replace(config, stream=stream)
    model = GPT(config)
    initial = GPT(dataclasses.replace(config, stream=None))

    def loss_fn(params, tokens, *key):
        rngs = {"dropout": key[0]} if key else {}
        logits = model.apply({"params": params}, tokens[:, :-1], rngs=rngs)
        logits = jnp.asarray(logits, jnp.float32)
        return _cross_entropy(logits, tokens[:, 1:], config.stream).mean()

    def make_args():
        init, drawn, step = jax.random.split(jax.random.PRNGKey(seed), 3)
        tokens = jax.random.randint(drawn, (batch, config.seq + 1), 0, config.vocab)
        params = initial.init({"params": init, "dropout": step}, tokens[:, :-1])["params"]
        return (params, tokens, step)[: 3 if config.dropout else 2]

    # Parameters are initialized on one device, where a sharding over several would be refused.
    args = make_args() if materialize else jax.eval_shape(make_args)
    if mesh is not None:
        args = _on_mesh(args, mesh, sharding, batch)
    if policy is not None:
        import remat_kit

        loss_fn = remat_kit.policy(policy, at=BLOCKS)(loss_fn)
    return loss_fn, args
