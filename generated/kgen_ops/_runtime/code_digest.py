"""The digest of a cubin's machine code, which does not depend on names and comments.

Two texts that compile to the same instructions are the same kernel: a verification or a time of one
holds for the other. So the digest covers, per function, all that a GPU executes and allocates:

- the instructions and the indirect branch tables;
- relocations and addresses of globals, by the content to which they point, not by name;
- registers, stack, barriers, static shared memory, local memory, launch bounds, parameters;
- the values of constants and initialised globals that an instruction reads.

It leaves out names, comments, line tables, unwind tables, the compiler's notes, the order of
functions, and globals that no instruction reads, such as those of `constexpr` members.

The layout is that of cubins for sm_75 and later, by NVRTC and nvcc 12 and 13.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

DIGEST_CHARS = 16

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQ")
_RELOCATION_ADDEND = struct.Struct("<QQq")
_INSTRUCTION = struct.Struct("<QQ")
_ATTRIBUTE = struct.Struct("<BBH")
_CUDA = 190  # e_machine
_NO_BITS = 8  # sh_type of memory that has no content in the file
_RELA = 4
_SIZED = 4  # format of an attribute whose value follows it
_GLOBALS_BANK = 4  # constant bank with the addresses of globals
_CONSTANT_FORMS = (3, 5)  # forms of an instruction with an operand in a constant bank
# Attributes (EIATTR) whose first four bytes are the index of a symbol.
_OF_SYMBOL = {0x0A, 0x11, 0x12, 0x23, 0x2F, 0x3B}
_EXTERNS = 0x0F  # a list of symbols; the relocations say which of them are called
# Prefixes of sections whose names end with the function's name. The digest covers the content of
# sections in _CONTENT, and the size of sections in _EXTENT.
_CONTENT = (".nv.constant2.",)  # branch targets
_EXTENT = (".nv.constant0.", ".nv.shared.", ".nv.local.")  # parameters, memory


class CubinError(ValueError):
    """The bytes are not a cubin that this module can read."""


class Code(NamedTuple):
    """The digest of a cubin.

    Attributes:
        digest: The digest of all functions, independent of their order.
        functions: The digest of each function, by name.
    """

    digest: str
    functions: Mapping[str, str]


def code_of(cubin: bytes) -> Code:
    """Compute the digest of a cubin's machine code.

    Args:
        cubin: A cubin that NVRTC or nvcc made for one architecture.
    Raises:
        CubinError: If the bytes are no cubin, or are cut off.
    """
    try:
        image = _Image(cubin)
        bodies = {name: _body(image, name) for name in image.functions}
        functions = {name: _function(image, name, bodies) for name in bodies}
    except (struct.error, IndexError, KeyError, ValueError) as problem:
        raise CubinError(f"no cubin: {type(problem).__name__}: {problem}") from None
    whole = [str(image.arch), *sorted(functions.values())]
    return Code(_digest(*(part.encode() for part in whole)), functions)


def globals_used(cubin: bytes) -> tuple[str, ...]:
    """Return the mangled names of the global variables that a cubin's instructions refer to.

    Such memory lives as long as the loaded module, so a kernel can keep state in it from one launch
    to the next. `__constant__` variables do not count, nor do globals that no instruction reads.

    Raises:
        CubinError: If the bytes are no cubin, or are cut off.
    """
    try:
        image = _Image(cubin)
        slots = {offset: symbol
                 for offset, _, symbol, _ in image.relocations(f".nv.constant{_GLOBALS_BANK}")}
        found = set()
        for name in image.functions:
            text = f".text.{name}"
            found |= {slots[offset & ~7] for bank, offset
                      in _constants_read(image.named[text].content)
                      if bank == _GLOBALS_BANK and offset & ~7 in slots}
            found |= {symbol for _, _, symbol, _ in image.relocations(text)}
        return tuple(sorted(
            symbol.name for symbol in found
            if 0 < symbol.section < len(image.sections)
            and image.sections[symbol.section].name.startswith(".nv.global")
        ))
    except (struct.error, IndexError, KeyError, ValueError) as problem:
        raise CubinError(f"no cubin: {type(problem).__name__}: {problem}") from None


class _Section(NamedTuple):
    name: str
    kind: int
    flags: int
    size: int
    info: int
    alignment: int
    entry_size: int
    content: bytes


class _Symbol(NamedTuple):
    name: str
    section: int  # 0: the symbol is defined in another module
    value: int
    size: int


class _Image:
    """A cubin's sections and symbols.

    Attributes:
        arch: The flags of the header: architecture and layout.
        sections: Sections by number.
        named: Sections by name.
        symbols: Symbols by number.
        functions: Names of the functions with code.
    """

    def __init__(self, cubin: bytes) -> None:
        identity, _, machine, *rest = _HEADER.unpack_from(cubin)
        if identity[:4] != b"\x7fELF" or machine != _CUDA:
            raise ValueError("the header is another's")
        _, _, _, start, self.arch, _, _, _, size, count, names_at = rest
        heads = [_SECTION.unpack_from(cubin, start + i * size) for i in range(count)]
        names = cubin[heads[names_at][4]:][:heads[names_at][5]]
        self.sections = [
            _Section(_text(names, name), kind, flags, extent, info, alignment, entry_size,
                     b"" if kind == _NO_BITS else cubin[offset:offset + extent])
            for name, kind, flags, _, offset, extent, _, info, alignment, entry_size in heads
        ]
        self.named = {section.name: section for section in self.sections}
        strings = self.named[".strtab"].content
        self.symbols = [
            _Symbol(_text(strings, name), section, value, extent)
            for name, _, _, section, value, extent
            in _SYMBOL.iter_unpack(self.named[".symtab"].content)
        ]
        self.functions = [s.name.removeprefix(".text.") for s in self.sections
                          if s.name.startswith(".text.")]
        if not self.functions:
            raise ValueError("there is no code in it")

    def attributes(self, name: str) -> Iterator[tuple[int, bytes]]:
        """Yield the attributes of a `.nv.info` section: number and value."""
        content, at = self.named[name].content, 0
        while at < len(content):
            form, number, value = _ATTRIBUTE.unpack_from(content, at)
            at += _ATTRIBUTE.size
            if form == _SIZED:
                yield number, content[at:at + value]
                at += value
            else:
                yield number, struct.pack("<H", value)

    def relocations(self, section: str) -> Iterator[tuple[int, int, _Symbol, int]]:
        """Yield the relocations of a section: offset, kind, symbol, addend."""
        for name in (f".rela{section}", f".rel{section}"):
            if (found := self.named.get(name)) is None:
                continue
            layout = _RELOCATION_ADDEND if found.kind == _RELA else _RELOCATION
            for offset, info, *addend in layout.iter_unpack(found.content):
                yield (offset, info & 0xFFFFFFFF, self.symbols[info >> 32],
                       addend[0] if addend else 0)


def _body(image: _Image, name: str) -> str:
    """The content of a function: its code, resources and parameters."""
    text = image.named[f".text.{name}"]
    # Layouts before version 8 keep the registers above the symbol's number, and the barriers
    # among the flags.
    parts = [text.content, struct.pack("<II", text.info >> 24, int(text.flags) >> 20 & 0xFFF)]
    for prefix in _CONTENT:
        if (found := image.named.get(prefix + name)) is not None:
            parts += [prefix.encode(), found.content]
    for prefix in _EXTENT:
        if (found := image.named.get(prefix + name)) is not None:
            parts += [prefix.encode(), struct.pack("<QQ", found.size, found.alignment)]
    if f".nv.info.{name}" in image.named:
        parts += sorted(
            bytes([number]) + (value[4:] if number in _OF_SYMBOL else value)
            for number, value in image.attributes(f".nv.info.{name}") if number != _EXTERNS
        )
    if ".nv.info" in image.named:  # attributes of all functions; each names its symbol
        parts += sorted(
            bytes([number]) + value[4:]
            for number, value in image.attributes(".nv.info")
            if number in _OF_SYMBOL
            and image.symbols[int.from_bytes(value[:4], "little")].name == name
        )
    return _digest(*parts)


def _function(image: _Image, name: str, bodies: Mapping[str, str]) -> str:
    """The digest of a function and of everything to which it refers."""
    parts = [bodies[name].encode()]
    for offset, kind, symbol, addend in sorted(image.relocations(f".text.{name}")):
        parts += [struct.pack("<QIq", offset, kind, addend), _target(image, symbol, bodies)]
    slots = {offset: (symbol, addend)
             for offset, _, symbol, addend in image.relocations(f".nv.constant{_GLOBALS_BANK}")}
    for bank, offset in sorted(_constants_read(image.named[f".text.{name}"].content)):
        if bank == _GLOBALS_BANK:
            # An address has 8 bytes, and an instruction may read only its upper half.
            if (slot := slots.get(offset & ~7)) is not None:
                symbol, addend = slot
                parts += [struct.pack("<Qq", offset, addend), _target(image, symbol, bodies)]
        elif (values := image.named.get(f".nv.constant{bank}")) is not None:
            parts += [struct.pack("<B", bank), values.content]
    return _digest(*parts)


def _target(image: _Image, symbol: _Symbol, bodies: Mapping[str, str]) -> bytes:
    """The content to which a symbol refers; for an external symbol, its name."""
    if symbol.section == 0 or symbol.section >= len(image.sections):
        return b"external " + symbol.name.encode()
    section = image.sections[symbol.section]
    function = section.name.removeprefix(".text.")
    if function in bodies:
        return f"code {bodies[function]} {symbol.value}".encode()
    # The address is left out, because it depends on other globals, which may be unused.
    kind = "memory" if section.kind == _NO_BITS else "data"
    content = section.content[symbol.value:symbol.value + symbol.size]
    return f"{kind} {symbol.size} ".encode() + content


def _constants_read(code: bytes) -> set[tuple[int, int]]:
    """The user's constants that instructions read, as (bank, offset); bank 3 counts as a whole.

    The result may contain false entries: a named barrier is encoded like an operand in the bank of
    its number, at an offset made of its thread count. These do no harm, because only offsets with a
    relocation hold addresses.
    """
    found: set[tuple[int, int]] = set()
    for low, _ in _INSTRUCTION.iter_unpack(code):
        if low >> 9 & 7 in _CONSTANT_FORMS:
            bank = low >> 54 & 31
            if bank == _GLOBALS_BANK:
                found.add((bank, low >> 38 & 0xFFFF))
            elif bank not in (0, 2):  # 0: parameters; 2: branch targets, covered with the function
                found.add((bank, 0))
    return found


def _text(strings: bytes, at: int) -> str:
    return strings[at:strings.index(b"\0", at)].decode()


def _digest(*parts: bytes) -> str:
    sha = hashlib.sha256()
    for part in parts:
        sha.update(len(part).to_bytes(8, "little"))
        sha.update(part)
    return sha.hexdigest()[:DIGEST_CHARS]
