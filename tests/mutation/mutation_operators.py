"""Mutation operators: small, systematic changes, each applied wherever its text occurs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum


class Mechanism(StrEnum):
    """The part of a certificate that refuses a kernel."""

    NUMBERS = "wrong numbers"
    DIFFERS = "differs between launches"
    CANARY = "canary"
    INPUT = "input modified"
    FAULT = "host layer's fault"
    ASAN = "AddressSanitizer"
    CRASH = "crash"
    HANG = "hang"
    UNTESTED = "untested branch"


class Fate(StrEnum):
    """The verdict that a certificate must give a mutant."""

    REFUSED = "refused"
    EQUIVALENT = "equivalent"  # no legal input takes the outputs out of their bound
    UNSEEN = "unseen"  # harmful, and beyond what this certificate can see
    SAME_CODE = "same code"  # the change is not compiled in this config


M = Mechanism
ANY_WRONG = frozenset({M.NUMBERS, M.DIFFERS, M.CANARY, M.FAULT, M.CRASH, M.HANG, M.INPUT})


@dataclass(frozen=True, slots=True)
class Edit:
    """A regular expression over code without comments, and the replacement of each match."""

    pattern: str
    replacement: str


@dataclass(frozen=True, slots=True)
class MutationOperator:
    """One kind of mistake.

    Attributes:
        name: Name for messages and the table.
        edits: Changes of the text; each match of each edit is a mutant.
        caught_by: The mechanisms that may refuse the mutants.
        fate: Fate of the mutants, unless `mutation_excuses.EXCUSES` says otherwise.
        why: Reason of a fate other than refused.
        plan: Changes of the launch instead of the text; see `mutation_harness.spoiled_plan`.
    """

    name: str
    edits: tuple[Edit, ...]
    caught_by: frozenset[Mechanism] = ANY_WRONG
    fate: Fate = Fate.REFUSED
    why: str = ""
    plan: tuple[str, ...] = field(default=())


def _drop(pattern: str) -> Edit:
    """Replace a statement by an empty statement."""
    return Edit(pattern, ";")


_INSIDE = r"\binside\((?:step, first|step, own|column|step)\)"
_EXTENT = r"(?:M|N|kN|kVectors|kChunkVectors|kTiles|kAhead|RowLanes|columns|rows(?:\.M)?)\b"
_ZERO = r"(?:Vector|T|Source|kgen::Vec<Source, kVec>)\{\}"

OPERATORS = (
    MutationOperator(
        "drop barrier",
        (_drop(r"\b(?:kgen::)?sync_block\(\);"), _drop(r"\bkgen::sync_warp\(\);")),
        frozenset({M.NUMBERS, M.DIFFERS, M.FAULT}),
    ),
    MutationOperator(
        "drop wait",
        (
            _drop(r"\bkgen::mbarrier_wait\([^;]*\);"),
        ),
        frozenset({M.NUMBERS, M.DIFFERS, M.FAULT}),
    ),
    MutationOperator(
        "weaken wait",
        (
            Edit(r"parity \^= 1;", "parity ^= 0;"),
            Edit(r"first_parity \^ \(wraps \? 1u : 0u\)", "first_parity"),
            Edit(r"\bprevious / kStages % 2", "(previous / kStages + 1) % 2"),
        ),
        frozenset({M.NUMBERS, M.DIFFERS, M.FAULT}),
    ),
    MutationOperator(
        "drop fence or commit",
        (
            _drop(r"\bkgen::mbarrier_init_fence\(\);"),
            _drop(r"\bkgen::mbarrier_arrive\([^;]*\);"),
        ),
        frozenset({M.NUMBERS, M.DIFFERS, M.FAULT}),
    ),
    MutationOperator(
        "loosen bound",
        (
            Edit(rf"(?<= )<(?= (?:own\.vectors_end\b|{_EXTENT}))", "<="),
            Edit(rf"(?<= )>=(?= {_EXTENT})", ">"),
            Edit(r"(?<= < )(?:M|N|kN|kVectors|kTiles)\b(?! [-/])", r"\g<0> + 1"),
        ),
        ANY_WRONG | {M.ASAN},
    ),
    MutationOperator(
        "tighten bound",
        (
            Edit(rf"(?<= < )(?:own\.vectors_end\b|{_EXTENT})(?! [-/])", r"\g<0> - 1"),
            Edit(r"(?<= )<=(?= kN\b)", "<"),
            Edit(rf"(?<= >= ){_EXTENT}", r"\g<0> - 1"),
        ),
    ),
    MutationOperator(
        "drop guard",
        (
            Edit(r"\b(?:exists|is_row) && ", ""),
            Edit(r"!exists\(row0 \+ r \* kGroups, M\) \|\| ", ""),
            Edit(r"\bif \(row < M\)", "if (true)"),
            Edit(r"\bif \((?:row0 >= M|row >= rows\.M)\) return;", ";"),
            Edit(r"\bif \((?:column >= kN|n >= N|row >= M)\) (?:return|continue);", ";"),
            Edit(r"\bif \(column < columns\)", "if (true)"),
            Edit(r"(?<=threadIdx\.x < 32) && n < kN\b", ""),
            Edit(r"\bown\.edge < kN\b", "true"),
            Edit(r"kN % kTile == 0 \|\| column < kN", "true"),
            Edit(_INSIDE, "true"),
        ),
        ANY_WRONG | {M.ASAN},
    ),
    MutationOperator(
        # The value that is read past the end is not used: only ASan, which checks the read itself,
        # can refuse it.
        "read past, then mask",
        (
            Edit(
                r"if \((?:exists && |is_row && |row < rows && )?"
                rf"({_INSIDE})\)\n\s*(\S+) = ([^;]*);",
                r"{ const Vector read = \3; if (\1) \2 = read; }",
            ),
            Edit(
                rf"({_INSIDE}) \? (kgen::load_vec<[^>]*>\([^)]*\)) : Vector\{{\}};",
                r"\2; if (!\1) held[u] = Vector{};",
            ),
            Edit(
                r"(\w+\[u\]) = column < kN \? (kgen::load_vec<[^>]*>\([^)]*\)) : Vector\{\};",
                r"\1 = \2; if (column >= kN) \1 = Vector{};",
            ),
        ),
        frozenset({M.ASAN, M.FAULT, M.CRASH}),
    ),
    MutationOperator(
        "drop eps", (Edit(r" \+ eps\b", ""), Edit(r" \+ eps\b", " - eps")), frozenset({M.NUMBERS})
    ),
    MutationOperator(
        "wrong divisor",
        (
            Edit(r"1\.0f / kN\b", "1.0f / (kN - 1)"),
            Edit(r"1\.0f / kN\b", "1.0f / ((kN + 31) / 32 * 32)"),
            Edit(r"static_cast<float>\(N\)", "static_cast<float>(N - 1)"),
            Edit(r"static_cast<float>\(N\)", "static_cast<float>((N + 31) / 32 * 32)"),
            Edit(r"\) / sum\)", ") / (sum + 1.0f))"),
        ),
        frozenset({M.NUMBERS}),
    ),
    MutationOperator(
        "wrong row stride",
        (
            Edit(r"\* (?:x|dy|dh|residual)_stride_M", "* {columns}"),
            Edit(r"(?<=row \* )rows\.(?:x|dy|dh)_stride\b", "{columns}"),
            Edit(r"(\bdx(?: \+ |\[)row \* )k?N\b", r"\1x_stride_M"),
            Edit(r"(?<=T\* y_row = y \+ row \* )k?N\b", "x_stride_M"),
            Edit(r"(T\* target = y \+ [^;]*\* )kN\b", r"\1x_stride_M"),
        ),
        ANY_WRONG,
    ),
    MutationOperator(
        "wrong column or place",
        (
            Edit(r"(?<=threadIdx\.x )/(?= kLanes)", "%"),
            Edit(r"(?<=threadIdx\.x )%(?= kLanes)", "/"),
            Edit(r"\bw \+ step \* kSweep", "w + step * kLanes"),
            Edit(r"(?<=offset \+ )factors\[i\]", "factors[kWeightVec - 1 - i]"),
            Edit(r"weight\[step\]\.data\[i\]\)", "weight[step].data[kVec - 1 - i])"),
            Edit(r"\bw\[n\]", "w[0]"),
            Edit(r"\bpartial\[i \* kWarps \+ rank % kWarps\]", "partial[i * kWarps]"),
            Edit(r"\bpartial\[i \* kWarps \+ rank % Thr", "partial[i + rank % Thr"),
            Edit(r"\beach\[2 \* i \+ 1\]", "each[2 * i]"),
            Edit(r"scratch_\.partial\[half_\] \+ rank / ThreadsPerGroup[^;]*;",
                 "scratch_.partial[half_];"),
            Edit(r"(?<=\bout\[2 \* i \+ 1\] = pair\.)y", "x"),
            Edit(r"\bchunk \* kChunk \+ ", ""),
            Edit(r"\bheld\.vectors\[1\]", "held.vectors[0]"),
            Edit(r"\bsums\[first\]\[lane\] = sum;", "sums[0][lane] = sum;"),
            Edit(r"\bpartial\[split \* N \+ n\]", "partial[n]"),
            Edit(r"\brow_stats\[2 \* row \+ 1\]", "row_stats[2 * row]"),
        ),
    ),
    MutationOperator(
        "wrong reduction width",
        (
            Edit(r"\bbits = Lanes / 2;", "bits = Lanes / 4;"),
            Edit(r"\bbits = Lanes / 2;", "bits = Lanes;"),
            Edit(r"\bbits > 0;", "bits > 1;"),
            Edit(r"\blanes_reduce<kLanes, Op>", "lanes_reduce<kLanes / 2, Op>"),
            Edit(r"\blanes_reduce<kWarps, Op>", "lanes_reduce<kWarps / 2, Op>"),
            Edit(r"\blanes_reduce<kWarps, Op>", "lanes_reduce<kWarps * 2, Op>"),
            Edit(r"\bwidth = kWarps / 2;", "width = kWarps / 4;"),
            Edit(r"\bGroupSum<kLanes, kGroups\b", "GroupSum<kLanes / 2, kGroups * 2"),
            Edit(r"\bGroupSum<kLanes, kGroups\b", "GroupSum<kLanes * 2, (kGroups + 1) / 2"),
            Edit(r"\bGroupSum<kThreads, 1>", "GroupSum<kThreads / 2, 2>"),
            Edit(r"\b(group_(?:sum|max))<kThreads, 1>", r"\1<kThreads / 2, 2>"),
            Edit(r"\bactive = kThreads / 2;", "active = kThreads / 4;"),
            Edit(r"\bactive > 0;", "active > 1;"),
        ),
    ),
    MutationOperator(
        "round the accumulator",
        (Edit(r"= kgen::fma\((\w+\[i\]), \1, (\w+(?:\[[^;=]*\])?)\);",
              r"= kgen::to_float(kgen::from_float<kgen::fp16>(kgen::fma(\1, \1, \2)));"),
         Edit(r"squares = kgen::fma\(value, value, squares\);",
              "squares = kgen::to_float(kgen::from_float<kgen::bf16>"
              "(kgen::fma(value, value, squares)));"),
         Edit(r"= (kgen::fma\(g\[i\], values\[i\], gx\[i % 2\]\));",
              r"= kgen::to_float(kgen::from_float<kgen::fp16>(\1));"),
         Edit(r"\bsum \+= (kgen::exp\([^;]*\));",
              r"sum = kgen::to_float(kgen::from_float<kgen::fp16>(sum + \1));")),
        frozenset({M.NUMBERS}),
    ),
    MutationOperator(
        "round the result",
        (Edit(r"(?<=\bvalue = )value \* scale(?= \* \()",
              "kgen::to_float(kgen::from_float<kgen::bf16>(value * scale))"),
         Edit(r"(?<=\bresult = )kgen::to_float\(value\) \* scale(?=;)",
              "kgen::to_float(kgen::from_float<kgen::fp16>(kgen::to_float(value) * scale))"),
         Edit(r"(?<=\bmean = )sums\[\d\] \* scale (?:\* \(1\.0f / kN\)|/ columns)(?=;)",
              r"kgen::to_float(kgen::from_float<kgen::bf16>(\g<0>))")),
        frozenset({M.NUMBERS}),
    ),
    MutationOperator(
        "wrong conversion",
        (
            Edit(r"bit_cast<float>\(pair << 16\)", "bit_cast<float>(pair & 0xffff0000u)"),
            Edit(r"bit_cast<float>\(pair & 0xffff0000u\)", "bit_cast<float>(pair)"),
            Edit(r"static_cast<u16>\(pair >> 16\)", "static_cast<u16>(pair)"),
            Edit(r"_bits\(second\)\) << 16", "_bits(first)) << 16"),
            Edit(r"\(magnitude << 13\) \+ 0x38000000u", "(magnitude << 13) + 0x37800000u"),
            Edit(r"magnitude >= 0x477ff000u", "magnitude >= 0x7f800000u"),
            Edit(r"magnitude < 0x0400u", "false"),
            Edit(r"magnitude < 0x38800000u", "false"),
            Edit(r"if \(magnitude > 0x7c00u\) return [^;]*;", ""),
            Edit(r"if \(magnitude == 0x7c00u\) return [^;]*;", ""),
            Edit(r"if \(magnitude > 0x7f800000u\) return [^;]*;", ""),
            Edit(r"if \(\(bits & 0x7fffffffu\) > 0x7f800000u\) return [^;]*;", ""),
        ),
        frozenset({M.NUMBERS}),
    ),
    MutationOperator(
        "drop initialisation",
        (
            Edit(r"\bfloat (squares|sum) = 0\.0f;", r"float \1;"),
            Edit(r"\bfloat sum\[(\w+)\] = \{\};", r"float sum[\1];"),
            Edit(r"\{edge \* edge\};", "{};"),
            Edit(r"= -kgen::infinity\(\);", "= 0.0f;"),
            # Another value, because without the assignment the value might be zero by chance.
            Edit(rf"\b(held\[r\]\[step\]|held\.(?:vector|x|dy)\[step\]) = {_ZERO};",
                 r"for (auto& part : \1.data) part = kgen::from_float<T>(__builtin_inff());"),
            Edit(rf"\b(held\.(?:x_|dy_)?edge) = {_ZERO};",
                 r"\1 = kgen::from_float<T>(__builtin_inff());"),
            Edit(r"\b(float (?:sums|gx|squares|sum_dw)(?:\[\w+\])+) = \{\};", r"\1 = {1.0f};"),
            Edit(r"\bfloat (total|edge_dw) = 0\.0f;", r"float \1 = 1.0f;"),
            Edit(r"(mbarrier_init\((?:ring\.)?full\[stage\], )1\);", r"\g<1>2);"),
            Edit(r"kgen::mbarrier_init\((?:ring\.)?full\[stage\], 1\);", ";"),
            Edit(r"(?<=mbarrier_init\(ring\.empty\[stage\], )kWarps\);", "kWarps + 1);"),
        ),
    ),
    MutationOperator(
        "stale value",
        (
            _drop(r"\bheld\[r\]\[step\] = next\[r\]\[step\];"),
            _drop(r"\bheld = next;"),
            _drop(r"\bload_row\(held, (?:next_row|rows, row \+ stride), [^;]*;"),
            _drop(r"\bfirst_stage -= kStages;"),
            _drop(r"\bfirst_number \+= kChunks;"),
            _drop(r"\bhalf_ \^= 1;"),
            Edit(r", row \+= stride\)", ")"),
        ),
    ),
    MutationOperator(
        "wrong row",
        (
            Edit(r"\bblock_row \+ stride \+ group", "block_row + group"),
            Edit(r"\(row \+ stride\) \* x_stride_M", "row * x_stride_M"),
            Edit(r"\bstage == 0 \? kStages - 1 : stage - 1;", "stage;"),
            Edit(r"\bkgen::i64 row = blockIdx\.x;", "kgen::i64 row = 0;"),
            Edit(r"static_cast<kgen::i64>\(blockIdx\.x\)", "static_cast<kgen::i64>(0)"),
            Edit(r"static_cast<kgen::i64>\(gridDim\.x\)", "static_cast<kgen::i64>(gridDim.x + 1)"),
            Edit(r"\brow \+= gridDim\.x\b", "row += gridDim.x + 1"),
            Edit(r"\b(row0? \+= (?:kSplits|RowLanes|kAhead \* RowLanes|kUnroll \* kSplits))\b",
                 r"\1 + 1"),
            Edit(r"= blockIdx\.y;", "= 0;"),
            Edit(r"(?<=blockIdx\.x \+ number / )kChunks", "kStages"),
            Edit(r"\btile = kReverse \? kTiles - 1 - step : step;", "tile = 0;"),
        ),
    ),
    MutationOperator(
        "write into the input",
        (
            Edit(r"(?<=T\* y_row = )y(?= \+)", "const_cast<T*>(x)"),
            Edit(r"(?<=T\* target = )y(?= \+)", "const_cast<T*>(x)"),
            Edit(r"(?<=y_row\[n\] = )", "const_cast<T*>(x_row)[n] = "),
            Edit(r"(?<=T\* dx_row = )dx(?= \+)|(?<=store_vec<kStore>\()dx(?= \+)",
                 "const_cast<T*>(x)"),
            Edit(r"(?<=dx\[row \* N \+ n\] = )", "const_cast<T*>(dy_row)[n] = "),
        ),
        frozenset({M.INPUT, M.FAULT, M.CRASH, M.DIFFERS, M.NUMBERS, M.CANARY}),
    ),
    MutationOperator(
        "drop special values",
        (
            Edit(r"a > b \|\| a != a \? a : b", "a > b ? a : b"),
            Edit(r"kgen::fma\((\w+(?:\[i\])?), \1,",
                 r"kgen::fma(\1 != \1 ? 0.0f : \1, \1 != \1 ? 0.0f : \1,"),
            Edit(r"kgen::fma\((\w+(?:\[i\])?), \1,",
                 r"kgen::fma(kgen::min(\1, 1e18f), kgen::min(\1, 1e18f),"),
            Edit(r"\bvalue \* scale(?= \* \()", "(value != value ? 0.0f : value) * scale"),
        ),
        frozenset({M.NUMBERS}),
    ),
    MutationOperator(
        "wrong gradient",
        (
            Edit(r"kgen::fma\(-xhat, mean", "kgen::fma(xhat, mean"),
            Edit(r"(?<=-xhat, )mean(?:\[u\])?(?=,)", "0.0f"),
            Edit(r"kgen::fma\(gradients\[i\], xhat, sum_dw[^;]*\);", "gradients[i] * xhat;"),
            Edit(r"kgen::fma\(gradients\[i\](?=, xhat, sum_dw\[(?:chunk|step))",
                 "kgen::fma(g[i]"),
            Edit(r"(?<=\bmean = sums\[\d\] \* )scale\b", "1.0f"),
            Edit(r"(?<=g\[at\] = )kWeighted \? [^:;]* : ", ""),
            _drop(r"\bvalues\[i\] \+= added\[i\];"),
            _drop(r"\b(?:result|sum|sums\[\w\]) \+= [^;]*;"),
            _drop(r"\bsum\.add\([^;]*;"),
            Edit(r": sum \+ sum_dw\[step\]\[i\];", ": sum_dw[step][i];"),
        ),
    ),
    MutationOperator(
        "forget an addend or a result",
        (
            _drop(r"\bheld\[r\]\[step\] = kgen::add\([^;]*;"),
            _drop(r"\bheld\.(?:vector\[step\]|edge) = kgen::(?:add|from_float<T>)\([^;]*;"),
            Edit(r"\brstd\[row(?: \+ r \* kGroups)?\] = scale(?:\[r\])?;", ";"),
            Edit(r"\bh\[row \* N \+ n\] = value;", ";"),
            Edit(r"(?<=\bscale = )rstd\[row\];", "rstd[0];"),
        ),
    ),
    MutationOperator(
        "wrong launch", (), ANY_WRONG,
        plan=("one block fewer", "one block more", "half the threads", "less shared memory"),
    ),
    MutationOperator(
        "truncate an offset",
        (
            Edit(r"(?<=\bx \+ )(\([^()]*\)|\w+) \* x_stride_M",
                 r"static_cast<int>(\1 * x_stride_M)"),
        ),
    ),
    MutationOperator(
        "cache hint",
        (
            Edit(r"= kgen::Cache::normal;", "= kgen::Cache::evict_first;"),
            Edit(r"\bkgen::Cache::no_l1>", "kgen::Cache::normal>"),
            Edit(r"\bkgen::Cache::streaming>", "kgen::Cache::normal>"),
            Edit(r"= kgen::BulkCache::normal;", "= kgen::BulkCache::evict_last;"),
        ),
        fate=Fate.EQUIVALENT,
        why="a hint says where a line is kept, not what it holds",
    ),
    MutationOperator(
        "other rounding",
        (
            Edit(r"kgen::fma\((\w+(?:\[i\])?), \1, (\w+(?:\[[^;=]*\])?)\)", r"(\1 * \1 + \2)"),
            Edit(r"\(sum\[0\] \+ sum\[1\]\) \+ \(sum\[2\] \+ sum\[3\]\)",
                 "((sum[0] + sum[1]) + sum[2]) + sum[3]"),
            Edit(r"\* \(1\.0f / kN\)", "/ kN"),
        ),
        fate=Fate.EQUIVALENT,
        why="another order of operations, whose rounding the bound grants any kernel",
    ),
    MutationOperator(
        "round toward zero",
        (
            Edit(r"\(bits \+ 0x7fffu \+ \(bits >> 16 & 1u\)\) >> 16", "bits >> 16"),
            Edit(r" \+ 0xfffu \+ odd\b", " + 0u * odd"),
        ),
    ),
)  # fmt: skip


def code_only(text: str) -> str:
    """Replace by blanks of equal length the text that a host build does not compile: comments, the
    GPU's branch of `#if KGEN_HOST`, static assertions and includes."""
    text = re.sub(r"//[^\n]*", lambda m: " " * len(m[0]), text)
    text = re.sub(r"static_assert\([^;]*;", lambda m: re.sub(r"\S", " ", m[0]), text)
    lines = []
    states: list[tuple[bool, bool]] = []  # for each open #if: (this branch is compiled, one was)
    for line in text.splitlines(keepends=True):
        directive = line.lstrip()
        if directive.startswith("#if"):
            taken = "KGEN_HOST" not in directive or "!KGEN_HOST" not in directive
            states.append((taken, taken))
        elif directive.startswith(("#else", "#elif")):
            states[-1] = (not states[-1][1], True)
        elif directive.startswith("#endif"):
            states.pop()
        hidden = directive.startswith("#") or not all(taken for taken, _ in states)
        lines.append(re.sub(r"\S", " ", line) if hidden else line)
    return "".join(lines)


def edits_of(
    operator: MutationOperator, text: str, columns: str
) -> Iterator[tuple[int, int, int, str]]:
    """Yield (number of the edit, start, end, replacement) for every place where an edit applies.

    Args:
        operator: The mutation operator.
        text: A source or header.
        columns: The kernel's name for the extent of a row.
    """
    code = code_only(text)
    for number, edit in enumerate(operator.edits):
        for match in re.finditer(edit.pattern, code):
            new = match.expand(edit.replacement).replace("{columns}", columns)
            yield number, match.start(), match.end(), new
