"""The CPU compute core (C++, `core/`): arrays in, arrays out; knows nothing of files or requests."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

BLOCK: int  # tokens in a KV block
ROTATION_UNIT: int  # rotated weights have a multiple of so many inputs
LAYOUT: int  # version of the packed bytes, layout and rounding; a packed file of another version is made anew
KV_LAYOUT: int  # version of a KV block's bytes; saved blocks of another version are of no use

Format = Literal["f32", "bf16", "fp8", "fp8e5m2", "int8", "int4", "int3", "int2", "nf4", "fp4", "mxfp4", "iq4"]
SourceType = Literal["f32", "bf16", "f16"]
KvType = Literal["f32", "bf16", "int8", "fp8", "int4"]

def isa_available() -> list[str]: ...  # best first
def isa_emulated() -> list[str]: ...  # for tests alone

# HEADRACE_ISA or the best of "native" or "portable" arithmetic (default: HEADRACE_ARITHMETIC); ValueError for others
def isa_default(arithmetic: str = "") -> str: ...
def isa_arithmetic(isa: str) -> str: ...  # instruction sets of one arithmetic give the same bits

class Pool:
    """Threads that run steps; asleep while idle. The calling thread is one of `threads`."""

    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...

def packed_bytes(
    format: Format,
    outputs: int,
    inputs: int,
    group: int,
    asymmetric: bool = False,
    multiples: bool = False,
    offsets: bool = False,
) -> int: ...
def pack(
    source: NDArray[Any],  # [outputs, inputs], C order; f32, or uint16 bits for bf16 and f16
    source_type: SourceType,
    format: Format,
    group: int,  # inputs that share a scale; 0: per channel; ignored by f32 and bf16
    out: NDArray[np.uint8],  # packed_bytes(...) long, aligned to 64
    pool: Pool,
    multiples: bool = False,  # of int4 in groups of 32: scales are whole multiples of one that four groups share
    rotated: bool = False,  # rotate the inputs first, so that outliers spread over the row
) -> float:
    """Quantise (round to nearest, clip by least squared error) and lay out for the kernels; returns the gain."""

def pack_codes(
    codes: NDArray[np.uint8],  # [outputs, inputs]
    scales: NDArray[np.float32],  # [outputs, groups]
    zeros: NDArray[np.int16] | None,  # [outputs, groups]; None: 8 (int4) or 128 (int8)
    format: Format,
    group: int,
    out: NDArray[np.uint8],
    offsets: NDArray[np.float32] | None = None,  # [outputs, groups], of int4 and int2 without zeros
) -> float:
    """Lay out codes that another program quantised: weight = scale * (code - zero), or scale * code + offset, or scale
    times an fp8 number."""

def find_nonfinite(source: NDArray[Any], source_type: SourceType, pool: Pool) -> int:
    """Index of the first NaN or infinity, or -1."""

class Packed:
    """A weight matrix in the kernels' layout; holds on to `data`, which may be a mapped file."""

    def __init__(
        self,
        format: Format,
        outputs: int,
        inputs: int,
        group: int,
        gain: float,
        data: NDArray[np.uint8],
        asymmetric: bool = False,
        multiples: bool = False,
        rotated: bool = False,
        float_rows: bool = False,  # integers meet rows of floats; otherwise rows are quantised too
        offsets: bool = False,  # groups have offsets, and codes no zero
    ) -> None: ...
    def unpack(self) -> NDArray[np.float32]: ...  # [outputs, inputs], as the kernels see it, rotated back
    def unpack_rows(self, rows: NDArray[np.int32]) -> NDArray[np.float32]: ...  # [rows, inputs], these of them

def multiply(
    weights: Packed,
    rows: NDArray[np.float32],  # [rows, inputs]
    out: NDArray[np.float32],  # [rows, outputs]
    pool: Pool,
    isa: str,
    bias: NDArray[np.float32] | None = None,  # [outputs]
    activation: Literal["", "gelu", "gelu_tanh", "silu"] = "",
) -> None:
    """One product, as a step computes it."""

class Kv:
    """KV memory of one model: blocks of 16 tokens, zeroed, in every layer."""

    # `shapes`: of each layer its KV heads, the dims of a key and those of a value. With `values_in_keys`, values are
    # the last dims of keys, and take no memory of their own.
    def __init__(
        self, shapes: Sequence[tuple[int, int, int]], blocks: int, type: KvType, values_in_keys: bool = False
    ) -> None: ...
    @property
    def blocks(self) -> int: ...
    @property
    def bytes_per_block(self) -> int: ...
    @staticmethod
    def block_bytes(shapes: Sequence[tuple[int, int, int]], type: KvType, values_in_keys: bool = False) -> int: ...
    def copy_block(self, source: int, target: int) -> None: ...
    def read_block(self, block: int, out: NDArray[np.uint8]) -> None:
        """Its bytes in all layers, `bytes_per_block` of them. Not while a step runs."""

    def write_block(self, block: int, bytes: NDArray[np.uint8]) -> None:
        """What `read_block` gave, of this or another KV memory of the same sizes and type. Not while a step runs."""

    def read_keys(self, layer: int, block: int, out: NDArray[np.float32]) -> None:
        """A block's keys of a layer, [16 tokens, heads, head size]; of f32 memory only. Not while a step runs."""

class States:
    """Recurrent states of sequences: `slots` of `floats` numbers each. Memory that no step touches costs nothing."""

    def __init__(self, slots: int, floats: int) -> None: ...
    @property
    def slots(self) -> int: ...
    def copy(self, source: int, target: int) -> None:
        """Copy one slot to another. Not while a step runs."""

