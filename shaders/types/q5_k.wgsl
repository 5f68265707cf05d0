fn block_at(tile: u32, b: u32, lane: u32) -> Block {
    let sub = b + p.w.first_sub;
    let s = k_scale(code_at(tile, p.w.blocks + sub / 8u, lane), sub & 7u);
    return five_bit_block(code_at(tile, b, lane), scale_at(tile, b, lane), s.x, s.y);
}
