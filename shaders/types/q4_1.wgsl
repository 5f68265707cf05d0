fn block_at(tile: u32, b: u32, lane: u32) -> Block {
    let s = unpack2x16float(scale_at(tile, b, lane));
    return nibble_block(code_at(tile, b, lane), s.x, s.y);
}
