"""Golden vectors of KV block keys, computed apart from the Rust code (see actors/src/kv/key.rs).

Usage: python3 -m pip install blake3 && python3 tools/block_keys.py
"""
import struct
import blake3

SCHEMA = 1


def cut(data: bytes) -> bytes:
    return blake3.blake3(data).digest()[:16]


def keys(namespace: int, block: int, tenant: str, salt: str, tokens: list[int]) -> list[str]:
    data = b"\0" + struct.pack("<I", SCHEMA) + bytes([namespace]) * 16
    for text in (tenant, salt):
        data += struct.pack("<Q", len(text.encode())) + text.encode()
    key, out = cut(data), []
    for at in range(0, len(tokens) - block + 1, block):
        part = tokens[at : at + block]
        key = cut(b"\1" + key + struct.pack(f"<{block}I", *part))
        out.append(key.hex())
    return out


if __name__ == "__main__":
    tokens = [i * 7919 + 3 for i in range(48)]
    for name, vector in (
        ("GOLDEN_ACME", keys(0xAB, 16, "acme", "", tokens)),
        ("GOLDEN_SALTED", keys(0, 4, "", "pepper", tokens[:9])),
        ("GOLDEN_WIDE", keys(1, 80, "t", "s", [5] * 80)),
    ):
        lines = "".join(f'        "{key}",\n' for key in vector)
        print(f"    const {name}: [&str; {len(vector)}] = [\n{lines}    ];")
