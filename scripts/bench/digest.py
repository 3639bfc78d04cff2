"""Digests of source trees and cache folders (standard library only).

The engine launcher imports this inside the serving process, so nothing heavy
may be imported here.
"""

import hashlib
from pathlib import Path

# Compiled files differ between wheels of one version; the text does not.
SKIPPED_SUFFIXES = {".pyc", ".so", ".co", ".pyd"}


def folder_digest(folder: Path) -> tuple[str, int]:
    """SHA-256 over the relative path and content of each file, and the file count.

    Byte code and compiled extensions do not count. A folder that is not there
    has the digest of an empty one.
    """
    total, count = hashlib.sha256(), 0
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        if path.suffix in SKIPPED_SUFFIXES or "__pycache__" in path.parts:
            continue
        name = path.relative_to(folder).as_posix().encode()
        content = hashlib.sha256(path.read_bytes()).digest()
        total.update(len(name).to_bytes(8, "big") + name + content)
        count += 1
    return total.hexdigest(), count
