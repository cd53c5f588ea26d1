"""Encode a feasible set as arrays for the numerical part of the search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from kgen.model.config import Config, Value

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

INACTIVE = -1  # code of a parameter that the config's variant does not have


class Encoding:
    """The enumerated feasible set of one problem.

    Parameters of the same name share one column in all variants: `vec` or `threads` mostly mean the
    same in all variants of a pass, so results of one variant inform the others. The variant has
    columns of its own, which let the model separate the variants.

    Attributes:
        configs: The feasible configs, in the order given, without repetitions.
        columns: Parameter names, in order of first appearance.
        choices: For each column its values; numbers ascending, text in order of appearance.
        codes: [N, D] index into the column's choices, or `INACTIVE`.
        variants: Variant names in order of first appearance.
        variant_of: [N] index into `variants`.
        features: [N, F] coordinates for distances, each in [0, 1].
        groups: [F] which length scale a feature belongs to.
    """

    def __init__(self, configs: Iterable[Config]) -> None:
        self.configs: tuple[Config, ...] = tuple(dict.fromkeys(configs))
        if not self.configs:
            raise ValueError("the feasible set is empty; nothing can be proposed")
        self._index = {config: i for i, config in enumerate(self.configs)}
        self.variants = tuple(dict.fromkeys(config.variant for config in self.configs))
        values_of: dict[str, dict[Value, None]] = {}
        for config in self.configs:
            for name, value in config.values:
                values_of.setdefault(name, {})[value] = None
        self.columns = tuple(values_of)
        self.choices = tuple(_ordered(tuple(values_of[name])) for name in self.columns)
        self.ordinal = tuple(_is_ordinal(choices) for choices in self.choices)
        self.codes = self._encode()
        variant_code = {name: i for i, name in enumerate(self.variants)}
        self.variant_of: Ints = np.array(
            [variant_code[config.variant] for config in self.configs], dtype=np.int64
        )
        self.features, self.groups = self._build_features()

    def __len__(self) -> int:
        return len(self.configs)

    def index(self, config: Config) -> int | None:
        """Return the position of a config, or None if it is not feasible."""
        return self._index.get(config)

    def neighbours(self, i: int) -> tuple[Ints, Ints]:
        """Return (one change away, two small steps away) of config i, inside the feasible set.

        The second kind moves two parameters by one step each: with rules such as
        `block_x * block_y <= 1024` a good config often needs two changes at once.
        """
        delta = np.abs(self.codes - self.codes[i])
        changed = delta != 0
        count = changed.sum(axis=1, dtype=np.int64)
        same_variant = self.variant_of == self.variant_of[i]
        one = np.flatnonzero(same_variant & (count == 1))
        two = np.flatnonzero(same_variant & (count == 2) & (delta.max(axis=1, initial=0) == 1))
        return one, two

    def _encode(self) -> NDArray[np.int16]:
        codes = np.full((len(self.configs), len(self.columns)), INACTIVE, dtype=np.int16)
        place = {
            name: (d, {value: code for code, value in enumerate(choices)})
            for d, (name, choices) in enumerate(zip(self.columns, self.choices, strict=True))
        }
        for i, config in enumerate(self.configs):
            row = codes[i]
            for name, value in config.values:
                d, code_of = place[name]
                row[d] = code_of[value]
        return codes

    def _build_features(self) -> tuple[Floats, Ints]:
        blocks: list[Floats] = []
        groups: list[int] = []
        group = 0
        for d, choices in enumerate(self.choices):
            if len(choices) == 1 and (self.codes[:, d] != INACTIVE).all():
                continue  # constant: no information
            code = self.codes[:, d]
            if self.ordinal[d]:
                # Ranks, not values: [1, 2, 4, 8] and [32, 64, 96, 128] are both count as
                # evenly spaced. An inactive parameter has the middle coordinate, close to all.
                rank = code / max(1, len(choices) - 1)
                blocks.append(np.where(code == INACTIVE, 0.5, rank)[:, None])
                groups.append(group)
                group += 1
            if (twos := _factors_of_two(choices)) is not None:
                blocks.append(np.where(code == INACTIVE, 0.5, twos[code])[:, None])
                groups.append(group)
                group += 1
            if not self.ordinal[d] or _is_enumeration(choices):
                blocks.append(_one_hot(code, len(choices)))
                groups += [group] * len(choices)
                group += 1
        if len(self.variants) > 1:
            blocks.append(_one_hot(self.variant_of, len(self.variants)))
            groups += [group] * len(self.variants)
        if not blocks:
            blocks, groups = [np.zeros((len(self.configs), 1))], [0]
        return np.ascontiguousarray(np.hstack(blocks)), np.array(groups, dtype=np.int64)


def _is_enumeration(choices: Sequence[Value]) -> bool:
    """Whether the choices are 0, 1, 2, ...: they number methods rather than sizes.

    Such a parameter gets nominal features (equal or not) besides the ordinal one, and the length
    scales weigh them. Nominal features for every short parameter were worse: the extra length
    scales cost more than they gained (GEMM after 50 trials: 1.073 against 1.022).
    """
    return len(choices) >= 3 and choices == tuple(range(len(choices)))


def _factors_of_two(choices: Sequence[Value]) -> Floats | None:
    """The factors of two of each choice, scaled to [0, 1]; None if they follow from the rank.

    128 threads and 256 threads fill warps and divide extents that 144 does not, though 144 lies
    between them. Without this feature a model of `16, 32, 48, ..., 256` finds no trend. Convolution
    (A4000) after 50 / 100 / 200 trials, one at a time: 1.125 / 1.049 / 1.010 without,
    1.079 / 1.012 / 1.000 with it.
    """
    sizes = [v for v in choices if isinstance(v, int) and not isinstance(v, bool) and v > 0]
    if len(sizes) < max(4, len(choices)) or all(v & (v - 1) == 0 for v in sizes):
        return None
    twos: Floats = np.array([(v & -v).bit_length() - 1 for v in sizes], dtype=np.float64)
    return twos / twos.max() if twos.max() > 0 else None


def _is_ordinal(choices: Sequence[Value]) -> bool:
    if len(choices) <= 2:
        return True  # with two values nominal and ordinal are the same
    return all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in choices)


def _ordered(values: tuple[Value, ...]) -> tuple[Value, ...]:
    if any(isinstance(value, str) for value in values):
        return values
    return tuple(sorted(values))


def _one_hot(code: NDArray[np.signedinteger], size: int) -> Floats:
    """Return columns at distance 1 from each other (each is 1/sqrt(2) long)."""
    return np.where(code[:, None] == np.arange(size)[None, :], np.sqrt(0.5), 0.0)
