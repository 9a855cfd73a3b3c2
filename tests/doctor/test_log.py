"""Out-of-memory messages of XLA, as compilers and runtimes print them."""

import pytest

from remat_kit import UserError
from remat_kit._doctor.log import Allocation, read_log

GIB = 2**30

# libtpu 0.0.52, for a program that was compiled for a TPU v5e.
E1000 = """\
jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on \
HBM, the total memory required for HLO temporaries (116.05G) exceeds available HBM (15.75G). HLO \
module: jit_loss.
See https://openxla.org/xla/errors/error_1000 for more details.
"""

# The format of earlier releases of libtpu.
TPU = """\
RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used \
49.34G of 32.00G hbm. Exceeded hbm capacity by 17.34G.

Total hbm usage >= 49.86G:
    reserved        530.00M
    program          48.00G
    arguments         1.34G

  Largest program allocations in hbm:

  1. Size: 8.00G
     Operator: op_name="jit(train_step)/jvp(GPT)/block_0/dot_general" source_file="/a/train.py" \
source_line=12
     Shape: bf16[8,32,4096,4096]{3,2,1,0:T(8,128)(2,1)}
     Unpadded size: 8.00G
     XLA label: fusion.12 = fusion(copy.1), kind=kOutput
     Allocation type: HLO temp
     ==========================

  2. Size: 1.00G
     Shape: f32[16384,16384]{1,0:T(8,128)}
     ==========================
"""

GPU = """\
W external/xla/xla/tsl/framework/bfc_allocator.cc:497] Allocator (GPU_0_bfc) ran out of memory \
trying to allocate 27.93GiB (rounded to 29995136256)requested by op
Limit:                     34359738368
InUse:                      5368709120
jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate \
29995136128 bytes.
BufferAssignment OOM Debugging.
BufferAssignment stats:
             parameter allocation:  475.37MiB
              constant allocation:   512.0KiB
        maybe_live_out allocation:  474.37MiB
     preallocated temp allocation:   27.93GiB
                 total allocation:   28.40GiB
              total fragmentation:   615.5KiB (0.00%)
Peak buffers:
        Buffer 1:
                Size: 1.96GiB
                Operator: op_name="pjit(train_step)/jit(main)/mul" source_file="losses.py" \
source_line=139
                XLA Label: fusion
                Shape: f32[16,1024,32128]
                ==========================

        Buffer 2:
                Size: 384.0KiB
                Entry Parameter Subshape: f32[256,128,3]
                ==========================
"""


def test_the_compiler_for_tpus():
    found = read_log(E1000)
    assert found.needed_bytes == int(116.05 * GIB)
    assert found.available_bytes == int(15.75 * GIB)
    assert found.program == "jit_loss"
    assert found.headline == (
        "The program `jit_loss` ran out of memory: it needs 116 GiB, and 15.8 GiB are available."
    )


def test_earlier_compilers_for_tpus():
    found = read_log(TPU)
    assert (found.needed_bytes, found.available_bytes) == (int(49.34 * GIB), 32 * GIB)
    op = "jit(train_step)/jvp(GPT)/block_0/dot_general"
    assert found.largest == (
        Allocation(8 * GIB, "bf16[8,32,4096,4096]", op, "/a/train.py:12"),
        Allocation(GIB, "f32[16384,16384]"),
    )
    assert "block_0" in found.table().text()


def test_the_allocator_of_gpus():
    found = read_log("some text\n1. Size: nothing\n" + GPU)
    assert found.needed_bytes == int(28.40 * GIB)
    assert found.requested_bytes == 29995136128
    assert found.available_bytes == 32 * GIB
    assert [a.shape for a in found.largest] == ["f32[16,1024,32128]", "f32[256,128,3]"]
    assert found.largest[0].source == "losses.py:139"


def test_the_last_of_several_messages_counts():
    found = read_log(GPU + GPU.replace("29995136128", "1024").replace("1.96GiB", "4.00GiB"))
    assert found.requested_bytes == 1024
    assert [a.bytes for a in found.largest] == [4 * GIB, 384 * 1024]


@pytest.mark.parametrize(
    ("text", "needed", "available", "requested"),
    [
        (
            "RESOURCE_EXHAUSTED: TPU TensorCore Hbm usage: 34.82G, SparseCore Hbm usage 174.10G, "
            "exceeding available bytes: 95.74G",
            int(34.82 * GIB),
            int(95.74 * GIB),
            None,
        ),
        (
            "RESOURCE_EXHAUSTED: Error loading program 'jit_step': Attempting to reserve 29.49G at "
            "the bottom of memory. That was not possible. There are 147.64M free",
            None,
            int(147.64 * 2**20),
            int(29.49 * GIB),
        ),
        (
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 32.00GiB.",
            None,
            None,
            32 * GIB,
        ),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 70368744177664 bytes.", None, None, 2**46),
    ],
)
def test_other_messages(text, needed, available, requested):
    found = read_log(text)
    assert (found.needed_bytes, found.available_bytes) == (needed, available)
    assert found.requested_bytes == requested


def test_logs_without_such_a_message():
    with pytest.raises(UserError, match="contains no out-of-memory message"):
        read_log("step 1: loss 0.5")
