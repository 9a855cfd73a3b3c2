"""What each compiler does to a program that the planner must know, one `Fact` each.

The smallest program that shows a fact is the function with its name in `tests/probes/probes.py`.
``pytest tests/probes`` compiles these programs, so that a release of a compiler that changes a fact
is a test that fails with its name. ``benchmarks/results/compiler_facts.md`` has the answers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

# Releases of JAX, oldest first, for which the probes have been compiled.
RELEASES = ("0.10.2", "0.12.0.1")


@dataclasses.dataclass(frozen=True, eq=False)
class Fact:
    """One thing that some compilers do to a program.

    Attributes:
        name: a short name, with underscores.
        sentence: what the compiler does, and what follows from it for us.
        seen: the compilers to which the fact applies (``cpu``, ``cuda``, ``tpu``), each with the
            `RELEASES` on which its probe shows the fact. A compiler without releases is one on
            which no probe has shown it yet, though the package counts on it there.
    """

    name: str
    sentence: str
    seen: Mapping[str, tuple[str, ...]]

    @property
    def backends(self) -> tuple[str, ...]:
        """The compilers to which the fact applies."""
        return tuple(self.seen)


def facts() -> Iterator[Fact]:
    """Yield all facts, in the order of this module."""
    yield from (value for value in globals().values() if isinstance(value, Fact))


_NEW = RELEASES[-1:]
_UNSEEN: tuple[str, ...] = ()


# -- which arrays are written to memory -----------------------------------------------------------

WRITES_WHAT_TWO_FUSIONS_READ = Fact(
    "writes_what_two_fusions_read",
    "If two fusions would both compute an array, the compiler writes it to memory, so whatever a "
    "derivative reads takes its bytes; other compilers compute cheap operations in each fusion.",
    {"cpu": RELEASES},
)

FUSES_INTO_PRODUCTS = Fact(
    "fuses_into_products",
    "Elementwise operations are computed inside the matrix products that read them, so an operand "
    "of a product and the cotangent of a product's result may take no memory.",
    {"tpu": RELEASES},
)

ROUNDS_PRODUCTS = Fact(
    "rounds_products",
    "Matrix products round float32 operands to bfloat16 by default, and an array that only such "
    "products read is stored in bfloat16, so it takes half of its bytes.",
    {"tpu": RELEASES},
)

PADS_IMAGES = Fact(
    "pads_images",
    "The arrays that convolutions read and compute are stored in tiles of 128 images or channels, "
    "so those of 64 images with 64 channels take twice their bytes.",
    {"tpu": RELEASES},
)

COPIES_BETWEEN_LOOPS = Fact(
    "copies_between_loops",
    "A loop over pieces of at least 128 images may store arrays with the images innermost, and one "
    "over smaller pieces with the channels innermost. An array between the two, or its cotangent, "
    "is then in memory twice. Plans run them in equal numbers of pieces.",
    {"tpu": RELEASES},
)

COPIES_STACKED_INPUTS = Fact(
    "copies_stacked_inputs",
    "A stacked input of a scan that only such products read is copied to bfloat16 before the first "
    "iteration, and the copy is live until the last one.",
    {"tpu": RELEASES},
)

COPIES_CONVOLUTION_INPUTS = Fact(
    "copies_convolution_inputs",
    "The gradient of a convolution's kernel reads a transposed copy of the convolution's input, "
    "whose bytes its derivative needs beside the residuals.",
    {"cpu": RELEASES},
)

KEEPS_RANDOM_WORDS = Fact(
    "keeps_random_words",
    "A mask of dropout is computed again in the derivative from the two words that Threefry "
    "returns for each element, so eight bytes of an element stay live in place of one.",
    {"cpu": RELEASES},
)

DRAWS_MASKS_AGAIN = Fact(
    "draws_masks_again",
    "Random bits are drawn again from their key in each fusion that reads them or a mask made of "
    "them, so neither takes memory.",
    {"tpu": RELEASES},
)

# -- when memory is reserved and arrays are computed ----------------------------------------------

REUSES_RESULTS = Fact(
    "reuses_results",
    "A temporary array may lie in the memory of a result that is not yet computed, so reserved "
    "memory does not always add to the peak.",
    {"cpu": RELEASES, "cuda": RELEASES},
)

PUTS_OFF_LARGE_GRADIENTS = Fact(
    "puts_off_large_gradients",
    "The gradient of a weight that takes many times the bytes that it is computed from is computed "
    "at the end of the program. Until then temporary arrays may lie in its memory, so we put no "
    "barrier there.",
    {"cuda": RELEASES},
)

OVERWRITES_THROUGH_VIEWS = Fact(
    "overwrites_through_views",
    "A fused operation writes its result over an operand that it reads through a bitcast, so that "
    "the two are never live together.",
    {"cuda": RELEASES, "tpu": RELEASES},
)

RECOMPUTES_REGIONS_EARLY = Fact(
    "recomputes_regions_early",
    "The compiler removes barriers before it orders the operations, and recomputes a region around "
    "regions before the derivatives of the later operations have run.",
    {"cpu": RELEASES[:1]},
)

SUMS_GRADIENTS_APART = Fact(
    "sums_gradients_apart",
    "The gradients that a partitioned loss returns are added up over the devices in temporaries, "
    "which are live together at the end, beside the memory of the results.",
    {"cpu": RELEASES, "cuda": RELEASES},
)

SUMS_KERNEL_GRADIENTS_APART = Fact(
    "sums_kernel_gradients_apart",
    "A loop adds up the gradient of a convolution's kernel in the order of axes in which it is "
    "computed, so the sum takes memory beside that of the result, which has another order.",
    {"cuda": RELEASES},
)

MAKES_ZEROS_FIRST = Fact(
    "makes_zeros_first",
    "The zeros in which a scan accumulates gradients depend on nothing, and are allocated before "
    "the first loop of the forward pass.",
    {"cpu": _NEW},
)

# -- what a rewrite or a barrier prevents ---------------------------------------------------------

SCATTERS_WINDOW_GRADIENTS = Fact(
    "scatters_window_gradients",
    "The derivative of a maximum over windows scatters into zeros that are allocated at the "
    "beginning of the program, so we compute it from zeros that depend on the cotangent.",
    {"cpu": RELEASES, "cuda": RELEASES},  # on CPUs, `INDEXES_WINDOWS` has the better rewrite
)

INDEXES_WINDOWS = Fact(
    "indexes_windows",
    "The derivative of a maximum over windows saves an index of four bytes for each dimension of "
    "each maximum, so we compute it from one byte for each maximum.",
    {"cpu": RELEASES},
)

READS_THE_INPUT_OF_RELU = Fact(
    "reads_the_input_of_relu",
    "The derivative of `jax.nn.relu` saves its input although a later region saves its output, so "
    "we compute the derivative from the output.",
    {"cpu": _NEW, "cuda": RELEASES, "tpu": RELEASES},
)

SCATTERS_PICKED_ELEMENTS = Fact(
    "scatters_picked_elements",
    "The derivative of an element picked from each row scatters into a second array as large as "
    "the cotangent if the array has an axis of one entry, so we drop such axes.",
    {"tpu": RELEASES},
)

COMPUTES_MASKS_AGAIN = Fact(
    "computes_masks_again",
    "The mask of a `jax.nn.relu` is computed again in the derivative, and keeps its input live at "
    "four bytes for each element in place of one, so we put a barrier on the mask.",
    {"cpu": _NEW},
)

COPIES_CONVOLUTION_INPUTS_EARLY = Fact(
    "copies_convolution_inputs_early",
    "The transposed copies of the inputs of convolutions are made in the forward pass, and are "
    "live until the backward pass, so we make them depend on the cotangent.",
    {"cpu": _NEW},
)

DELAYS_KERNEL_GRADIENTS = Fact(
    "delays_kernel_gradients",
    "The gradient of a convolution's kernel is computed after the cotangent of the convolution's "
    "input, and keeps what it reads live until then, so we put a barrier between them.",
    {"cpu": _NEW},
)

DELAYS_BATCHED_GRADIENTS = Fact(
    "delays_batched_gradients",
    "In a loop, the cotangent of the scores of attention is computed once for each of the two "
    "gradients that read it, and both are live beside what it is computed from, so we put barriers "
    "on the cotangent and on the gradients of the weights and the values.",
    {"cpu": _NEW},
)

FUSES_PRODUCTS_WITH_SUMS = Fact(
    "fuses_products_with_sums",
    "In a loop over pieces of attention in float32 with at least 4096 queries in a piece, counted "
    "over all heads and examples, the product that gives the gradient of the attention weights is "
    "fused with the sums of the softmax's derivative, so we put no barrier on this gradient.",
    {"cpu": _NEW},
)

CONVOLVES_SLOWLY_IN_LOOPS = Fact(
    "convolves_slowly_in_loops",
    "A convolution in a loop is not transposed to the order of axes that has a fast kernel, as it "
    "is outside of loops, so we transpose it in the loops over pieces.",
    {"cpu": RELEASES},
)

DELAYS_WEIGHT_GRADIENTS = Fact(
    "delays_weight_gradients",
    "The gradients of the weights of products and convolutions are computed late, and keep what "
    "they read live until then, so we put a barrier on the two gradients of each.",
    {"cuda": RELEASES},
)

KEEPS_COPIES_FOR_DERIVATIVES = Fact(
    "keeps_copies_for_derivatives",
    "A copy in half precision of an argument that all pieces of a loop read is kept for the loop "
    "of the derivative, which reads the same copy, so we put a barrier on the argument there.",
    {"tpu": RELEASES},
)

FUSES_SUMS_INTO_READERS = Fact(
    "fuses_sums_into_readers",
    "A sum of many arrays is computed again in each block that reads it, so that all its terms "
    "stay live; we put a barrier before each region.",
    # No small program has shown it on a TPU. There, a plan of ResNet-50 with nested regions needs
    # more temporaries without the barrier (64 images, v5e, jax 0.12).
    {"cpu": _NEW, "cuda": _NEW, "tpu": _UNSEEN},
)

COMPUTES_RESULTS_AGAIN = Fact(
    "computes_results_again",
    "The results of a region inside of another are computed again where the derivatives of later "
    "operations read them, so we put a barrier behind the region.",
    {"cpu": _NEW},
)

FUSES_GRADIENT_SUMS = Fact(
    "fuses_gradient_sums",
    "The sum of the gradients of an argument that is read twice is fused into the product that "
    "computes one of its terms, which then waits for the other; we put a barrier before it.",
    {"cuda": _NEW, "tpu": RELEASES},
)

# -- what a compiled program says of itself -------------------------------------------------------

KEEPS_THE_MARK_OF_RECOMPUTES = Fact(
    "keeps_the_mark_of_recomputes",
    "The metadata of a recomputed instruction contain `rematted_computation`, by which the "
    "inspector counts recomputes in the compiled program.",
    {"cpu": RELEASES, "cuda": RELEASES, "tpu": RELEASES},
)

STATES_TRIP_COUNTS = Fact(
    "states_trip_counts",
    "A compiled loop states the number of its iterations; where it does not, we read the number "
    "from the condition of the loop.",
    {"cpu": RELEASES, "cuda": RELEASES},
)

ESTIMATES_CYCLES = Fact(
    "estimates_cycles",
    "Each fusion states the cycles that the compiler expects, from which `inspect` reports the "
    "compiler's own estimate of the time.",
    {"tpu": RELEASES},
)

HAS_ONE_MEMORY = Fact(
    "has_one_memory",
    "An array that is moved to the host's memory stays where it is, so that offloading it frees "
    "nothing.",
    {"cpu": RELEASES},
)
