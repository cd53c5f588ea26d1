"""One planted mistake per operation and kernel family, found by the text of the statement.

`mutants.py` spoils every statement of rmsnorm's kernels. The kernels of linear_attention, wkv5,
wkv6 and timex are many times as long, so of these each operation is spoiled once: barriers, waits,
slots of rings, exchange between blocks, masks, decays, the last chunk, the carried state.

Kernels with a fast path repeat a block step by step where an output is not finite. So the host
layer fills memory that a copy has not reached yet with NaN in two orders of threads and with an
ordinary number in the others.

A statement is looked for in the rendered source and in every header that it includes, whatever
their names. A pattern that finds nothing is an error: the statement was rewritten, so write the
pattern anew; never leave the operation out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from mutants import Mutant
from mutation_operators import ANY_WRONG, Fate, Mechanism, MutationOperator
from mutation_subjects import Subject

from kgen.assets import include_dir
from kgen.catalogue import open_catalogue, profile_named
from kgen.errors import EmptySpaceError
from kgen.model.config import Config, Value
from kgen.model.problem import parse_problem
from kgen.search.feasible import enumerate_feasible, is_feasible

_INCLUDE = re.compile(r'^\s*#\s*include\s*"(kgen/[^"]+\.cuh)"', re.MULTILINE)
# Rooms of headers that belong to no family: `mutants.py` and the unit tests spoil these.
_SHARED = ("kgen/primitives/", "kgen/host/")


@dataclass(frozen=True)
class Mistake:
    """A statement, and what becomes of it.

    Attributes:
        operation: What the statement is for.
        pattern: Regular expression of it; its first match is replaced.
        new: As for `re.Match.expand`.
        under: Beginning of the path of the header, where several have such a statement.
    """

    operation: str
    pattern: str
    new: str
    under: str = ""


@dataclass(frozen=True)
class Family:
    """A kernel with its mistakes.

    Attributes:
        operator: As the catalogue knows it.
        pass_name: Which pass.
        variant: One of its variants.
        dims: The problem, as `--problem` takes it: several chunks or batches, the last one ragged.
        mistakes: Each must be refused.
        choose: What parameters should be, where the variant has them and a feasible config allows.
    """

    operator: str
    pass_name: str
    variant: str
    dims: str
    mistakes: tuple[Mistake, ...]
    choose: Mapping[str, Value] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.operator}-{self.pass_name}-{self.variant}"


# More warps than one, or barriers do nothing; few stages, so that a ring comes round.
_RING = {"stages": 3, "chunk": 16, "segments": 1, "value_warps": 2, "key_warps": 2}
_BATCHES = (
    Mistake("wait", r"cp_async_wait<Stages - 2>\(\);", ";", "kgen/recurrent/"),
    Mistake("barrier", r"(cp_async_wait<Stages - 2>\(\);\s*)sync_block\(\);", r"\1",
            "kgen/recurrent/"),
    Mistake("slot", r"(\w+\(batch \* Tokens, )static_cast<int>\(batch % Stages\)\)", r"\g<1>0)"),
    Mistake("last batch", r"steps - begin < Tokens \? static_cast<int>\(steps - begin\) : Tokens",
            "Tokens"),
)  # fmt: skip
_LAST_CHUNK = Mistake("last chunk", r"(<WithA, false>\(tile, )(\w+)\)", r"\1\2 - 1)")
_SLOTS = (
    Mistake("skipped slot", r"Slot\{place, place >= 0 && place < slots,",
            "Slot{place < 0 ? 0 : place, place < slots,"),
    Mistake("refused slot", r"place < 0 \? 0\.0f : nan", "0.0f"),
    Mistake("slot", r"pool\.head\(slot\.place, h\)", "pool.head(n < S ? n : 0, h)"),
)
_WARP_STATE = (
    *_SLOTS,
    Mistake("next step", r"if \(t \+ 1 < T\) step = step_of", "if (t + 2 < T) step = step_of"),
    Mistake("state carry", r"state\.store\(states\);", ";"),
    Mistake("exchange", r"bits < kFirst \* Split;", "bits < kFirst * Split / 2;"),
)
_WGMMA = "kgen/linear_attention/split_t_wgmma"
_GATHER = "kgen/linear_attention/split_t_exchange_gather"
_TERMS = "kgen/linear_attention/wgmma_loop"
_GROUPS = "kgen/wkv7/group_producer"
_F64_PRODUCER, _F64_LOOP, _F64_ROWS = (f"kgen/wkv7/f64_{x}" for x in ("producer", "loop", "rows"))
_DECODE = "B=3,S=5,T=3,H=2,K=9,V=5,dtype=fp32,state_indices_dtype=int64"
FAMILIES = (
    Family(
        "linear_attention", "forward", "chunk_loop",
        "B=1,H=2,T=170,E=32,M=32,dtype=bf16,initial_state_dtype=fp32,final_state_dtype=fp32",
        (
            Mistake("wait", r"cp_async_wait<Stages - 3>\(\);", ";"),
            Mistake("barrier", r"(cp_async_wait<Stages - 3>\(\);[^;]*finish_norm_key[^;]*;\s*)"
                               r"sync_block\(\);", r"\1"),
            Mistake("barrier behind the stage",
                    r"sync_block\(\);(\s*//[^\n]*\n\s*)stage<true>\(\);",
                    r"\1stage<true>(); sync_block();"),
            _LAST_CHUNK,
            Mistake("mask", r"\bs \+ i <= t \?", "s + i < t + 2 ?"),
            Mistake("slot", r"(T\* tile = \w+ \+ )chunk( % Stages \* \w+;\s*carry\()",
                    r"\1(chunk + 1)\2"),
            Mistake("state carry", r"\bcarry\(sums, state, tile\);", ";"),
        ),
        _RING,
    ),
    Family(
        "linear_attention", "forward", "chunk_scan", "B=1,H=2,T=170,E=32,M=32,dtype=fp32",
        (
            Mistake("exchange", r"(state\[j\]) \+= (\w+\[i\]\[j\];)", r"\1 = \2"),
            Mistake("exchange of the first sum", r"(state\[j\] \+= \w+)\[i\]\[j\];",
                    r"\1[0][j];"),
            Mistake("state carry", r"(\bsegment) - 1\) \* Size", r"\1) * Size"),
        ),
        {**_RING, "segments": 4},
    ),
    Family(
        "linear_attention", "backward", "chunk_scan", "B=1,H=1,T=170,E=32,M=32,dtype=fp32",
        (Mistake("exchange", r"(state\[j\]) \+= (\w+\[i\]\[j\];)", r"\1 = \2"),),
        {**_RING, "segments": 4},
    ),
    Family(
        "linear_attention", "forward", "split_t", "B=1,H=1,T=300,E=32,M=32,dtype=bf16",
        (
            Mistake("exchange", r"(\bleft\[j\]) \+= (\w+\[0\]\[j\];)", r"\1 = \2"),
            Mistake("exchange of the first sum", r"sum_of_tile\(first \+ cta, unit, tile\)",
                    "sum_of_tile(0, unit, tile)"),
            Mistake("wait", r"cp_async_wait<kBatches - 1 - Number>\(\);", ";"),
            Mistake("barrier", r"(cp_async_wait<kBatches - 1 - Number>\(\);\s*)sync_block\(\);",
                    r"\1"),
        ),
        {"products": "mma"},
    ),
    Family(
        "linear_attention", "forward", "split_t",
        "B=1,H=1,T=300,E=32,M=32,dtype=bf16,final_state_dtype=fp32",
        (
            Mistake("arrival at a grid barrier",
                    r"barrier_\.template arrive<Threads>\(kSumWaiter\);", ";"),
            Mistake("wait for states", r"barrier_\.wait\(kStateWaiter\);", ";"),
            Mistake("counters of a grid barrier", r"(kgen::clear_grid_barriers\(counters, )[^;]*;",
                    r"\g<1>1);"),
        ),
        {"products": "mma"},
    ),
    Family(
        "linear_attention", "forward", "split_t",
        "B=1,H=1,T=300,E=64,M=64,dtype=bf16,final_state_dtype=fp32",
        (
            Mistake("fence of rows", r"fence_proxy_async\(\);", ";", _WGMMA),
            Mistake("fence of registers", r"wgmma_fence\(sums\[m\]\);", ";", _WGMMA),
            Mistake("fence of a state", r"fence_proxy_async\(\);", ";", _GATHER),
            Mistake("sums written", r"named_barrier_sync\(kSumsWritten, Consumers \+ Reducers\);",
                    ";", _GATHER),
            Mistake("sums visible", r"named_barrier_sync\(kSumsVisible, Reducers\);", ";", _GATHER),
            Mistake("wait for other blocks", r"counter_\.wait\(\);", ";", _GATHER),
            Mistake("arrival of consumers",
                    r"named_barrier_arrive<Consumers \+ Reducers>\(kSumsWritten\);", ";",
                    _GATHER),
            Mistake("second round", r"static_cast<u32>\(round % 2\)", "0u", _GATHER),
            Mistake("buffers of rounds", r"\(\(round % 2 \* 2 \+ rest\) \* Ctas", "(rest * Ctas",
                    _GATHER),
        ),
        {"head_ctas": 4, "segment": 128, "block_v": 64, "batch": 64, "copy_bytes": 16,
         "score_terms": 1, "min_blocks": 1, "products": "wgmma", "overlap": 0},
    ),
    Family(
        "linear_attention", "forward", "wgmma_split_bf16",
        "B=1,H=2,T=170,E=40,M=40,dtype=fp32,product_dtype=tf32,final_state_dtype=fp32",
        (
            Mistake("fence of terms", r"fence_proxy_async\(\);", ";", _TERMS),
            Mistake("fence of states",
                    r"(store_state\(state_before\(chunk\), state\);\s*)fence_proxy_async\(\);",
                    r"\1", _TERMS),
            Mistake("fence of registers", r"wgmma_fence\(sum\);", ";", _TERMS),
            Mistake("wait", r"wgmma_wait<1>\(sums, a\);", "wgmma_wait<2>(sums, a);", _TERMS),
        ),
        {"terms": 2, "copy_bytes": 16},
    ),
    Family(
        "linear_attention", "forward", "warp_specialized", "B=1,H=2,T=700,E=64,M=64,dtype=bf16",
        (
            Mistake("wait", r"cp_async_wait<Stages - 3>\(\);", ";"),
            Mistake("barrier", r"(cp_async_wait<Stages - 3>\(\);\s*)sync_block\(\);", r"\1"),
            Mistake("slot", r"(\(staged_ - 1\)) % \(Stages - 1\) \* ", r"0 * "),
            Mistake("last chunk", r"(start<false>\(tile, \w+, )(\w+)\);", r"\1\2 - 1);"),
        ),
        _RING,
    ),
    Family(
        "linear_attention", "forward", "block_per_head",
        "B=1,H=2,T=170,E=24,M=24,dtype=fp32,initial_state_dtype=fp32", _BATCHES, {"stages": 3},
    ),
    Family(
        "wkv4", "forward", "scan", "B=1,T=90,C=13,dtype=fp32,final_state_dtype=fp32",
        (
            Mistake("barrier", r"kgen::sync_block\(\);", ";"),
            Mistake("slot", r"parity \* kSegments \+ segment, lane, state", "segment, lane, state"),
            Mistake("exchange", r"i < segment; \+\+i", "i + 1 < segment; ++i"),
            Mistake("state carry", r"\(parity \^ 1\), lane, j\)", "parity, lane, j)"),
            Mistake("sums of earlier parts", r"i64 i = 0; i < split;", "i64 i = 1; i < split;"),
            Mistake("decay of a segment", r"decay_of_steps\(decay\[j\], kSteps\)",
                    "decay_of_steps(decay[j], 1)"),
            Mistake("rescaling", r"rises \? small : 1\.0f", "1.0f"),
            Mistake("final state", r"inside && last && end == T", "inside && segment == 0"),
            Mistake("anchor of a state", r"(larger\(channel\.bonus_log2, 0\.0f\)), "
                    r"state\.exponent \* kLog2e", r"\1, -infinity()"),
            Mistake("scale of the weights", r"fast_exp2\(anchor\[j\] - common\)", "1.0f"),
            Mistake("largest term", r"larger\(largest\[j\] \* factor, e\)",
                    "larger(largest[j], e)"),
            Mistake("sums below the least", r"b\[j\] >= kLeast && channel", "channel"),
            Mistake("outputs below the least",
                    r"!anchored \|\| !own\.outputs_fit\(state, channel\)", "!anchored"),
        ),
        {"splits": 2, "segments": 4, "steps": 8},
    ),
    Family(
        "wkv4", "forward", "running_max",
        "B=1,T=90,C=13,dtype=fp32,initial_state_dtype=fp32",
        (
            Mistake("barrier of the sums", r"kgen::sync_block\(\);  // A", ";"),
            Mistake("barrier of the states", r"kgen::sync_block\(\);  // B", ";"),
            Mistake("state before a segment", r"slots\.put\(i, own, before\);",
                    "slots.put(i, own, sum);"),
            Mistake("sums of earlier parts", r"i64 i = 0; i < place\.part;",
                    "i64 i = 1; i < place.part;"),
            Mistake("decay of a segment", r"decay = WholeDecay::of\(own_decay, kSteps\)",
                    "decay = WholeDecay::of(own_decay, 1)"),
            Mistake("fraction of a decay", r"(abs\(exponent\) < 1e7f \? )exp2\(rest\)",
                    r"\g<1>1.0f"),
            Mistake("size of the sums", r"exponent \+= static_cast<float>\([^;]*;", ";"),
            Mistake("running maximum", r"m = larger\(kept, k\);", "m = kept;"),
            Mistake("weight of a larger term", r"rises \? fma\(small, a, x\)",
                    "rises ? fma(small, x, a)"),
            Mistake("most ratio", r"smaller_or_nan\(ratio, kMostRatio\)", "ratio"),
            Mistake("unknown key", r"return x > bound \? bound : x;",
                    "return x < bound ? x : bound;"),
        ),
        {"splits": 2, "segments": 4, "steps": 8},
    ),
    Family(
        "wkv4", "backward", "scan",
        "B=2,T=170,C=13,dtype=fp32,decay_form=raw,initial_state_dtype=fp32,final_state_dtype=fp32",
        (
            Mistake("barrier of the sums", r"kgen::sync_block\(\);  // A", ";"),
            Mistake("barrier of the gradients", r"kgen::sync_block\(\);  // B", ";"),
            Mistake("exchange", r"i > segment; --i", "i > segment + 1; --i"),
            Mistake("gradient carry", r"between\.put\(parity,", "between.put(1,"),
            Mistake("state before a round", r"rows\.put\(first_row \+ round \+ i, c, state\);",
                    "rows.put(first_row + round + i, c, sums[i]);"),
            Mistake("decay of the last segment", r"decay_of_steps\(decay\[j\], steps\)",
                    "decay_of_steps(decay[j], kSteps)"),
            Mistake("gw by the state", r"gw_round\[j\] \+= derivative\[j\]\.by_state[^;]*;", ";"),
            Mistake("gradient of the first state", r"-state\.exponent, gfinal_state",
                    "0.0f, gfinal_state"),
            Mistake("second part of an exponent", r"low \+= rounding_of\(sum, error\)",
                    "low += 0.0f"),
            Mistake("sum of the batch", r"i64 row = 0; row < rows;", "i64 row = 1; row < rows;"),
        ),
        {"segments": 4, "steps": 4},
    ),
    Family(
        "wkv4", "backward", "running_max",
        "B=2,T=90,C=13,dtype=fp32,decay_form=raw,final_state_dtype=fp32",
        (
            Mistake("barrier of the gradients", r"kgen::sync_block\(\);  // B", ";"),
            Mistake("slots of a round", r"const int slot = parity \* kSegments;",
                    "const int slot = 0;"),
            Mistake("state before a segment", r"round \* kSegments \+ segment, column \+ j",
                    "round * kSegments, column + j"),
            Mistake("gradient behind a segment", r"slots\.put\(segment, column, after\);",
                    "slots.put(segment, column, sum);"),
            Mistake("decay of the last segment", r"WholeDecay::of\(own_decay, there\), slots",
                    "decay, slots"),
            Mistake("gradient of the final state", r"WholeSum<false> gradient\{-state\.exponent",
                    "WholeSum<false> gradient{state.exponent"),
            Mistake("exponent of an output", r"larger\(state\.m, k \+ bonus\)", "state.m"),
            Mistake("own term", r"now \* found\.r", "found.r"),
            Mistake("sum of gradients", r"fma\(channel\[j\]\.decay, static_cast<float>\(i\), own\)",
                    "own"),
            Mistake("step back", r"gradient\.m = larger\(m, -output\.exponent\)",
                    "gradient.m = m"),
            Mistake("gw of a step", r"\(output\.before\.m \+ gradient\.m\) \+ decay",
                    "output.before.m + gradient.m"),
            Mistake("parts of gw", r"gw_sum\.add\(part\.a\)", "gw_sum.add(i > 0 ? part.a : 0.0f)"),
        ),
        {"segments": 4, "steps": 4},
    ),
    Family(
        "wkv4", "backward", "running_max",
        "B=2,T=90,C=13,dtype=fp32,decay_form=raw,final_state_dtype=fp32",
        (
            Mistake("decay between segments", r"change \+ decay\.whole", "change"),
            Mistake("gradient after a segment", r"put_gradient\(slot, column, after\);",
                    "put_gradient(slot, column, sum);"),
            Mistake("state after a segment", r"rows\.exponent\(row \+ 1, c \+ j\)",
                    "rows.exponent(row, c + j)"),
            Mistake("exponent of the final gradient", r"last \? -exponent : exponent", "exponent"),
            Mistake("units of a gradient", r"fma\(m, kLog2e, -exponent\)", "-exponent"),
            Mistake("weight of a state", r"found\.forget = rises \? small : 1\.0f",
                    "found.forget = small"),
            Mistake("weight of a step", r"found\.input = rises \? 1\.0f : small",
                    "found.input = 1.0f"),
            Mistake("steps that do not exist", r"Final && i >= count", "false"),
            Mistake("own ratio", r"smaller_or_nan\(ratio, kMostOwnRatio\)", "ratio"),
            Mistake("step back", r"fma\(step\.forget, b, -step\.r \* step\.y\)",
                    "fma(step.forget, b, step.r * step.y)"),
            Mistake("gw of a step", r"fma\(step\.a, after\.a, step\.b \* after\.b\)",
                    "step.a * after.a"),
        ),
        {"segments": 4, "steps": 4, "step_weights": True},
    ),
    Family(
        "wkv4", "backward", "anchored", "B=2,T=90,C=12,dtype=fp32,decay_form=raw",
        (
            Mistake("barrier of the sums", r"kgen::sync_block\(\);  // A\s*copy_round\(round - ",
                    "copy_round(round - "),
            Mistake("barrier of the states", r"kgen::sync_block\(\);  // B", ";"),
            Mistake("barrier of the gradients' sums", r"kgen::sync_block\(\);  // C", ";"),
            Mistake("barrier of the gradients", r"kgen::sync_block\(\);  // D", ";"),
            Mistake("wait for a tile",
                    r"kgen::cp_async_wait<kStages - 2>\(\);(\s*kgen::sync_block\(\);  // E)",
                    r"\1"),
            Mistake("barrier of a tile",
                    r"(kgen::cp_async_wait<kStages - 2>\(\);\s*)kgen::sync_block\(\);  // E",
                    r"\1"),
            Mistake("wait for a tile of the states",
                    r"kgen::cp_async_wait<kStateStages - 3>\(\);", ";"),
            Mistake("slots of a round", r"const int slot = parity \* kSegments;",
                    "const int slot = 0;"),
            Mistake("rows beyond T", r"steps_of_round\(place\.end - 1, x\.T\) : kRound",
                    "kRound : kRound"),
            Mistake("exponent after a round", r"carried\.at\(0, own\)\[2\] = exponent;", ";"),
            Mistake("sums of keys apart", r"if \(steps\.apart\[j\]\)(\s*sums\[j\] = Separate)",
                    r"if (false)\1"),
            Mistake("a lower anchor", r"top - width - low\[j\]\)", "top)"),
            Mistake("bias of values", r"\(value\[j\] \* kBias\)", "value[j]"),
            Mistake("a state above the anchor", r"anchor\[j\] = lowest;", ";"),
            Mistake("own term", r"weight\[i\]\[j\] \* fma\(bonus, own, later\)",
                    "weight[i][j] * later"),
            Mistake("gw of a segment", r"gw\[j\] = channel\[j\]\.decay \* ", "gw[j] = "),
            Mistake("states before steps", r"kept\.put\(i, a, b\);",
                    "if (i == 0) kept.put(i, a, b);"),
        ),
        {"segments": 4, "steps": 4, "prefetch": False, "splits": 1},
    ),
    Family(
        "wkv4", "backward", "anchored", "B=2,T=90,C=12,dtype=fp32",
        (
            Mistake("barrier D beside the next sums",
                    r"(following, kSteps\);\s*)kgen::sync_block\(\);  // D", r"\1"),
            Mistake("barrier B behind the gradients",
                    r"kgen::sync_block\(\);  // B(\s*copy_round\(round - \(kStages - 1\), behind)",
                    r"\1"),
            Mistake("barrier C beside the copies",
                    r"(kgen::cp_async_wait<kStages - 2>\(\);\s*)kgen::sync_block\(\);  // C",
                    r"\1"),
            Mistake("wait beside the outputs",
                    r"kgen::cp_async_wait<kStages - 2>\(\);(\s*kgen::sync_block\(\);  // C)",
                    r"\1"),
            Mistake("steps of the round after", r"round \+ 1 == last \? count : kSteps", "kSteps"),
            Mistake("the last gradients", r"place\.end - place\.first == 1 \? count : kSteps",
                    "0"),
        ),
        {"segments": 4, "steps": 4, "prefetch": True, "splits": 1},
    ),
    Family(
        "wkv4", "backward", "anchored", "B=2,T=300,C=12,dtype=fp32",
        (
            Mistake("weights that count", r" \|\| \(low\[j\] \+ shift < kLow && counts\);", ";"),
            Mistake("state before a part", r"state = carried\.sum\(2, own\);", ";"),
            Mistake("decay of the state before a part",
                    r"\(round - place\.first\) \* kRound;", "0;"),
            Mistake("parts before", r"i < place\.split; \+\+i", "i + 1 < place.split; ++i"),
            Mistake("parts behind", r"i > place\.split; --i", "i > place.split + 1; --i"),
            Mistake("gradient before a part", r"carried\.at\(0, own\)\[2\], after\.a, after\.b",
                    "carried.at(0, own)[2], 0.0f, after.b"),
            Mistake("gw of parts", r"gu_parts, gw, gu, B \* split_count", "gu_parts, gw, gu, B"),
        ),
        {"segments": 2, "steps": 8, "prefetch": False, "splits": 2},
    ),
    Family(
        "wkv6", "forward", "chunk_halving",
        "B=1,T=170,H=2,K=32,V=32,dtype=bf16,initial_state_dtype=fp32,final_state_dtype=fp32",
        (
            Mistake("wait", r"(kBuffers == 1\) \{\s*)cp_async_wait<Stages - 3>\(\);", r"\1;"),
            Mistake("barrier",
                    r"(kBuffers == 1\) \{\s*cp_async_wait<Stages - 3>\(\);\s*)sync_block\(\);",
                    r"\1"),
            _LAST_CHUNK,
            Mistake("slot", r"ring_ \+ chunk % Stages \* Base::kStage",
                    "ring_ + (chunk + 1) % Stages * Base::kStage"),
            Mistake("state carry", r"this->carry\(sums, state, this->factors_\.carried\(\)\);",
                    ";"),
            Mistake("decay of the state", r"(state\[m\]\[tile\]\[i\] \*= two)\[i % 2\]", r"\1[0]"),
            Mistake("decay anchor", r"near\[level\] = first \? decay : near\[level\] \* decay;",
                    "near[level] *= decay;"),
            Mistake("level", r"\(i & half\) == 0\) continue;", "(i & half) != 0) continue;"),
            Mistake("bonus", r"if \(lane_id\(\) % 2 == 0\) all\[Padded", "if (false) all[Padded"),
        ),
        {**_RING, "buffers": 1},
    ),
    Family(
        "wkv6", "backward", "chunk_loop_slices", "B=1,T=40,H=2,K=144,V=96,dtype=bf16",
        (
            Mistake("keys of a slice", r"return key \* Whole::kK;", "return 0;"),
            Mistake("terms of a slice", r"return value \* kHeadKeys \+ key \* Whole::kK;",
                    "return key * Whole::kK;"),
            Mistake("sum over slices", r"int slice = 1; slice < Slices;",
                    "int slice = 2; slice < Slices;"),
            Mistake("states of slices", r"part \* kSlices \+ C::slice\(\)", "part"),
            Mistake("gu of slices", r"const i64 parts = chunks \* C::kValueSlices;",
                    "const i64 parts = chunks;"),
            Mistake("u that is Inf", r"C::kValueSlices > 1 && !is_finite\(x\.u\)", "false"),
        ),
        {"chunk": 32, "key_slices": 2, "value_slices": 2, "sequential_chunks": False},
    ),
    Family(
        "wkv6", "backward", "chunk_loop", "B=1,T=170,H=1,K=32,V=32,dtype=bf16",
        (
            Mistake("wait", r"\bcp_async_wait<1>\(\);", ";", "kgen/wkv/chunk_gradients"),
            Mistake("barrier", r"(cp_async_wait_all\(\);\s*)sync_block\(\);", r"\1",
                    "kgen/wkv/chunk_gradients"),
            Mistake("slot", r"static_cast<int>\(buffer % kStages\)", "0"),
            Mistake("last chunk", r"kgen::min\(left, i64\{kChunk\}\)", "kChunk"),
            Mistake("mask", r"= i < left \? (to_float\(\*from\)) : 0\.0f;", r"= \1;"),
            Mistake("decay anchor", r"\bbefore\.multiply\(d\[i\]\);", ";"),
            Mistake("state carry", r"\bback\.update\(back,[^;]*;", ";"),
        ),
        {"chunk": 32, "stages": 3},
    ),
    Family(
        "wkv5", "backward", "chunk_loop", "B=1,T=70,H=1,K=32,V=32,dtype=fp16",
        (
            Mistake("barrier", r"(scores\.cross_scores\(\);\s*\}\s*)sync_block\(\);", r"\1"),
            Mistake("level", r"halves<2>\(at\.decayed_r", "halves<2>(at.decays"),
            Mistake("mask of a level", r"if \(g / Steps == column / Steps\)",
                    "if (g / Steps <= column / Steps)"),
            Mistake("causal mask", r"(Vec<float, 4>\*>\(to \+ i\)) = \{\};", r"\1;"),
            Mistake("NaN of earlier steps", r"for \(int j = s; j < kSubSteps; \+\+j\)",
                    "for (int j = 0; j < kSubSteps; ++j)"),
            Mistake("neighbours", r"x\.k\[t\] \* x\.r\[t \+ 1\]", "x.k[t] * x.r[t]"),
            Mistake("decay of a row", r"early = i == 0 \? x\.d\[s\] : early \* x\.d\[s\];", ";"),
        ),
        {"chunk": 32, "level_scores": True},
    ),
    Family(
        "wkv6", "backward", "chunk_loop_packed",
        "B=1,N=4,T=170,H=2,K=16,V=16,dtype=bf16,cu_seqlens_dtype=int32",
        (
            Mistake("slots of sequences", r"return first_step / Chunk \+ n;",
                    "return first_step / Chunk;"),
            Mistake("search of a slot", r"middle\) <= slot;", "middle) < slot;"),
            Mistake("sequence start", r"its\.rows = its\.at\(first_step\);", ";"),
            Mistake("last chunk", r"min\(its\.span\.steps - number \* kChunk, i64\{kChunk\}\)",
                    "kChunk"),
            Mistake("unused slots", r"gu_parts\[sum\] = 0\.0f;", ";"),
        ),
        {"chunk": 32, "sequential_chunks": False},
    ),
    Family("wkv6", "forward", "block_per_head", "B=1,T=45,H=2,K=24,V=24,dtype=fp32", _BATCHES,
           {"stages": 3}),
    Family("wkv5", "backward", "block_per_head", "B=1,T=45,H=2,K=24,V=24,dtype=fp32",
           (Mistake("wait", r"cp_async_wait<Stages - 2>\(\);", ";", "kgen/recurrent/"),
            Mistake("barrier", r"(products\[i\] = product \* scale;\s*\}\s*)sync_block\(\);",
                    r"\1")), {"stages": 3}),
    Family(
        "wkv6", "forward", "warp_specialized", "B=1,T=45,H=1,K=16,V=16,dtype=bf16,decay_form=log",
        (
            Mistake("level", r"add_level<1>\(r, k\);", "add_level<2>(r, k);"),
            Mistake("late half", r"late\[x\] = flip \?", "late[x] = !flip ?"),
            Mistake("neighbours", r"soon\[i\] = odd \? copied_k\[1\]",
                    "soon[i] = odd ? copied_k[0]"),
            Mistake("partner", r"kHalf == 2 \? 4 : 8", "kHalf == 2 ? 8 : 4", "kgen/wkv6/"),
            Mistake("level of a score", r"other & 4   \? sums_\[1\]\[x\]",
                    "other & 4 ? sums_[1][2 + x]"),
            Mistake("sums of a chunk", r"sums_\[i / 4\]\[i % 4\] = 0\.0f;", ";"),
            Mistake("bonus", r"own_r\[x\] \* bonus\[x\]", "own_r[x]"),
            Mistake("bonus of late steps", r"if \(mma_lane\(\)\.q == 0\)", "if (false)"),
            Mistake("from the start", r"r\[1\]\[x\] \*= all\[0\]\[x\];", ";"),
            Mistake("to the end", r"k\[0\]\[x\] \*= all\[1\]\[x\];", ";"),
            Mistake("slot", r"slot = slot == kRowWarps \? 0 : slot \+ 1;", ";"),
            Mistake("last chunk", r"there = left_ > 8 \* half;", "there = true;"),
            Mistake("decay of the state",
                    r"(i < 4; \+\+i\)) s\[i\] \*= d\[i % 2\];", r"\1 ;"),
        ),
    ),
    Family(
        "wkv6", "forward", "warp_specialized", "B=1,T=53,H=1,K=32,V=32,dtype=bf16,decay_form=log",
        (
            Mistake("wait of a producer", r"cp_async_wait<0>\(\);(\s*sync_warp)", r"\1",
                    "kgen/wkv6/row_producer"),
            Mistake("first wait of consumers",
                    r"cp_async_wait<kStages - 2>\(\);  // before the barrier", ";  // before",
                    "kgen/wkv6/specialized"),
            Mistake("wait before the barrier",
                    r"cp_async_wait<kStages - 2>\(\);  // the next chunk", ";  // the next chunk",
                    "kgen/wkv6/specialized"),
            Mistake("other inputs", r"to_next_ = -to_next_;", ";", "kgen/wkv6/row_producer"),
            Mistake("last chunk", r"chunk == full_ \? last_ : 0", "chunk == full_ ? 16 : 0"),
            Mistake("place of a row", r"place_, kRows \* i\)\);", "place_, i));"),
            Mistake("row", r"next_ \+ kRows \* i \* stride_", "next_ + i * stride_"),
            Mistake("step of a row", r"first_ \+ kRows \* i < left", "first_ < left"),
        ),
        {"row_copies": True},
    ),
    Family(
        "wkv6", "backward", "chunk_halving",
        "B=1,T=70,H=1,K=48,V=32,dtype=bf16,w_dtype=bf16,decay_form=raw",
        (
            Mistake("wait and barrier", r"cp_async_wait<0>\(\);\s*meet\(\);", "",
                    "kgen/wkv6/gradient"),
            Mistake("barrier before rows are written", r"meet\(\);(\s*write\(x\.gr,)", r"\1"),
            Mistake("flip of a row", r"15 \* KeyRows::kRow \+ 40", "15 * KeyRows::kRow + 32"),
            Mistake("tile of a warp", r"2 \* mma_lane\(\)\.q\), warp\)\);",
                    "2 * mma_lane().q), 0));"),
            Mistake("unused threads", r"\(kThreads == kUsed \|\| rank < kUsed\)", "true"),
            Mistake("steps behind the end", r"\|\| step >= steps \|\| column >= kK",
                    "|| column >= kK"),
        ),
        {"groups": 2, "row_copies": True},
    ),
    Family(
        "wkv6", "backward", "chunk_halving",
        "B=1,T=70,H=1,K=32,V=16,dtype=bf16,w_dtype=bf16,decay_form=raw,final_state_dtype=fp32",
        (
            Mistake("wait and barrier", r"cp_async_wait<0>\(\);\s*meet\(\);", "",
                    "kgen/wkv6/gradient"),
            Mistake("wait of the gradient",
                    r"chunk \+ 1 < chunks\) wait_for_gradient\(\);", "false) wait_for_gradient();"),
            Mistake("gradient handed on", r"(\+ \(group \+ 1\)) % kGroups;", r"\1;"),
            Mistake("barrier before gv", r"meet\(\);(\s*write\(x\.gr,)", r"\1"),
            Mistake("group's next chunk", r"copy\(chunk - kGroups, stage \^ 1\);",
                    "copy(chunk - 1, stage ^ 1);"),
            Mistake("state of the next chunk", r"copy_state\(chunk - kGroups\);",
                    "copy_state(chunk - 1);"),
            Mistake("last chunk", r"chunk \+ 1 < chunks \? 16 : last_", "16", "kgen/wkv6/gradient"),
            Mistake("decay of the gradient", r"g\[i\]\[j\] \*= kept\[j / 2\];", ";"),
            Mistake("final state", r"there \? from\[key \* kV \+ value\] : 0\.0f", "0.0f"),
            Mistake("step behind the end", r"step < steps \? decay\(half, i\) : 1\.0f",
                    "decay(half, i)"),
            Mistake("level of 8", r"add_level<8>\(n, m\);", ";"),
            Mistake("level of 4", r"add_level<4>\(n, m\);", "add_level<2>(n, m);"),
            Mistake("mask of a level", r"lane\.g / 4 \^ lane\.q / 2\) == 1", "lane.g / 4) >= 0"),
            Mistake("before a late step", r"before_8\[key\] = before_wide\[1\];",
                    "before_8[key] = before_near[1];"),
            Mistake("from the start of the chunk", r"= before_wide\[1\] \* all\[0\];",
                    "= before_wide[1];"),
            Mistake("to the end of the chunk", r"= behind_wide\[0\] \* all\[1\];",
                    "= behind_wide[0];"),
            Mistake("states of gw", r"both\[i / 2\] \* kept\[i / 2\]", "both[i / 2]"),
            Mistake("sums of gw of 8 steps", r"descend<4>\(ahead\(\), back\(\)\);", ";",
                    "kgen/wkv6/gradient"),
            Mistake("neighbour", r"pair\[half\], k_at\(half, other\)", "pair[half], 0.0f"),
            Mistake("bonus of gu", r"gu\[key\] = fma\(own\[half\]\[step\] \* r_i",
                    "gu[key] = fma(own[half][0] * r_i"),
            Mistake("score of neighbours", r"second \? neighbours : bonus\[0\]", "bonus[0]"),
            Mistake("scores of other warps", r"i = 1; i < kWarps; \+\+i\) \{",
                    "i = 1; i < 1; ++i) {", "kgen/wkv6/gradient"),
            Mistake("slope", r"-min\(four\[i\], 1e30f\)", "-four[i]"),
            Mistake("not finite",
                    r"if \(block_any_nonfinite<kGroups \* kWarps>\(nonfinite\)\)", "if (false)"),
            Mistake("state of 16 steps", r"\(2 \* time \+ half\) \* checkpoint_stride",
                    "(2 * time) * checkpoint_stride"),
        ),
        {"groups": 2},
    ),
    Family(
        "wkv5", "backward", "chunk_halving",
        "B=1,T=70,H=1,K=16,V=16,dtype=bf16,w_dtype=bf16,decay_form=raw,final_state_dtype=fp32",
        (
            Mistake("sum of gw", r"gw\[i % 4 / 2\] \+= step < steps \?",
                    "gw[i % 4 / 2] = step < steps ?"),
            Mistake("gw behind the end", r"gw\[i % 4 / 2\] \+= step < steps \? (.*?) : 0\.0f;",
                    r"gw[i % 4 / 2] += \1;"),
        ),
    ),
    Family(
        "wkv6", "backward", "chunk_halving_segments",
        "B=1,T=170,H=2,K=32,V=16,dtype=bf16,w_dtype=bf16,decay_form=raw,final_state_dtype=fp32",
        (
            Mistake("sums of all segments before", r"segment\.segment, nullptr,",
                    "segment.segment > 0 ? 1 : 0, nullptr,"),
            Mistake("sums of all segments behind", r"kSegments - 1 - segment\.segment,",
                    "segment.segment + 1 < kSegments ? 1 : 0,"),
            Mistake("order of segments", r"Backward \? segments - 1 - i : i;", "i;"),
            Mistake("decay between segments", r"fma\(element, decay\[half\], there \?",
                    "fma(element, 1.0f, there ?"),
            Mistake("final state", r"if \(final != nullptr\)", "if (false)"),
            Mistake("segment of a gradient", r"if \(Gradient\) \+\+block\.segment;", ";"),
            Mistake("place of a gradient", r"\+ \(Gradient \? N \* H \* \(kSegments - 1\) : 0\)",
                    "+ (Gradient ? N * H * (kSegments - 1) - 1 : 0)"),
            Mistake("first segment behind", r"\(N \* H \+ head\) \* \(kSegments - 1\)",
                    "head * (kSegments - 1)"),
            Mistake("scale", r"before\[1\] = scale;", "before[1] = 1.0f;"),
            Mistake("earlier chunks", r"before\[half\] \*= chunk\[half\];", ";"),
            Mistake("earlier half of a chunk", r"earlier = before\[half\] \* chunk\[half\];",
                    "earlier = before[half];"),
            Mistake("earlier lanes", r"earlier = q & 2 \? earlier \* others : earlier;", ";"),
            Mistake("earlier neighbour", r"q & 1 \? earlier \* neighbour : earlier", "earlier"),
            Mistake("earlier steps", r"f\[i\] = f\[i - 1\] \* d\[i - 1\];", "f[i] = f[i - 1];"),
            Mistake("step behind the end", r"\+ i % 4 < left \? d : 1\.0f",
                    "+ i % 4 < 32 ? d : 1.0f"),
            Mistake("decay of a segment", r"all\[half\] \*= factors\.chunk\[half\];", ";"),
            Mistake("first chunk of a segment",
                    r"chunk \+= \(span\.first - sequence\.first\) / 16;", ";"),
            Mistake("parts of all segments", r"parts = \(head \* kSegments \+ segment\.segment\)",
                    "parts = head * kSegments"),
        ),
        {"segments": 3, "groups": 2},
    ),
    Family(
        "wkv5", "backward", "chunk_halving_segments",
        "B=1,T=170,H=1,K=16,V=16,dtype=bf16,w_dtype=bf16,decay_form=log,final_state_dtype=fp32",
        (
            Mistake("earlier chunks",
                    r"row\[i / 8\]\[i / 4 % 2\]\[i % 4\] \*= chunk\[i / 4 % 2\];", ";"),
            Mistake("part of a chunk", r"i < left; \+\+i\) chunk\[half\] \*= d;",
                    "i < kChunk; ++i) chunk[half] *= d;"),
            Mistake("parts of all segments", r"parts = \(head \* kSegments \+ segment\.segment\)",
                    "parts = head * kSegments"),
        ),
        {"segments": 3},
    ),
    Family(
        "wkv5", "forward", "warp_specialized", "B=1,T=45,H=2,K=16,V=16,dtype=bf16",
        (
            Mistake("power", r"n < 4; \+\+n\) power \*= power", "n < 3; ++n) power *= power"),
            Mistake("decay of a step", r"buffers_\.step_decay\(\)\[i\] = power;",
                    "buffers_.step_decay()[i] = 1.0f;"),
        ),
    ),
    Family(
        "wkv5", "forward", "warp_specialized", "B=1,T=45,H=2,K=32,V=16,dtype=bf16",
        (
            Mistake("powers of a level", r"power_place\(late % half\)", "power_place(late % 2)"),
            Mistake("powers of rows", r"power_place\(step\(which\)\)", "power_place(step(0))"),
            Mistake("table of powers", r"\+\+n, power \*= decay\)",
                    "++n, power *= power * decay)"),
            Mistake("late rows by powers", r"late\[x\] = \(flip \?", "late[x] = (!flip ?"),
            Mistake("rows by powers", r"k\[0\]\[x\] \*= late_power\[x\];", ";"),
        ),
        {"powers": True},
    ),
    Family(
        "wkv6", "forward", "warp_specialized", "B=1,T=45,H=1,K=16,V=16,dtype=bf16,decay_form=raw",
        (
            Mistake("low terms of rows", r"pack_rest\(r\[which\], high\);", "high;"),
            Mistake("place of the low terms", r"from\.rows\(slot, kRowRLow\)",
                    "from.rows(slot, kRowK)"),
        ),
        {"r_terms": 2},
    ),
    Family(
        "wkv6", "forward", "warp_specialized_segments",
        "B=1,T=170,H=1,K=32,V=24,dtype=bf16,decay_form=log,initial_state_dtype=fp32",
        (
            Mistake("wait", r"cp_async_wait<kStages - 2>\(\);", ";", "kgen/wkv6/segment"),
            Mistake("barrier", r"(cp_async_wait<kStages - 2>\(\);\s*)sync_block\(\);", r"\1",
                    "kgen/wkv6/segment"),
            Mistake("order of steps", r"row / 2 \* 4 \+ row % 2 \+ 2 \* late", "row + 8 * late"),
            Mistake("steps of w", r"return 4 \* mma_lane\(\)\.q;", "return 0;"),
            Mistake("own steps", r"f\[i\] = f\[i \+ 1\] \* d\[i \+ 1\];", "f[i] = f[i + 1];"),
            Mistake("neighbour", r"q & 1 \? later : later \* neighbour",
                    "q & 1 ? later * neighbour : later"),
            Mistake("later lanes", r"q & 2 \? chunk\[half\] : chunk\[half\] \* others",
                    "q & 2 ? chunk[half] * others : chunk[half]"),
            Mistake("later half of a chunk", r"chunk\[half\] \*= pair \* others;",
                    "chunk[half] = pair * others;"),
            Mistake("decay of a segment's sum",
                    r"state\[i / 4\]\[i % 4\] \*= factors\.chunk\[i % 4 / 2\];", ";"),
            Mistake("decay of a segment", r"all\[half\] \*= factors\.chunk\[half\];", ";"),
            Mistake("tile of values", r"const int tile = first_tile \+ warp\(\);",
                    "const int tile = first_tile;"),
            Mistake("keys of a lane", r"const int key = own_key\(\) \+ 8 \* half;",
                    "const int key = own_key() + 8 * (1 - half);"),
            Mistake("sums of all segments", r"states\.segments = block\.segment;",
                    "states.segments = block.segment > 0 ? 1 : 0;"),
            Mistake("decay between segments", r"2 \* y \+ x\], decay, sum\)",
                    "2 * y + x], 1.0f, sum)"),
            Mistake("place of a sum", r"segment_states \+ block\.place\(\) \* kStateSize",
                    "segment_states + block.head * 2 * kStateSize"),
            Mistake("last chunk of a segment",
                    r"const (Span span = block\.own\(span_of\(cu_seqlens, block\.head / H, T\)\);)",
                    r"\1 span.steps = kgen::max(span.steps - 16, i64{0});"),
            Mistake("initial state", r"if \(kInitialState\) states\.initial_state",
                    "if (false) states.initial_state"),
            Mistake("not finite", r"if \(block_any_nonfinite<kWarps \+ kRowWarps>\(nonfinite\)\)",
                    "if (false)", "kgen/wkv6/specialized"),
            Mistake("steps before the segment", r"states\.after_earlier_steps = true;", ";"),
        ),
        {"segments": 3, "state_stages": 2},
    ),
    Family(
        "wkv6", "forward", "warp_specialized_segments",
        "B=1,T=170,H=1,K=32,V=24,dtype=bf16,w_dtype=bf16,decay_form=raw",
        (
            Mistake("steps of w in pairs", r"\[i % 2\]\[i / 2 \* 2\] = two\.x;",
                    "[i % 2][i / 2 * 2] = two.y;"),
        ),
        {"segments": 3},
    ),
    Family(
        "wkv5", "forward", "warp_specialized_segments",
        "B=1,T=170,H=2,K=32,V=24,dtype=bf16",
        (
            Mistake("decay of a step", r"decay\[i / 4\]\[half\]\[i % 4\] = d;",
                    "decay[i / 4][half][i % 4] = i == 0 ? 1.0f : d;"),
            Mistake("key of a decay", r"of_key\(w, key \+ 8 \* half\)", "of_key(w, key)"),
        ),
        {"segments": 3},
    ),
    Family(
        "wkv7", "forward", "chunk_loop", "B=1,T=45,H=1,K=16,V=16,dtype=bf16,decay_form=clamp",
        (
            Mistake("mask", r"kBack \? i < j \+ own : j < i \+ own", "kBack ? i < j + own : true"),
            Mistake("decay of the state", r"if constexpr \(!kBack\) decay_state\(state\);", ";"),
        ),
    ),
    Family(
        "wkv7", "forward", "warp_specialized",
        "B=1,T=45,H=1,K=16,V=16,dtype=bf16,decay_form=clamp",
        (
            Mistake("interval", r"if \(chunk \+ kAhead < chunks\)", "if (chunk + 4 < chunks)"),
            Mistake("wait", r"cp_async_wait<Stages - 2>\(\);(\s*sync_warp)", r"\1", "kgen/wkv7/"),
            Mistake("last chunk", r"there = left_ > 8 \* half;", "there = true;"),
            Mistake("decay of the state",
                    r"(i < 4; \+\+i\)) state\[2 \* tile \+ n\]\[i\] \*= d\[i % 2\];", r"\1 ;"),
        ),
    ),
    Family(
        "wkv7", "forward", "warp_specialized", "B=1,T=45,H=1,K=16,V=16,dtype=bf16,decay_form=log",
        (
            Mistake("level", r"add_level<false>\(2, near, in", "add_level<false>(4, near, in"),
            Mistake("late half", r"late = flip \? before\[0\]\[i\] :", "late = flip ? 1.0f :"),
            Mistake("early half", r"early = flip \? behind\[1\]\[i\] :", "early = flip ? 1.0f :"),
            Mistake("own decay", r"\(late \* \(flip \? decay\[0\]\[i\] : decay\[1\]\[i\]\)\)",
                    "late"),
            Mistake("partner", r"First \? 16 : 2 \* half;", "First ? 16 : half == 2 ? 8 : 4;"),
            Mistake("mask of a level", r"if \(other & half\)", "if (other & (half | 1))"),
            Mistake("diagonal", r"own\[i / 2\]\[i\]", "own[0][i]"),
            Mistake("place of the diagonal", r"score_place\(g \+ i / 2 \* 8, g \+ i / 2 \* 8\)",
                    "score_place(g, g)"),
            Mistake("to the end", r"behind\[0\]\[x\] \*= all\[1\]\[x\];", ";"),
        ),
    ),
    Family(
        "wkv7", "forward", "warp_specialized",
        "B=1,T=45,H=1,K=16,V=16,dtype=bf16,w_dtype=bf16,decay_form=clamp",
        (
            Mistake("steps before a lane's", r"group\(\) & bit \? other", "true ? other"),
            Mistake("sums of steps", r"if \(s > 0\) sums\[s\]", "if (s > 9) sums[s]"),
            Mistake("before its own decay", r"product\[x\] = fast_exp2\(before\[x\]\);",
                    "product[x] = fast_exp2(before[x] + sums[0][x]);"),
            Mistake("quotient", r"inverse\[x\] = fast_exp2\(-sum\);",
                    "inverse[x] = fast_exp2(-before[x]);"),
            Mistake("decay behind the chunk", r"if constexpr \(kBack\) continue;", "continue;"),
            Mistake("decays of the last step", r"group\(\) == kStepLanes - 1", "group() == 0"),
            Mistake("mask", r"x >= lane\.g \+ own\)", "x > lane.g + own)"),
            Mistake("own update", r"own = of_r \? 1 : 0;", "own = 0;"),
            Mistake("rows of a matrix", r"\(which \+ 1\) & 2", "which & 1"),
            Mistake("quarters of a score", r"16 \* half \^ 8 \* n\)", "16 * half)"),
            Mistake("diagonal of the inverse", r"if \(half == column / 8\) place",
                    "if (false) place"),
            Mistake("halves of the inverse", r"found\[2 \* i\] : found\[8 \+ 2 \* i\]",
                    "found[2 * i] : found[2 * i]"),
            Mistake("complete elements", r"int j = 1; j < 15", "int j = 1; j < 14"),
            Mistake("triangle of zeros", r"triangle\(0\)\[i\] = 0\.0f;", "triangle(0)[i] = 1.0f;"),
        ),
        {"quotients": 1},
    ),
    Family(
        "wkv7", "forward", "warpgroups",
        "B=1,T=129,H=1,K=64,V=64,dtype=bf16,w_dtype=bf16,decay_form=clamp",
        (
            Mistake("wait", r"cp_async_wait<1>\(\);", "cp_async_wait<2>();", _GROUPS),
            Mistake("barrier behind the sums of steps",
                    r"(totals\(warp_\) [^;]*;\s*)named_barrier_sync\(kProducersBarrier, 128\);",
                    r"\1", _GROUPS),
            Mistake("barrier behind the rows",
                    r"(fence_proxy_async\(\);\s*)named_barrier_sync\(kProducersBarrier, 128\);",
                    r"\1", _GROUPS),
            Mistake("fence of rows", r"fence_proxy_async\(\);", ";", _GROUPS),
            Mistake("fence of the inverse",
                    r"(GroupInverse<GroupTiles>::put\(from\);\s*)fence_proxy_async\(\);", r"\1"),
            Mistake("fence of registers", r"wgmma_fence\(x, y, s, v, sa, state\);", ";"),
            Mistake("wait for x", r"wgmma_wait<1>\(x\);", "wgmma_wait<2>(x);"),
            Mistake("barrier behind the inverse",
                    r"named_barrier_sync\(kInverseBarrier, 128\);", ";"),
            Mistake("chunk that is consumed",
                    r"if \(chunk > 0\) named_barrier_sync\(kConsumedBarrier, kThreads\);",
                    "if (chunk > 1) named_barrier_sync(kConsumedBarrier, kThreads);"),
            Mistake("slots of rows", r"slot == kSlots - 1 \? 0", "slot == 1 ? 0"),
            Mistake("slots of v", r"\(chunk & 1\) \* ScorePanels", "0 * ScorePanels"),
            Mistake("steps behind the last one", r"at < left && first", "first",
                    "kgen/wkv7/group_copier"),
            Mistake("place of a copy", r"column / 8\) \+ column % 8", "column / 8 ^ 1)",
                    "kgen/wkv7/group_copier"),
            Mistake("earlier steps of the warp", r"own\.late \? other : 0\.0f", "other"),
            Mistake("earlier warps", r"if \(other >= warp_\) break;", "if (other > warp_) break;"),
            Mistake("before its own decay", r"product\[x\] = fast_exp2\(before\[x\]\);",
                    "product[x] = fast_exp2(before[x] + sums[0][x]);", _GROUPS),
            Mistake("quotient", r"inverse\[x\] = fast_exp2\(-sum\);",
                    "inverse[x] = fast_exp2(-before[x]);", _GROUPS),
            Mistake("decays of the last step", r"warp_ == 3 && own\.late",
                    "warp_ == 2 && own.late"),
            Mistake("place of a step", r"\(first \^ 8 \* s\) \+ 64 \* s", "first + 64 * s",
                    _GROUPS),
            Mistake("low terms of scores", r"if \(of_r\(\)\) read_a", "if (warp_ >= 1) read_a"),
            Mistake("own update", r"\(of_r\(\) \? 1 : 0\)", "0", _GROUPS),
            Mistake("mask", r"< limit \+ 8 \* half;", "<= limit + 8 * half;"),
            Mistake("later block of scores", r"if \(n >= 2 && warp_ % 2 == 0\) break;",
                    "if (n >= 2) break;"),
            Mistake("blocks of the triangle", r"n / 2 \* GroupTiles::kBlock", "0"),
            Mistake("zeros of scores", r"scores\[i\] = 0;", "scores[i] = 0x3f803f80u;"),
            Mistake("turns with the inverse", r"== \(chunk & 3\)", "== (chunk & 7)"),
            Mistake("complete elements", r"add_complete<14>", "add_complete<7>"),
            Mistake("later block of the inverse", r"tiles\.triangle\(2 \* block\)",
                    "tiles.triangle(block)"),
            Mistake("diagonal of the inverse", r"to\[[^;]*\] = from_float<bf16>\(1\.0f\);", ";"),
            Mistake("between the blocks", r"stmatrix_transposed\(words\[term\], at",
                    "if (false) stmatrix_transposed(words[term], at"),
            Mistake("low term of r", r"slot, Tiles::kRLow", "slot, Tiles::kKLow"),
            Mistake("rows of the update", r"from\.row_operand\(slot, Tiles::kB\)\);",
                    "from.row_operand(slot, Tiles::kK));"),
            Mistake("decay of the state", r"state\[tile\]\[i\] \*= d\[i % 2\];", ";",
                    "kgen/wkv7/group_loop"),
            Mistake("not finite", r"if \(block_any_nonfinite<kThreads / kWarpSize>\(nonfinite\)\)",
                    "if (false)"),
        ),
        {"vec": 8, "min_blocks": 1},
    ),
    Family(
        "wkv7", "forward", "warp_specialized_segments",
        "B=1,T=100,H=1,K=16,V=24,dtype=bf16,decay_form=clamp,initial_state_dtype=fp32",
        (
            Mistake("state before a segment", r"\(block\.place\(\) - 1\)",
                    "(block.place() - (block.segment > 1 ? 2 : 1))"),
            Mistake("state that a segment adds", r"sums\[x\] \+ \(there \? state\[x\] : 0\.0f\)",
                    "sums[x]"),
            Mistake("transition", r": key \* Keys \+ row\]", ": row * Keys + key]"),
            Mistake("identity", r"key == column && key < Keys", "key == column + 1"),
            Mistake("zeros for v", r"Values - 16 \* tile : 0;", "Values - 16 * tile : Values;"),
            Mistake("columns of v", r"of_values\(\) \? 16 \* tile : 0;", "0;"),
            Mistake("last chunk of a segment",
                    r"const (Span span = block\.own\(span_of\(cu_seqlens, block\.head / H, T\)\);)",
                    r"\1 span.steps = kgen::max(span.steps - 16, i64{0});"),
            Mistake("initial state", r"segment > 0 \|\| initial != nullptr", "segment > 0"),
            Mistake("keys of a lane", r"key < Keys; key \+= 4", "key < Keys - 4; key += 4"),
            Mistake("exchange", r"shfl_xor\(given, Half / 4\)", "shfl_xor(given, 3 - Half / 4)"),
            Mistake("barrier", r"sync_block\(\);  // the next segment reads", "//"),
            Mistake("not finite", r"if \(block_any_nonfinite<kWarps \+ kRowWarps>\(nonfinite\)\)",
                    "if (false)"),
        ),
        {"segments": 3},
    ),
    Family(
        "wkv7", "forward", "warp_specialized_segments",
        "B=1,T=100,H=1,K=16,V=24,dtype=bf16,w_dtype=bf16,decay_form=clamp",
        (
            Mistake("no transition", r"first_tile >= Columns::kValueTiles\)",
                    "first_tile + 1 >= Columns::kValueTiles)"),
        ),
        {"segments": 3},
    ),
    Family(
        "wkv7", "backward", "warp_specialized_segments",
        "B=1,T=100,H=1,K=16,V=24,dtype=bf16,w_dtype=bf16,decay_form=raw,final_state_dtype=fp32",
        (
            Mistake("transposed transition", r"kBack \? row \* Keys \+ key",
                    "kBack ? key * Keys + row"),
            Mistake("order of segments", r"\(kBack \? -1 : 1\) \* Keys \* Keys", "Keys * Keys"),
            Mistake("last segment", r"states \+= \(Sums - 1\)", "states += (Sums - 2)"),
            Mistake("final gradient", r"behind != nullptr && is_there", "false && is_there"),
            Mistake("segment of gradients", r"\+\+block\.segment;", ""),
            Mistake("state before a segment", r"\(block\.place\(\) - 1\)", "block.place()"),
            Mistake("steps beyond the last one", r"kFirst = false, kKeepsState = true",
                    "kFirst = false, kKeepsState = false"),
            Mistake("chunk of a segment", r"\(span\.first - all\.first\)",
                    "(all.first - all.first)"),
        ),
        {"segments": 3},
    ),
    Family(
        "wkv7", "backward", "warp_specialized",
        "B=1,T=45,H=1,K=16,V=16,dtype=bf16,w_dtype=bf16,decay_form=raw,final_state_dtype=fp32",
        (
            Mistake("order of chunks", r"kBack \? chunks - 1 - chunk : chunk\}", "chunk}"),
            Mistake("copies backward", r"\? 16 : -16\) \* stride_", "? 16 : -32) * stride_"),
            Mistake("transposed scores", r"multiply<kBack>\(sums,", "multiply<false>(sums,"),
            Mistake("transposed inverse", r"multiply<!kBack>\(solved, high,",
                    "multiply<true>(solved, high,"),
            Mistake("decays behind the last step", r"if \(left == 16\) return;", "return;"),
            Mistake("states in order", r"state_ \+= \(kBack \? -1 : 1\)", "state_ += 1"),
            Mistake("sums in order", r"kBack \? -16 : 16\) \* step_", "kBack ? -15 : 16) * step_"),
            Mistake("last chunk", r"there = left_ > 8 \* half;", "there = true;"),
            Mistake("factor of rows", r"through\[x\] \*= r_factor_;", ";"),
            Mistake("factor of scores", r"sums\[x\] \*= r_factor_;", ";"),
            Mistake("factor of the diagonal",
                    r"if \(diagonal\) sums\[2 \+ x\] \*= r_factor_;", ";"),
            Mistake("slots of scores", r"kRowTiles > 4 \? 3 : 4", "kRowTiles > 4 ? 2 : 4"),
            Mistake("rows that read", r"kX = kRowB, kZ = kRowK", "kX = kRowA, kZ = kRowK"),
            Mistake("rows that update", r"kP = kRowA, kQ = kRowR", "kP = kRowA, kQ = kRowK"),
            Mistake("scores that first needs", r"kScoreXQ = kScoreRB, kScoreZP = kScoreAK",
                    "kScoreXQ = kScoreRB, kScoreZP = kScoreRK"),
            Mistake("rows of a tensor", r"Which > kRowK \? Pass::kTermsK : 0",
                    "Which > kRowK ? 0 : 0"),
        ),
    ),
    Family(
        "wkv7", "backward", "warp_specialized",
        "B=1,T=45,H=1,K=16,V=16,dtype=bf16,w_dtype=bf16,decay_form=clamp,final_state_dtype=fp32",
        (
            Mistake("decay before the chunk", r"Pass::kQuotients && kBack\)", "false)"),
            Mistake("factor of rows", r"kBack \? product\[x\] \* r_factor_", "kBack ? product[x]"),
            Mistake("decays behind the last step", r"if constexpr \(Pass::kKeepsState\) this->keep",
                    "if (false) this->keep"),
            Mistake("matrices without r", r"2 \* i : 3 \* i", "2 * i : i",
                    "kgen/wkv7/quotient_scores"),
        ),
        {"quotients": 1},
    ),
    Family(
        "wkv7", "backward", "warp_specialized",
        "B=1,T=45,H=1,K=16,V=16,dtype=bf16,w_dtype=bf16,decay_form=clamp",
        (
            Mistake("scores of consumers", r"put_scores\(scores, chunk \+ 2\)",
                    "put_scores(scores, chunk + 1)"),
            Mistake("first scores of consumers", r"if \(chunk >= 1 && chunk - 1 < order",
                    "if (chunk >= 2 && chunk - 1 < order"),
        ),
        {"quotients": 1, "consumer_scores": 1},
    ),
    Family(
        "wkv7", "backward", "warp_specialized",
        "B=1,T=65,H=1,K=64,V=64,dtype=bf16,w_dtype=bf16,decay_form=clamp",
        (
            Mistake("largest of a column", r"lanes_reduce<4, LargerNumber>\(largest\);",
                    "largest;"),
            Mistake("scale of a column", r"there_\[half\]\) scales_\[8 \* half\]",
                    "there_[half]) scales_[4 * half]"),
            Mistake("scales in order", r"scales_ \+= \(kBack \? -1 : 1\)", "scales_ += 1"),
            Mistake("scales of G", r"\? state_scales : gradient_scales",
                    "? state_scales : state_scales"),
            Mistake("scale read back", r"exponent - 14u", "exponent - 13u"),
        ),
        {"state_bytes": 2, "level_loop": 0, "warps": 1, "row_warps": 1, "stages": 2, "vec": 8,
         "min_blocks": 1, "chunk_warps": 1, "chunk_blocks": 1, "chunk": 32, "quotients": 0,
         "consumer_scores": 0},
    ),
    Family(
        "wkv7", "backward", "warp_specialized",
        "B=1,T=37,H=1,K=64,V=64,dtype=bf16,w_dtype=bf16,decay_form=log",
        (
            Mistake("blocks of both directions", r"back = block < half;", "back = true;"),
            Mistake("keys of rounded states", r"kPairs \? mma_lane\(\)\.g : 2", "kPairs ? 2 : 2"),
            Mistake("value features of rounded states", r"kQuads \? column_of_quad\(\)",
                    "kQuads ? 4 * mma_lane().q"),
            Mistake("tiles of rounded states", r"state_ \+ 8 \* number \* pitch_",
                    "state_ + 4 * number * pitch_"),
            Mistake("rows become keys", r"transpose_matrix\((pack2<State>\(tile)", r"(\1"),
        ),
        {"state_bytes": 2, "level_loop": 1, "warps": 1, "row_warps": 1, "stages": 2, "vec": 8,
         "min_blocks": 1, "chunk_warps": 1, "chunk_blocks": 1},
    ),
    Family(
        "wkv7", "forward", "warp_specialized_tf32",
        "B=1,T=45,H=1,K=16,V=16,dtype=fp16,decay_form=raw,final_state_dtype=fp32",
        (
            Mistake("interval", r"if \(chunk \+ kAhead < chunks\)", "if (chunk + 3 < chunks)"),
            Mistake("slot", r"slot == Buffers::kSlots - 1 \? 0", "slot == 1 ? 0"),
            Mistake("wait", r"cp_async_wait<kStages - 2>\(\);(\s*sync_warp)", r"\1", "kgen/wkv7/"),
            Mistake("last chunk", r"there = left_ > 8 \* half;", "there = true;"),
            Mistake("decay of the state",
                    r"fma\(state\[tile\]\[i\], d\[i % 2\], sum\[i\]\)",
                    "state[tile][i] + sum[i]"),
            Mistake("no decay behind the last step", r"decay\[which\]\[x\] = there \? d : 1\.0f;",
                    "decay[which][x] = d;"),
            Mistake("low terms", r"pass = Exact \? 1 : 0;", "pass = 2;"),
            Mistake("low terms of scores", r"Ops::template multiply<0>\(sums, a, b\);", ";"),
            Mistake("final state", r"if \(end != nullptr && used\) end\[place\] = state",
                    "if (false) end[place] = state"),
        ),
    ),
    Family(
        "wkv7", "forward", "warp_specialized_tf32",
        "B=1,T=45,H=1,K=16,V=16,dtype=bf16,decay_form=log,final_state_dtype=fp32",
        (
            Mistake("level", r"add_level<2>\(near, in", "add_level<4>(near, in"),
            Mistake("late half", r"late = flip \? before\[0\]\[x\] :", "late = flip ? 1.0f :"),
            Mistake("early half", r"early = flip \? behind\[1\]\[x\] :", "early = flip ? 1.0f :"),
            Mistake("own decay", r"kNext \? own : late \* own", "kNext ? own : late"),
            Mistake("partner", r"kDistance = 16 / kHalf;",
                    "kDistance = kHalf == 2 ? 4 : 16 / kHalf;"),
            Mistake("mask of a level", r"if \(other & kHalf\)", "if (other & (kHalf | 1))"),
            Mistake("diagonal", r"own\[i / 2\]\[i\]", "own[0][i]"),
            Mistake("place of the diagonal",
                    r"place\(g \+ i / 2 \* 8, g \+ i / 2 \* 8\)", "place(g, g)"),
            Mistake("to the end", r"behind\[0\]\[x\] \*= all\[1\]\[x\];", ";"),
            Mistake("key of a column", r"return column / 2 \+ column % 2 \* 4;", "return column;"),
            Mistake("decays in the order of columns", r"\(slot\) \+ 2 \* mma_lane\(\)\.q;",
                    "(slot) + 2 * (3 - mma_lane().q);"),
            Mistake("rows of b", r"operands, rows_b\)", "operands, rows_k)"),
        ),
    ),
    Family(
        "wkv7", "backward", "chunk_rows",
        "B=2,T=150,H=1,K=32,V=24,dtype=bf16,w_dtype=bf16,decay_form=log",
        (
            Mistake("wait for the copies", r"cp_async_wait<0>\(\);(\s*put_values\(scores\);)",
                    r"\1", "kgen/wkv7/chunk_rows_loop"),
            Mistake("barrier between walks", r"sync_block\(\);  // all warps have read", "//"),
            Mistake("buffer of the next chunk", r"start<16>\(\(chunk \+ 1\) % 2",
                    "start<16>(chunk % 2"),
            Mistake("buffer of a chunk", r"tiles \+ chunk % 2 \*", "tiles + (chunk + 1) % 2 *"),
            Mistake("inputs of the next chunk", r"start<16>", "start<0>"),
            Mistake("state of the next chunk", r"gradient \+= kK \* kV;", ";"),
            Mistake("results of the next chunk",
                    r"this->ga\.first \+= 16 \* this->ga\.stride_t;", ";"),
            Mistake("steps of the next chunk", r"(advance\(\);\s*)steps = steps_of\(left\);",
                    r"\1"),
            Mistake("end of a sequence", r"min\(end - index, ceil_div\(left, i64\{kSteps\}\)\)",
                    "(end - index)"),
            Mistake("place of sa", r"row \+ 4 \* \(piece \+ half \* kPieces\)",
                    "row + 4 * (2 * piece + half)"),
            Mistake("steps behind the last", r"inside = step < there && 8 \* piece < kV",
                    "inside = 8 * piece < kV"),
        ),
        {"split": 4, "tile": 1, "columns": 16, "tokens": 4, "stages": 2, "vec": 8, "chunk": 16,
         "chunk_warps": 2, "chunk_blocks": 1, "row_chunks": 4},
    ),
    Family(
        "wkv7", "forward", "warp_specialized",
        "B=1,T=70,H=1,K=64,V=24,dtype=bf16,w_dtype=bf16,decay_form=log",
        (
            Mistake("producers' wait",
                    r"if constexpr \(RowCopies\) cp_async_wait<Stages - 2>\(\);", ""),
            Mistake("producers' first barrier", r"named_barrier_sync\(2, kWarpSize \* Warps\);",
                    ";"),
            Mistake("consumers' wait",
                    r"if constexpr \(kRowCopies\) cp_async_wait<kStages - 2>\(\);", ""),
            Mistake("tile of a warp", r"tile % Warps \* WarpStride", "0"),
            Mistake("tile after the warps", r"tile / Warps \* TileStride", "0"),
            Mistake("columns behind the last", r"at < left && first < width", "at < left"),
            Mistake("steps behind the last", r"at < left && first < width", "first < width"),
            Mistake("step of a copy", r"return i / kPerRow;", "return i / kPerRow / 2;"),
        ),
        {"warps": 2, "row_warps": 2, "stages": 2, "vec": 8, "min_blocks": 1, "row_copies": 1,
         "quotients": 0},
    ),
    Family(
        "wkv7", "backward", "block_per_head", "B=1,T=45,H=1,K=8,V=8,dtype=fp32",
        (
            Mistake("decay of the state", r"s = fma\(d\[j\], s,", "s = fma(1.0f, s,"),
            Mistake("last chunk", r"== 0 \|\| t \+ 1 == span\.steps\)", "== 0)"),
        ),
    ),
    Family(
        "wkv7", "backward", "block_per_head",
        "B=1,T=45,H=1,K=12,V=40,dtype=bf16,decay_form=clamp,final_state_dtype=fp32",
        (
            Mistake("barrier before the results", r"sync_block\(\);\s*write_results",
                    "write_results"),
            Mistake("sums of lanes", r"\(upper \? d : b\) \+ shfl_xor\(upper \? b : d, First\)",
                    "d + shfl_xor(b, First)"),
            Mistake("lanes of a key", r"distance = 4; distance < Lanes",
                    "distance = 8; distance < Lanes"),
            Mistake("number of a sum", r"rank % 2 \* 2 \+ rank / 2 % 2",
                    "rank % 4"),
            Mistake("keys of a pair", r"\* kPair \+ thread_rank\(\) % kPair", "* kPair"),
            Mistake("features of a pair", r"thread_rank\(\) / kPair % kSplit",
                    "thread_rank() % kSplit"),
            Mistake("place of ga", r"number == 3 \? 6 : number", "number == 3 ? 5 : number"),
            Mistake("steps of gr", r"by_step\[\(i - 3\) \* kStep\]", "by_step[i * kStep]"),
            Mistake("slope", r"forward\[0\] \* forward\[3\]", "forward[0]"),
            Mistake("factors of a sigmoid", r"w < 0\.0f \? small : large",
                    "w < 0.0f ? large : small"),
            Mistake("decay behind the last step", r"step < steps \? of_step\.decay : 1\.0f",
                    "of_step.decay"),
            Mistake("scale of r", r"scale \* at\(r, step", "at(r, step"),
            Mistake("scale of gr", r"\(scale \* backward\[3\]\)", "(backward[3])"),
            Mistake("decay of G", r"fma\(d, total, a_t \* gsa4\[j\]\)",
                    "fma(1.0f, total, a_t * gsa4[j])"),
            Mistake("steps behind the last", r"first \+ n \* kApart < steps \? kV - column : 0",
                    "kV - column"),
            Mistake("rows of a later step", r"from \+= kApart \* source\.stride;", ";"),
            Mistake("keys beyond the last", r"if \(key >= kK\) return;", ";"),
            Mistake("steps of the next copies", r"next_ \+= Tokens \* stride_;", ";"),
            Mistake("copies from the last step on", r"D == Direction::backward \? -1 : 1", "1"),
            Mistake("copies behind the last step", r"token \+ n \* kApart < left", "true"),
            Mistake("decays of a step", r"\(d\[x\]\)\.decay;", "(d[x]).slope;"),
            Mistake("barrier behind the decays", r"widen\(wide, values\);\s*sync_block\(\);",
                    "widen(wide, values);"),
        ),
        {"prepared": 1, "chunk": 16, "key_split": 8, "keys": 8, "vec": 4, "columns": 16, "tile": 1,
         "tokens": 4, "stages": 2},
    ),
    Family(
        "wkv7", "backward", "chunk_rows",
        "B=1,T=45,H=1,K=16,V=16,dtype=bf16,w_dtype=bf16,decay_form=raw,final_state_dtype=fp32",
        (
            Mistake("wait and barrier", r"cp_async_wait<0>\(\);\s*sync_block\(\);", "",
                    "kgen/wkv7/chunk_rows"),
            Mistake("level", r"kHalf == 4 \? 2 : kHalf == 2 \? 4 : 6", "kHalf == 4 ? 4 : 6"),
            Mistake("mask of a level", r"~\(2 \* kHalf - 1\)", "~15"),
            Mistake("before a late step", r"flip_near == \(half == 0\) \? near\[half\]\[key\]",
                    "flip_near == (half == 0) ? 1.0f"),
            Mistake("behind an early step", r"half == 0 \? all\(1, key\)", "half == 0 ? 1.0f"),
            Mistake("own decay", r"own\[i\] \*= to_late\[i\];", "own[i] = to_late[i];"),
            Mistake("last step", r"step < steps \? decay : 1\.0f", "decay"),
            Mistake("diagonal", r"scores\[slot \* Buffers::kScores \+ 16 \+ slot\]", "0.0f"),
            Mistake("states", r"all\(0, i / 2\) \* all\(1, i / 2\), own", "all(0, i / 2), own"),
            Mistake("sums across the middle", r"gw\[1\]\[2 \* key \+ step\] \+= early;", ";"),
            Mistake("sums of a half", r"if constexpr \(kHalf == 4\) sum \+= shfl_xor\(sum, 1\);",
                    ";"),
            Mistake("sums of neighbours", r"\+= back\(half, i \+ 1 - half\);", "+= 0.0f;"),
            Mistake("scale", r"row == 0 \? scale : 1\.0f", "1.0f"),
            Mistake("not finite", r"if \(block_any_nonfinite<kWarps>\(nonfinite\)\) step_by_step",
                    "if (false) step_by_step", "kgen/wkv7/chunk_rows"),
        ),
    ),
    Family(
        "wkv7", "backward", "chunk_rows",
        "B=1,T=45,H=1,K=16,V=16,dtype=bf16,w_dtype=bf16,decay_form=clamp,final_state_dtype=fp32",
        (
            Mistake("wait and barrier", r"cp_async_wait<0>\(\);\s*sync_block\(\);", "",
                    "kgen/wkv7/quotient_rows"),
            Mistake("mask of scores", r"beyond == 0 && distance >= i", "beyond == 0"),
            Mistake("mask of the own step", r"2 \* lane\.q - \(of_a \? 1 : 0\)", "2 * lane.q"),
            Mistake("swizzle of scores", r"part \^ \(\(row \^ row >> 1\) & 1\)",
                    "(part & row & 1)"),
            Mistake("anchor", r"offsets\[4\] = \{-begin, -second", "offsets[4] = {-begin, -begin"),
            Mistake("last step", r">= steps\) upto\[i / 4\]\[i % 4\] = 0\.0f;", ">= steps) ;"),
            Mistake("decays before S is read", r"\*= c\.to_middle\[which\] \* scale;", "*= scale;"),
            Mistake("decays after G is read", r"\*= c\.to_end\[which\];", "*= 1.0f;"),
            Mistake("decays of a", r"c\.before_two\[tile\]\[x / 2\] : upto\[tile\]\[x - 1\]",
                    "c.before_two[tile][x / 2] : upto[tile][x]"),
            Mistake("decays of ga", r": its_decays\[i - 1\];", ": its_decays[i];"),
            Mistake("later tiles", r"part = half; part < 2", "part = 1; part < 2"),
            Mistake("decays between the states", r"\(c\.to_middle\[which\] \* c\.to_end\[which\]\)",
                    "c.to_middle[which]"),
            Mistake("low terms", r"x\[i\] & 0xffffe000u\);", "x[i] & 0xffe00000u);",
                    "kgen/wkv7/quotient_rows"),
            Mistake("the nearer end", r"is_late \? from_end : forth",
                    "is_late ? forth[tile][i % 4] : forth"),
            Mistake("lanes before", r"fma\(c\.upper, others, c\.odd \* other\)", "(c.odd * other)"),
            Mistake("lanes behind", r"fma\(1\.0f - c\.upper, others,", "fma(0.0f, others,"),
            Mistake("sums from the end", r"end\[which\] -= its;", ";"),
            Mistake("slopes", r"own_slopes = own_decays \+ 4 \* kWarpSize",
                    "own_slopes = own_decays"),
            Mistake("rows of G", r"column \+ later \* kV, there", "column, there"),
            Mistake("not finite", r"return !block_any_nonfinite<kWarps>\(fma\(.*\);",
                    "return true;",
                    "kgen/wkv7/quotient_rows"),
        ),
        {"split": 1, "tile": 1, "columns": 32, "tokens": 4, "stages": 1, "vec": 2, "chunk": 32,
         "chunk_warps": 1, "chunk_blocks": 1},
    ),
    Family(
        "wkv7", "backward", "warp_specialized_fp64",
        "B=1,T=45,H=1,K=24,V=20,dtype=bf16,decay_form=raw,initial_state_dtype=fp32,"
        "final_state_dtype=fp32",
        (
            Mistake("barrier behind the partial scores",
                    r"named_barrier_sync\(1, kThreads\);\s*put_scores", "put_scores"),
            Mistake("barrier before the inverse",
                    r"(put_scores\(slot\);\s*)named_barrier_sync\(1, kThreads\);", r"\1"),
            Mistake("decay behind the last step", r"there\[i\] && is_key\(key \+ x\)",
                    "is_key(key + x)"),
            Mistake("steps behind the last one", r"there\[i / 4\] && is_key", "is_key",
                    _F64_PRODUCER),
            Mistake("writers of a level", r"late \? b\[1\]\[x\] : b\[0\]\[x\]",
                    "late ? b[0][x] : b[1][x]"),
            Mistake("readers of a level", r"late \? a\[0\]\[x\] : a\[1\]\[x\]",
                    "late ? a[1][x] : a[0][x]"),
            Mistake("decays of readers", r"late \? other\[i\]\[x\] : 1\.0,", "1.0,",
                    _F64_PRODUCER),
            Mistake("decays of writers", r"late \? 1\.0 : other\[i\]\[x\];", "1.0;",
                    _F64_PRODUCER),
            Mistake("decays of a block", r"all \*= other\[i / 4\]\[i % 4\];", ";"),
            Mistake("lanes of a block", r"extend\(product, other, 16\)",
                    "extend(product, other, 8)"),
            Mistake("level of decays", r"apply\(a, r, k, b, other, 2\)",
                    "apply(a, r, k, b, other, 1)"),
            Mistake("decays before a reader", r"a\[1\]\[x\] \*= product\[0\]\[x\];", ";"),
            Mistake("decays behind a writer", r"k\[0\]\[x\] \*= product\[1\]\[x\];", ";"),
            Mistake("decays of a chunk", r"product\[0\]\[x\] \* product\[1\]\[x\]",
                    "product[1][x]"),
            Mistake("own decay of r", r"r\[i\]\[x\] \*= d;", ";"),
            Mistake("scores of a step itself", r"rk \+= r\[i\]\[x\] \* k\[i\]\[x\];",
                    "rk += r[i][x] * b[i][x];"),
            Mistake("level of a pair", r"apart >= 4 \? 2", "apart >= 5 ? 2"),
            Mistake("sums over keys", r"tile < Tiles::kKeyTiles; \+\+tile, from",
                    "tile < 1; ++tile, from"),
            Mistake("mask of scores", r"ab = s < t \?", "ab = s <= t ?"),
            Mistake("substitution", r"j < 7; \+\+j", "j < 6; ++j", _F64_PRODUCER),
            Mistake("diagonal of the inverse", r"block \+ i == column \? 1\.0 : found", "found"),
            Mistake("block off the diagonal of the inverse", r"to\[0\] = sums\[0\];",
                    "to[0] = 0.0;"),
            Mistake("inverse of the transpose", r"Back \? Tiles::place\(column, row\) :", ""),
            Mistake("slot of a chunk", r"run\(static_cast<int>\(i & 1\)", "run(0"),
            Mistake("order of chunks", r"kBack \? max\(chunks - 1 - i, i64\{0\}\) : i", "i"),
            Mistake("decay of the state", r"state\[tile\]\[i\] \*= i % 2 == 0[^;]*;", ";",
                    _F64_LOOP),
            Mistake("checkpoint", r"checkpoint\[place\] = static_cast<float>\(state\[tile\]\[i\]\)",
                    "checkpoint[place] = static_cast<float>(state[tile][i ^ 1])"),
            Mistake("scale of gy", r"static_cast<double>\(c_factor\) \* ", "", _F64_LOOP),
            Mistake("what gsa gives to gv",
                    r"multiply_matrix\(out, x, slot, Tiles::kSecondOfFirst\);", ";"),
            Mistake("what gy gives to gv",
                    r"multiply_matrix\(out, of_c, slot, Tiles::kSecondOfC\);", ";"),
            Mistake("what the chunk gives to sa",
                    r"multiply_matrix\(read, of_c, slot, Tiles::kFirstOfC\);", ";"),
            Mistake("order of an operand", r"to\[1\] = x\[2\], to\[2\] = x\[1\]",
                    "to[1] = x[1], to[2] = x[2]"),
            Mistake("gradient of the first state", r"end\[place\] = s;", ";", _F64_LOOP),
            Mistake("initial state", r"start != nullptr && used \? start\[place\] : 0\.0f", "0.0f",
                    _F64_LOOP),
            Mistake("value features beyond the last", r"column \+ i / 2 \* 8 < width\)", "true)",
                    _F64_LOOP),
            Mistake("steps of c behind the last", r"step < left && column \+ 8 \* half",
                    "column + 8 * half", _F64_LOOP),
            Mistake("columns not finite",
                    r"if \(block_any_nonfinite<kWarps \+ kRowWarps>\(nonfinite\)\)", "if (false)"),
            Mistake("barrier before the results", r"sync_block\(\);\s*write_results",
                    "write_results", _F64_ROWS),
            Mistake("barrier behind the scores", r"put_scores\(warp\);\s*sync_block\(\);",
                    "put_scores(warp);", _F64_ROWS),
            Mistake("decay of a row behind the last step",
                    r"x < width \? of_step\.decay : 1\.0f", "of_step.decay"),
            Mistake("scale of a row of gy", r"column, width, scale\);", "column, width, 1.0);"),
            Mistake("slope", r"its_w \* of\.single\(kFloatSlope, tile, x\)", "its_w"),
            Mistake("readers of another level", r"is_reader \? reads : kZero", "reads"),
            Mistake("writers of another level", r"is_writer \? writes : kZero", "writes"),
            Mistake("zero of scores", r"scores_of\(which\)\[kZero\] = 0\.0;", ";"),
            Mistake("late columns", r"mma_lane\(\)\.g % 2 == 1", "mma_lane().g % 2 == 0"),
            Mistake("late steps of pairs", r"lane\.q \+ 6 - 3 \*", "lane.q + 6 - 2 *"),
            Mistake("readers of the late tile", r"= all \+ late;", "= all + early;"),
            Mistake("pair of both states", r"both\[half\] \* \(of_early \* of_late\)",
                    "both[half] * of_early"),
            Mistake("decays before G", r"by_k\[0\]\[x\] \*= of_late;", ";"),
            Mistake("other pair of gw", r"of_w\[x\] \+= shfl_xor\(sum, 2\);", "of_w[x] += sum;"),
            Mistake("decay of a neighbour's gw", r"shfl_xor\(other \* sum, 1\)",
                    "shfl_xor(sum, 1)"),
            Mistake("own reader of gw", r"its_w \+= of\(kInputRD, tile, x\) \* its_r;", ";"),
            Mistake("own writer", r"its_k \+ from_r \* rk;", "its_k;"),
            Mistake("decays in a pair", r"is_odd\(\) == late \? other : 1\.0",
                    "is_odd() ? other : 1.0"),
            Mistake("decays of the other pair", r"by_first \*= decays\.others\[x\];", ";"),
            Mistake("decays in four steps", r"is_odd\(\) \? earlier_too : earlier;", "earlier;"),
            Mistake("neighbours", r"odd \? kInputK : kInputRD, tile, x\);\s*const double second",
                    "odd ? kInputB : kInputRD, tile, x); const double second"),
            Mistake("targets of results", r"target<Value>\(kInputA\) = ga\.first;",
                    "target<Value>(kInputA) = gb.first;"),
            Mistake("keys beyond the last", r"there = extent\(1\) \+ key < kK", "there = true"),
            Mistake("rows not finite",
                    r"if \(block_any_nonfinite<kWarps>\(nonfinite\)\) return false;", ""),
        ),
        {"warps": 2, "row_warps": 2, "vec": 4, "min_blocks": 1, "chunk_warps": 2,
         "chunk_blocks": 1},
    ),
    Family(
        "wkv7", "backward", "chunk_loop",
        "B=1,T=45,H=1,K=16,V=16,dtype=bf16,w_dtype=bf16,decay_form=clamp",
        (
            Mistake("last checkpoint", r"end >= steps \|\| end % StateSteps", "end % StateSteps"),
            Mistake("place of a checkpoint", r"checkpoints\[begin / StateSteps",
                    "checkpoints[begin / 16"),
            Mistake("checkpoints step by step", r"\(t \+ 1\) % StateSteps == 0 \|\| step == 0",
                    "(t + 1) % 16 == 0 || step == 0"),
        ),
        {"warps": 1, "stages": 2, "vec": 8, "min_blocks": 1, "chunk": 32, "chunk_warps": 1,
         "chunk_blocks": 1},
    ),
    Family(
        "wkv7", "backward", "chunk_loop",
        "B=1,N=3,T=35,H=1,K=8,V=3,dtype=bf16,w_dtype=bf16,decay_form=clamp,"
        "initial_state_dtype=fp32,cu_seqlens_dtype=int32",
        (
            # After a tiny state the terms of the only step cancel on one side alone.
            Mistake("terms of a step", r"abs\(x\[tile\]\[i\]\) \+ abs\(.*\) \+ of_y\[step\];",
                    "abs(late_terms[step]) + of_y[step];"),
        ),
        {"warps": 1, "stages": 2, "vec": 1, "min_blocks": 1, "chunk": 32, "chunk_warps": 1,
         "chunk_blocks": 1},
    ),
    Family(
        "wkv5_decode", "forward", "naive", _DECODE,
        (
            *_SLOTS,
            Mistake("pitch of the state", r"states\.stride_k, K, T,", "V, K, T,"),
        ),
    ),
    Family("wkv6_decode", "forward", "warp_state", _DECODE, _WARP_STATE, {"split": 4}),
    Family(
        "wkv7_decode", "forward", "warp_state", _DECODE,
        (
            *_WARP_STATE,
            Mistake("state before the step", r"(state\.read\(step\.a, sa\);)",
                    r"state.read(step.b, sa);"),
        ),
        {"split": 4},
    ),
    Family(
        "timex", "forward", "toeplitz_mma", "B=3,C=5,T=100,dtype=bf16",
        (
            Mistake("wait", r"cp_async_wait_all\(\);", ";"),
            Mistake("barrier",
                    r"(values\[thread_rank\(\) / kWarpSize\] = \w+;\s*)sync_block\(\);", r"\1"),
            Mistake("mask", r"(b >= \w+) \|\| t >= \w+(\) return;)", r"\1\2"),
        ),
        {"warps": 2},
    ),
    Family(
        "timex", "backward", "toeplitz_mma", "B=3,C=5,T=100,dtype=bf16",
        (
            Mistake("wait of taps", r"cp_async_wait_all\(\);", ";", "kgen/toeplitz/tap"),
        ),
    ),
    Family(
        "timex", "forward", "register_tiles", "B=3,C=5,T=100,dtype=fp32",
        (Mistake("mask", r"i < columns \? (to_float\(from\[i\]\)) : 0\.0f", r"\1"),),
    ),
)  # fmt: skip


@lru_cache
def subject_of(family: Family) -> Subject:
    """A feasible config of a family on the host, near to what the family would choose."""
    entry = open_catalogue().entry(family.operator)
    variant = entry.space.variant(family.pass_name, family.variant)
    signature = entry.operator.signature
    problem = parse_problem(family.dims, signature)
    if family.choose.keys() == {p.name for p in variant.params}:  # also what no search would try
        return Subject(family.name, family.operator, family.variant, family.choose, family.dims,
                       pass_name=family.pass_name)  # fmt: skip
    host, h200 = profile_named("host"), profile_named("h200")
    pass_ = signature.pass_named(family.pass_name)
    # A search may pass over what is chosen wholly.
    if family.choose.keys() >= {param.name for param in variant.params}:
        chosen = Config.of(variant.name, dict(family.choose))
        assert is_feasible(variant, chosen, pass_, problem, h200, legality_only=True)
        return Subject(family.name, family.operator, family.variant, chosen.as_dict(), family.dims,
                       pass_name=family.pass_name)  # fmt: skip
    try:
        configs = enumerate_feasible([variant], pass_, problem, host).configs
    except EmptySpaceError:  # for large heads: it runs there, but a search would not try it
        configs = enumerate_feasible([variant], pass_, problem, h200).configs

    def agreement(index: int) -> tuple[int, int]:
        values = variant.values(configs[index])
        return sum(values.get(k) == v for k, v in family.choose.items()), -index

    assert h200.smem_per_block > host.smem_per_block
    best = configs[max(range(len(configs)), key=agreement)]
    return Subject(family.name, family.operator, family.variant, best.as_dict(), family.dims,
                   pass_name=family.pass_name)  # fmt: skip


def texts_of(subject: Subject) -> dict[str, str]:
    """The rendered source, under an empty name, and the family's headers that it includes."""
    source = subject.render().source
    texts, pending = {"": source}, _INCLUDE.findall(source)
    seen: set[str] = set()
    while pending:
        name = pending.pop(0)
        if name in seen:
            continue
        seen.add(name)
        text = (include_dir() / name).read_text(encoding="utf-8")
        pending += _INCLUDE.findall(text)
        if not name.startswith(_SHARED):
            texts[name] = text
    return texts


def mutant_of(family: Family, mistake: Mistake) -> Mutant:
    """The family's kernel with a mistake.

    Raises:
        LookupError: If no text that the kernel is compiled from has the statement.
    """
    subject = subject_of(family)
    texts = texts_of(subject)
    for header, text in texts.items():
        found = re.search(mistake.pattern, text) if header.startswith(mistake.under) else None
        if found is not None:
            changed = text[: found.start()] + found.expand(mistake.new) + text[found.end() :]
            kind = MutationOperator(mistake.operation, (), ANY_WRONG | {Mechanism.ASAN})
            return Mutant(f"{family.name} / {mistake.operation}", subject, kind, 0, header, changed,
                          "", Fate.REFUSED, "")  # fmt: skip
    raise LookupError(
        f"{family.name}: no statement for '{mistake.operation}' any more\n"
        f"  pattern: {mistake.pattern}\n  searched: the rendered source, {', '.join(texts)}\n"
        "  next: find the statement that does this now, and write its pattern"
    )
