"""Write a wheel whose bytes depend on its content only.

Times, order and permissions are fixed, and nothing is compressed, because the output of deflate
depends on the version of zlib.
"""

from __future__ import annotations

import base64
import hashlib
import io
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kgen.errors import RecordError

TAG = "py3-none-any"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time of the zip format
_UNIX = 3
_REGULAR_0644 = 0o100644 << 16


@dataclass(frozen=True, slots=True)
class Project:
    """The metadata of a wheel.

    Attributes:
        name: As pip knows it: `kgen-ops`.
        version: `0.1.0`, or `0.1.0+sha1a2b...` with a local label.
        summary: One line.
        readme: Markdown.
        requires_python: `>=3.11`.
        dependencies: Requirements, such as `torch>=2.6`.
        licence: SPDX expression, `Apache-2.0`; empty if not all files have the same licence.
    """

    name: str
    version: str
    summary: str
    readme: str
    requires_python: str
    dependencies: tuple[str, ...]
    licence: str = ""

    @property
    def stem(self) -> str:
        """The beginning of file names: `kgen_ops-0.1.0`."""
        return f"{self.name.replace('-', '_')}-{self.version}"


def read_project(text: str, readme: str) -> Project:
    """Read the `pyproject.toml` that kgen wrote next to a library.

    Raises:
        RecordError: If a key is missing.
    """
    try:
        data = tomllib.loads(text)["project"]
        return Project(data["name"], data["version"], data["description"], readme,
                       data["requires-python"], tuple(data["dependencies"]),
                       data.get("license", ""))
    except (KeyError, TypeError, tomllib.TOMLDecodeError) as problem:
        raise RecordError(
            "pyproject.toml does not have the format that kgen writes: "
            f"{type(problem).__name__}: {problem}\n"
            "  restore it from version control, or run kgen tune again"
        ) from None


def wheel_name(project: Project) -> str:
    """Return the file name that pip expects."""
    return f"{project.stem}-{TAG}.whl"


def wheel_bytes(
    project: Project, files: Mapping[str, bytes], info: Mapping[str, bytes], generator: str,
    licences: Mapping[str, bytes],
) -> bytes:
    """Return a wheel in wheel format 1.0.

    Args:
        project: Metadata of the wheel.
        files: Installed files by path.
        info: More files for the `.dist-info` folder, by name.
        generator: Name and version of the program that writes the wheel.
        licences: Texts of licences, by the path of each in the library.
    """
    folder = f"{project.stem}.dist-info"
    described = {
        **info,
        **{f"licenses/{name}": content for name, content in licences.items()},
        "METADATA": _metadata(project, sorted(licences)).encode(),
        "WHEEL": (f"Wheel-Version: 1.0\nGenerator: {generator}\nRoot-Is-Purelib: true\n"
                  f"Tag: {TAG}\n").encode(),
    }
    # The format recommends the metadata after the content, with RECORD last.
    ordered = [*sorted(files.items()),
               *((f"{folder}/{name}", described[name]) for name in sorted(described))]
    record = "".join(f"{name},sha256={_sha256(content)},{len(content)}\n"
                     for name, content in ordered)
    ordered.append((f"{folder}/RECORD", f"{record}{folder}/RECORD,,\n".encode()))
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, content in ordered:
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.create_system = _UNIX
            entry.external_attr = _REGULAR_0644
            archive.writestr(entry, content)
    return out.getvalue()


def _metadata(project: Project, licences: Sequence[str]) -> str:
    lines = [
        "Metadata-Version: 2.4",
        f"Name: {project.name}",
        f"Version: {project.version}",
        f"Summary: {project.summary}",
        *([f"License-Expression: {project.licence}"] if project.licence else []),
        *(f"License-File: {name}" for name in licences),
        f"Requires-Python: {project.requires_python}",
        *(f"Requires-Dist: {dependency}" for dependency in project.dependencies),
        "Description-Content-Type: text/markdown",
    ]
    return "\n".join(lines) + f"\n\n{project.readme}"


def _sha256(content: bytes) -> str:
    """The SHA-256 in the format of RECORD: URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
