// Bits 8j .. 8j+7 of `high` as bits 4 and 5 of four codes.
fn upper(high: u32, j: u32) -> vec4<u32> {
    return ((vec4<u32>(high >> (8u * j)) >> vec4<u32>(0u, 2u, 4u, 6u)) & vec4<u32>(3u)) << vec4<u32>(4u);
}

fn block_at(tile: u32, b: u32, lane: u32) -> Block {
    let sub = b + p.w.first_sub;
    let d = bitcast<f32>(scale_at(tile, 2u * p.w.blocks + sub / 8u, lane));
    // Sixteen signed bytes, two for each of the eight sub-blocks.
    let packed = code_at(tile, p.w.blocks + sub / 8u, lane)[(sub & 7u) / 2u];
    let pair = packed >> (16u * (sub & 1u));
    let s = d * f32(bitcast<i32>(pair << 24u) >> 24u);
    let t = d * f32(bitcast<i32>(pair << 16u) >> 24u);
    let q = code_at(tile, b, lane);
    let u = q >> vec4<u32>(4u);
    let h = scale_at(tile, 2u * b, lane);
    let i = scale_at(tile, 2u * b + 1u, lane);
    return Block(
        values(bytes(q.x, 15u) | upper(h, 0u), s, -32.0 * s),
        values(bytes(q.y, 15u) | upper(h, 1u), s, -32.0 * s),
        values(bytes(q.z, 15u) | upper(h, 2u), s, -32.0 * s),
        values(bytes(q.w, 15u) | upper(h, 3u), s, -32.0 * s),
        values(bytes(u.x, 15u) | upper(i, 0u), t, -32.0 * t),
        values(bytes(u.y, 15u) | upper(i, 1u), t, -32.0 * t),
        values(bytes(u.z, 15u) | upper(i, 2u), t, -32.0 * t),
        values(bytes(u.w, 15u) | upper(i, 3u), t, -32.0 * t),
    );
}
