// Two float16 numbers a word. Reading them is exact on every adapter; how pack2x16float rounds is
// the adapter's affair, so that rounding is whole numbers: to nearest, ties to even.
alias Kept = vec2<u32>;
const STRIDE = DIM4;

fn half(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let sign = (bits >> 16u) & 0x8000u;
    let size = bits & 0x7fffffffu;
    if (size >= 0x47800000u) {
        return sign | select(0x7c00u, 0x7e00u, size > 0x7f800000u);
    }
    if (size >= 0x38800000u) {
        return sign | ((size - 0x38000000u + 0xfffu + ((size >> 13u) & 1u)) >> 13u);
    }
    // Below the least normal number: multiples of 2^-24.
    let drop = min(126u - (size >> 23u), 25u);
    let digits = (size & 0x7fffffu) | 0x800000u;
    return sign | ((digits + (1u << (drop - 1u)) - 1u + ((digits >> drop) & 1u)) >> drop);
}

fn kept(v: vec4<f32>) -> Kept {
    return vec2<u32>(half(v.x) | (half(v.y) << 16u), half(v.z) | (half(v.w) << 16u));
}

fn floats(k: Kept) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(k.x), unpack2x16float(k.y));
}
