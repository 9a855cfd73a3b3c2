"""For each fact about a compiler, the smallest program that shows it.

A probe is a function with the name of the fact. It compiles for a platform, runs nothing, and
answers whether the fact holds there, with the figures that show it.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import re
from unittest import mock

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import remat_kit
from remat_kit import _jax
from remat_kit._apply import run_schedule
from remat_kit._backend import barriers, rewrites
from remat_kit._chip.compile import compile_program
from remat_kit._policy import schedule as _schedule
from remat_kit._program import program as _program

CHIPS = {"cpu": "cpu", "cuda": "h100", "tpu": "tpu-v5e"}


@dataclasses.dataclass(frozen=True)
class Answer:
    """Whether a fact holds, and the figures that show it."""

    holds: bool
    figures: str = ""

    def __str__(self):
        return ("yes" if self.holds else "no") + (f", {self.figures}" if self.figures else "")


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def compiled(fn, *args, platform):
    return compile_program(fn, args, CHIPS[platform], argnums=None)


def temporaries(fn, *args, platform):
    return compiled(fn, *args, platform=platform).memory.temp_bytes


def in_order(fn, *args, platform):
    """Return the instructions of the compiled program's main computation as they run."""
    text = compiled(fn, *args, platform=platform).hlo_text
    return text[text.index("\nENTRY") :].splitlines()[1:]


def results(lines, *shape, dtype="f32"):
    """Return the places of the instructions that compute an array of this shape."""
    start = rf"= {dtype}\[{','.join(map(str, shape))}\]\S* (?!parameter|get-tuple|bitcast)"
    return [i for i, line in enumerate(lines) if re.search(start, line)]


def saves(with_it, without, least=0.01):
    """Answer whether the workaround for a fact takes less memory than leaving it out."""
    figures = f"{without / 2**20:.4g} MiB, and {with_it / 2**20:.4g} with the workaround"
    return Answer(with_it < (1 - least) * without, figures)


NO_BARRIER = lambda values, *_: values  # noqa: E731


@contextlib.contextmanager
def left_out(module, name, instead):
    """Leave out a barrier or a rewrite."""
    rewrites._convolution.cache_clear()  # it remembers what it has traced
    with mock.patch.object(module, name, instead):
        yield
    rewrites._convolution.cache_clear()


def compared(make, args, platform, without):
    """Compare the temporaries of a gradient with and without the workaround for a fact."""
    with_it = temporaries(jax.grad(make()), *args, platform=platform)
    with left_out(*without):
        figure = temporaries(jax.grad(make()), *args, platform=platform)
    return saves(with_it, figure)


def planned(fn, args, lines):
    """Return a maker of the function under a plan, which JAX traces anew each time.

    ``lines`` returns the text of the plan, given the names of the program's primitives.
    """
    program = _program.flat_program(jax.make_jaxpr(fn)(*args))
    names = [e.primitive.name for e in program.eqns]
    plan = remat_kit.policy(remat_kit.planned(_schedule.describe(program), *lines(names)))
    return lambda: plan(lambda *args: fn(*args))


def convolution(x, kernel):
    dims = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dims)


def scanned(ws, x):
    return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, ws)[0]


# -- which arrays are written to memory -----------------------------------------------------------


