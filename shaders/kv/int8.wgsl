// Four signed bytes a word, and behind a token's head its scale: largest magnitude / 127.
alias Kept = u32;
const STRIDE = DIM4 + 1u;

fn kept(v: vec4<f32>) -> Kept {
    let c = vec4<u32>(vec4<i32>(clamp(round(v), vec4<f32>(-127.0), vec4<f32>(127.0)))) & vec4<u32>(255u);
    return c.x | (c.y << 8u) | (c.z << 16u) | (c.w << 24u);
}

fn floats(k: Kept) -> vec4<f32> {
    let up = vec4<u32>(k) << vec4<u32>(24u, 16u, 8u, 0u);
    return vec4<f32>(bitcast<vec4<i32>>(up) >> vec4<u32>(24u));
}
