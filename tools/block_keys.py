"""Golden vectors of KV block keys, computed apart from the Rust code (see actors/src/kv/key.rs).

Usage: python3 -m pip install blake3 && python3 tools/block_keys.py
"""
import struct
import blake3

SCHEMA = 2


def keys(namespace: int, block: int, tenant: str, salt: str, tokens: list[int]) -> list[str]:
    data = struct.pack("<I", SCHEMA) + bytes([namespace]) * 16
    for text in (tenant, salt):
        data += struct.pack("<Q", len(text.encode())) + text.encode()
    link, out = blake3.blake3(data).digest(), []
    for at in range(0, len(tokens) - block + 1, block):
        part = struct.pack(f"<{block}I", *tokens[at : at + block])
        link = blake3.blake3(part, key=link).digest()
        out.append(link[:16].hex())
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
