"""`python -m kgen_ops.selftest`: check an installation of the library on this machine.

Without a GPU it checks versions, compares all files with the library's list, and reads and
dispatches every table. With a GPU it also compares every measured row of that GPU with the safe
kernel (`rowtest`).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from .arguments import complete_dtypes
from .code_digest import CubinError, code_of
from .dispatch import Dispatcher
from .errors import DispatchError
from .integrity import LEAST_TORCH, MANIFEST, IntegrityError, content_hash, cubin_sm, damages
from .problems import Explanation
from .rows import Gpu, Row, SafeRow
from .rowtest import compare_rows, is_served

Say = Callable[[str, str], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks and print a line for each.

    Returns:
        0 if all passed, else 1.
    """
    library = __name__.rsplit(".", maxsplit=2)[0]
    parser = argparse.ArgumentParser(
        prog=f"python -m {library}.selftest",
        description="Check an installation of the library: files, tables and, on a GPU, kernels.",
    )
    parser.add_argument("--device", default="auto", metavar="DEVICE",
                        help="where to run kernels: cuda, cuda:1, cpu (compiles with g++) or none "
                             "(default: the current CUDA GPU if there is one, else none)")
    parser.add_argument("--op", metavar="OP", help="only the tables and kernels of this operator")
    parser.add_argument("-v", "--verbose", action="store_true",
                        help="also print a line per row: the kernel that serves it and its result")
    options = parser.parse_args(arguments)
    failed: list[str] = []

    def say(state: str, text: str) -> None:
        if state == "FAIL":
            failed.append(text)
        if state != "row" or options.verbose:
            print(f"{state:<5} {text}", flush=True)

    root = Path(importlib.import_module(library).__path__[0])
    try:
        _check_versions(library, root, say)
        trouble = damages(root)
        for line in trouble:
            say("FAIL", f"{root}: {line}")
        if not trouble:
            say("ok", f"files: exactly those that {MANIFEST} lists")
        names = _operators(root)
        if options.op is not None and options.op not in names:
            parser.error(f"--op: unknown operator '{options.op}'; known: {', '.join(names)}")
        for name in names if options.op is None else [options.op]:
            _check_operator(library, name, root, options.device, say)
    except IntegrityError as error:  # the list is missing
        say("FAIL", str(error))
    print(f"\n{len(failed)} failed" if failed else "\nall passed")
    return 1 if failed else 0


def _check_versions(library: str, root: Path, say: Say) -> None:
    version = importlib.import_module(library).__version__
    content = content_hash(root)
    say("ok", f"{library} {version}, content {content[:12]}, Python {platform.python_version()}, "
              f"torch {torch.__version__}")
    found = tuple(int(n) for n in re.findall(r"\d+", torch.__version__)[:2])
    if found < LEAST_TORCH:
        say("FAIL", f"torch {torch.__version__} is too old; this library needs "
                    f"{'.'.join(map(str, LEAST_TORCH))} or later")
    try:
        installed = importlib.metadata.distribution(library)
    except importlib.metadata.PackageNotFoundError:
        return  # on sys.path, but not installed
    if Path(str(installed.locate_file(library))).resolve() != root.resolve():
        return
    public, _, local = installed.version.partition("+")
    if public != version or (local and not content.startswith(local.removeprefix("sha"))):
        say("FAIL", f"the installed version is {installed.version}, but the files are of {version} "
                    f"with content {content[:12]}; install it again")


def _operators(root: Path) -> list[str]:
    return [path.parent.name for path in sorted(root.glob("*/safe.py"))]


def _check_operator(library: str, name: str, root: Path, device: str, say: Say) -> None:
    package = importlib.import_module(f"{library}.{name}")
    passes = [p for p in vars(package).values() if isinstance(p, Dispatcher)]
    kernels = root / name / "kernels"
    for passed in passes:
        try:
            _check_pass(passed, kernels, device, say)
        except IntegrityError as error:
            say("FAIL", str(error))


