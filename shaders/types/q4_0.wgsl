fn block_at(tile: u32, b: u32, lane: u32) -> Block {
    let d = half_scale(tile, 0u, b, lane);
    return nibble_block(code_at(tile, b, lane), d, -8.0 * d);
}
