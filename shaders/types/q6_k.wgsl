// Bits 8j .. 8j+7 of `high` as bits 4 and 5 of the bytes of word j, for four words; codes of 0..63
// become -32..31, byte by byte without a borrow.
fn centred(low: vec4<u32>, high: u32) -> vec4<u32> {
    let v = (vec4<u32>(high) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(255u);
    let upper = ((v & vec4<u32>(3u)) << vec4<u32>(4u)) | ((v & vec4<u32>(12u)) << vec4<u32>(10u))
        | ((v & vec4<u32>(48u)) << vec4<u32>(16u)) | ((v & vec4<u32>(192u)) << vec4<u32>(22u));
    return (((low | upper) | vec4<u32>(0x80808080u)) - vec4<u32>(0x20202020u)) ^ vec4<u32>(0x80808080u);
}

fn packed_at(tile: u32, b: u32, lane: u32) -> Packed {
    let sub = b + p.w.first_sub;
    let d = bitcast<f32>(scale_at(tile, 2u * p.w.blocks + sub / 8u, lane));
    let packed = code_at(tile, p.w.blocks + sub / 8u, lane)[(sub & 7u) / 2u];
    let pair = packed >> (16u * (sub & 1u));
    let s = d * f32(bitcast<i32>(pair << 24u) >> 24u);
    let t = d * f32(bitcast<i32>(pair << 16u) >> 24u);
    let q = code_at(tile, b, lane);
    let first = centred(nibbles(q), scale_at(tile, 2u * b, lane));
    let second = centred(nibbles(q >> vec4<u32>(4u)), scale_at(tile, 2u * b + 1u, lane));
    return Packed(first, second, vec2<f32>(s, t), 0.0);
}
