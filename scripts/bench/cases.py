"""Fixed token-id prompts: the same for every arm, every run and every machine."""

import hashlib
import random


def tokens(count: int, *, name: str, ids: tuple[int, int]) -> list[int]:
    """`count` token ids from [ids[0], ids[1]), decided by `name` alone."""
    return random.Random(name).choices(range(*ids), k=count)


def sha256(ids: list[int]) -> str:
    """SHA-256 over token ids as 4-byte little-endian numbers."""
    return hashlib.sha256(b"".join(i.to_bytes(4, "little") for i in ids)).hexdigest()
