fn packed_at(tile: u32, b: u32, lane: u32) -> Packed {
    let sub = b + p.w.first_sub;
    let s = k_scale(code_at(tile, p.w.blocks + sub / 8u, lane), sub & 7u);
    let q = code_at(tile, b, lane);
    return Packed(nibbles(q), nibbles(q >> vec4<u32>(4u)), s.xx, s.y);
}
