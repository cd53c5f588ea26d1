"""The optional C extensions. They save host time; without them the library runs in Python.

`_launch.c` launches kernels. `_fast_path.c` serves calls whose layouts were seen before. Both
include only Python.h.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType

EXTENSIONS = ("_launch", "_fast_path")


@functools.cache
def extension(name: str) -> ModuleType | None:
    """Return an extension, or None where it was not built.

    Looked for once: a failing import takes longer than a launch.
    """
    try:
        return importlib.import_module(f".{name}", __package__)
    except ImportError:
        return None


def provide_extensions(folder: str | Path) -> bool:
    """Have this process use the extensions, built in `folder` if they are nowhere yet.

    For a process that launches a great deal from an installation that has none built in.

    Returns:
        Whether all are there now; without a C compiler Python goes on serving.
    """
    provided = [_provided(name, Path(folder)) for name in EXTENSIONS]  # each, whatever the others
    return all(provided)


def _provided(name: str, folder: Path) -> bool:
    if extension(name) is not None:
        return True
    path = folder / _file_name(name)
    try:
        if not path.is_file():
            # Built aside and renamed: two processes may start at once.
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                build_extension(scratch, name).replace(path)
        full_name = f"{__package__}.{name}"
        spec = importlib.util.spec_from_file_location(full_name, path)
        if spec is None or spec.loader is None:
            return False
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, OSError, RuntimeError):
        return False
    sys.modules[full_name] = module
    extension.cache_clear()
    return True


def build_extension(out_dir: str | Path, name: str, compiler: str | None = None) -> Path:
    """Compile an extension for the running interpreter.

    Put `out_dir` beside this file (in place) to have `extension` find the result.

    Args:
        out_dir: Existing directory; the file is named as the interpreter wants it.
        name: One of `EXTENSIONS`.
        compiler: C compiler; default `cc`, gcc or clang, whichever is there.
    Returns:
        Path of the extension.
    Raises:
        RuntimeError: If there is no C compiler, no Python.h, or the compilation fails.
    """
    cc = compiler or next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    import sysconfig  # 0.5 ms that a first call has no use for

    include = sysconfig.get_paths()["include"]
    if cc is None or shutil.which(cc) is None:
        raise RuntimeError(f"no C compiler ({compiler or 'cc, gcc, clang'}) on PATH\n"
                           "  next: install one, or go on without the extensions")
    if not Path(include, "Python.h").is_file():
        raise RuntimeError(f"Python.h is not in {include}\n"
                           "  next: install the development files of Python "
                           f"{sys.version_info.major}.{sys.version_info.minor}")
    out = Path(out_dir) / _file_name(name)
    source = Path(__file__).with_name(f"{name}.c")
    command = [cc, "-O2", "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(out), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr.strip()}")
    return out


def _file_name(name: str) -> str:
    return f"{name}{importlib.machinery.EXTENSION_SUFFIXES[0]}"
