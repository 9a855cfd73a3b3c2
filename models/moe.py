"""A GPT decoder with a mixture of experts in place of each feed-forward layer, in Flax Linen.

Lepikhin et al., "GShard: scaling giant models with conditional computation and automatic sharding",
ICLR 2021, https://arxiv.org/abs/2006.16668: a router sends each token to its best experts, each
expert takes a fixed number of tokens of a sequence and drops the rest, and tokens go to and from
the experts through one-hot products. The loss that keeps the experts equally busy is that of Fedus
et al., "Switch transformers", JMLR 2022, https://arxiv.org/abs/2101.03961. The rest is GPT-2.
"""

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

BLOCKS = "*/block_*"  # the paths a policy is applied to, unrolled ("block_3") or not ("block_scan")

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
BALANCE = 0.01  # the weight of the balancing loss


def _positive(name, value):
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}: must be a positive whole number")


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of one model; ``dtype`` is that of the computation, parameters are float32."""

    layers: int
    width: int
    heads: int
    experts: int = 8
    top: int = 2
    capacity: float = 1.25
    vocab: int = 50257
    seq: int = 1024
    dtype: str = "f32"
    scan: bool = False
    stream: jax.sharding.NamedSharding | None = None

    def __post_init__(self):
        for name in ("layers", "width", "heads", "experts", "top", "vocab", "seq"):
            _positive(name, getattr(self, name))
        if self.width % self.heads:
            raise ValueError(
                f"heads={self.heads} does not divide width={self.width}: must be a divisor of it"
            )
        if self.top > self.experts:
            raise ValueError(f"top={self.top}: must be at most experts={self.experts}")
        if not isinstance(self.capacity, int | float) or not self.capacity > 0:
            raise ValueError(f"capacity={self.capacity!r}: must be a positive number")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: must be one of {', '.join(DTYPES)}")
        if not isinstance(self.scan, bool):
            raise ValueError(f"scan={self.scan!r}: must be True or False")

    @property
    def slots(self):
        """How many tokens of a sequence an expert takes."""
        return math.ceil(self.capacity * self.top * self.seq / self.experts)


# GPT-2's, with experts.
SIZES = {
    "tiny": Config(layers=2, width=32, heads=4, experts=4, vocab=128, seq=16),
    "small": Config(layers=12, width=768, heads=12),
    "medium": Config(layers=24, width=1024, heads=16),
}


# -- a mesh of several devices ------------------------------------------------------------------

SHARDINGS = ("dp", "fsdp", "tp", "fsdp+tp")

# The mesh axis that each dimension of a parameter may be split over, by the end of its path: over
# "data" with fsdp, over "model" with tp. Experts are always split over "expert". Scanned layers
# have one dimension more in front, and what is not listed is whole on every device.
SPLITS = {
    "query/kernel": ("data", "model", None),
    "key/kernel": ("data", "model", None),
    "value/kernel": ("data", "model", None),
    "query/bias": ("model", None),
    "key/bias": ("model", None),
    "value/bias": ("model", None),
    "out/kernel": ("model", None, "data"),
    "up/kernel": ("expert", "data", "model"),
    "up/bias": ("expert", "model"),
    "down/kernel": ("expert", "model", "data"),
    "down/bias": ("expert", None),
    "wte/embedding": ("model", "data"),
    "wpe/embedding": (None, "data"),
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
    used = ("expert", *(("data",) if "fsdp" in sharding else ()))
    used += ("model",) if "tp" in sharding else ()

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
            y = nn.DenseGeneral(heads, dtype=dtype, kernel_init=_init(), name=name)(x)
            return checkpoint_name(y, f"{name}_proj")

        query, key, value = project("query"), project("key"), project("value")
        scores = jnp.einsum("bqhd,bkhd->bhqk", query * heads[1] ** -0.5, key)
        causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))[None, None]
        scores = jnp.where(causal, scores.astype(jnp.float32), -jnp.inf)
        weights = jax.nn.softmax(scores).astype(dtype)
        context = checkpoint_name(jnp.einsum("bhqk,bkhd->bqhd", weights, value), "context")
        out_init = _init((2 * c.layers) ** -0.5)
        out = nn.DenseGeneral(c.width, (-2, -1), dtype=dtype, kernel_init=out_init, name="out")
        return checkpoint_name(out(context), "out_proj")


class Router(nn.Module):
    """Which slot of which expert a token takes, and with what weight, ``(batch, seq, E, slots)``.

    A slot holds one token of the sequence or none. The first choices of all tokens are served
    before the second ones, early tokens before late ones; who comes when the slots are taken is
    dropped. Also gives the balancing loss, which is 1 when the experts are equally busy.
    """

    config: Config

    @nn.compact
    def __call__(self, x):
        c = self.config
        logits = nn.Dense(c.experts, False, dtype=jnp.float32, kernel_init=_init(), name="gate")(x)
        probs = jax.nn.softmax(checkpoint_name(logits, "router_logits"))
        weights, chosen = jax.lax.top_k(probs, c.top)
        if c.top > 1:
            weights = weights / weights.sum(-1, keepdims=True)
        chosen = jax.nn.one_hot(chosen, c.experts)  # (batch, seq, top, E)
        queue = chosen.swapaxes(1, 2).reshape(x.shape[0], -1, c.experts)
        place = (jnp.cumsum(queue, axis=1) - 1) * queue
        place = place.sum(-1).reshape(x.shape[0], c.top, -1).swapaxes(1, 2)  # (batch, seq, top)
        # Of a place beyond the slots, `one_hot` makes zeros: the token is dropped.
        slot = jax.nn.one_hot(place.astype(jnp.int32), c.slots)
        taken = jnp.einsum("bske,bskc->bsec", chosen, slot)
        weighted = jnp.einsum("bske,bskc->bsec", weights[..., None] * chosen, slot)
        share = chosen[:, :, 0].mean((0, 1))
        return taken, weighted, c.experts * jnp.sum(share * probs.mean((0, 1)))


class Experts(nn.Module):
    """A router, and experts of two dense layers around a GELU; also gives the balancing loss."""

    config: Config

    @nn.compact
    def __call__(self, x):
        c = self.config
        dtype = DTYPES[c.dtype]
        taken, weighted, balance = Router(c, name="router")(x)
        x = jnp.einsum("bsec,bsd->ebcd", taken.astype(dtype), x)
        # One dense layer for each expert, with its own parameters: a product with a batch of E.
        x = self._dense("up", x, 4 * c.width, _init())
        x = nn.gelu(checkpoint_name(x, "mlpwi"))
        x = self._dense("down", x, c.width, _init((2 * c.layers) ** -0.5))
        x = jnp.einsum("bsec,ebcd->bsd", weighted.astype(dtype), x)
        return checkpoint_name(x, "mlpwo"), balance

    @nn.nowrap  # or the method would be part of the paths
    def _dense(self, name, x, features, init):
        layer = nn.vmap(nn.Dense, variable_axes={"params": 0}, split_rngs={"params": True})
        return layer(features, dtype=x.dtype, kernel_init=init, name=name)(x)


class Block(nn.Module):
    """One decoder layer: the residual stream and the balancing loss, as ``nn.scan`` takes them."""

    config: Config

    @nn.compact
    def __call__(self, x, _=None):
        c = self.config
        dtype = DTYPES[c.dtype]
        x = checkpoint_name(_split(x, c.stream), "decoder_layer_input")
        y = Attention(c, name="attn")(nn.LayerNorm(dtype=dtype, name="ln_1")(x))
        x = x + checkpoint_name(y, "attn_out")
        y, balance = Experts(c, name="moe")(nn.LayerNorm(dtype=dtype, name="ln_2")(x))
        return x + y, balance


class MoE(nn.Module):
    """Tokens ``(batch, seq)`` to logits ``(batch, seq, vocab)`` and the mean balancing loss."""

    config: Config

    @nn.compact
    def __call__(self, tokens):
        c = self.config
        dtype = DTYPES[c.dtype]
        embed = nn.Embed(c.vocab, c.width, dtype=dtype, embedding_init=_init(), name="wte")
        positions = nn.Embed(c.seq, c.width, dtype=dtype, embedding_init=_init(), name="wpe")
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))[None]
        if c.scan:
            layers = nn.scan(
                Block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=c.layers,
            )
            x, balance = layers(c, name="block_scan")(x, None)
        else:
            balances = []
            for i in range(c.layers):
                x, balance = Block(c, name=f"block_{i}")(x)
                balances.append(balance)
            balance = jnp.stack(balances)
        x = nn.LayerNorm(dtype=dtype, name="ln_f")(x)
        return embed.attend(x), balance.mean()


def config_of(size, **overrides):
    """Return the ``Config`` of a preset, with every override that is not None put in.

    >>> config_of("small", experts=64, top=1).slots
    20
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
    experts=None,
    top=None,
    capacity=None,
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

    ``tokens`` is ``(batch, seq + 1)``: each position predicts the next token. The loss is the mean
    cross entropy and a hundredth of the balancing loss.

    >>> loss_fn, args = build(size="tiny", batch=2, scan=True)
    >>> jax.eval_shape(loss_fn, *args)
    ShapeDtypeStruct(shape=(), dtype=float32)
    >>> args[0]["block_scan"]["moe"]["up"]["kernel"]
    ShapeDtypeStruct(shape=(2, 4, 32, 128), dtype=float32)

    Args:
      policy: what to save in each layer, as ``remat_kit.policy`` takes it; None leaves JAX's rule.
      size: a preset, one of ``SIZES``.
      batch: sequences per batch.
      layers, width, heads, vocab, seq: override the preset.
      experts, top: experts in each layer, and how many of them a token is sent to; override too.
      capacity: how many tokens the experts can take, in units of those that are sent to them.
      dtype: of the computation, "f32" or "bf16"; parameters, router and loss are float32.
      scan: run the layers as one ``nn.scan`` with stacked parameters, not unrolled.
      mesh: the axes of a mesh and their sizes, as in ``"data=8,model=8"``, or a mesh. The arguments
        then have shardings over it, and the batch is split over ``data``.
        Experts are split over the axis ``expert``, if there is one.
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
        experts=experts,
        top=top,
        capacity=capacity,
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
    model = MoE(config)

    def loss_fn(params, tokens):
        outputs = model.apply({"params": params}, tokens[:, :-1])
        logits, balance = (jnp.asarray(x, jnp.float32) for x in outputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean() + BALANCE * balance

    def make_args():
        init, drawn = jax.random.split(jax.random.key(seed))
        tokens = jax.random.randint(drawn, (batch, config.seq + 1), 0, config.vocab)
        return model.init(init, tokens[:, :-1])["params"], tokens

    # Parameters are initialized on one device, where a sharding over several would be refused.
    args = make_args() if materialize else jax.eval_shape(make_args)
    if mesh is not None:
        args = _on_mesh(args, mesh, sharding, batch)
    if policy is not None:
        import remat_kit

        loss_fn = remat_kit.policy(policy, at=BLOCKS)(loss_fn)
    return loss_fn, args
