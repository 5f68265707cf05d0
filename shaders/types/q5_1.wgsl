fn block_at(tile: u32, b: u32, lane: u32) -> Block {
    let s = unpack2x16float(scale_at(tile, 2u * b, lane));
    let high = scale_at(tile, 2u * b + 1u, lane);
    return five_bit_block(code_at(tile, b, lane), high, s.x, s.y);
}
