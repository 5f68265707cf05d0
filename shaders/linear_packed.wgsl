// What the products with activations as int8 (quantise.wgsl) share: whole numbers within a block of 32,
// and one chain of fused multiply-adds over the blocks in ascending order, whatever the rows of the call.
// Lines marked @two are for types whose halves of a block have scales of their own.

fn dot16(w: vec4<u32>, v: vec4<u32>) -> i32 {
    return (dot4I8Packed(w.x, v.x) + dot4I8Packed(w.y, v.y))
        + (dot4I8Packed(w.z, v.z) + dot4I8Packed(w.w, v.w));
}

@one fn more(w: Packed, a: vec4<u32>, b: vec4<u32>, s: vec2<f32>, sum: f32) -> f32 {
@one    let whole = dot16(w.first, a) + dot16(w.second, b);
@one    return fma(w.scale.x * s.x, f32(whole), fma(w.low, s.y, sum));
@one }
@two fn more(w: Packed, a: vec4<u32>, b: vec4<u32>, s: vec2<f32>, sum: f32) -> f32 {
@two    let part = fma(w.scale.x * s.x, f32(dot16(w.first, a)), sum);
@two    return fma(w.scale.y * s.x, f32(dot16(w.second, b)), part);
@two }
