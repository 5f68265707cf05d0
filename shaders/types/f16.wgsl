fn halves(x: u32, y: u32) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(x), unpack2x16float(y));
}

fn block_at(tile: u32, b: u32, lane: u32) -> Block {
    let q = code_at(tile, 4u * b, lane);
    let r = code_at(tile, 4u * b + 1u, lane);
    let s = code_at(tile, 4u * b + 2u, lane);
    let t = code_at(tile, 4u * b + 3u, lane);
    return Block(
        halves(q.x, q.y), halves(q.z, q.w), halves(r.x, r.y), halves(r.z, r.w),
        halves(s.x, s.y), halves(s.z, s.w), halves(t.x, t.y), halves(t.z, t.w),
    );
}
