fn packed_at(tile: u32, b: u32, lane: u32) -> Packed {
    let d = half_scale(tile, 0u, b, lane);
    return Packed(code_at(tile, 2u * b, lane), code_at(tile, 2u * b + 1u, lane), vec2<f32>(d), 0.0);
}
