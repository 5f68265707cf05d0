fn packed_at(tile: u32, b: u32, lane: u32) -> Packed {
    let sub = b + p.w.first_sub;
    let s = k_scale(code_at(tile, p.w.blocks + sub / 8u, lane), sub & 7u);
    let high = scale_at(tile, b, lane);
    let q = code_at(tile, b, lane);
    let second = nibbles(q >> vec4<u32>(4u)) | fifths(high >> 16u);
    return Packed(nibbles(q) | fifths(high), second, s.xx, s.y);
}
