fn packed_at(tile: u32, b: u32, lane: u32) -> Packed {
    let s = unpack2x16float(scale_at(tile, 2u * b, lane));
    let high = scale_at(tile, 2u * b + 1u, lane);
    let q = code_at(tile, b, lane);
    let second = nibbles(q >> vec4<u32>(4u)) | fifths(high >> 16u);
    return Packed(nibbles(q) | fifths(high), second, s.xx, s.y);
}