def _check_pass(passed: Dispatcher, kernels: Path, device: str, say: Say) -> None:
    title = passed.signature.function
    for gpu in passed.tables.gpus():
        rows = passed.tables.rows(gpu)
        troubles = [t for row in rows for t in _table_troubles(passed, gpu, row, kernels, say)]
        for trouble in troubles:
            say("FAIL", f"{title} on {gpu.name}: {trouble}")
        if not troubles:
            say("ok", f"{title} on {gpu.name}: {len(rows)} rows, each serves its own problem; "
                      f"{_cubins(kernels, rows)}")
    safe = passed.tables.safe_rows()
    missing = [row for row in safe if not (kernels / f"{row.kernel}.cu").is_file()]
    for lost in missing:
        say("FAIL", f"{title}: safe kernel {lost.kernel}.cu is missing")
    if not missing:
        say("ok", f"{title}: {len(safe)} safe kernels; {_cubins(kernels, safe)}")
    _check_kernels(passed, device, say)


def _table_troubles(
    passed: Dispatcher, gpu: Gpu, row: Row, kernels: Path, say: Say
) -> Iterator[str]:
    """Yield the errors of a row in its table; runs no kernel."""
    signature = passed.signature
    if len(row.dims) != len(signature.dims) or len(row.dtypes) != len(signature.choices):
        yield f"row {row.record} has {len(row.dims)} dims and {len(row.dtypes)} dtypes; the " \
              f"operator has {len(signature.dims)} and {len(signature.choices)}"
        return
    dims = dict(zip((d.name for d in signature.dims), row.dims, strict=True))
    dtypes = dict(zip((f.name for f in signature.choices), row.dtypes, strict=True))
    try:
        complete_dtypes(signature, dtypes)
        found: Explanation = passed.explain(dims, dtypes, gpu)
    except (TypeError, ValueError, DispatchError) as problem:
        yield f"row {row.record}: {problem}"
        return
    say("row", str(found))
    if (found.step, found.record) != ("exact", row.record):
        yield f"row {row.record} does not serve its own problem {found.problem}; step " \
              f"{found.step} chose {found.config}"
    if not (kernels / f"{row.kernel}.cu").is_file():
        yield f"kernel {row.kernel}.cu of row {row.record} is missing"
    for path in kernels.glob(f"{row.kernel}.*.cubin"):
        named = path.suffixes[0].removeprefix(".sm_").rstrip("af")
        if str(cubin_sm(path.read_bytes())) != named:
            yield f"{path.name} holds code for sm_{cubin_sm(path.read_bytes())}"
    measured = kernels / f"{row.kernel}.{gpu.arch}.cubin"
    if row.code and measured.is_file() and (trouble := _code_trouble(row, measured)):
        yield f"{measured.name} {trouble}"


def _code_trouble(row: Row, cubin: Path) -> str:
    """Describe the difference between a row's cubin and the measured code; empty if none."""
    try:
        found = code_of(cubin.read_bytes()).digest
    except CubinError as problem:
        return str(problem)
    if found == row.code:
        return ""
    return f"holds code {found}; row {row.record} was measured with {row.code}"


def _cubins(kernels: Path, rows: Sequence[Row] | Sequence[SafeRow]) -> str:
    """The number of cubins per architecture. Other kernels are compiled at their first call."""
    stems = {row.kernel for row in rows}
    counts: dict[str, int] = {}
    for path in sorted(kernels.glob("*.cubin")):
        stem, arch, _ = path.name.split(".")
        if stem in stems:
            counts[arch] = counts.get(arch, 0) + 1
    parts = [f"{count} of {len(stems)} for {arch}" for arch, count in counts.items()]
    return f"cubins: {', '.join(parts) or 'none'}"


def _check_kernels(passed: Dispatcher, wanted: str, say: Say) -> None:
    title = passed.signature.function
    if wanted == "none" or (wanted == "auto" and not torch.cuda.is_available()):
        say("skip", f"{title}: no kernel was run: "
                    f"{'not asked for' if wanted == 'none' else 'there is no CUDA GPU'}")
        return
    device = torch.device("cuda" if wanted == "auto" else wanted)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if not is_served(passed, device):
        say("skip", f"{title}: there are no kernels for {device}")
        return
    ran = errors = 0
    for test in compare_rows(passed, device):
        problem = ",".join(f"{name}={extent}" for name, extent in test.dims.items())
        where = f"{title} on {device}: {problem},{','.join(test.row.dtypes)} {test.row.config}"
        if test.skipped:
            say("skip", f"{where}: {test.skipped}")
        elif test.trouble:
            errors += 1
            say("FAIL", f"{where}: {test.trouble}")
        else:
            say("row", f"{where}: differs from the safe kernel by {test.error:.1e}")
        ran += not test.skipped
    if not errors:
        say("ok", f"{title} on {device}: {ran} rows agree with the safe kernels")
