"""Short names of problems: the values that differ from the defaults of the operator's signature.

`B=8,N=8,T=4096,H=32,K=64,V=64,dtype=bf16,...,decay_form=raw` is `B8 T4096 H32 D64 bf16 raw +state`.
A short name is for people, the full key for files; both parse to the same problem:

- `T4096`: a dim. A dim that the signature implies is left out, and so is a dim that equals the dim
  that it is declared to be `like`. `D64` gives both dims where the signature declares `D` for them.
- `bf16`: the first dtype field. Another field appears only if it differs from its default, as in
  `w:fp32`.
- `+residual`: an optional tensor that is present; `-w`: an optional tensor that is absent. `+state`
  stands for `+initial_state +final_state`. `+x:int64` names a dtype other than the first allowed
  one.
- `raw`: an option that differs from its default; `decay_form:raw` if two options have this choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kgen.errors import ProblemError, suggest
from kgen.model.dtypes import DTYPES
from kgen.model.problem import Problem, parse_problem
from kgen.model.signature import DTypeField, Option, Signature
from kgen.runtime.signature import ABSENT

_FIRST, _LAST = "initial_", "final_"


def short_name(problem: Problem, signature: Signature) -> str:
    """Return a problem's values that differ from the defaults; unique within an operator."""
    words = [*_dims(problem, signature), *_choices(problem, signature)]
    return " ".join(_joined(words))


def parse_short_name(text: str, signature: Signature) -> Problem:
    """Parse a short name; its words may be in any order.

    Raises:
        ProblemError: If a word is unknown, or two words set the same field.
    """
    spelled = _spellings(signature)
    given: dict[str, str] = {}

    def take(name: str, value: str, word: str) -> None:
        if given.setdefault(name, value) != value:
            raise ProblemError(f"problem '{text}': '{word}' says '{name}' a second time")

    for word in text.split():
        pairs = list(spelled[word]) if word in spelled else list(_dim_of(word, signature))
        if not pairs:
            raise ProblemError(
                f"problem '{text}': unknown word '{word}'\n  {suggest(word, [*spelled])}"
            )
        for name, value in pairs:
            take(name, value, word)
    return parse_problem(",".join(f"{name}={value}" for name, value in given.items()), signature)


def read_problem(text: str, signature: Signature) -> Problem:
    """Parse a problem in either form: `M=8192,N=4096,dtype=bf16` or `M8192 N4096 bf16`.

    Raises:
        ProblemError: If the text has neither form.
    """
    if "=" in text:
        return parse_problem(text, signature)
    return parse_short_name(text, signature)


def _dims(problem: Problem, signature: Signature) -> Iterator[str]:
    extents = dict(problem.dims)
    implied = signature.implied(dict(problem.dtypes))
    left_out = implied[0] if implied is not None and implied[1] != "1" else ""
    equal = {d.like: d for d in signature.dims if d.like and extents[d.name] == extents[d.like]}
    for dim in signature.dims:
        if dim.name == left_out or (dim.like and extents[dim.name] == extents[dim.like]):
            continue
        other = equal.get(dim.name)
        name = other.both if other is not None and other.both else dim.name
        yield _dim_word(name, extents[dim.name])


def _dim_word(name: str, extent: int) -> str:
    return f"{name}{extent}" if name.isalpha() else f"{name}:{extent}"


def _dim_of(word: str, signature: Signature) -> Iterator[tuple[str, str]]:
    name, colon, value = word.partition(":")
    if not colon:
        name = word.rstrip("0123456789")
        value = word[len(name) :]
    if not value.isdecimal():
        return
    for dim in signature.dims:
        if name == dim.name:
            yield dim.name, value
        elif dim.both and name == dim.both:
            yield dim.like, value
            yield dim.name, value


def _choices(problem: Problem, signature: Signature) -> Iterator[str]:
    chosen = dict(problem.dtypes)
    for choice in signature.choices:
        yield from _word(choice, chosen[choice.name], chosen, signature)


def _word(
    choice: DTypeField | Option, value: str, chosen: Mapping[str, str], signature: Signature
) -> Iterator[str]:
    first = signature.dtypes[0] if signature.dtypes else None
    if choice is first:
        yield value
        return
    default = _default(choice, signature)
    if value == chosen.get(default, default):
        return
    if isinstance(choice, Option):
        yield _option_word(choice, value, signature)
        return
    word = choice.name.removesuffix("_dtype")
    if value == ABSENT:
        yield f"-{word}"
    elif default == ABSENT:
        usual = next((a for a in choice.allowed if a != ABSENT), "")
        yield f"+{word}" if value == chosen.get(usual, usual) else f"+{word}:{value}"
    else:
        yield f"{word}:{value}"


def _default(choice: DTypeField | Option, signature: Signature) -> str:
    if choice.default is not None:
        return choice.default
    first = signature.dtypes[0].name
    return first if first in choice.allowed else ""


def _option_word(option: Option, value: str, signature: Signature) -> str:
    others = [o for o in signature.options if o is not option and value in o.allowed]
    dims = [n for d in signature.dims for n in (d.name, d.both) if n and value.startswith(n)]
    return f"{option.name}:{value}" if others or dims or value in DTYPES else value


def _joined(words: list[str]) -> list[str]:
    """Replace the pair `+initial_state +final_state` by `+state`, and sort tensors to the end."""
    out = []
    for word in words:
        stem = word.removeprefix(f"+{_FIRST}")
        if word != stem and f"+{_LAST}{stem}" in words:
            out.append(f"+{stem}")
            continue
        stem = word.removeprefix(f"+{_LAST}")
        if word == stem or f"+{_FIRST}{stem}" not in words:
            out.append(word)
    # Order for readers: shape, dtypes, options, then tensors that are present or absent.
    return sorted(out, key=lambda word: word[0] in "+-")


def _spellings(signature: Signature) -> dict[str, tuple[tuple[str, str], ...]]:
    """The meaning of each word except dims: (field, value) pairs."""
    found: dict[str, tuple[tuple[str, str], ...]] = {}
    for chosen in signature.dtype_combinations():
        for choice in signature.choices:
            value = chosen[choice.name]
            for word in _word(choice, value, chosen, signature):
                # A value that refers to another field stays a reference: another word of the name
                # may choose that field's dtype.
                found[word] = ((choice.name, _relative(choice, value, chosen)),)
    for word, pairs in list(found.items()):
        stem = word.removeprefix(f"+{_FIRST}")
        if word != stem and f"+{_LAST}{stem}" in found:
            found.setdefault(f"+{stem}", (*pairs, *found[f"+{_LAST}{stem}"]))
    return found


def _relative(choice: DTypeField | Option, value: str, chosen: Mapping[str, str]) -> str:
    """The value as the field declares it: `dtype`, not the `bf16` that `dtype` is in `chosen`."""
    if isinstance(choice, Option) or value in choice.allowed:
        return value
    return next((a for a in choice.allowed if chosen.get(a) == value), value)