def writes_what_two_fusions_read(platform):
    """The derivative needs `x @ w`, and one product reads what is computed from it."""
    n = 8192

    def loss(w, v, x):
        return jnp.sum(jax.nn.gelu(jax.nn.gelu(x @ w)) @ v)

    args = struct(n, n), struct(n, n // 16), struct(n, n)
    found = temporaries(jax.grad(loss, argnums=(0, 1)), *args, platform=platform) / (4 * n * n)
    return Answer(found > 2.5, f"{found:.2g} arrays live")


def fuses_into_products(platform):
    """The derivative reads `x @ w`, and one product reads its sine."""
    n = 8192

    def loss(w, v, x):
        return jnp.sum(jnp.sin(x @ w) @ v)

    args = struct(n, n), struct(n, n // 16), struct(n, n)
    found = temporaries(jax.grad(loss, argnums=(0, 1)), *args, platform=platform) / (4 * n * n)
    return Answer(found < 1.5, f"{found:.2g} arrays live")


def rounds_products(platform):
    def fn(x, w):
        return (x @ w) @ w

    args = struct(8192, 8192), struct(8192, 8192)
    halved = results(in_order(fn, *args, platform=platform), 8192, 8192, dtype="bf16")
    return Answer(bool(halved), f"{len(halved)} arrays in bfloat16")


def pads_images(platform):
    """The derivative of a chain of convolutions with 64 channels, of 64 and of 128 images."""

    def chain(kernels, x):
        for kernel in kernels:
            x = jax.nn.relu(convolution(x, kernel))
        return jnp.sum(x * x)

    kernels = [struct(3, 3, 64, 64)] * 4
    few, many = (
        temporaries(jax.grad(chain), kernels, struct(n, 56, 56, 64), platform=platform)
        for n in (64, 128)
    )
    return Answer(
        few > 0.9 * many, f"{few / 2**20:.4g} MiB, and {many / 2**20:.4g} for twice as many"
    )


def copies_between_loops(platform):
    """Two loops over images, in 16 and 8 pieces, and both in 16."""

    def half(kernels, x):
        for kernel in kernels:
            x = jnp.tanh(convolution(x, kernel))
        return x[:, ::2, ::2]

    def in_pieces(kernels, x, pieces):
        parts = x.reshape(pieces, -1, *x.shape[1:])
        parts = jax.lax.map(jax.checkpoint(functools.partial(half, kernels)), parts)
        return parts.reshape(-1, *parts.shape[2:])

    def loss(first, second, x, last):
        x = in_pieces(second, in_pieces(first, x, 16), last)
        return jnp.sum(x * x)

    kernels = [struct(3, 3, 64, 128), struct(3, 3, 128, 64)]
    args = kernels, kernels, struct(1024, 28, 28, 64)
    unlike, alike = (
        temporaries(
            jax.grad(functools.partial(loss, last=last), argnums=(0, 1)), *args, platform=platform
        )
        for last in (8, 16)
    )
    figures = f"{unlike / 2**20:.4g} MiB, and {alike / 2**20:.4g} in equal pieces"
    return Answer(alike < 0.95 * unlike, figures)


def copies_stacked_inputs(platform):
    args = struct(16, 1024, 1024), struct(256, 1024)
    lines = in_order(jax.grad(lambda ws, x: jnp.sum(scanned(ws, x))), *args, platform=platform)
    copies = results(lines, 16, 1024, 1024, dtype="bf16")
    return Answer(bool(copies), f"{len(copies)} copies in bfloat16")


def convolutions(kernels, x):
    for kernel in kernels:
        x = jnp.sin(convolution(x, kernel))
    return jnp.sum(x)


CONVOLUTIONS = [struct(3, 3, 64, 64)] * 3, struct(8, 128, 128, 64)


def transposed_inputs(platform):
    lines = in_order(jax.grad(convolutions), *CONVOLUTIONS, platform=platform)
    return lines, results(lines, 64, 128, 128, 8)


def copies_convolution_inputs(platform):
    copies = transposed_inputs(platform)[1]
    return Answer(bool(copies), f"{len(copies)} transposed copies")


def mask_bytes(platform):
    """Return the bytes that a mask of dropout takes for each of its elements.

    The same program is compiled with masks that are drawn from a key and with given ones. The
    difference may be below 0, because a compiler may copy given masks.
    """
    layers, n = 8, 4096

    def drawn(ws, x, key):
        keys = jax.random.split(key, layers)
        return given(ws, x, [jax.random.bernoulli(k, 0.9, (n, n)) for k in keys])

    def given(ws, x, masks):
        for w, mask in zip(ws, masks, strict=True):
            x = jnp.where(mask, jnp.sin(x @ w), 0.0)
        return jnp.sum(x * x)

    ws, x = [struct(n, n)] * layers, struct(n, n)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    masks = [jax.ShapeDtypeStruct((n, n), bool)] * layers
    least = temporaries(jax.grad(given), ws, x, masks, platform=platform)
    return (temporaries(jax.grad(drawn), ws, x, key, platform=platform) - least) / (layers * n * n)


def keeps_random_words(platform):
    found = mask_bytes(platform)
    return Answer(found > 6, f"{found:.2g} bytes for each element of a mask")


def draws_masks_again(platform):
    found = mask_bytes(platform)
    return Answer(found < 0.5, f"{found:.2g} bytes for each element of a mask")


# -- when memory is reserved and arrays are computed ----------------------------------------------


def reuses_results(platform):
    """`tanh(x @ w)` is read for the last time before the result of its size is computed.

    The result is an elementwise operation, which needs no other array of that size.
    """
    n = 8192

    def fn(x, w, v):
        return x * jnp.max(jnp.tanh(x @ w) @ v)

    args = struct(n, n), struct(n, n), struct(n, n // 32)
    found = temporaries(fn, *args, platform=platform) / (4 * n * n)
    return Answer(found < 0.4, f"{found:.2g} arrays beside the result")


def puts_off_large_gradients(platform):
    """The gradient of the last layer takes 57 times the bytes that it is computed from."""

    def loss(ws, wide, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(jnp.tanh(x.reshape(32, -1) @ wide))

    args = [struct(512, 512)] * 4, struct(32 * 512, 2048), struct(1024, 512)
    lines = in_order(jax.grad(loss, argnums=(0, 1)), *args, platform=platform)
    last = results(lines, 32 * 512, 2048)[-1]
    others = results(lines, 512, 512)
    return Answer(last > max(others), f"{sum(i < last for i in others)} of {len(others)} before it")


def overwrites_through_views(platform):
    """A product is read in the shape of heads for the last time, and the result as a matrix."""
    n, heads = 4096, 16

    def fn(x, w, b, v):
        y = jax.lax.optimization_barrier(x @ w).reshape(n, heads, n // heads)
        y = jax.lax.optimization_barrier(jnp.tanh(y + b).reshape(n, n))
        return jnp.sum(jnp.sin(y @ v))

    args = struct(n, n), struct(n, n), struct(1, heads, n // heads), struct(n, 8)
    found = temporaries(fn, *args, platform=platform) / (4 * n * n)
    return Answer(found < 1.5, f"{found:.2g} arrays live")


def recomputes_regions_early(platform):
    """A region around regions stands before the product with the vocabulary."""

    @jax.checkpoint
    def inner(x, w1, w2):
        return jnp.tanh(jnp.tanh(x @ w1) @ w2)

    @jax.checkpoint
    def outer(x, ws):
        for w1, w2 in ws:
            x = inner(x, w1, w2)
        return x

    def loss(ws, x, v):
        x = outer(x, ws)
        with jax.named_scope("tail"):
            return jnp.sum(jax.nn.logsumexp(x @ v, axis=-1))

    args = [(struct(512, 512), struct(512, 512))] * 4, struct(8192, 512), struct(512, 8192)
    lines = in_order(jax.grad(loss), *args, platform=platform)
    again = [i for i, line in enumerate(lines) if "rematted_computation" in line]
    later = [i for i, line in enumerate(lines) if "tail" in line and "transpose(" in line]
    early = sum(i < later[-1] for i in again)
    return Answer(early > len(again) / 4, f"{early} of {len(again)} instructions")


def sums_gradients_apart(platform):
    mesh = jax.sharding.AbstractMesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    copies = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def loss(ws, x):
        for w in ws:
            x = jnp.sin(x @ w)
        return jnp.sum(x)

    ws = [struct(512, 512).update(sharding=copies)] * 8
    args = ws, struct(64, 512).update(sharding=rows)
    memory = compiled(jax.grad(loss), *args, platform=platform).memory
    figures = f"{memory.temp_bytes / 2**20:.4g} MiB beside {memory.output_bytes / 2**20:.4g}"
    return Answer(memory.temp_bytes > 0.9 * memory.output_bytes, figures)


def sums_kernel_gradients_apart(platform):
    """Two convolutions of small images, in eight pieces of one image."""

    def loss(kernels, x):
        for kernel in kernels:
            x = jnp.tanh(convolution(x, kernel))
        return jnp.sum(x)

    def lines(names):
        return [f"0:{len(names) - 1} pieces 8 of 0.0 axis 0", "0:2 plain"]

    args = [struct(3, 3, 512, 512)] * 2, struct(8, 8, 8, 512)
    found = temporaries(jax.grad(planned(loss, args, lines)()), *args, platform=platform)
    kernels = 2 * 4 * 9 * 512**2
    figures = f"{found / 2**20:.4g} MiB for kernels of {kernels / 2**20:.4g}"
    return Answer(found > 1.2 * kernels, figures)


def makes_zeros_first(platform):
    args = struct(16, 1024, 1024), struct(16, 1024, 1024), struct(256, 1024)
    loss = lambda a, b, x: jnp.sum(scanned(b, scanned(a, x)))  # noqa: E731
    lines = in_order(jax.grad(loss, argnums=(0, 1)), *args, platform=platform)
    zeros = results(lines, 16, 1024, 1024)
    loops = [i for i, line in enumerate(lines) if " while(" in line]
    early = sum(i < loops[0] for i in zeros)
    return Answer(early > 0, f"{early} of {len(zeros)} before the first loop")


# -- what a rewrite or a barrier prevents ---------------------------------------------------------


def largest(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def pooled(x):
    return jnp.sum(largest(jnp.sin(x)) ** 2)


def scatters_window_gradients(platform):
    text = compiled(jax.grad(pooled), struct(8, 256, 256, 64), platform=platform).hlo_text
    scatters = re.findall(r" scatter\(", text)
    return Answer(bool(scatters), f"{len(scatters)} scatters")


def indexes_windows(platform):
    text = compiled(jax.grad(pooled), struct(8, 256, 256, 64), platform=platform).hlo_text
    indices = set(re.findall(r"= \(?(?:\S+ )*?(s32\[8,128,128,64)", text))
    return Answer(bool(indices), f"{len(indices)} kinds of arrays of indices")


def reads_the_input_of_relu(platform):
    """A region follows each `jax.nn.relu`."""

    def stack(relu, ws, x):
        for w in ws:
            x = relu(x @ w)
            x = jax.checkpoint(lambda x: jnp.tanh(x) * x)(x)
        return jnp.sum(x)

    args = [struct(256, 256)] * 2, struct(262144, 256)
    ours, theirs = (
        temporaries(jax.grad(lambda ws, x, f=f: stack(f, ws, x)), *args, platform=platform)
        for f in (rewrites._relu, jax.nn.relu)
    )
    return saves(ours, theirs)


def scatters_picked_elements(platform):
    """The loss of one sequence, as a region."""

    def loss(w, x, labels):
        logits = jax.nn.log_softmax(x @ w)
        return -jnp.sum(jnp.take_along_axis(logits, labels[..., None], -1))

    def lines(names):
        return [f"0:{len(names)}"]

    args = struct(512, 32000), struct(1, 4096, 512), jax.ShapeDtypeStruct((1, 4096), jnp.int32)
    without = rewrites, "lean_pick", lambda eqn: eqn
    return compared(planned(loss, args, lines), args, platform, without)


def computes_masks_again(platform):
    """A maximum over windows follows each `jax.nn.relu`."""

    def stack(relu, kernels, x):
        for kernel in kernels:
            x = relu(convolution(x, kernel))
            (eqn,) = jax.make_jaxpr(largest)(x).eqns
            x = _jax.bind(rewrites.lean_pooling(eqn), [x])[0]
        return jnp.sum(x)

    args = [struct(3, 3, 64, 64)] * 2, struct(8, 256, 256, 64)
    ours, theirs = (
        temporaries(jax.grad(lambda ks, x, f=f: stack(f, ks, x)), *args, platform=platform)
        for f in (rewrites._relu_with_mask, jax.nn.relu)
    )
    return saves(ours, theirs)


def copies_convolution_inputs_early(platform):
    lines, copies = transposed_inputs(platform)
    backward = [i for i, line in enumerate(lines) if "transpose(jvp" in line]
    early = sum(i < backward[0] for i in copies)
    return Answer(early > 0, f"{early} of {len(copies)} copies in the forward pass")


def delays_kernel_gradients(platform):
    """Each block of a chain is a region of one convolution."""

    def ours(x, kernel):
        (eqn,) = jax.make_jaxpr(convolution)(x, kernel).eqns
        return _jax.bind(rewrites.convolution_with_late_copies(eqn), [x, kernel])[0]

    def chain(kernels, x):
        for kernel in kernels:
            x = jax.checkpoint(lambda x, kernel: jnp.sin(ours(x, kernel)))(x, kernel)
        return jnp.sum(x)

    args = [struct(3, 3, 32, 32)] * 5, struct(8, 64, 64, 32)

    def make():
        return lambda *args: chain(*args)

    return compared(make, args, platform, (rewrites, "kernel_first", NO_BARRIER))


def attention_in_pieces(pieces):
    """Return a maker of a loss of attention, its queries in pieces, and the arguments.

    There are 16,384 queries, counted over all heads.
    """

    def attention(query, key, value):
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query / 8, key))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, value)

    def make():
        # a new function each time, so that JAX traces it anew
        divided = remat_kit.policy(remat_kit.pieces(pieces, axis=-2))(
            lambda *args: attention(*args)
        )
        return lambda args: jnp.sum(jnp.sin(divided(*args)))

    return make, ((struct(1, 2048, 8, 64),) * 3,)


def delays_batched_gradients(platform):
    """Attention with 2048 queries in a piece, for all heads."""
    return compared(*attention_in_pieces(8), platform, (barriers, "_in_turn", NO_BARRIER))


def fuses_products_with_sums(platform):
    """Attention with 4096 queries in a piece, for all heads."""
    return compared(*attention_in_pieces(4), platform, (barriers, "_FUSED_FROM", math.inf))


def convolves_slowly_in_loops(platform):
    """The gradients of a convolution, outside of a loop and in one."""

    def gradients(x, kernel, ct):
        return jax.vjp(convolution, x, kernel)[1](ct)

    def looped(x, kernel, cts):
        return jax.lax.map(lambda ct: gradients(x, kernel, ct), cts)

    fast = "dim_labels=b01f_01io->b01f"
    image = (4, 64, 64, 32)
    args = struct(*image), struct(3, 3, 32, 32)
    outside, inside = (
        compiled(fn, *args, struct(*shape), platform=platform).hlo_text
        for fn, shape in ((gradients, image), (looped, (2, *image)))
    )
    slow = [
        sum(fast not in line for line in text.splitlines() if " convolution(" in line)
        for text in (outside, inside)
    ]
    figures = f"{slow[1]} of 2 in a loop are not in the fast order, {slow[0]} of 2 outside"
    return Answer(slow[1] > slow[0] == 0, figures)


def delays_weight_gradients(platform):
    """Each region is two dense layers with biases, whose gradients are sums over the rows."""

    def stack(ws, x):
        for up, bias, down, last in ws:
            x = x + jax.nn.gelu(x @ up + bias[None]) @ down + last[None]
        return jnp.sum(x)

    def lines(names):
        products = [i for i, name in enumerate(names) if name == "dot_general"]
        bounds = dict.fromkeys([0, *products[2::2], len(names)])
        return [f"{lo}:{hi}" for lo, hi in itertools.pairwise(bounds)]

    layer = struct(512, 2048), struct(2048), struct(2048, 512), struct(512)
    args = [layer] * 8, struct(256, 512)
    without = run_schedule, "without_delay_equations", lambda eqn: [eqn]
    return compared(planned(stack, args, lines), args, platform, without)


def keeps_copies_for_derivatives(platform):
    """The channels of a convolution are in pieces, each of which reads all images."""

    def loss(kernels, images):
        dims = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(
            *(images, kernels[0], (4, 4), "SAME"), dimension_numbers=dims
        )
        return jnp.sum(jnp.exp(convolution(jnp.tanh(x), kernels[1])))

    def lines(names):
        return ["0:2 pieces 4 of 0.0 axis 3", f"0:{len(names) - 1} plain"]

    args = [struct(11, 11, 3, 64), struct(3, 3, 64, 64)], struct(128, 224, 224, 3)
    return compared(planned(loss, args, lines), args, platform, (barriers, "again", NO_BARRIER))


def fuses_sums_into_readers(platform):
    """A residual stream runs through blocks, and the sum of each block is read by later ones.

    For CPUs, the blocks are products, and three of them at a time are a region. For GPUs, they are
    three convolutions, and regions are nested.
    """
    without = run_schedule, "materialized", lambda values, stacked: {}
    make, args = (_nested_convolutions if platform == "cuda" else _regions_of_three)()
    return compared(make, args, platform, without)


def _regions_of_three():
    def stack(ws, x):
        for w in ws:
            h = x @ w
            x = jax.nn.relu((h - h.mean(0, keepdims=True)) + x)
        return jnp.sum(x)

    def lines(names):
        bounds = dict.fromkeys([0, *_relus(names)[2::3], len(names)])
        return [f"{lo}:{hi}" for lo, hi in itertools.pairwise(bounds)]

    args = [struct(128, 128)] * 12, struct(262144, 128)
    return planned(stack, args, lines), args


def _nested_convolutions():
    def normalized(h):
        centered = h - h.mean((0, 1, 2), keepdims=True)
        variance = jnp.square(centered).mean((0, 1, 2), keepdims=True)
        return centered * jax.lax.rsqrt(variance + 1e-5)

    def stack(blocks, x):
        for narrow, square, wide in blocks:
            h = jax.nn.relu(normalized(convolution(x, narrow)))
            h = jax.nn.relu(normalized(convolution(h, square)))
            x = jax.nn.relu(normalized(convolution(h, wide)) + x)
        return jnp.sum(x)

    def lines(names):
        a, b, _, c, *_, end = _relus(names)[2::3]
        inner = f"0:{b} around (0:{a}; {a}:{b} plain)"
        middle = f"0:{c} around ({inner}; {b}:{c} plain)"
        return [f"0:{end} around ({middle}; {c}:{end} plain)", f"{end}:{len(names)} plain"]

    block = [struct(1, 1, 64, 64), struct(3, 3, 64, 64), struct(1, 1, 64, 64)]
    args = [block] * 6, struct(64, 32, 32, 64)
    return planned(stack, args, lines), args


def _relus(names):
    """Return the number of the equation behind each `jax.nn.relu`."""
    return [i + 1 for i, name in enumerate(names) if name == "custom_jvp_call"]


def computes_results_again(platform):
    """The plain part of a region reads the sum that the region inside of it saves."""

    def loss(ws, x):
        left, right, square, last = ws
        total = jnp.tanh(jnp.sin(x @ left)) + jnp.tanh(x @ right)
        return jnp.sum(jnp.sin(jnp.sin(jnp.abs(total) @ square) @ last))

    def lines(names):
        add, stop = names.index("add"), len(names)
        return [f"0:{stop} around (0:{add + 1} save {add}.0; {add + 1}:{stop} plain)"]

    ws = [struct(64, 256), struct(64, 256), struct(256, 256), struct(256, 16)]
    args = ws, struct(1024, 64)
    without = run_schedule, "computed_once", lambda values: {}
    return compared(planned(loss, args, lines), args, platform, without)


def fuses_gradient_sums(platform):
    """The gradient of the table has two terms, each of which a product computes."""

    def tied(table, x):
        return jnp.sum(jnp.exp(jnp.tanh(x @ table) @ table.T))

    args = struct(16384, 512), struct(4096, 16384)
    text = compiled(jax.grad(tied), *args, platform=platform).hlo_text
    bodies = [b for b in text[: text.index("\nENTRY")].split("\n}\n") if "16384,512]" in b]
    fused = [b for b in bodies if re.search(r" (convolution|dot)\(", b) and " add(" in b]
    return Answer(bool(fused), f"{len(fused)} products with a sum")


# -- what a compiled program says of itself -------------------------------------------------------


def keeps_the_mark_of_recomputes(platform):
    fn = jax.checkpoint(lambda x, w: jnp.sum(jnp.sin(jnp.sin(x @ w) @ w)))
    text = compiled(jax.grad(fn), struct(64, 64), struct(64, 64), platform=platform).hlo_text
    return Answer("rematted_computation" in text)


def states_trip_counts(platform):
    text = compiled(scanned, struct(7, 64, 64), struct(64, 64), platform=platform).hlo_text
    return Answer(re.search(r'known_trip_count":\{"n":"7"', text) is not None)


def estimates_cycles(platform):
    text = compiled(scanned, struct(7, 64, 64), struct(64, 64), platform=platform).hlo_text
    return Answer('"estimated_cycles"' in text)


def has_one_memory(platform):
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(ws, x):
        def body(x, w):
            return jnp.sin(checkpoint_name(x, "x")) @ w, None

        return jnp.sum(jax.lax.scan(jax.checkpoint(body, policy=policy), x, ws)[0])

    args = struct(16, 1024, 1024), struct(1024, 1024)
    memory = compiled(jax.grad(loss), *args, platform=platform).memory
    return Answer(not memory.host_bytes, f"{memory.host_bytes / 2**20:.4g} MiB on the host")
