fn packed_at(tile: u32, b: u32, lane: u32) -> Packed {
    let s = unpack2x16float(scale_at(tile, b, lane));
    let q = code_at(tile, b, lane);
    return Packed(nibbles(q), nibbles(q >> vec4<u32>(4u)), s.xx, s.y);
}
