fn block_at(tile: u32, b: u32, lane: u32) -> Block {
    let high = scale_at(tile, b, lane);
    let d = half_scale(tile, p.w.blocks, b, lane);
    return five_bit_block(code_at(tile, b, lane), high, d, -16.0 * d);
}
