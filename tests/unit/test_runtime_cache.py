"""The file cache: damage, sharing between processes, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kgen.runtime.cache import Cache, CacheError, default_directory, read_file

CONTENT = bytes(range(256)) * 40

WRITER = """
import sys
from kgen.runtime.cache import Cache
cache = Cache(sys.argv[1])
for round in range(60):
    for key in ("aaa1", "aab2"):
        content = (key * 5000).encode()
        cache.put(key, ".bin", content)
        got = cache.get(key, ".bin")
        if got != content:
            sys.exit(f"{key}: {None if got is None else len(got)} bytes")
"""


def test_round_trip(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c")
    assert cache.get("abc123", ".cubin") is None
    path = cache.put("abc123", ".cubin", CONTENT)
    assert path == cache.path("abc123", ".cubin")
    assert cache.get("abc123", ".cubin") == CONTENT
    assert cache.get("abc123", ".so") is None
    assert path.read_bytes().startswith(CONTENT)  # a loader finds what it expects at offset 0
    assert read_file(path) == CONTENT


def test_empty_content_is_an_entry(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put("abc", ".x", b"")
    assert cache.get("abc", ".x") == b""


def test_modes(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c")
    path = cache.put("abc", ".x", CONTENT)
    program = cache.put("abd", ".exe", CONTENT, executable=True)
    assert cache.directory.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    assert program.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", ["truncated", "altered", "emptied", "extended"])
def test_a_damaged_entry_is_a_miss_and_goes_away(tmp_path: Path, damage: str) -> None:
    cache = Cache(tmp_path)
    path = cache.put("abc", ".x", CONTENT)
    raw = bytearray(path.read_bytes())
    if damage == "truncated":
        del raw[100:200]
    elif damage == "altered":
        raw[7] ^= 1
    elif damage == "emptied":
        raw.clear()
    else:
        raw += b"more"
    path.write_bytes(raw)
    assert cache.get("abc", ".x") is None
    assert not path.exists()
    cache.put("abc", ".x", CONTENT)
    assert cache.get("abc", ".x") == CONTENT


def test_read_file(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_bytes(CONTENT)
    assert read_file(plain) == CONTENT
    entry = Cache(tmp_path).put("abc", ".x", CONTENT)
    raw = bytearray(entry.read_bytes())
    raw[0] ^= 1
    entry.write_bytes(raw)
    with pytest.raises(CacheError, match="is damaged"):
        read_file(entry)


def test_concurrent_processes(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path / "c")], cwd=root,
                         stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    errors = [writer.communicate()[1] for writer in writers]
    assert [writer.returncode for writer in writers] == [0] * 4, errors
    assert list((tmp_path / "c" / "tmp").iterdir()) == []


@pytest.mark.parametrize(("key", "suffix"), [("../a", ".x"), ("ab", ".x"), ("abc", "x"),
                                             ("abc", "./x"), ("a/b", ".x"), ("", ".x")])
def test_keys_cannot_leave_the_directory(tmp_path: Path, key: str, suffix: str) -> None:
    with pytest.raises(ValueError, match="cache entry"):
        Cache(tmp_path).path(key, suffix)


@pytest.mark.parametrize(("mode", "who"), [(0o777, "every user"), (0o770, "a group of users")])
def test_a_directory_open_to_others_is_refused(tmp_path: Path, mode: int, who: str) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(mode)
    with pytest.raises(CacheError, match=rf"may be written by {who}.*\n  next: set KGEN_CACHE"):
        Cache(shared)


def test_another_users_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(CacheError, match=f"belongs to user {owner}, not to this one"):
        Cache(tmp_path)


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(CacheError, match="is not a directory"):
        Cache(tmp_path / "f")


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user to be refused; needs root")
def test_no_permission_as_another_user(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from kgen.runtime.cache import Cache, CacheError\n"
        "cache = Cache(sys.argv[1])\n"
        "os.setuid(65534)\n"
        "try:\n"
        "    cache.put('abc', '.x', b'1')\n"
        "except CacheError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "c" / "d")],
                          cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert "cannot write" in done.stdout
    assert "Permission denied" in done.stdout
    assert "set KGEN_CACHE_DIR" in done.stdout


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_read_only_directory(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "c")
    cache.put("abc", ".x", CONTENT)
    for folder in (cache.directory, cache.directory / "tmp", cache.directory / "ab"):
        folder.chmod(0o500)
    try:
        assert cache.get("abc", ".x") == CONTENT
        with pytest.raises(CacheError, match=r"cannot write .*: Permission denied"):
            cache.put("abc", ".x", CONTENT)
    finally:
        for folder in (cache.directory, cache.directory / "tmp", cache.directory / "ab"):
            folder.chmod(0o700)


def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path)
    cache.put("abc", ".x", CONTENT)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fchmod", full)
    with pytest.raises(CacheError, match="No space left on device") as caught:
        cache.put("abd", ".x", CONTENT)
    assert caught.value.errno == 28
    assert list((tmp_path / "tmp").iterdir()) == []


def test_sweep_takes_only_what_is_old(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.put("abc", ".x", CONTENT)
    old, new = tmp_path / "tmp" / "old", tmp_path / "tmp" / "new"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    assert cache.sweep() == 1
    assert not old.exists()
    assert new.exists()


def test_default_directory() -> None:
    assert default_directory({"KGEN_CACHE_DIR": "/k", "XDG_CACHE_HOME": "/x"}) == Path("/k")
    assert default_directory({"XDG_CACHE_HOME": "/x"}) == Path("/x/kgen")
    assert default_directory({}) == Path.home() / ".cache" / "kgen"


def test_an_entry_under_another_name_is_a_miss(tmp_path: Path) -> None:
    """Its content is whole, and it is the code of another kernel."""
    cache = Cache(tmp_path)
    path = cache.put("abc", ".cubin", CONTENT)
    other = path.with_name("abd.cubin")
    other.write_bytes(path.read_bytes())
    with pytest.raises(CacheError, match="damaged"):
        read_file(other)
    assert cache.get("abd", ".cubin") is None
    assert not other.exists()
    assert cache.get("abc", ".cubin") == CONTENT
