"""Stable short digests of plain data."""

from __future__ import annotations

import hashlib
import json

DIGEST_CHARS = 12


def digest_of(data: object) -> str:
    """Return the first 12 hex digits of the SHA-256 of `data` as canonical JSON.

    Equal data give equal digests in every process and on every machine.
    """
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return digest_of_text(text)


def digest_of_text(*parts: str) -> str:
    """Return the digest of several texts; ("ab", "c") and ("a", "bc") differ."""
    sha = hashlib.sha256()
    for part in parts:
        raw = part.encode()
        sha.update(len(raw).to_bytes(8, "little"))
        sha.update(raw)
    return sha.hexdigest()[:DIGEST_CHARS]
