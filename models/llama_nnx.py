"""A Llama decoder in Flax NNX: RMSNorm, rotary positions, grouped queries, SwiGLU, no biases.

Touvron et al., "Llama 2: open foundation and fine-tuned chat models", 2023,
https://arxiv.org/abs/2307.09288; Grattafiori et al., "The Llama 3 herd of models", 2024,
https://arxiv.org/abs/2407.21783. The layers are unrolled, or scanned with their parameters stacked.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

BLOCKS = "*/block_*"  # the paths a policy is applied to, unrolled ("block_3") or not ("block_scan")

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


def _positive(name, value):
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}: must be a positive whole number")


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of one model; ``dtype`` is that of the computation, parameters are float32.

    ``kv_heads`` is how many heads keys and values have: each serves as many heads of queries.
    ``theta`` is the base of the wavelengths of the rotary positions.
    """

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int = 32000
    seq: int = 4096
    theta: float = 10000.0
    dtype: str = "f32"
    scan: bool = False
    stream: jax.sharding.NamedSharding | None = None

    def __post_init__(self):
        for name in ("layers", "width", "heads", "kv_heads", "hidden", "vocab", "seq"):
            _positive(name, getattr(self, name))
        if self.width % (2 * self.heads):
            raise ValueError(
                f"heads={self.heads} does not divide width={self.width} into heads of even width"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"kv_heads={self.kv_heads} does not divide heads={self.heads}: must be a divisor"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: must be one of {', '.join(DTYPES)}")
        if not isinstance(self.scan, bool):
            raise ValueError(f"scan={self.scan!r}: must be True or False")


# "7b", "13b" and "70b" are Llama 2, "8b" is Llama 3.
SIZES = {
    "tiny": Config(2, width=32, heads=4, kv_heads=2, hidden=88, vocab=128, seq=16),
    "7b": Config(32, width=4096, heads=32, kv_heads=32, hidden=11008),
    "8b": Config(
        32,
        width=4096,
        heads=32,
        kv_heads=8,
        hidden=14336,
        vocab=128256,
        seq=8192,
        theta=500000.0,
    ),
    "13b": Config(40, width=5120, heads=40, kv_heads=40, hidden=13824),
    "70b": Config(80, width=8192, heads=64, kv_heads=8, hidden=28672),
}


# -- a mesh of several devices ------------------------------------------------------------------

SHARDINGS = ("dp", "fsdp", "tp", "fsdp+tp")

# The mesh axis that each dimension of a parameter may be split over, by the end of its path: over
# "data" with fsdp, over "model" with tp. Scanned layers have one dimension more in front, and
# what is not listed is whole on every device.
SPLITS = {
    "query/kernel": ("data", "model", None, None),
    "key/kernel": ("data", "model", None),
    "value/kernel": ("data", "model", None),
    "out/kernel": ("model", None, None, "data"),
    "gate/kernel": ("data", "model"),
    "up/kernel": ("data", "model"),
    "down/kernel": ("model", "data"),
    "embed/embedding": ("model", "data"),
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


def _init(scale=1.0):
    return nnx.initializers.normal(0.02 * scale)


def rotate(x, theta):
    """Turn each pair of ``(batch, seq, ..., d)`` by its position: rotary embedding.

    Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021,
    https://arxiv.org/abs/2104.09864. A pair is an element of the first half of the last axis and
    the one at its place in the second half.

    >>> x = jnp.ones((1, 3, 1, 2))
    >>> bool(jnp.allclose(rotate(x, 10000.0)[0, 2, 0, 1], jnp.sin(2) + jnp.cos(2)))
    True
    """
    half = x.shape[-1] // 2
    speeds = theta ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None] * speeds[None]
    angles = angles.reshape(1, x.shape[1], *(1,) * (x.ndim - 3), half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Causal self-attention; each head of keys and values serves a group of query heads."""

    def __init__(self, config, rngs):
        c = config
        size = c.width // c.heads
        kinds = {"dtype": DTYPES[c.dtype], "use_bias": False, "rngs": rngs}
        groups = (c.kv_heads, c.heads // c.kv_heads, size)
        out_init = _init((2 * c.layers) ** -0.5)
        self.theta = c.theta
        self.query = nnx.LinearGeneral(c.width, groups, kernel_init=_init(), **kinds)
        self.key = nnx.LinearGeneral(c.width, (c.kv_heads, size), kernel_init=_init(), **kinds)
        self.value = nnx.LinearGeneral(c.width, (c.kv_heads, size), kernel_init=_init(), **kinds)
        self.out = nnx.LinearGeneral(
            groups, c.width, axis=(-3, -2, -1), kernel_init=out_init, **kinds
        )

    def __call__(self, x):
        query = checkpoint_name(rotate(self.query(x), self.theta), "query_proj")
        key = checkpoint_name(rotate(self.key(x), self.theta), "key_proj")
        value = checkpoint_name(self.value(x), "value_proj")
        scores = jnp.einsum("bqhgd,bkhd->bhgqk", query * query.shape[-1] ** -0.5, key)
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))[None, None, None]
        scores = jnp.where(causal, scores.astype(jnp.float32), -jnp.inf)
        weights = jax.nn.softmax(scores).astype(value.dtype)
        context = checkpoint_name(jnp.einsum("bhgqk,bkhd->bqhgd", weights, value), "context")
        return checkpoint_name(self.out(context), "out_proj")


class Feedforward(nnx.Module):
    """SwiGLU: a dense layer gated by the SiLU of another one, and a third one back."""

    def __init__(self, config, rngs):
        c = config
        kinds = {"dtype": DTYPES[c.dtype], "use_bias": False, "rngs": rngs}
        down_init = _init((2 * c.layers) ** -0.5)
        self.gate = nnx.Linear(c.width, c.hidden, kernel_init=_init(), **kinds)
        self.up = nnx.Linear(c.width, c.hidden, kernel_init=_init(), **kinds)
        self.down = nnx.Linear(c.hidden, c.width, kernel_init=down_init, **kinds)

    def __call__(self, x):
        gate = checkpoint_name(self.gate(x), "mlpwi_0")
        x = nnx.silu(gate) * checkpoint_name(self.up(x), "mlpwi_1")
        return checkpoint_name(self.down(x), "mlpwo")


class Block(nnx.Module):
    """One decoder layer."""

    def __init__(self, config, rngs):
        c = config
        self.stream = c.stream
        kinds = {"epsilon": 1e-5, "dtype": DTYPES[c.dtype], "rngs": rngs}
        self.norm_1 = nnx.RMSNorm(c.width, **kinds)
        self.attn = Attention(c, rngs)
        self.norm_2 = nnx.RMSNorm(c.width, **kinds)
        self.mlp = Feedforward(c, rngs)

    def __call__(self, x):
        x = checkpoint_name(_split(x, self.stream), "decoder_layer_input")
        x = x + checkpoint_name(self.attn(self.norm_1(x)), "attn_out")
        return x + self.mlp(self.norm_2(x))


class Llama(nnx.Module):
    """Tokens ``(batch, seq)`` to logits ``(batch, seq, vocab)``."""

    def __init__(self, config, rngs):
        c = config
        kinds = {"dtype": DTYPES[c.dtype], "rngs": rngs}
        self.config = c
        self.embed = nnx.Embed(c.vocab, c.width, embedding_init=_init(), **kinds)
        if c.scan:
            self.block_scan = nnx.vmap(lambda rngs: Block(c, rngs))(rngs.split(c.layers))
        else:
            # Attributes, not a list: the paths are then Linen's, and one pattern serves both.
            for i in range(c.layers):
                setattr(self, f"block_{i}", Block(c, rngs))
        self.norm = nnx.RMSNorm(c.width, epsilon=1e-5, **kinds)
        self.head = nnx.Linear(c.width, c.vocab, use_bias=False, kernel_init=_init(), **kinds)

    def __call__(self, tokens):
        c = self.config
        x = self.embed(tokens)
        if c.scan:
            layers = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            x = layers(x, self.block_scan)
        else:
            for i in range(c.layers):
                x = getattr(self, f"block_{i}")(x)
        return self.head(self.norm(x))


def config_of(size, **overrides):
    """Return the ``Config`` of a preset, with every override that is not None put in.

    >>> config_of("8b", layers=2).kv_heads
    8
    """
    if size not in SIZES:
        raise ValueError(f"size={size!r}: must be one of {', '.join(SIZES)}")
    given = {name: value for name, value in overrides.items() if value is not None}
    return dataclasses.replace(SIZES[size], **given)


def loss(module, tokens):
    """Return the mean cross entropy of the module's next-token predictions."""
    logits = module(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def build(
    policy=None,
    *,
    size="8b",
    batch=1,
    layers=None,
    width=None,
    heads=None,
    kv_heads=None,
    hidden=None,
    vocab=None,
    seq=None,
    dtype="f32",
    scan=False,
    mesh=None,
    sharding=None,
    materialize=False,
    seed=0,
):
    """Return ``(loss_fn, args)`` for one training batch: ``loss_fn(params, tokens)``.

    ``params`` is the ``nnx.State`` of the module's parameters, and ``tokens`` is
    ``(batch, seq + 1)``: each position predicts the next token.

    >>> loss_fn, args = build(size="tiny", batch=2, scan=True)
    >>> jax.eval_shape(loss_fn, *args)
    ShapeDtypeStruct(shape=(), dtype=float32)
    >>> args[0]["block_scan"]["attn"]["query"]["kernel"].get_value()
    ShapeDtypeStruct(shape=(2, 32, 2, 2, 8), dtype=float32)

    Args:
      policy: what to save in each layer, as ``remat_kit.policy`` takes it; None leaves JAX's rule.
      size: a preset, one of ``SIZES``.
      batch: sequences per batch.
      layers, width, heads, kv_heads, hidden, vocab, seq: override the preset.
      dtype: of the computation, "f32" or "bf16"; parameters and the loss are float32.
      scan: run the layers as one ``nnx.scan`` with stacked parameters, not unrolled.
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
        kv_heads=kv_heads,
        hidden=hidden,
        vocab=vocab,
        seq=seq,
        dtype=dtype,
        scan=scan,
    )
    if mesh is not None:
        mesh, sharding = _mesh_of(mesh, materialize), sharding or "dp"
        _check_sharding(mesh, sharding)
        stream = _stream(mesh, sharding, batch, config.seq)
        config = dataclasses.replace(config, stream=stream)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Llama(config, nnx.Rngs(seed))))

    def loss_fn(params, tokens):
        return loss(nnx.merge(graphdef, params), tokens)

    def make_args():
        params = nnx.state(Llama(config, nnx.Rngs(seed)))
        key = jax.random.fold_in(jax.random.PRNGKey(seed), 1)
        return params, jax.random.randint(key, (batch, config.seq + 1), 0, config.vocab)

    # Parameters are initialized on one device, where a sharding over several would be refused.
    args = make_args() if materialize else jax.eval_shape(make_args)
    if mesh is not None:
        args = _on_mesh(args, mesh, sharding, batch)
    if policy is not None:
        import remat_kit

        loss_fn = remat_kit.policy(policy, at=BLOCKS)(loss_fn)
    return loss_fn, args
