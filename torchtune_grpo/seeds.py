"""Seeds derived from integers, so that no run has to carry generator state."""

import hashlib


def mix_seed(*ints: int) -> int:
    """A seed in ``[0, 2**63)`` that depends on every argument and on their order.

    The same arguments give the same seed in every process and on every platform (BLAKE2b, unlike ``hash``),
    and seeds of neighbouring arguments are unrelated, unlike ``seed + step``.
    """
    text = ",".join(str(int(value)) for value in ints)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
