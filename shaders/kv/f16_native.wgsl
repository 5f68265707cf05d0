// The same bytes as kv/f16.wgsl, for adapters with float16 of their own; to read only.
alias Kept = vec4<f16>;
const STRIDE = DIM4;

fn floats(k: Kept) -> vec4<f32> {
    return vec4<f32>(k);
}
