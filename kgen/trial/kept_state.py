"""Detects kernels that can keep state from one launch to the next outside their tensors.

A global variable lives as long as the loaded module. A kernel that counts its launches in one, for
example, passes every verification and is wrong later. So kernels with global variables are refused,
unless the variant states a reason (`keeps_state`). The symbols of a cubin list all of them. A build
for the host has no symbols, so the rendered source is searched, also for variables at namespace
scope, which need no keyword on the host. Macros and spliced lines that could spell such a variable
are refused where they are defined. Heap memory and `mutable` members of constants outlive a launch
as well, and are refused, too.
"""

from __future__ import annotations

import re

from kgen.model.artifact import Artifact, Rendered
from kgen.model.source_text import bare_text
from kgen.model.space import Variant
from kgen.runtime.cache import read_file
from kgen.runtime.code_digest import CubinError, globals_used
from kgen.trial.host_imports import system_calls

# A declaration, up to the first character that distinguishes a variable from a function.
_DECLARATION = re.compile(
    r"\b(?P<kind>static|thread_local|__device__|__managed__)\b(?P<rest>[^;{}()=\[]*)"
    r"(?P<end>[;{}()=\[])",
)
_HARMLESS = re.compile(r"\b(constexpr|__constant__|__shared__)\b")
_POINTER_TO = re.compile(r"\*(?!\s*const\b)[^*]*$")
_RECORD = re.compile(r"\b(struct|class|union|enum)\b")
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'')
_NAMESPACE = re.compile(r"^(inline\s+)?namespace\b|^extern\s*\"\"$")
_NO_VARIABLE = re.compile(
    r"^(namespace|using|typedef|static_assert|friend|template|asm)\b|^extern\s(?!\"\")"
)
_MACRO = re.compile(r"(?m)^[ \t]*#[ \t]*define[ \t]+(\w+)(.*)$")
_KEEPS = re.compile(r"\b(static|thread_local|__device__|__managed__)\b|##")
_INLINE = re.compile(r"\b(static|inline|KGEN_DEVICE|__forceinline__)\b")
_ARGUMENTS = re.compile(r"<[^<>;(){}]*>")  # template arguments; a `const` in them does not count
_CONSTANTS = re.compile(r"\b__constant__\b([^;={(]*)")
_CHANGES = re.compile(r"\bmutable\s+\w+|\b(?:new|malloc)\b\s*[\w(\[]")
_ATTRIBUTE = re.compile(
    r"\[\[[^\]]*\]\]|\b(?:__attribute__|alignas|asm|__asm__)\s*\(+[^()]*(?:\([^()]*\)[^()]*)*\)+"
)
_TYPE_OF = re.compile(r"\b(?:decltype|typeof|__typeof__)\s*\([^()]*(?:\([^()]*\)[^()]*)*\)")
_TEMPLATE = re.compile(r"^template\s*<[^;{}]*?>\s*(?=[\w:\[_])")
# A name in parentheses: `int (n)`, `int (*f)(int)`, `int (&n)[1]`; not `int f(T)`.
_IN_PARENTHESES = re.compile(
    r"^(?!KGEN_)(?:(?:const|volatile|unsigned|signed|long|short)\s+)*[\w:]+\s*\(\s*[*&]*\s*(\w+)\s*\)"
)
_BOUND = re.compile(r"^auto\s*&*\s*\[\s*(\w+)")
_NUMBER_IN_BRACKETS = re.compile(r"^[\w:<>\s,*&]+\s[\w]+\s*\(\s*[-+.\d]")


def kept_state(rendered: Rendered, artifact: Artifact, variant: Variant) -> str:
    """Return why a build is refused; empty if it keeps no state, or its variant says why it may.

    Args:
        rendered: The source of the build.
        artifact: The build.
        variant: The variant of the config.
    """
    if artifact.kind == "so" and (calls := system_calls(read_file(artifact.path))):
        return (
            f"the kernel calls functions of the system: {', '.join(calls)}\n"
            "  what they return depends on more than the inputs, and a GPU has none of them"
        )
    if variant.keeps_state:
        return ""
    names = _in_cubin(artifact) if artifact.kind == "cubin" else ()
    names = names or variables_of(rendered.source)
    if not names:
        return ""
    # The name gets an explanation, but no exception: a kernel's own variable may have it, too.
    printed = " ($str: the text of a printf)" if "$str" in names else ""
    return (
        f"the kernel has global variables, which live from one launch to the next: "
        f"{', '.join(names)}{printed}\n"
        f"  next: use a workspace, or say why it may at {variant.where}: `keeps_state: ...`"
    )