class Model:
    """A model bound to its weights, ready to run steps of at most `max_rows` new tokens."""

    def __init__(
        self,
        description: Mapping[str, Any],
        tensors: Mapping[str, Packed | NDArray[np.float32]],
        pool: Pool,
        max_rows: int,
        isa: str,
    ) -> None: ...
    @property
    def isa(self) -> str: ...
    @property
    def kv_layers(self) -> int: ...
    @property
    def state_floats(self) -> int: ...
    @property
    def scratch_bytes(self) -> int: ...
    def stage_seconds(self) -> dict[str, float]:
        """Where the time of all steps so far went."""

    def step(
        self,
        kv: Kv,
        tokens: NDArray[np.int32],  # [rows] new tokens of all sequences, one sequence after the other
        offsets: NDArray[np.int32],  # [sequences + 1] where each sequence's rows start
        computed: NDArray[np.int32],  # [sequences] tokens already in the KV blocks
        block_tables: NDArray[np.int32],  # [sequences, most blocks]
        rope_variants: NDArray[np.int32],  # [sequences]
        wanted: NDArray[np.int32],  # rows, ascending
        out: NDArray[np.float32],  # [wanted, vocab] logits, or [wanted, hidden] when hidden
        hidden: bool = False,
        peaks: NDArray[np.float32] | None = None,  # out, [wanted, ceil(vocab / 32)] the largest of every 32 logits
        second_texts: NDArray[np.int32] | None = None,  # [sequences] position where token type 1 begins, -1: nowhere
        adapters: list[Adapter] = ...,  # those that sequences have
        slots: NDArray[np.int32] | None = None,  # [sequences] index into `adapters`, -1: none
        states: States | None = None,  # of a model with recurrent layers
        state_slots: NDArray[np.int32] | None = None,  # [sequences], each another
        # [features, (1 + feature_layers) * hidden] what rows begin with instead of an embedding, and what layers add
        features: NDArray[np.float32] | None = None,
        feature_rows: NDArray[np.int32] | None = None,  # [rows] which feature, -1: the token's embedding
        spans: NDArray[np.int32] | None = None,  # [rows, 2] first token and end of what layers with spans see beside
        places: NDArray[np.int32] | None = None,  # [rows, 3] numbers that ropes turn by instead of positions
        final_states: NDArray[np.float32] | None = None,  # out, [wanted, hidden] what the logits are computed from
        state_trails: NDArray[np.int32] | None = None,  # [rows] another slot for the state after a row, -1: none
        answered: NDArray[np.int32] | None = None,  # places in `wanted` that `out` has logits of; None: all
        kept: NDArray[np.float32] | None = None,  # out, [kept layers * rows, hidden] what these layers begin with
        kept_layers: NDArray[np.int32] | None = None,  # ascending
    ) -> None: ...

class Adapter:
    """Low-rank products that a sequence adds to a model's own: out += up @ (down @ row), before out is opened."""

    # `format`: of the weights that are held. A product that int8 would change by more than 2 % is held in bf16.
    def __init__(self, model: Model, format: Literal["f32", "bf16", "int8"]) -> None: ...
    def add(
        self,
        layer: int,
        product: Literal["qkv", "o", "up", "down", "in", "out"],
        down: NDArray[np.float32],  # [ranks of all parts, inputs]
        parts: list[tuple[NDArray[np.int32], NDArray[np.float32]]],  # columns of the packed product; [columns, ranks]
        magnitudes: NDArray[np.float32] | None = None,  # [packed outputs] factors of the sum, without the bias
    ) -> None: ...
    @property
    def bytes(self) -> int: ...

class Sampler:
    """Chooses the next tokens of all rows at once; see core/sample.h for the order in which wishes apply."""

    def __init__(self, vocab: int, pool: Pool, isa: str) -> None: ...
    def choose(
        self,
        logits: NDArray[np.float32],  # [rows, vocab]; changed where a row's wishes do
        numbers: NDArray[np.float32],  # [rows, 6] temperature, top_p, min_p, repetition, frequency, presence
        counts: NDArray[np.int32],  # [rows, 2] top_k (0: all), logprobs (-1: none)
        keys: NDArray[np.uint64],  # [rows, 2] seed, position
        seen: NDArray[np.int32],  # tokens of prompt and output, each once a row, all rows one after the other
        seen_counts: NDArray[np.int32],  # how often each is in the output
        seen_offsets: NDArray[np.int32],  # [rows + 1]
        bias_tokens: NDArray[np.int32],
        biases: NDArray[np.float32],
        bias_offsets: NDArray[np.int32],  # [rows + 1]
        masks: NDArray[np.uint32],  # [masks, ceil(vocab / 32)] a bit per token, set where it is allowed
        mask_rows: NDArray[np.int32],  # [rows] index of the row's mask, -1: none
        tokens: NDArray[np.int32],  # out, [rows]; -1 where no token can be chosen
        logprobs: NDArray[np.float32],  # out, [rows]
        top: NDArray[np.int32],  # out, [rows, most]
        top_logprobs: NDArray[np.float32],  # out, [rows, most]
        peaks: NDArray[np.float32] | None = None,  # [rows, ceil(vocab / 32)] as a step gives them; None: to be found
    ) -> None: ...

def measure_bandwidth(pool: Pool, mebibytes: int, seconds: float) -> float:
    """Bytes per second that all threads together read from memory."""

def measure_peak(pool: Pool, kind: str, seconds: float) -> float:
    """Operations per second (a multiply and an add are two) from registers; 0 where the machine lacks the instructions.

    Kinds: fma_f32, dot_int8, dot_bf16, amx_int8, amx_bf16.
    """
