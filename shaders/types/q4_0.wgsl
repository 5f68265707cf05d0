fn packed_at(tile: u32, b: u32, lane: u32) -> Packed {
    let d = half_scale(tile, 0u, b, lane);
    let q = code_at(tile, b, lane);
    return Packed(nibbles(q), nibbles(q >> vec4<u32>(4u)), vec2<f32>(d), -8.0 * d);
}