def variables_of(source: str) -> tuple[str, ...]:
    """Return the names of variables in a CUDA source that outlive a launch.

    These are `static`, `__device__` and `__managed__` variables and variables at namespace scope,
    if they are neither constant nor shared. Functions and static assertions are recognised by the
    characters after the name.
    """
    text = bare_text(source).replace("\\\n", "").replace("%:", "#")  # a digraph of C++
    found = [f"macro {m[1]}" for m in _MACRO.finditer(text) if _KEEPS.search(m[2])]
    found += [" ".join(m[0].split()) for m in _CHANGES.finditer(_LITERAL.sub('""', text))]
    for match in _DECLARATION.finditer(text):
        before = _statement_before(match)
        words, end = match["rest"], match["end"]
        if _RECORD.search(words) and end == "{":
            words = _behind_braces(text, match.end() - 1)
        elif end in "(}":
            continue
        if not _is_constant(before + words):
            found += _last_name(words)
    return tuple(dict.fromkeys([*found, *_of_namespaces(text), *_written_constants(text)]))


def _written_constants(text: str) -> list[str]:
    """Names of `__constant__` variables that the source writes, which host compilers allow."""
    found = []
    for match in _CONSTANTS.finditer(text):
        name = "".join(_last_name(match[1].split("[")[0]))
        rest = text[: match.start()] + text[match.end() :]
        writes = rf"(?:\+\+|--|&)\s*{name}\b|\b{name}\b(?:\s*(?:\[[^\]]*\]|\.\s*\w+))*\s*" \
                 r"(?:\+\+|--|(?:[-+*/%&|^]|<<|>>)?=(?!=))"
        if name and re.search(writes, rest):
            found.append(name)
    return found


def _is_constant(declaration: str) -> bool:
    """Whether a declaration declares something that cannot change, or no variable at all."""
    while (bare := _ARGUMENTS.sub(" ", declaration)) != declaration:
        declaration = bare
    if _HARMLESS.search(declaration):
        return True
    if _RECORD.match(declaration.strip()) and len(re.findall(r"[A-Za-z_]\w*", declaration)) < 3:
        return True  # names a type, but declares no variable of it
    to, *pointers = declaration.split("*")
    if pointers and "const" not in to.split():
        return False  # the data that the pointer points to may change
    return "const" in declaration.split() and not _POINTER_TO.search(declaration)


def _last_name(words: str) -> list[str]:
    return re.findall(r"[A-Za-z_]\w*", words)[-1:]


def _behind_braces(text: str, start: int) -> str:
    """The text between a body in braces and the end of its statement."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return " " + text[at + 1 :].split(";")[0]
    return ""


def _of_namespaces(text: str) -> list[str]:
    """Names of the variables at namespace scope, including the global namespace."""
    for name, body in _MACRO.findall(text):
        if ";" in body:  # the macro may contain a whole declaration
            declared = re.sub(r"^\([^)]*\)", "", body).replace("\\", "")
            text = re.sub(rf"(?m)(?<!define )\b{name}\b(?:\([^()]*\))?", declared, text)
    code = re.sub(r"(?m)^#(?:.*\\\n)*.*$", "", text)
    code = _LITERAL.sub('""', code)
    found: list[str] = []
    statement, depth = "", 0  # depth: nesting of braces within a body
    for character in code:
        if depth or character == "{":
            if depth == 0 and _NAMESPACE.search(statement.strip()):
                statement = ""
                continue
            depth += (character == "{") - (character == "}")
            if depth == 0:
                is_function = "(" in statement.split("=")[0] and not _RECORD.match(
                    statement.strip()
                )
                statement = "" if is_function else statement + " {} "
        elif character == ";":
            found += _variable(statement.strip())
            statement = ""
        elif character == "}":  # end of a namespace
            statement = ""
        else:
            statement += character
    return [] if depth else found  # unbalanced braces, as in branches of an #if: undecidable


def _variable(statement: str) -> list[str]:
    """The name of the variable that a statement at namespace scope declares, if it can change."""
    statement = _TYPE_OF.sub("auto", _ATTRIBUTE.sub(" ", statement)).strip()
    is_template = _TEMPLATE.match(statement) is not None
    statement = _TEMPLATE.sub("", statement)
    if _NO_VARIABLE.search(statement):
        return []
    statement = _INLINE.sub("", re.sub(r"^extern\s*\"\"", "", statement)).strip()
    if bound := _BOUND.match(statement):
        return [bound[1]]
    if re.match(r"union\s*\{\}$", statement):
        return ["union"]  # the members of an anonymous union are variables
    if not is_template and (named := _IN_PARENTHESES.match(statement)):
        return [] if _is_constant(statement.split("=")[0]) else [named[1]]
    if _RECORD.match(statement) and "{}" in statement:
        statement = "record " + statement.rpartition("{}")[2]
    declared = re.split(r"[=\[]|\{\}", statement)[0]
    if _NUMBER_IN_BRACKETS.match(statement):
        declared = declared.split("(")[0]
    if "(" in declared or len(re.findall(r"[A-Za-z_]\w*", declared)) < 2:
        return []
    return [] if _is_constant(declared) else _last_name(declared)


def _statement_before(match: re.Match[str]) -> str:
    """The text before a match in its statement; `constexpr` may stand there."""
    before = match.string[: match.start()]
    start = max(before.rfind(end) for end in ";{}")
    return before[start + 1 :]


def _in_cubin(artifact: Artifact) -> tuple[str, ...]:
    try:
        return globals_used(read_file(artifact.path))
    except CubinError:
        return ()
