fn packed_at(tile: u32, b: u32, lane: u32) -> Packed {
    let high = scale_at(tile, b, lane);
    let d = half_scale(tile, p.w.blocks, b, lane);
    let q = code_at(tile, b, lane);
    let second = nibbles(q >> vec4<u32>(4u)) | fifths(high >> 16u);
    return Packed(nibbles(q) | fifths(high), second, vec2<f32>(d), -16.0 * d);
}
