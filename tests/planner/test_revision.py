"""The recorded frontiers of frozen programs, which say when the planner's revision must rise.

python tests/planner/test_revision.py      (prints the frontiers to record)
"""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from shapes import struct

import remat_kit
from remat_kit import _jax
from remat_kit._planner.revision import PIECES_REVISIONS, REVISION

# The programs are frozen: they are not those of `models/`, which may change for other reasons.


def dense(weights, x):
    for i, (up, down) in enumerate(weights):
        with jax.named_scope(f"block_{i}"):
            x = x + jax.nn.gelu(x @ up) @ down
    return jnp.mean(x**2)


def scanned(weights, x):
    def layer(x, w):
        y = x - jnp.mean(x, -1, keepdims=True)
        return x + jnp.tanh(y @ w[0]) @ w[1], None

    return jnp.mean(jax.lax.scan(layer, x, weights)[0] ** 2)


def attention(weights, x):
    for w in weights:
        q, k, v = jnp.split(x @ w, 3, axis=-1)
        scores = jax.nn.softmax(q @ k.mT / 8.0)
        x = x + scores @ v
    return jnp.mean(x**2)


class Convolutional(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (16, 32, 64):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return jnp.mean(nn.Dense(10)(x.reshape(x.shape[0], -1)) ** 2)


def convolutional(params, x):
    return Convolutional().apply(params, x)


def dropped(weights, x, key):
    for i, w in enumerate(weights):
        q, k, v = jnp.split(x @ w, 3, axis=-1)
        scores = jax.nn.softmax(q @ k.mT / 8.0)
        mask = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, scores.shape)
        x = x + jnp.where(mask, scores / 0.9, 0.0) @ v
    return jnp.mean(x**2)


IMAGES = struct(16, 64, 64, 3)
PROGRAMS = {
    "dense": (dense, [(struct(64, 256), struct(256, 64))] * 8, struct(4096, 64)),
    "scan": (scanned, (struct(12, 64, 64), struct(12, 64, 64)), struct(4096, 64)),
    "attend": (attention, [struct(64, 192)] * 6, struct(8, 256, 64)),
    "conv": (
        convolutional,
        jax.eval_shape(Convolutional().init, jax.random.key(0), IMAGES),
        IMAGES,
    ),
}
IN_PIECES = {
    "attend": PROGRAMS["attend"],
    "dropped": (dropped, *PROGRAMS["attend"][1:], struct(2, dtype=jnp.uint32)),
}
CHIPS = {
    # The installed plugin may describe the card's bandwidth to more digits.
    "h100": dataclasses.replace(remat_kit.target("h100"), bandwidth_bytes_per_second=3.352e12),
    "v5e": remat_kit.target("tpu-v5e"),
}


def frontier(program, chip, pieces=False):
    """Return the memory in KiB and the extra FLOPs, as a fraction, at five places of a frontier."""
    fn, *args = (IN_PIECES if pieces else PROGRAMS)[program]
    points = remat_kit.frontier(fn, *args, target=CHIPS[chip], pieces=pieces).points
    low, high = points[0].predicted_peak_bytes, points[-1].predicted_peak_bytes
    found = []
    for place in (0, 0.25, 0.5, 0.75, 1):
        limit = low + place * (high - low)
        best = min(
            (p for p in points if p.predicted_peak_bytes <= limit),
            key=lambda p: (p.extra_work, p.predicted_peak_bytes),
        )
        found.append((best.predicted_peak_bytes // 1024, round(best.extra_flops_fraction, 3)))
    return found


# Of these revisions, on JAX 0.12.
RECORDED = {
    ("dense", "h100"): [
        (17408, 3.525),
        (32768, 0.453),
        (49152, 0.451),
        (65536, 0.269),
        (81920, 0.0),
    ],
    ("dense", "v5e"): [
        (13312, 3.075),
        (19456, 0.45),
        (27648, 0.329),
        (35840, 0.193),
        (48128, 0.0),
    ],
    ("scan", "h100"): [
        (15120, 1.503),
        (20432, 0.5),
        (26960, 0.252),
        (35104, 0.003),
        (42768, 0.0),
    ],
    ("scan", "v5e"): [
        (14608, 1.503),
        (19920, 0.5),
        (25360, 0.496),
        (29840, 0.331),
        (36624, 0.0),
    ],
    ("attend", "h100"): [
        (8768, 4.429),
        (16496, 0.476),
        (24720, 0.368),
        (32912, 0.244),
        (41072, 0.0),
    ],
    ("attend", "v5e"): [
        (9288, 1.171),
        (12408, 0.398),
        (15960, 0.249),
        (19296, 0.171),
        (22640, 0.003),
    ],
    ("conv", "h100"): [
        (13560, 0.572),
        (14328, 0.159),
        (14328, 0.159),
        (16632, 0.415),
        (18424, 0.0),
    ],
    ("conv", "v5e"): [
        (99576, 0.0),
        (99576, 0.0),
        (99576, 0.0),
        (99576, 0.0),
        (99576, 0.0),
    ],
}

RECORDED_IN_PIECES = {
    ("attend", "h100"): [
        (8768, 4.429),
        (15504, 0.458),
        (24736, 0.367),
        (32912, 0.244),
        (41072, 0.0),
    ],
    ("attend", "v5e"): [
        (7496, 1.535),
        (10840, 0.489),
        (14448, 0.337),
        (18528, 0.215),
        (22640, 0.003),
    ],
    ("dropped", "h100"): [
        (10320, 1.95),
        (18064, 0.423),
        (27232, 0.321),
        (35464, 0.196),
        (44144, 0.0),
    ],
    ("dropped", "v5e"): [
        (8536, 1.783),
        (12408, 0.409),
        (16496, 0.289),
        (20576, 0.171),
        (25200, 0.005),
    ],
}


@pytest.mark.skipif(_jax.JAX_VERSION < (0, 12), reason="older versions of JAX trace other programs")
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_the_answers_of_this_revision(program, chip):
    same(frontier(program, chip), RECORDED[program, chip], f"revision {REVISION}")


@pytest.mark.skipif(_jax.JAX_VERSION < (0, 12), reason="older versions of JAX trace other programs")
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("program", IN_PIECES)
def test_the_answers_with_pieces(program, chip):
    revision = f"revision {PIECES_REVISIONS[CHIPS[chip].platform]} of plans with pieces"
    same(frontier(program, chip, pieces=True), RECORDED_IN_PIECES[program, chip], revision)


def same(found, recorded, revision):
    for (size, extra), (size_before, extra_before) in zip(found, recorded, strict=True):
        message = (
            f"the planner's answers have changed since {revision}: raise it in "
            "remat_kit/_planner/revision.py, and record what `python "
            "tests/planner/test_revision.py` prints"
        )
        assert size == pytest.approx(size_before, rel=2e-3), message
        assert extra == pytest.approx(extra_before, rel=2e-3, abs=2e-3), message


if __name__ == "__main__":
    for table, programs, divided in (
        ("RECORDED", PROGRAMS, False),
        ("RECORDED_IN_PIECES", IN_PIECES, True),
    ):
        print(f"{table} = {{")
        for name in programs:
            for of in CHIPS:
                found = str(frontier(name, of, divided))[1:-1]
                print(f'    ("{name}", "{of}"): [\n        {found},\n    ],')
        print("}")
