"""An LSTM language model, trained by backpropagation through time over ``lax.scan``, in Flax Linen.

Zaremba et al., "Recurrent neural network regularization", 2014, https://arxiv.org/abs/1409.2329:
its medium and large models of the Penn Treebank, without dropout. One step of all the layers is the
body of the scan, and each step keeps its gates: what BPTT takes in memory grows with the sequence.
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

BLOCKS = "*/block_*"  # the paths a policy is applied to: "block_scan", one step in time

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}


def _positive(name, value):
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}: must be a positive whole number")


@dataclasses.dataclass(frozen=True)
class Config:
    """The shape of one model; ``dtype`` is that of the computation, parameters are float32."""

    width: int
    layers: int = 2
    vocab: int = 10000
    seq: int = 35
    dtype: str = "f32"

    def __post_init__(self):
        for name in ("width", "layers", "vocab", "seq"):
            _positive(name, getattr(self, name))
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: must be one of {', '.join(DTYPES)}")


SIZES = {
    "tiny": Config(width=16, vocab=64, seq=12),
    "medium": Config(width=650),
    "large": Config(width=1500),
}


class Cell(nn.Module):
    """One layer at one time: all four gates from the input and the last output."""

    dtype: DTypeLike

    @nn.compact
    def __call__(self, state, x):
        memory, output = state
        gates = nn.Dense(4 * output.shape[-1], dtype=self.dtype, name="gates")
        update, forget, show, new = jnp.split(gates(jnp.concatenate([x, output], -1)), 4, axis=-1)
        memory = nn.sigmoid(forget) * memory + nn.sigmoid(update) * jnp.tanh(new)
        output = nn.sigmoid(show) * jnp.tanh(memory)
        return (memory, output), output


class Step(nn.Module):
    """All the layers at one time, from the lowest up."""

    dtype: DTypeLike

    @nn.compact
    def __call__(self, states, x):
        new = []
        for i, state in enumerate(states):
            state, x = Cell(self.dtype, name=f"layer_{i}")(state, x)
            new.append(state)
        return tuple(new), x


class LSTM(nn.Module):
    """Tokens ``(batch, seq)`` to logits ``(batch, seq, vocab)``, from a state of zeros."""

    config: Config

    @nn.compact
    def __call__(self, tokens):
        c = self.config
        dtype = DTYPES[c.dtype]
        x = nn.Embed(c.vocab, c.width, dtype=dtype, name="embed")(tokens)
        zeros = jnp.zeros((tokens.shape[0], c.width), dtype)
        steps = nn.scan(
            Step,
            variable_broadcast="params",
            split_rngs={"params": False},
            in_axes=1,
            out_axes=1,
        )
        _, x = steps(dtype, name="block_scan")(((zeros, zeros),) * c.layers, x)
        return nn.Dense(c.vocab, dtype=dtype, name="head")(x)


def config_of(size, **overrides):
    """Return the ``Config`` of a preset, with every override that is not None put in.

    >>> config_of("large", seq=1024).width
    1500
    """
    if size not in SIZES:
        raise ValueError(f"size={size!r}: must be one of {', '.join(SIZES)}")
    given = {name: value for name, value in overrides.items() if value is not None}
    return dataclasses.replace(SIZES[size], **given)


def build(
    policy=None,
    *,
    size="medium",
    batch=20,
    layers=None,
    width=None,
    vocab=None,
    seq=None,
    dtype="f32",
    materialize=False,
    seed=0,
):
    """Return ``(loss_fn, args)`` for one training batch: ``loss_fn(params, tokens)``.

    ``tokens`` is ``(batch, seq + 1)``: each position predicts the next token.

    >>> loss_fn, args = build(size="tiny", batch=2, seq=100)
    >>> jax.eval_shape(loss_fn, *args)
    ShapeDtypeStruct(shape=(), dtype=float32)
    >>> args[0]["block_scan"]["layer_1"]["gates"]["kernel"]
    ShapeDtypeStruct(shape=(32, 64), dtype=float32)

    Args:
      policy: what to save in each step, as ``remat_kit.policy`` takes it; None leaves JAX's rule.
      size: a preset, one of ``SIZES``.
      batch: sequences per batch.
      layers, width, vocab, seq: override the preset; ``seq`` is the number of steps.
      dtype: of the computation, "f32" or "bf16"; parameters and the loss are float32.
      materialize: return seeded arrays in place of ``jax.ShapeDtypeStruct``.
      seed: the seed of those arrays.

    Raises:
      ValueError: if a size is unknown or out of range; the message says what is allowed.
    """
    _positive("batch", batch)
    config = config_of(size, layers=layers, width=width, vocab=vocab, seq=seq, dtype=dtype)
    model = LSTM(config)

    def loss_fn(params, tokens):
        logits = jnp.asarray(model.apply({"params": params}, tokens[:, :-1]), jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def make_args():
        init, drawn = jax.random.split(jax.random.key(seed))
        tokens = jax.random.randint(drawn, (batch, config.seq + 1), 0, config.vocab)
        return model.init(init, tokens[:, :-1])["params"], tokens

    args = make_args() if materialize else jax.eval_shape(make_args)
    if policy is not None:
        import remat_kit

        loss_fn = remat_kit.policy(policy, at=BLOCKS)(loss_fn)
    return loss_fn, args
