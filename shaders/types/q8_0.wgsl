// Signed bytes, sign-extended by an arithmetic shift.
fn signed_bytes(q: u32, scale: f32) -> vec4<f32> {
    let up = vec4<u32>(q) << vec4<u32>(24u, 16u, 8u, 0u);
    return vec4<f32>(bitcast<vec4<i32>>(up) >> vec4<u32>(24u)) * scale;
}

fn block_at(tile: u32, b: u32, lane: u32) -> Block {
    let d = half_scale(tile, 0u, b, lane);
    let q = code_at(tile, 2u * b, lane);
    let r = code_at(tile, 2u * b + 1u, lane);
    return Block(
        signed_bytes(q.x, d), signed_bytes(q.y, d), signed_bytes(q.z, d), signed_bytes(q.w, d),
        signed_bytes(r.x, d), signed_bytes(r.y, d), signed_bytes(r.z, d), signed_bytes(r.w, d),
    );
}
