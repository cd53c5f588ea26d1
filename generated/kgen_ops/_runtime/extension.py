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

    The result is cached, because a failing import takes longer than a launch.
    """
    try:
        return importlib.import_module(f".{name}", __package__)
    except ImportError:
        return None


def provide_extensions(folder: str | Path) -> bool:
    """Let this process use the extensions; build missing ones in `folder`.

    For processes with many launches, in an installation without built extensions.

    Returns:
        Whether all extensions are available; without a C compiler, the library runs in Python.
    """
    provided = [_provided(name, Path(folder)) for name in EXTENSIONS]  # a list: build all of them
    return all(provided)


def _provided(name: str, folder: Path) -> bool:
    if extension(name) is not None:
        return True
    path = folder / _file_name(name)
    try:
        if not path.is_file():
            # Built in a temporary folder and renamed, because two processes may start at once.
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

    `extension` finds the result if `out_dir` is the folder of this file.

    Args:
        out_dir: Existing folder; the interpreter's naming convention determines the file's name.
        name: One of `EXTENSIONS`.
        compiler: C compiler; None: the first of cc, gcc and clang that is installed.
    Returns:
        Path of the extension.
    Raises:
        RuntimeError: If there is no C compiler, no Python.h, or the compilation fails.
    """
    cc = compiler or next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    import sysconfig  # imported here: it takes 0.5 ms, and a first call does not need it

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
